"""Slow GPUs: who computes longer than the others for the same work, and what would help. Pure.

    Measured, per worker and step  --StragglerWatch.feed-->  turns
                                   --helps-->                what each remedy would make of a step
                                   --new_shares-->           other batch shares, if they gain more than they cost

A step time says nothing: all wait for the slowest. What counts is the time between collectives, per unit of work, where a sample
is 1 / degree of a unit on each role of its data row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_ntp.errors import ConfigError
from lightning_ntp.outliers import OutlierLimits, OutlierWatch, Sample, Turn
from lightning_ntp.shares import deal
from lightning_ntp.topology import Topology

WEIGHT_SCALE = 1000
"""Weight of the fastest data row, when shares follow speeds."""

MIN_GAIN = 0.03
"""Shares that shorten a step by less are not worth an entry in a log."""


@dataclass(frozen=True)  # no slots: LightningCLI reads a default through vars()
class SlowConfig:
    """What happens when a GPU computes longer than the others for the same work.

    Args:
        mode: ``"advise"`` names it and what would help; ``"act"`` also lets batch shares follow the speeds, if that gains more than
            it costs; ``"off"`` measures nothing.
        factor: slow is who takes so many times the usual time; well again below half of the excess.
        steps: for so many steps in a row.
        horizon_seconds: time over which a change of shares must pay.
        cost_seconds: of such a change, until one has been measured that took longer.
    """

    mode: Literal["off", "advise", "act"] = "advise"
    factor: float = 1.3
    steps: int = 20
    horizon_seconds: float = 600.0
    cost_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.mode not in ("off", "advise", "act"):
            raise ConfigError(f'SlowConfig: mode is "off", "advise" or "act", got {self.mode!r}')
        if not self.factor > 1 or self.steps < 1:
            raise ConfigError(f"SlowConfig: factor is above 1 and steps at least 1, got {self.factor} and {self.steps}")
        if self.horizon_seconds < 0 or self.cost_seconds < 0:
            raise ConfigError("SlowConfig: horizon_seconds and cost_seconds are 0 or more")


@dataclass(frozen=True, slots=True)
class Measured:
    """What a worker says of one step: seconds that it computed, for so many samples."""

    seconds: float
    samples: int


@dataclass(frozen=True, slots=True)
class Help:
    """A remedy: what to do, in words, and the seconds of a step after it."""

    words: str
    step_seconds: float


@dataclass(frozen=True, slots=True)
class NewShares:
    """Weights per data row, and the seconds of a step before and after."""

    weights: tuple[int, ...]
    now_seconds: float
    then_seconds: float

    @property
    def gain(self) -> float:
        """Share of the step that is saved."""
        return 1.0 - self.then_seconds / self.now_seconds


@dataclass
class StragglerWatch:
    """The speeds of a topology's workers. Made anew with each topology, as work is dealt out anew."""

    topology: Topology
    limits: OutlierLimits = field(default_factory=OutlierLimits)
    _watch: OutlierWatch[int] = field(init=False)
    _measured: dict[int, Measured] = field(default_factory=dict)
    _degrees: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self._watch = OutlierWatch(self.limits)
        self._degrees = {worker: replica.degree for replica in self.topology.replicas for worker in replica.workers}

    @property
    def slow(self) -> Mapping[int, float]:
        """Slow workers: how many times as long as usual they compute."""
        return self._watch.slow

    def feed(self, measured: Mapping[int, Measured]) -> list[Turn[int]]:
        """One step of all workers with a role; who has become slow, or is well again."""
        self._measured = dict(measured)
        samples = {}
        for worker, one in measured.items():
            units = max(one.samples, 1) / self._degrees[worker]
            samples[worker] = Sample(one.seconds / units, units)
        return self._watch.feed(samples, max(one.seconds for one in measured.values()))

    def waiting_seconds(self) -> float:
        """How long the slow ones kept the others waiting in the last step; 0 while nobody is slow."""
        slow = [one.seconds for worker, one in self._measured.items() if worker in self.slow]
        rest = [one.seconds for worker, one in self._measured.items() if worker not in self.slow]
        return max(0.0, max(slow) - max(rest)) if slow and rest else 0.0

    @property
    def num_samples(self) -> int:
        """Samples of the last step over all data rows."""
        rows = [self.topology.replicas[r].grid[f][0] for r, f in self.topology.data_rows]
        return sum(self._measured[worker].samples for worker in rows)

    def sample_seconds(self) -> tuple[float, ...]:
        """Per data row, for one sample: rows of one replica gather parameters together, so its slowest worker sets the pace."""
        paces = self._watch.values
        return self._per_row(
            [max(paces[worker] for worker in replica.workers) / replica.degree for replica in self.topology.replicas]
        )

    def step_seconds(self, weights: tuple[int, ...], sample_seconds: Sequence[float] | None = None) -> float:
        """What a step takes when its samples are dealt by `weights`."""
        each = self.sample_seconds() if sample_seconds is None else sample_seconds
        return max(count * seconds for count, seconds in zip(deal(self.num_samples, weights), each, strict=True))

    def helps(self, worker: int, weights: tuple[int, ...]) -> list[Help]:
        """What could be done about a slow worker, the best first. `weights`: by which the samples are dealt now."""
        at = self.topology.position(worker).replica
        replica, paces = self.topology.replicas[at], self._watch.values
        each = self.sample_seconds()
        found = []
        if len(set(self._per_row(list(range(len(self.topology.replicas)))))) > 1:
            found.append(Help("batch shares by speed", self.step_seconds(weights_of(each), each)))
        if replica.degree > 1:
            even = max(1.0 / sum(1.0 / paces[one] for one in row) for row in replica.grid)
            found.append(Help("its neighbours take some of its granules", self._with(at, even, weights)))
            column = {row[self.topology.position(worker).tp] for row in replica.grid}
            left = max(paces[one] for one in replica.workers if one not in column) / (replica.degree - 1)
            found.append(Help(f"leave without it: ntp drain {worker}", self._with(at, left)))
        elif len(self.topology.replicas) > 1:
            rest = [seconds for (r, _), seconds in zip(self.topology.data_rows, each, strict=True) if r != at]
            found.append(Help(f"leave without it: ntp drain {worker}", self.step_seconds(weights_of(rest), rest)))
        return sorted(found, key=lambda one: one.step_seconds)

    def new_shares(self, weights: tuple[int, ...], horizon_seconds: float, cost_seconds: float) -> NewShares | None:
        """Other weights per data row, if over the horizon they gain more than the change costs; None to leave all as it is."""
        if not self._watch.values:
            return None
        wanted = weights_of(self.sample_seconds())
        change = NewShares(wanted, self.step_seconds(weights), self.step_seconds(wanted))
        worth = change.gain >= MIN_GAIN and change.gain * horizon_seconds > cost_seconds
        return change if worth else None

    def _with(self, replica: int, sample_seconds: float, weights: tuple[int, ...] | None = None) -> float:
        """A step with another speed of one replica; shares by speed unless `weights` are given."""
        each = [
            sample_seconds if r == replica else seconds
            for (r, _), seconds in zip(self.topology.data_rows, self.sample_seconds(), strict=True)
        ]
        return self.step_seconds(weights or weights_of(each), each)

    def _per_row(self, of_replica: Sequence[float]) -> tuple[float, ...]:
        return tuple(of_replica[r] for r, _ in self.topology.data_rows)


def weights_of(sample_seconds: Sequence[float]) -> tuple[int, ...]:
    """Weights with which all data rows take equally long."""
    fastest = min(sample_seconds)
    return tuple(max(1, round(WEIGHT_SCALE * fastest / seconds)) for seconds in sample_seconds)
