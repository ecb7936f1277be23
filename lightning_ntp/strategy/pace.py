"""What a worker measures of its own steps, and tells the others with the exchange that every window has anyway.

    stopwatch laps of a window --commit--> numbers --the next window's exchange--> `heard`: the same on all workers

One step late, so that on CUDA nobody waits for events, and no collective is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_ntp.dtensor.stopwatch import STOPWATCH, Lap
from lightning_ntp.links import Exchanged
from lightning_ntp.stragglers import Measured
from lightning_ntp.strategy.groups import Groups

NUM_NUMBERS = 6


@dataclass(frozen=True, slots=True)
class Heard:
    """One step of all workers with a role; what the last change of shares, and of granules, took the slowest of them."""

    measured: dict[int, Measured]
    exchanged: dict[int, Exchanged]
    reshare_seconds: float
    move_seconds: float


@dataclass
class PaceMeter:
    """Measures nothing unless `on`.

    heard: from the last exchange; None where some worker had nothing to say.
    reshare_seconds, move_seconds: of this worker, for the others.
    """

    on: bool = False
    cuda: bool = False
    heard: Heard | None = None
    reshare_seconds: float = 0.0
    move_seconds: float = 0.0
    _laps: list[Lap] = field(default_factory=list)
    _num_samples: int = 0
    _told: tuple[int, ...] = (0,) * NUM_NUMBERS

    def begin_window(self) -> None:
        """What an abandoned window has left is forgotten."""
        self._laps, self._num_samples = [], 0

    def begin(self) -> None:
        """A loop batch begins."""
        if self.on:
            STOPWATCH.begin(self.cuda)

    def end(self, num_samples: int) -> None:
        """It has run so many samples, ghosts included."""
        if self.on:
            self._laps.append(STOPWATCH.end())
            self._num_samples += num_samples

    def commit(self, groups: Groups) -> None:
        """The window stands: its numbers will be told. On CUDA after the vote, when its work is done."""
        if not self.on or not self._laps:
            return
        computed, by_group = 0, dict[str, int]()
        for lap in self._laps:
            nanoseconds, waits = lap.read()
            computed += nanoseconds
            for name, waited in waits.items():
                by_group[name] = by_group.get(name, 0) + waited
        slots = sum(by_group.get(group.group_name, 0) for group in groups.slots.values())
        tp = by_group.get(groups.tp.group_name, 0)
        changes = int(self.reshare_seconds * 1e9), int(self.move_seconds * 1e9)
        self._told = (max(computed, 1), self._num_samples, tp, slots, *changes)

    def outgoing(self, groups: Groups) -> list[int]:
        """This worker's numbers at its place among those of all, zeros elsewhere: to be combined by maximum."""
        if not self.on:
            return []
        workers = groups.topology.workers
        numbers = [0] * (NUM_NUMBERS * len(workers))
        start = NUM_NUMBERS * workers.index(groups.worker)
        numbers[start : start + NUM_NUMBERS] = self._told
        return numbers

    def incoming(self, numbers: Sequence[int], groups: Groups) -> None:
        """Everybody's numbers."""
        workers = groups.topology.workers
        each = {
            worker: numbers[NUM_NUMBERS * i : NUM_NUMBERS * (i + 1)] for i, worker in enumerate(workers) if self.on
        }
        self._told = (0,) * NUM_NUMBERS
        if not each or any(told[0] == 0 for told in each.values()):
            self.heard = None
            return
        self.heard = Heard(
            {worker: Measured(told[0] / 1e9, told[1]) for worker, told in each.items()},
            {worker: Exchanged(told[2] / 1e9, told[3] / 1e9) for worker, told in each.items()},
            max(told[4] for told in each.values()) / 1e9,
            max(told[5] for told in each.values()) / 1e9,
        )
