"""Phases, losses, recoveries and commits become the goodput ledger of this worker, and a list of events for logs and reports."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_ntp.goodput import Ledger
from lightning_ntp.goodput_totals import PRODUCTIVE
from lightning_ntp.strategy.events import CommitEvent, DamageEvent, LossEvent, Observer, RecoveryEvent, SlowEvent
from lightning_ntp.topology import Topology

PHASE_BUCKETS = {
    "start": "init",
    "step": PRODUCTIVE,
    "evaluate": "eval",
    "save": "checkpoint_save",
    "load": "checkpoint_load",
    "broken": "detection",
    "regrouping": "regroup",
    "planning": "reshard",
    "moving": "reshard",
    "teardown": "other",
}
"""Phase -> bucket. ``control`` belongs to whatever was going on, and ``commit`` to `LedgerObserver.between`."""

FLUSH_SECONDS = 10.0
FLUSH_SHARE = 1000
"""Times are written every 10 s, later every thousandth of the job's age: a month makes about 7,000 records."""

EVERY_STEP = frozenset({PRODUCTIVE, "data_wait", "other"})
MIN_RECORD_SECONDS = 0.1

NUM_TYPICAL = 20
SLOW_STEP = 2.0
"""A step that was lost and took longer than this many typical ones was waiting for the loss to be noticed."""

COMPILE_STEPS = 3
"""Steps after a first one that say how long it would have taken without compiling."""

MAX_EVENTS = 5_000


