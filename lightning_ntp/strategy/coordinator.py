"""Who is a member: the supervisor's side of the membership, as a state machine over the store. No process, no torch group.

    forming N --all live workers have joined--> standing N --a loss, or newcomers at a step boundary--> forming N+1
        \\--a loss------------------------------------------------------------------------------------/

Keys (JSON, below the job's token): generation; join/N/W, joined/N; world/N; ended/N/W; heartbeat/W; regroup/N,
regrouping/N; suspect/N, doubt/N; called-off/N; leave/W, left/W, leaves. Clock and store are injected; who is killed is
the caller's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields

import torch.distributed as dist

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.deadline import HangDeadline
from lightning_ntp.strategy.rendezvous import delete_below, get_json, peek_json, put_json
from lightning_ntp.strategy.respawn import PartyState

UNWATCHED_PHASES = frozenset({"start", "compile", "evaluate", "save", "debugger"})
"""Phases of `Member.progress` in which nothing can be said about how long they take: the progress clock stands still.
A member under a debugger reports "debugger" by itself."""

STACKS_SECONDS = 1.0
"""Between the order to write stacks and the break that changes them."""

DOUBT_BEATS = 2
"""After a failed collective a member counts as alive once it has given so many further signs of life."""


@dataclass(frozen=True, slots=True)
class Patience:
    """When a worker that lives is taken for lost.

    hang_seconds: without any sign of life (a stopped process; a thread that holds the GIL as long looks the same).
    progress_factor, progress_floor_seconds: the main threads may go without reaching a new phase for so many median
    steps, and for so long in any case. progress_seconds: if given, this limit and nothing measured.
    join_seconds: for a survivor to come to the next generation; more than the longest stretch of pure computing.
    start_seconds: for a new worker or node to come at all: imports, data, model.
    doubt_seconds: after a failed collective, for somebody to die or to report an error of its program; then all re-form.
    exit_seconds: from the end of its membership to the end of its process: teardown, the user's last lines, the interpreter's exit.
    node_seconds: a node's supervisor without a sign of life; doubted_node_seconds: the same while members suspect a loss.
    """

    hang_seconds: float = 10.0
    progress_factor: float = 10.0
    progress_floor_seconds: float = 60.0
    progress_seconds: float | None = None
    join_seconds: float = 60.0
    start_seconds: float = 900.0
    doubt_seconds: float = 2.0
    exit_seconds: float = 300.0
    node_seconds: float = 10.0
    doubted_node_seconds: float = 3.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and value <= 0:
                raise ConfigError(f"Patience.{each.name} is {value}: wanted more than 0")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the membership; `seconds` is the coordinator's clock."""

    kind: str
    generation: int
    seconds: float
    workers: tuple[int, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the caller shall do now: end the workers in `fence` (worker -> why); have all write their stacks."""

    fence: Mapping[int, str]
    write_stacks: bool = False


@dataclass(slots=True)
class LifeSignState:
    """The last that was heard of a worker, by our clock: clocks of other machines are not compared."""

    beats: int = -1
    beat_seconds: float = 0.0
    progress: tuple[int, str] = (-1, "start")
    progress_seconds: float = 0.0
    commits: int = 0


@dataclass(slots=True)
class DoubtState:
    """A member's collective has failed, and nobody is known to be lost: since when, and everybody's beats then."""

    since_seconds: float
    beats: dict[int, int]


@dataclass(slots=True)
class Coordinator:
    """The membership of one job. `workers` are the ids that the first generation waits for.

    pending: newcomers, taken in at a step boundary. waiting: hot spares, which become newcomers when a role is free, or when more
    are at the door than have found none: two may fill a row or a role for which one was too few.
    """

    store: dist.Store
    workers: Collection[int]
    patience: Patience
    clock: Callable[[], float]
    on_event: Callable[[Event], None]
    generation: int = 1
    forming: bool = True
    active: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    fenced: dict[int, str] = field(default_factory=dict)
    _members: tuple[int, ...] = ()
    _left: set[int] = field(default_factory=set)
    _signs: dict[int, LifeSignState] = field(default_factory=dict)
    _forming_since: float = 0.0
    _party: PartyState = field(default_factory=PartyState)
    _stuck_since: float | None = None
    _doubt: DoubtState | None = None
    _num_leaves: int = 0
    _leaving: set[int] = field(default_factory=set)
    _to_call: bool = False
    _takes_newcomers: bool = True
    _num_taken: int = 0  # newcomers in the current generation
    _num_parked: int = 0  # workers that have left it since there is no role for them
    _num_in_vain: int = 0  # so many at once have found no role since one has become free
    deadline: HangDeadline = field(init=False)

    def __post_init__(self) -> None:
        patience = self.patience
        self.deadline = HangDeadline(
            patience.progress_factor, patience.progress_floor_seconds, patience.progress_seconds
        )
        self.active = set(self.workers)
        self._forming_since = self.clock()
        put_json(self.store, "generation", self.generation)

    def expect(self, worker: int, waits: bool = False) -> None:
        """A new worker has been started; it is taken in when it has joined, at a step boundary of the others.

        waits: it, or somebody in its place, has found no role.
        """
        (self.waiting if waits else self.pending).add(worker)
        self._party.start(worker, self.clock())

    def finish(self, worker: int) -> None:
        """A worker has ended well: no loss, unless the others still wait for it (see `tick`)."""
        self._forget(worker)
        if worker in self._members:
            self._left.add(worker)

    def lose(self, losses: Mapping[int, str]) -> bool:
        """Workers are gone or given up (worker -> why). Breaks the generation and says so if any was needed for it."""
        needed = self.active & losses.keys()
        for worker, why in losses.items():
            self.fenced[worker] = why
            self._forget(worker)
        if needed:
            self._call_spares()
            self._break(tuple(sorted(needed)), "; ".join(losses[worker] for worker in sorted(needed)))
        return bool(needed)

    def ask_to_leave(self, workers: Collection[int], why: str) -> None:
        """Asks members to leave at the next step boundary, where the others take over what they hold."""
        for worker in workers:
            put_json(self.store, f"leave/{worker}", why)
        self.store.add("leaves", 1)

    @property
    def in_use(self) -> bool:
        """Whether any worker has shown that it is a member. A program may run under recovery and know nothing of it."""
        return bool(self._members) or any(sign.beats != -1 for sign in self._signs.values())

    @property
    def suspected(self) -> bool:
        """Whether a collective has failed, and nobody has been lost yet that would explain it."""
        return self._doubt is not None

    def tick(self) -> Verdict:
        """Looks at the store and the clock. Call it often: it is what moves a generation from forming to standing."""
        now = self.clock()
        fence = self._silent(now)
        self._see_off()
        if self.forming:
            fence |= self._late(now)
            self._form(now)
            return Verdict(fence)
        self._call_newcomers(now)
        if self.store.check([f"regrouping/{self.generation}"]):
            self._open_next(now, {"broken": False})
        elif self.store.check([f"called-off/{self.generation}"]):
            self._break((), str(get_json(self.store, f"called-off/{self.generation}")))
        elif self._left and self._num_suspicions():
            self._break((), f"workers {sorted(self._left)} ended while others still needed them")
        elif self._doubted(now):
            self._break((), "a collective failed although all workers live")
        else:
            return Verdict(fence, write_stacks=self._deal_with_standstill(now))
        return Verdict(fence)

    def _see_off(self) -> None:
        """Takes notice of who shall leave (the members re-form for it) and of who has left."""
        if (num_leaves := self.store.add("leaves", 0)) == self._num_leaves:
            return
        for worker in sorted(self.active | self.pending | self.waiting):
            if (frees_role := peek_json(self.store, f"left/{worker}")) is not None:
                self._forget(worker)
                if frees_role:
                    self._call_spares()
                else:
                    self._num_parked += 1
                    self._num_in_vain = max(self._num_in_vain, self._num_taken, self._num_parked)
            elif worker not in self._leaving and (why := peek_json(self.store, f"leave/{worker}")) is not None:
                self._leaving.add(worker)
                self._to_call = True
                if worker in self.waiting:  # it leaves by being taken in, as any other
                    self.waiting.remove(worker)
                    self.pending.add(worker)
                self.on_event(Event("leaving", self.generation, self.clock(), (worker,), str(why)))
        self._num_leaves = num_leaves

    def _call_spares(self) -> None:
        """A role is free."""
        self._num_in_vain = 0
        self.pending |= self.waiting
        self.waiting.clear()

    def _num_suspicions(self) -> int:
        return self.store.add(f"suspect/{self.generation}", 0)

    def _doubted(self, now_seconds: float) -> bool:
        """Whether a collective failed some time ago although everybody lives: each has given signs of life since."""
        if not self.store.check([f"doubt/{self.generation}"]):
            return False
        beats = {worker: self._signs[worker].beats for worker in self.active if worker in self._signs}
        if self._doubt is None:
            self._doubt = DoubtState(now_seconds, beats)
        lived = all(beats.get(worker, 0) >= then + DOUBT_BEATS for worker, then in self._doubt.beats.items())
        return lived and now_seconds - self._doubt.since_seconds > self.patience.doubt_seconds

    def _forget(self, worker: int) -> None:
        self.active.discard(worker)
        self.pending.discard(worker)
        self.waiting.discard(worker)
        self._signs.pop(worker, None)
        self._party.forget(worker)

    def _break(self, workers: tuple[int, ...], why: str) -> None:
        broken = self.generation
        if self.forming:
            self._publish((), ())
        now = self.clock()
        self._open_next(now, {"broken": True, "workers": workers, "why": why})
        self.on_event(Event("broken", broken, now, workers, why))

    def _open_next(self, now_seconds: float, end: Mapping[str, object]) -> None:
        self._doubt = self._stuck_since = None
        ended = self.generation
        self.generation += 1
        self.forming = True
        self._forming_since = now_seconds
        # After a loss survivors may be anywhere; whoever comes new can follow them from a step boundary only.
        self._takes_newcomers = not end["broken"] or not self._members
        put_json(self.store, "generation", self.generation)
        for worker in self._members:
            put_json(self.store, f"ended/{ended}/{worker}", end)

    def _delete_old_keys(self) -> None:
        """Two generations back nobody reads any more: a worker that slept that long has been given up."""
        for kind in (
            "join",
            "joined",
            "world",
            "ended",
            "regroup",
            "regrouping",
            "suspect",
            "doubt",
            "called-off",
            "vote",
            "groups",
        ):
            delete_below(self.store, f"{kind}/{self.generation - 2}")

    def _joined(self) -> set[int]:
        offers = {worker: f"join/{self.generation}/{worker}" for worker in self.active | self.pending}
        return {worker for worker, key in offers.items() if self.store.check([key])}

    def _form(self, now_seconds: float) -> None:
        if not self.active or not self.store.check([f"joined/{self.generation}"]):
            return
        joined = self._joined()
        if not self.active <= joined:
            return
        if not self._takes_newcomers:
            joined &= self.active
        survivors = sorted(joined & set(self._members))
        members = (*survivors, *sorted(joined - set(survivors)))
        infos = tuple(get_json(self.store, f"join/{self.generation}/{worker}") for worker in members)
        self._num_taken, self._num_parked = len(joined - self.active), 0
        self.active |= joined
        self.pending -= joined
        self._members, self._left, self.forming = members, set(), False
        for sign in self._signs.values():
            sign.progress_seconds = now_seconds
        self._publish(members, infos)
        self._to_call = False  # whoever must leave is named in it
        self.on_event(Event("formed", self.generation, now_seconds, members))
        self._delete_old_keys()

    def _publish(self, members: tuple[int, ...], infos: tuple[object, ...]) -> None:
        leaving = sorted(self._leaving & set(members))
        world = {"members": members, "infos": infos, "fenced": self.fenced, "leaving": leaving}
        put_json(self.store, f"world/{self.generation}", world)

    def _call_newcomers(self, now_seconds: float) -> None:
        """Asks the members to re-form after their next commit, once a newcomer waits at the door or a member must go."""
        if self._to_call:
            self._to_call = False
            put_json(self.store, f"regroup/{self.generation}", True)
        newcomers = self.pending | self.waiting
        if not newcomers or self.store.check([f"regroup/{self.generation}"]):
            return
        door = {worker for worker in newcomers if self.store.check([f"join/{self.generation + 1}/{worker}"])}
        fresh = door & self.pending
        if self._party.is_complete(fresh, self.pending, now_seconds) if fresh else len(door) > self._num_in_vain:
            put_json(self.store, f"regroup/{self.generation}", True)
            self.pending |= door
            self.waiting -= door

    def _silent(self, now_seconds: float) -> dict[int, str]:
        """Workers without a sign of life for too long. Before its first sign a worker is starting."""
        silent = {}
        for worker in self.active | self.pending | self.waiting:
            sign = self._signs.setdefault(worker, LifeSignState())
            heard = peek_json(self.store, f"heartbeat/{worker}")
            if heard is None:
                continue
            if heard["beats"] != sign.beats:
                sign.beats, sign.beat_seconds = heard["beats"], now_seconds
            if heard.get("commits", 0) != sign.commits:
                sign.commits = heard["commits"]
                self.deadline.note_step(heard["step_seconds"])
            if (heard["progress"], heard["phase"]) != sign.progress:
                sign.progress, sign.progress_seconds = (heard["progress"], heard["phase"]), now_seconds
            quiet_seconds = now_seconds - sign.beat_seconds
            if quiet_seconds > self.patience.hang_seconds and not self._exits(worker, quiet_seconds):
                silent[worker] = f"worker {worker} gave no sign of life for {quiet_seconds:.1f} s"
        return silent

    def _exits(self, worker: int, quiet_seconds: float) -> bool:
        """Whether a silent worker has ended its membership and is still allowed to take its time with the rest."""
        return self.store.check([f"closed/{worker}"]) and quiet_seconds <= self.patience.exit_seconds

    def _late(self, now_seconds: float) -> dict[int, str]:
        """Live workers that should have joined by now."""
        limit = self.patience.join_seconds if self._members else self.patience.start_seconds
        if now_seconds - self._forming_since <= limit or not self.in_use:
            return {}
        missing = self.active - self._joined()
        return {w: f"worker {w} did not come to generation {self.generation} within {limit:g} s" for w in missing}

    def _deal_with_standstill(self, now_seconds: float) -> bool:
        """Whether stacks shall be written now: first that, and a little later the break, which changes them."""
        stuck = self._stuck(now_seconds)
        if not stuck:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now_seconds
            return True
        elif now_seconds - self._stuck_since >= STACKS_SECONDS:
            self._break((), stuck)
        return False

    def _stuck(self, now_seconds: float) -> str:
        """Why the generation is broken although all live: nobody's main thread gets on. Empty if all is well."""
        limit = self.deadline.seconds
        signs = {worker: self._signs[worker] for worker in self.active if worker in self._signs}
        if limit is None or not signs or any(sign.progress[1] in UNWATCHED_PHASES for sign in signs.values()):
            return ""
        if min(now_seconds - sign.progress_seconds for sign in signs.values()) <= limit:
            return ""
        phases = ", ".join(f"{worker}: {signs[worker].progress[1]}" for worker in sorted(signs))
        return f"no worker has got on for {self.deadline} (phases: {phases})"
