"""The buckets of time, the numbers of a ledger at one moment, and the goodput of a window. Standard library only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

PRODUCTIVE = "productive"
IDLE = "degraded_capacity"
LOST = "lost_step"
BADPUT = (
    "init", "compile", "data_wait", "detection", "regroup", "reshard", LOST, "checkpoint_save", "checkpoint_load", "straggler", IDLE, "eval",
    "other",
)  # fmt: skip
"""Buckets of time that trained nothing; docs/goodput.md says what belongs into each."""

BUCKETS = (PRODUCTIVE, *BADPUT)


@dataclass(frozen=True, slots=True)
class Totals:
    """A ledger at one moment.

    Args:
        at_ns: the moment, nanoseconds since 1970.
        gpu_ns: bucket -> nanoseconds summed over all GPUs.
        job_ns: bucket -> nanoseconds of the job: what its live GPUs did, however many there were.
        num_owned: GPUs that belong to the job now, dead ones too.
        num_live: GPUs at work.
    """

    at_ns: int
    gpu_ns: Mapping[str, int]
    job_ns: Mapping[str, int]
    num_owned: int
    num_live: int

    @property
    def goodput(self) -> float:
        """Share of the job's time in which it trained, on however many GPUs. 0 before anything was measured."""
        return _share(self.job_ns)

    @property
    def capacity_weighted(self) -> float:
        """Share of the time of all owned GPUs in which they trained."""
        return _share(self.gpu_ns)

    def since(self, earlier: Totals) -> Totals:
        """What was added after `earlier`. A bucket can be negative where time was moved out of it."""
        return Totals(
            self.at_ns,
            {bucket: self.gpu_ns[bucket] - earlier.gpu_ns[bucket] for bucket in BUCKETS},
            {bucket: self.job_ns[bucket] - earlier.job_ns[bucket] for bucket in BUCKETS},
            self.num_owned,
            self.num_live,
        )


def _share(spent: Mapping[str, int]) -> float:
    total = sum(spent.values())
    return min(1.0, max(0.0, spent[PRODUCTIVE] / total)) if total > 0 else 0.0


@dataclass(slots=True)
class GoodputWindow:
    """Goodput of the last `seconds`, from totals that are handed in now and then."""

    seconds: float
    _marks: deque[Totals] = field(default_factory=deque)

    def add(self, totals: Totals) -> Totals:
        """Takes the newest totals; what was added over the window, all of it while the job is younger."""
        if not self._marks:
            self._marks.append(_nothing_before(totals))
        self._marks.append(totals)
        start = totals.at_ns - int(self.seconds * 1e9)
        while len(self._marks) > 2 and self._marks[1].at_ns <= start:
            self._marks.popleft()
        return totals.since(self._marks[0])

    def restart(self, totals: Totals) -> None:
        """Forget what was before: the job goes on in a new process."""
        self._marks.clear()
        self._marks.append(totals)


def _nothing_before(totals: Totals) -> Totals:
    nothing = dict.fromkeys(BUCKETS, 0)
    return Totals(totals.at_ns - sum(totals.job_ns.values()), nothing, nothing, totals.num_owned, totals.num_live)


def ranges(numbers: Iterable[int]) -> str:
    """``{0, 1, 2, 5}`` -> ``"0-2,5"``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def numbers(text: str) -> Iterator[int]:
    """The inverse of `ranges`."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
