"""What happens to a job, for whoever wants to know: the goodput ledger, callbacks, logs.

    strategy.observers.add(observer)     ->  on_phase, on_loss, on_recovery, on_commit, on_damage

Observers run on the main thread of every worker and must not talk to other workers: survivors may be at different places when
they hear of a loss. An exception of an observer is an exception of user code and ends the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

PHASES = (
    "start",
    "step",
    "commit",
    "control",
    "evaluate",
    "save",
    "integrity",
    "broken",
    "regrouping",
    "planning",
    "moving",
    "teardown",
)
"""Names that `Observer.on_phase` hears. A phase lasts until the next one begins; "commit" is everything between two steps."""


MAX_PLACES = 5
"""So many damaged places are named one by one."""


@dataclass(frozen=True, slots=True)
class LossEvent:
    """Workers are gone. Said once per broken generation, by every survivor, as soon as the new members are known.

    step: optimizer step that was running, not yet decided; all its work is done again unless it was already committed.
    workers: ids of the lost ones.
    why: as the supervisor has it, for example ``worker 4: killed by SIGKILL``; "" where it gave none.
    seconds: `time.monotonic` of this process when it heard of the loss.
    phase: what this worker was doing then, one of `PHASES`.
    """

    step: int
    workers: tuple[int, ...]
    why: str
    seconds: float
    phase: str = "step"


@dataclass(frozen=True, slots=True)
class RecoveryEvent:
    """The job goes on with other members.

    step: optimizer step that runs next, or again.
    generation: number of the new one.
    lost, joined: worker ids; both empty when a collective failed although all live.
    left: workers that were asked to leave, or had no role any more and are started anew as hot spares.
    seconds: by phase: ``regrouping`` (with its parts ``agree`` and ``connect``), ``planning``, ``moving`` and ``total``
        (from hearing of the loss to running again).
    bytes_moved: received by this worker.
    topology: in words.
    leader: worker id.
    planned: newcomers or a leave at a step boundary: nothing was lost.
    degrees: of each replica, and `healthy_degree`; `num_workers` live ones, parked spares included.
    """

    step: int
    generation: int
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    seconds: Mapping[str, float]
    bytes_moved: int
    topology: str
    leader: int
    planned: bool = False
    degrees: tuple[int, ...] = ()
    healthy_degree: int = 0
    num_workers: int = 0
    left: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CommitEvent:
    """An optimizer step has been decided and applied.

    step: number of the step, from 0; the next one is step + 1.
    num_samples: that counted in it, over all data rows (tokens, or the user's own weight, where batch_weight says so).
    updated: False for a skipped step: nothing in its window counted.
    attempts: how often its window ran, 1 unless workers were lost.
    generation: that decided it; 0 without recovery.
    seconds: `time.monotonic` after the update.
    straggler_seconds: for which slow workers kept the others waiting in the step before this one.
    """

    step: int
    num_samples: float
    updated: bool
    attempts: int
    generation: int
    seconds: float
    straggler_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SlowEvent:
    """Something is slow, or is not any more; said by every worker at the same commit.

    kind: ``"worker"``, ``"link"``, ``"well"`` (a worker or link is as fast as others again) or ``"shares"`` (other batch shares
        from the next step on).
    step: optimizer steps that are complete.
    workers: ids; of a link all that exchange over it.
    factor: times as long as usual.
    words: who, where, how slow, what would help.
    """

    kind: str
    step: int
    workers: tuple[int, ...]
    factor: float
    words: str


@dataclass(frozen=True, slots=True)
class DamageEvent:
    """Copies of the same state were found to differ: a bit has flipped somewhere. The same on all workers.

    step: optimizer steps that were complete; since_step: the same at the check before, 0 if this was the first.
    workers: that a majority has shown to be wrong; empty if there is none.
    places: parameter or optimizer state, rows and columns, and who differs, in words.
    num_repaired: places that got the majority's bits back. If there are others the job ends with `SilentCorruptionError`.
    seconds: `time.monotonic` of this process.
    """

    step: int
    since_step: int
    workers: tuple[int, ...]
    places: tuple[str, ...]
    num_repaired: int
    generation: int
    seconds: float

    @property
    def shown(self) -> list[str]:
        """The first places, and how many more there are."""
        more = len(self.places) - MAX_PLACES
        return [*self.places[:MAX_PLACES], *([f"and {more} more places"] if more > 0 else [])]


class Observer(Protocol):
    """What an observer answers to; derive from it to implement only a part."""

    def on_phase(self, name: str) -> None:
        """This worker's main thread has entered a phase, see `PHASES`."""

    def on_loss(self, event: LossEvent) -> None:
        """Workers were lost."""

    def on_recovery(self, event: RecoveryEvent) -> None:
        """The job goes on."""

    def on_commit(self, event: CommitEvent) -> None:
        """A step is done."""

    def on_damage(self, event: DamageEvent) -> None:
        """Copies of the state differ."""

    def on_slow(self, event: SlowEvent) -> None:
        """A worker or a link is slow, or well again."""


@dataclass
class Observers:
    """All observers of a strategy, told in the order in which they were added. `phase` is the one that runs."""

    clock: Callable[[], float] = time.monotonic
    phase: str = "start"
    _all: list[Observer] = field(default_factory=list)

    def add(self, observer: Observer) -> None:
        """Tell `observer` from now on, once however often it is added."""
        if observer not in self._all:
            self._all.append(observer)

    def remove(self, observer: Observer) -> None:
        """Stop telling it; no error if it was never added."""
        self._all = [one for one in self._all if one is not observer]

    def enter(self, name: str) -> None:
        """Begin a phase."""
        self.phase = name
        for observer in self._all:
            observer.on_phase(name)

    def lose(self, event: LossEvent) -> None:
        """Say that workers were lost."""
        for observer in self._all:
            observer.on_loss(event)

    def recover(self, event: RecoveryEvent) -> None:
        """Say that the job goes on."""
        for observer in self._all:
            observer.on_recovery(event)

    def commit(self, event: CommitEvent) -> None:
        """Say that a step is done."""
        for observer in self._all:
            observer.on_commit(event)

    def damage(self, event: DamageEvent) -> None:
        """Say that copies of the state differ."""
        for observer in self._all:
            observer.on_damage(event)

    def slow(self, event: SlowEvent) -> None:
        """Say that something is slow, or well again."""
        for observer in self._all:
            observer.on_slow(event)
