"""How long a step may take before the job counts as hung: a multiple of what steps have taken, by measurement.

Compile, the first steps, evaluation, saving and a debugger take as long as they take: there the clock stands still
(`UNWATCHED_PHASES` in coordinator.py), and before some steps are measured there is no deadline at all.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

MEASURED_STEPS = 3
"""So many steps must have been measured first: the first ones compile, allocate and fill caches."""

REMEMBERED_STEPS = 64


@dataclass(slots=True)
class HangDeadline:
    """The limit from the measured step times.

    factor: of the median step. floor_seconds: never less than this. fixed_seconds: if given, this and nothing measured.
    """

    factor: float
    floor_seconds: float
    fixed_seconds: float | None = None
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))

    def note_step(self, seconds: float) -> None:
        """A step has been committed after so many seconds."""
        self._steps.append(seconds)

    @property
    def seconds(self) -> float | None:
        """The limit now; None while nothing can be said."""
        if self.fixed_seconds is not None:
            return self.fixed_seconds
        if len(self._steps) < MEASURED_STEPS:
            return None
        return max(self.floor_seconds, self.factor * statistics.median(self._steps))

    def __str__(self) -> str:
        limit = self.seconds
        if limit is None:
            return "no limit yet"
        if self.fixed_seconds is not None or limit == self.floor_seconds:
            return f"{limit:g} s"
        return f"{limit:.1f} s = {self.factor:g} x the median step of {statistics.median(self._steps):.2f} s"
