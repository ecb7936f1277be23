"""A job's history cut into equal stretches of time: what pictures and timelines are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ntp.goodput_file import History, Segment
from lightning_ntp.goodput_totals import BUCKETS, PRODUCTIVE

COLORS = {
    PRODUCTIVE: "#2a9d5c",
    "init": "#9aa5b1",
    "compile": "#6d7f91",
    "data_wait": "#e9c46a",
    "detection": "#d62828",
    "regroup": "#e76f51",
    "reshard": "#f4a261",
    "lost_step": "#9d0208",
    "checkpoint_save": "#457b9d",
    "checkpoint_load": "#1d3557",
    "straggler": "#b5838d",
    "degraded_capacity": "#3a3f47",
    "eval": "#8ecae6",
    "other": "#c9ced6",
}
"""One colour per bucket in every picture."""


@dataclass(frozen=True, slots=True)
class Bins:
    """Time by bucket in equal stretches.

    Args:
        start_ns: of the first one.
        width_ns: of each, a float so that they end where the job does.
        spent: per stretch, bucket -> nanoseconds.
    """

    start_ns: int
    width_ns: float
    spent: tuple[dict[str, float], ...]

    def gpus(self, bucket: str) -> list[float]:
        """How many GPUs were in a bucket, on average over each stretch."""
        return [each.get(bucket, 0.0) / self.width_ns for each in self.spent]

    def most(self) -> list[str]:
        """The bucket that took most of each stretch; "" where nothing is known."""
        return [max(each, key=lambda bucket: each[bucket]) if any(each.values()) else "" for each in self.spent]


def bins_of(history: History, gpus: Sequence[int], number: int) -> Bins:
    """The time of these GPUs together in `number` stretches from the job's start to its last word."""
    start, end = history.start_ns, max(history.at_ns, history.start_ns + 1)
    width = (end - start) / number
    spent: tuple[dict[str, float], ...] = tuple({} for _ in range(number))
    for gpu in gpus:
        for segment in history.segments.get(gpu, ()):
            _spread(segment, start, width, spent)
    return Bins(start, width, spent)


def _spread(segment: Segment, start_ns: int, width_ns: float, spent: Sequence[dict[str, float]]) -> None:
    """Adds a segment to the stretches that it overlaps, in proportion."""
    length = segment.end_ns - segment.start_ns
    first = min(len(spent) - 1, max(0, int((segment.start_ns - start_ns) / width_ns)))
    for index in range(first, len(spent)):
        left = start_ns + index * width_ns
        if left >= segment.end_ns:
            return
        overlap = min(segment.end_ns, left + width_ns) - max(segment.start_ns, left)
        if overlap <= 0:
            continue
        each = spent[index]
        for bucket, ns in segment.spent.items():
            if ns:
                each[bucket] = each.get(bucket, 0.0) + ns * overlap / length


def used_buckets(history: History) -> list[str]:
    """Buckets that took any time, in their usual order."""
    total = history.gpu_ns()
    return [bucket for bucket in BUCKETS if total[bucket]]