class LedgerObserver(Observer):
    """See the module docstring.

    Args:
        ledger: what to fill.
        gpus: worker -> number of its GPU.
        topology: the live topology, asked for when roles are written down; None before there is one.
        changed: called after every event with its row.
    """

    def __init__(
        self,
        ledger: Ledger,
        gpus: Mapping[int, int],
        topology: Callable[[], Topology | None],
        changed: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.ledger = ledger
        self.gpus = dict(gpus)
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.roles: dict[int, tuple[int, int, int]] = {}
        self.num_samples = 0.0
        self.between = "other"  # what the time between two steps is, see the callback
        self._topology, self._changed = topology, changed or (lambda row: None)
        self._start_ns = self._flushed_ns = ledger.now()
        self._step_ns: deque[int] = deque(maxlen=NUM_TYPICAL)
        self._productive_before = 0
        self._first_ns: int | None = None
        self._after_first: list[int] = []
        self._is_first = True

    def on_phase(self, name: str) -> None:
        """Time goes to another bucket."""
        bucket = self.between if name == "commit" else PHASE_BUCKETS.get(name)
        if bucket is not None:
            self.enter(bucket)

    def enter(self, bucket: str) -> None:
        """Time goes to a bucket. Rare ones get records of their own, so that a timeline shows when they were."""
        before = self.ledger.bucket
        self.ledger.enter(bucket)
        if (bucket in EVERY_STEP) != (before in EVERY_STEP) and self.ledger.now() - self._flushed_ns > MIN_RECORD_SECONDS * 1e9:
            self.flush()

    def on_commit(self, event: CommitEvent) -> None:
        """The step's time stands."""
        ledger = self.ledger
        ledger.commit(event.step + 1)
        self.num_samples += event.num_samples if event.updated else 0.0
        self._time_step()
        if event.straggler_seconds:
            ledger.move(int(event.straggler_seconds * 1e9), PRODUCTIVE, "straggler")
            self._productive_before = ledger.productive_ns
        now = ledger.now()
        if now - self._flushed_ns > max(FLUSH_SECONDS * 1e9, (now - self._start_ns) / FLUSH_SHARE):
            self.flush()

    def on_loss(self, event: LossEvent) -> None:
        """The running step is void; the lost workers' GPUs idle from now on."""
        ledger = self.ledger
        pending = ledger.pending_ns
        if self._step_ns and pending > SLOW_STEP * statistics.median(self._step_ns):
            ledger.move(pending - int(statistics.median(self._step_ns)), PRODUCTIVE, "detection")
        ledger.discard()
        before = {worker: self.roles.get(worker) for worker in event.workers}
        ledger.lose(self.gpus[worker] for worker in event.workers if worker in self.gpus)
        self.note(
            "loss",
            key=[ledger.generation, *event.workers],
            step=event.step,
            workers=list(event.workers),
            gpus=self._gpus_of(event.workers),
            roles=[_role_text(role) for role in before.values()],
            why=event.why,
            phase=event.phase,
        )

    def on_slow(self, event: SlowEvent) -> None:
        """For the record."""
        self.note(
            "slow" if event.kind in ("worker", "link") else event.kind,
            key=[self.ledger.generation, event.step, *event.workers],
            step=event.step,
            workers=list(event.workers),
            gpus=self._gpus_of(event.workers),
            roles=[_role_text(self.roles.get(worker)) for worker in event.workers],
            why=event.words,
            factor=round(event.factor, 3),
        )

    def on_recovery(self, event: RecoveryEvent) -> None:
        """Others work on, and newcomers with them: a GPU that was lost is not owned twice."""
        ledger = self.ledger
        self._seat(event.joined)
        ledger.generation = event.generation
        self.place()
        self._start_over()
        kind = "rejoin" if event.joined else "recovery" if event.lost or not event.planned else "leave"
        self.note(
            kind,
            key=[event.generation],
            step=event.step,
            workers=list(event.joined or event.lost or event.left),
            gpus=self._gpus_of(event.joined or event.lost or event.left),
            roles=[_role_text(self.roles.get(worker)) for worker in event.joined],
            why="planned" if event.planned else "",
            seconds={name: round(value, 4) for name, value in event.seconds.items()},
            bytes_moved=event.bytes_moved,
            topology=event.topology,
            leader=event.leader,
            placed=self.placed(),
        )

    def on_damage(self, event: DamageEvent) -> None:
        """A bit has flipped somewhere."""
        self.note(
            "damage",
            key=[event.generation, event.step],
            step=event.step,
            workers=list(event.workers),
            gpus=self._gpus_of(event.workers),
            why="; ".join(event.shown),
            num_places=len(event.places),
            num_repaired=event.num_repaired,
        )

    def place(self) -> None:
        """Take over who has a role from the topology; GPUs without one are idle."""
        topology = self._topology()
        if topology is None:
            return
        self.roles = {}
        for worker in topology.workers:
            at = topology.position(worker)
            degree = topology.replicas[at.replica].degree
            self.roles[worker] = (at.replica, at.fsdp, topology.roles(degree)[at.tp])
        working = {self.gpus[worker] for worker in self.roles if worker in self.gpus}
        self.ledger.lose(self.ledger.live - working)
        self.ledger.restore(working & self.ledger.idle)
        self.ledger.own(working - self.ledger.live)

    def seat_unknown(self) -> None:
        """For a newcomer, who has not heard of its own arrival as the others have: the same seats as theirs."""
        topology = self._topology()
        if topology is not None:
            there = {*topology.workers, *topology.spares}
            self.roles = {worker: role for worker, role in self.roles.items() if worker in self.gpus.keys() & there}
            self._seat(there - self.gpus.keys())
            self.place()

    def placed(self) -> dict[str, list[int]]:
        """GPU -> replica, fsdp coordinate, role, and the replica's degree: what a timeline draws."""
        topology = self._topology()
        if topology is None:
            return {}
        return {
            str(self.gpus[worker]): [*role, topology.replicas[role[0]].degree]
            for worker, role in self.roles.items()
            if worker in self.gpus
        }

    def note(self, event: str, **facts: Any) -> None:
        """Write an event down at once, and tell who listens."""
        self.ledger.note(event, **facts)
        self._flushed_ns = self.ledger.now()
        row = {"event": event, "t": self._flushed_ns, "generation": self.ledger.generation, **facts}
        self.events.append(row)
        self._changed(row)

    def flush(self) -> None:
        """Bring the file up to date."""
        self.ledger.flush()
        self._flushed_ns = self.ledger.now()

    def resumed(self) -> None:
        """The ledger has been given an earlier process' time: only steps from now on are typical."""
        self._start_ns = self._flushed_ns - sum(self.ledger.totals().job_ns.values())
        self._start_over()

    def _start_over(self) -> None:
        """The next step may compile again."""
        self._first_ns, self._after_first, self._is_first = None, [], True
        self._productive_before = self.ledger.totals().job_ns[PRODUCTIVE]

    def _time_step(self) -> None:
        """Keeps step times; what the first step took beyond the next ones was compiling and warming up."""
        productive = self.ledger.productive_ns
        spent, self._productive_before = productive - self._productive_before, productive
        if self._is_first:
            self._first_ns, self._is_first = spent, False
            return
        self._step_ns.append(spent)
        if self._first_ns is None:
            return
        self._after_first.append(spent)
        if len(self._after_first) == COMPILE_STEPS:
            extra = self._first_ns - int(statistics.median(self._after_first))
            self.ledger.move(max(0, extra), PRODUCTIVE, "compile")
            self._productive_before = self.ledger.productive_ns
            self._first_ns = None

    def _seat(self, joined: Iterable[int]) -> None:
        """A newcomer sits on the lowest idle GPU that no worker with a role or in waiting uses, else on a new one."""
        for worker in sorted(set(joined) - self.gpus.keys()):
            taken = {self.gpus[other] for other in self.roles if other in self.gpus}
            free = sorted(self.ledger.idle - taken)
            gpu = free[0] if free else max((*self.ledger.live, *self.ledger.idle)) + 1
            self.gpus = {other: number for other, number in self.gpus.items() if number != gpu} | {worker: gpu}
            self.roles[worker] = (-1, -1, -1)

    def _gpus_of(self, workers: Iterable[int]) -> list[int]:
        return [self.gpus[worker] for worker in workers if worker in self.gpus]


def _role_text(role: tuple[int, int, int] | None) -> str:
    return "" if role is None or role[0] < 0 else f"r{role[0]}/fsdp{role[1]}/tp{role[2]}"


def process_start_ns(pid: str = "self") -> int | None:
    """When a process began, nanoseconds since 1970; None where /proc does not say."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime") as file:
            uptime = float(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return int((time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")) * 1e9)
