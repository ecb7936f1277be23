"""Slow GPUs: who computes longer than the others for the same work, and what would help. Pure.

    Measured, per worker and step  --StragglerWatch.feed-->  turns
                                   --helps-->                what each remedy would make of a step
                                   --new_deal-->             other granules and batch shares, if they gain more than they cost

A step time says nothing: all wait for the slowest. What counts is the time between collectives, per unit of work, where a sample
is one unit, of which each role of its data row does its fraction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lightning_ntp.errors import ConfigError
from lightning_ntp.layout import Relief
from lightning_ntp.outliers import OutlierLimits, OutlierWatch, Sample, Turn
from lightning_ntp.shares import deal
from lightning_ntp.topology import Replica, Topology

WEIGHT_SCALE = 1000
"""Weight of the fastest data row, when shares follow speeds."""

MIN_GAIN = 0.03
"""What shortens a step by less is not worth an entry in a log."""

Fractions = Mapping[int, float]
"""Worker -> the part of each sample of its data row that it computes; over a row they add up to 1."""


@dataclass(frozen=True)  # no slots: LightningCLI reads a default through vars()
class SlowConfig:
    """What happens when a GPU computes longer than the others for the same work.

    Args:
        mode: ``"advise"`` names it and what would help; ``"act"`` also hands granules of a slow role to its neighbours (where the job
            can recover) and lets batch shares follow the speeds, if that gains more than it costs; ``"off"`` measures nothing.
        factor: slow is who takes so many times the usual time; well again below half of the excess.
        steps: for so many steps in a row.
        horizon_seconds: time over which a change must pay.
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
class NewDeal:
    """Who shall do how much: a topology with other reliefs or the same, weights per data row; seconds of a step before and after."""

    topology: Topology
    weights: tuple[int, ...]
    now_seconds: float
    then_seconds: float

    @property
    def gain(self) -> float:
        """Share of the step that is saved."""
        return 1.0 - self.then_seconds / self.now_seconds


def even_fractions(topology: Topology) -> dict[int, float]:
    """Every role of a replica does the same, as far as it is not relieved: granules as fine as one likes."""
    found: dict[int, float] = {}
    for replica in topology.replicas:
        kept = {role: permille / 1000 / replica.degree for role, permille in replica.relief}
        rest = (1.0 - sum(kept.values())) / (replica.degree - len(kept))
        for row in replica.grid:
            each = zip(row, topology.roles(replica.degree), strict=True)
            found |= {worker: kept.get(role, rest) for worker, role in each}
    return found


@dataclass
class StragglerWatch:
    """The speeds of a topology's workers. Made anew with each topology, as work is dealt out anew."""

    topology: Topology
    limits: OutlierLimits = field(default_factory=OutlierLimits)
    fractions_of: Callable[[Topology], Fractions] = even_fractions
    _watch: OutlierWatch[int] = field(init=False)
    _measured: dict[int, Measured] = field(default_factory=dict)
    _fractions: Fractions = field(init=False)

    def __post_init__(self) -> None:
        self._watch = OutlierWatch(self.limits)
        self._fractions = self.fractions_of(self.topology)

    @property
    def slow(self) -> Mapping[int, float]:
        """Slow workers: how many times as long as usual they compute."""
        return self._watch.slow

    def feed(self, measured: Mapping[int, Measured]) -> list[Turn[int]]:
        """One step of all workers with a role; who has become slow, or is well again."""
        self._measured = dict(measured)
        samples = {}
        for worker, one in measured.items():
            units = max(one.samples, 1) * self._fractions[worker]
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

    def sample_seconds(self, fractions: Fractions | None = None) -> tuple[float, ...]:
        """Per data row, for one sample: rows of one replica gather parameters together, so its slowest worker sets the pace."""
        paces, each = self._watch.values, self._fractions if fractions is None else fractions
        return self._per_row(
            [max(paces[worker] * each[worker] for worker in replica.workers) for replica in self.topology.replicas]
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

    def new_deal(
        self, weights: tuple[int, ...], horizon_seconds: float, share_seconds: float, move_seconds: float | None
    ) -> NewDeal | None:
        """What gains most over the horizon beyond what it costs: other weights per data row, or other granules and weights.

        Args:
            weights: by which the samples are dealt now.
            horizon_seconds: time over which a change must pay.
            share_seconds: what other weights cost.
            move_seconds: what it costs to move granules as well; None where they cannot move.

        Returns:
            None to leave all as it is.
        """
        if not self._watch.values:
            return None
        now = self.step_seconds(weights)
        found = [(self._dealt(self.topology, now), share_seconds)]
        if move_seconds is not None and (relieved := self.relieved()) != self.topology:
            found.append((self._dealt(relieved, now), move_seconds))
        deal_, cost = max(found, key=lambda one: one[0].gain * horizon_seconds - one[1])
        return deal_ if deal_.gain >= MIN_GAIN and deal_.gain * horizon_seconds > cost else None

    def relieved(self) -> Topology:
        """The topology in which every slow role keeps what it does in the time of the others, as far as granules allow."""
        replicas = tuple(replace(replica, relief=self._relief(replica)) for replica in self.topology.replicas)
        return replace(self.topology, replicas=replicas)

    def _relief(self, replica: Replica) -> Relief:
        columns = list(zip(*replica.grid, strict=True))
        speeds = [1.0 / max(self._watch.values[worker] for worker in column) for column in columns]
        kept = [round(1000 * replica.degree * speed / sum(speeds)) for speed in speeds]
        roles = self.topology.roles(replica.degree)
        found = tuple(
            (role, permille)
            for role, permille, column in zip(roles, kept, columns, strict=True)
            if permille < 1000 and any(worker in self.slow for worker in column)
        )
        return found if len(found) < replica.degree else ()

    def _dealt(self, topology: Topology, now_seconds: float) -> NewDeal:
        each = self.sample_seconds(self.fractions_of(topology))
        weights = weights_of(each)
        return NewDeal(topology, weights, now_seconds, self.step_seconds(weights, each))

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
