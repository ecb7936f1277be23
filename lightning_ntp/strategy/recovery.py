"""Work that all members do or nobody does, done again when somebody is lost: the state machine of a job that survives.

    RUNNING --a loss--> BROKEN --> REGROUPING --next generation stands--> PLANNING --plans agree--> MOVING --> RUNNING
                          ^-------------------- a loss in any phase starts over --------------------/

    phase       tensors that may be used                             groups that may be used
    RUNNING     all                                                  all
    BROKEN      own cells of the last complete step                  none
    REGROUPING  the same                                             none until the next generation stands
    PLANNING    the same                                             the default group
    MOVING      the same; the new cells once all have received them  those of the new topology

[Note: regions] A job is a sequence of regions, the same on every worker: an optimizer step, a control call, a pass of evaluation, a
saved checkpoint. A region ends with a vote, so no worker is ever more than the running region ahead of another: after a loss all
survivors meet in the same one, and each runs it again from its beginning. Regions inside a region are part of it.

No Lightning and no model here: a `Job` has the state, `Member` knows who lives.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from lightning_ntp.errors import PlanMismatchError, PoisonBatchError, UnrecoverableError
from lightning_ntp.strategy.events import LossEvent, Observers, RecoveryEvent
from lightning_ntp.strategy.generation import Decision, Generation, GenerationBrokenError, Outcome
from lightning_ntp.strategy.membership import Member
from lightning_ntp.strategy.rendezvous import EXIT_PARKED
from lightning_ntp.testing import Fault

Done = TypeVar("Done")

MAX_FAILURES = 3
"""So often a region may fail in a row although nobody is lost."""


class RecoveryPhase(StrEnum):
    """What a worker is doing about losses; see the module docstring for what may be used in each phase."""

    RUNNING = "running"
    BROKEN = "broken"
    REGROUPING = "regrouping"
    PLANNING = "planning"
    MOVING = "moving"


@dataclass(frozen=True, slots=True)
class Regroup:
    """What the members of a new generation are about to do; equal on all of them.

    lost, joined: worker ids relative to the topology that held the state so far.
    leavers: members that end once the others hold what they held: asked to leave, or without a role; `parked` are the latter.
    topology: the new one; None where nothing has been cut yet.
    words: the topology in words; `degrees` of its replicas, `healthy_degree`.
    """

    generation: Generation
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    leavers: tuple[int, ...] = ()
    parked: tuple[int, ...] = ()
    topology: Any = None
    words: str = ""
    degrees: tuple[int, ...] = ()
    healthy_degree: int = 0


class Job(Protocol):
    """What has a state that must survive. Called by the main thread only."""

    @property
    def step(self) -> int:
        """Optimizer steps that are complete here."""

    def info(self) -> dict[str, Any]:
        """What the others shall know when this worker joins them (JSON)."""

    def let_go(self) -> None:
        """Drop whatever refers to the groups of the broken generation. Local."""

    def plan(self, generation: Generation) -> Regroup:
        """The new topology; raises on all if their plans differ. All members."""

    def move(self, regroup: Regroup, agree: Callable[[], object]) -> int:
        """Give every member its cells; bytes received here. `agree` is the vote before old cells go. All members."""

    def resume(self, regroup: Regroup) -> None:
        """Bring everything else that belongs to the running step back to where this worker was in it. All members."""

    def ran_out_of_memory(self, error: Exception) -> bool:
        """Whether `error` says that memory did not suffice; the next plan then needs less of it. Local."""

    def leave(self, exit_code: int = 0) -> None:
        """End this process well: the others hold what it held. Does not return. Local."""

    def batch_in_words(self) -> str:
        """The samples of the step that is running."""

    def damage(self, fault: Fault) -> None:
        """Flip a bit of the state, as a fault script demands. Local."""


@dataclass
class RegionState:
    """A region that is running: its phase, and what went wrong with it so far.

    planned: the members re-form although nothing is wrong; `unasked`: not because a vote said so, but since some have left, or the
        members have decided it.
    """

    phase: str
    undo: Callable[[], None]
    planned: bool = False
    unasked: bool = False
    error: str = ""
    num_failures: int = 0
    lost: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    left: tuple[int, ...] = ()


@dataclass
class Recovery:
    """Runs regions. Without a `member` (recovery is off) it just runs them once.

    Args:
        job: set before the first region runs.
    """

    member: Member | None
    observers: Observers
    job: Job | None = None
    clock: Callable[[], float] = time.monotonic
    phase: RecoveryPhase = RecoveryPhase.RUNNING
    num_attempts: int = 1
    num_started: int = 0  # workers of the job as it was started; 0 without recovery
    advises: bool = False  # a loss ends the job once it is said what would have followed
    _region: RegionState | None = None
    _serial: int = 0
    _members: tuple[int, ...] = ()
    _leavers: tuple[int, ...] = ()
    _casualties: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def generation(self) -> int:
        """Number of the current generation; 0 without recovery."""
        current = None if self.member is None else self.member.generation
        return 0 if current is None else current.number

    @property
    def running(self) -> bool:
        """Whether a region runs: what is called now will be called again if it fails."""
        return self._region is not None

    def joined(self, generation: Generation) -> None:
        """This worker has joined its first generation."""
        self._members, self._serial = generation.members, 0

    def fire(self, phase: str) -> None:
        """Strike the faults of a test's or a drill's script that are due at this phase of the running step."""
        if self.member is not None and (job := self.job) is not None:
            self.member.faults.handlers["flip-bit"] = lambda fault: job.damage(fault)
            self.member.faults.fire(self.member.worker, job.step, phase)

    def run(
        self,
        phase: str,
        work: Callable[[], Done],
        undo: Callable[[], None] = lambda: None,
        planned: bool = False,
        unasked: bool = False,
    ) -> Done:
        """`work`, again after every loss until it comes through. All members.

        Args:
            phase: of `events.PHASES`.
            undo: local effects of a failed attempt; called before `work` is run again.
            planned: form a new generation first, for newcomers or for a worker that wants to leave.
            unasked: with `planned`, although no vote has said so: the members have decided it among themselves.

        Raises:
            Exception: of `work`, if it does not come from a loss.
            PlanMismatchError: it fails again and again although nobody is lost.
            PoisonBatchError: the step has killed a second worker in the same way.
            UnrecoverableError: state is lost for good.
        """
        if self.member is None or self.job is None or self._region is not None:
            return self._told(phase, work) if self._region is None else work()
        region = RegionState(phase, undo, planned, unasked)
        self.num_attempts = 0
        while True:
            self.num_attempts += 1
            self._region = region
            try:
                while region.error or region.planned:
                    self._recover(self.member, self.job, region)
                self.member.check()
                return self._told(phase, work)
            except Exception as error:
                if not self.member.confirm_loss(error):
                    self.member.report_error(error)  # the earliest place: what the peers see next is a consequence
                    raise
                region.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            finally:
                self._region = None

    def once(self, phase: str, work: Callable[[], Done], why: str) -> Done:
        """`work` that cannot be run again: a loss in it ends the job. All members.

        Args:
            phase: of `events.PHASES`.
            why: said when that happens.

        Raises:
            Exception: of `work`, if it does not come from a loss.
            UnrecoverableError: a worker was lost meanwhile.
        """
        self._region = RegionState(phase, lambda: None, False)
        try:
            return self._told(phase, work)
        except Exception as error:
            if self.member is None:
                raise
            if self.member.confirm_loss(error):
                raise UnrecoverableError(f"a worker was lost: {why}. Start again from the last checkpoint") from error
            self.member.report_error(error)
            raise
        finally:
            self._region = None

    def all_or_nobody(self, phase: str, work: Callable[[], Done], undo: Callable[[], None] = lambda: None) -> Done:
        """`run`, ended by a vote: every member has done `work` in the same generation. All members."""
        if self._region is not None:
            self.fire(phase)
            return work()

        def decided() -> Done:
            self.fire(phase)
            done = work()
            self.agree()
            return done

        return self.run(phase, decided, undo)

    def agree(self, ballot: Outcome = Outcome.COMMIT, fault_phase: str | None = None) -> Decision:
        """The vote that ends a region. All members."""
        if self.member is None or self.job is None:
            return Decision(ballot)
        self._serial += 1
        return self.member.agree(self.job.step, self._serial, ballot, fault_phase)

    def _told(self, phase: str, work: Callable[[], Done]) -> Done:
        before = self.observers.phase
        self._enter(phase)
        done = work()
        self._enter("commit" if phase == "step" else before)
        return done

    def _enter(self, phase: str) -> None:
        self.observers.enter(phase)
        if self.member is not None:
            self.member.progress(phase)

    def _turn(self, phase: RecoveryPhase, seconds: dict[str, float]) -> None:
        now = self.clock()
        seconds[self.phase] = now - seconds.pop("since")
        seconds["since"], self.phase = now, phase
        if phase is not RecoveryPhase.RUNNING:
            self._enter(phase)
            self.fire(phase)

    def _recover(self, member: Member, job: Job, region: RegionState) -> None:
        """From a broken generation to one in which every member has its state. All survivors, and newcomers."""
        heard = self.clock() if region.planned or member.broken_at_seconds is None else member.broken_at_seconds
        was_running, step = self.phase is RecoveryPhase.RUNNING, job.step
        seconds = {"since": heard}
        self._turn(RecoveryPhase.BROKEN, seconds)
        job.let_go()
        self._turn(RecoveryPhase.REGROUPING, seconds)
        generation = member.join(job.info() | {"error": region.error, "phase": region.phase}, regroup=region.unasked)
        lost = tuple(worker for worker in self._members if worker not in {*generation.members, *self._leavers})
        self.joined(generation)
        self._judge(region, generation, lost, step, heard, was_running)
        self._turn(RecoveryPhase.PLANNING, seconds)
        regroup = job.plan(generation)
        if lost and self.advises:
            self._advise(member, regroup, step, self.clock() - heard)
        self._turn(RecoveryPhase.MOVING, seconds)
        num_bytes = self._move(member, job, regroup)
        self._turn(RecoveryPhase.RUNNING, seconds)
        self._leavers = regroup.leavers
        region.lost += lost
        region.joined += tuple(worker for worker in regroup.joined if worker not in regroup.leavers)
        region.left += regroup.leavers
        if member.worker in regroup.leavers:
            job.leave(EXIT_PARKED if member.worker in regroup.parked else 0)
        # Without the leavers everybody forms once more; until then nobody resumes.
        region.planned = region.unasked = bool(regroup.leavers)
        if not region.planned:
            region.undo()
            job.resume(regroup)
            self._tell(regroup, region, seconds, heard, num_bytes)
            region.error, region.lost, region.joined, region.left = "", (), (), ()

    def _advise(self, member: Member, regroup: Regroup, step: int, seconds: float) -> None:
        """Says what would follow from a loss, and raises. All survivors."""
        generation = regroup.generation
        would = f"step {step} would run again on {regroup.words or f'{generation.num_members} workers'}"
        words = f"advise=True: workers {list(regroup.lost)} are lost. {would}, planned {seconds:.2f} s after the loss was heard of"
        if member.worker == generation.leader:
            member.tell("advice", [words], step=step, lost=regroup.lost, topology=regroup.words)
        raise UnrecoverableError(f"{words}. Start again from the last checkpoint, or leave advise out to go on in place")

    def _move(self, member: Member, job: Job, regroup: Regroup) -> int:
        """`Job.move`. A worker without the memory for it breaks the generation off: all meet again and plan with less."""

        def agree() -> Decision:
            self.fire("moved")
            return self.agree()

        try:
            return job.move(regroup, agree)
        except (MemoryError, RuntimeError) as error:
            if not job.ran_out_of_memory(error):
                raise
            why = f"out of memory while state moved: {error}"
            member.call_off(why)
        raise GenerationBrokenError(why)

    def _judge(
        self,
        region: RegionState,
        generation: Generation,
        lost: tuple[int, ...],
        step: int,
        heard_seconds: float,
        was_running: bool,
    ) -> None:
        """Says who was lost; raises if going on would only repeat what has happened. Equal on all members."""
        whys = {worker: generation.fenced.get(worker, "") for worker in lost}
        if lost:
            self.observers.lose(LossEvent(step, lost, "; ".join(whys.values()), heard_seconds, region.phase))
            region.num_failures = 0
        elif not region.planned and not any(info.get("out_of_memory") for info in generation.infos):
            region.num_failures += 1
        if region.num_failures >= MAX_FAILURES:
            said = "; ".join(f"worker {w}: {info['error']}" for w, info in generation.who_said() if info["error"])
            raise PlanMismatchError(
                f"{region.phase} of step {step} failed {region.num_failures} times although all workers "
                f"{list(generation.members)} live, so they do not do the same: {said}. Look for a branch that only some "
                "ranks take: a skipped module, a collective under `if rank == 0`"
            )
        kinds = {why.partition(": ")[2] for why in whys.values()}
        again = kinds & self._casualties[step]
        if region.phase == "step" and was_running:
            self._casualties = defaultdict(set, {step: self._casualties[step] | kinds})
            if again and self.job is not None:
                raise PoisonBatchError(
                    f"step {step} has cost a second worker in the same way ({', '.join(sorted(again))}; now {list(lost)}): its "
                    f"batch seems to be the cause. {self.job.batch_in_words()}. Nothing of it was applied"
                )

    def _tell(
        self, regroup: Regroup, region: RegionState, seconds: dict[str, float], heard_seconds: float, num_bytes: int
    ) -> None:
        generation = regroup.generation
        now = self.clock()
        times = {str(name): value for name, value in seconds.items() if name not in ("since", RecoveryPhase.RUNNING)}
        times |= {
            "agree": generation.agree_seconds,
            "connect": generation.connect_seconds,
            "resume": now - seconds["since"],
            "total": now - heard_seconds,
        }
        self.observers.recover(
            RecoveryEvent(
                step=0 if self.job is None else self.job.step,
                generation=generation.number,
                lost=region.lost,
                joined=region.joined,
                left=region.left,
                seconds=times,
                bytes_moved=num_bytes,
                topology=regroup.words,
                leader=generation.leader,
                planned=not region.error,
                degrees=regroup.degrees,
                healthy_degree=regroup.healthy_degree,
                num_workers=generation.num_members,
            )
        )
