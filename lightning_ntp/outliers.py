"""Who stays worse than the others: smoothed values, two limits and patience, so that one bad step changes nothing.

    feed(samples)  ->  turns: keys that have become slow, or are well again
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lightning_ntp.errors import ConfigError

Key = TypeVar("Key")

WARM_FEEDS = 2
"""First steps open connections and compile: they say nothing of the next ones."""

OUTLIER = 4.0
"""A single value counts as this many times the smoothed one at most."""


@dataclass(frozen=True, slots=True)
class OutlierLimits:
    """When a key counts as slow.

    Args:
        enter: becomes slow at so many times the usual value (the lower median) ...
        leave: ... and is well again below so many times; between the two it stays what it is.
        patience: for so many feeds in a row.
        smoothing: weight of the newest value in the exponential average.
        cost_share: only what costs at least this part of a step can become slow.
    """

    enter: float = 1.3
    leave: float = 1.15
    patience: int = 20
    smoothing: float = 0.1
    cost_share: float = 0.05

    def __post_init__(self) -> None:
        if not 1.0 <= self.leave <= self.enter:
            raise ConfigError(f"OutlierLimits: 1 <= leave <= enter, got leave={self.leave}, enter={self.enter}")
        if self.patience < 1 or not 0 < self.smoothing <= 1 or self.cost_share < 0:
            raise ConfigError(
                f"OutlierLimits: patience of at least 1, smoothing in (0, 1], cost_share from 0, got {self.patience}, "
                f"{self.smoothing}, {self.cost_share}"
            )


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one step. value: per unit of work; units: of work in this step, so that value x units are seconds."""

    value: float
    units: float


@dataclass(frozen=True, slots=True)
class Turn(Generic[Key]):
    """A key has become slow, or is well again; `factor` times the usual value."""

    key: Key
    factor: float
    is_slow: bool


@dataclass
class OutlierWatch(Generic[Key]):
    """See the module docstring. The same feeds give the same turns, on every worker."""

    limits: OutlierLimits = field(default_factory=OutlierLimits)
    values: dict[Key, float] = field(default_factory=dict)
    slow: dict[Key, float] = field(default_factory=dict)
    _streaks: dict[Key, int] = field(default_factory=dict)
    _num_feeds: int = 0

    def feed(self, samples: Mapping[Key, Sample], step_seconds: float) -> list[Turn[Key]]:
        """One step's values of all keys, which stay the same; `step_seconds` is what its slowest part took."""
        self._num_feeds += 1
        if self._num_feeds <= WARM_FEEDS or len(samples) < 2:
            return []
        for key, sample in samples.items():
            self.values[key] = self._smoothed(self.values.get(key), sample.value)
        usual = self.usual
        turns = []
        for key, sample in samples.items():
            factor = self.values[key] / usual if usual > 0 else 1.0
            costs = (self.values[key] - usual) * sample.units >= self.limits.cost_share * step_seconds
            turns += self._judge(key, factor, costs)
        return turns

    @property
    def usual(self) -> float:
        """The lower median: where half of the keys are slow, the other half is the measure."""
        return statistics.median_low(self.values.values()) if self.values else 0.0

    def _smoothed(self, before: float | None, value: float) -> float:
        if before is None or before <= 0:
            return value
        return before + self.limits.smoothing * (min(value, OUTLIER * before) - before)

    def _judge(self, key: Key, factor: float, costs: bool) -> list[Turn[Key]]:
        is_slow = key in self.slow
        turning = factor < self.limits.leave if is_slow else factor >= self.limits.enter and costs
        self._streaks[key] = self._streaks.get(key, 0) + 1 if turning else 0
        if is_slow:
            self.slow[key] = factor
        if self._streaks[key] < self.limits.patience:
            return []
        self._streaks[key] = 0
        if is_slow:
            del self.slow[key]
        else:
            self.slow[key] = factor
        return [Turn(key, factor, not is_slow)]
