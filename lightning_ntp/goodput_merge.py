"""The ledgers of all workers of a job, as one: each GPU's time from its own worker, the rest from the leader of the newest generation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_ntp.errors import ConfigError
from lightning_ntp.goodput_file import History, Segment, read_ledger
from lightning_ntp.goodput_totals import IDLE


def read_run(folder: Path) -> History:
    """All ledgers of a run's folder, merged.

    One whose worker has not come further than making the file (it begins just now, died there, or the disk is full) is left out.

    Raises:
        ConfigError: the folder has none that can be read.
    """
    paths = sorted(folder.glob("ledger-*.jsonl"))
    if not paths:
        raise ConfigError(f"{folder} holds no ledger-*.jsonl; give the folder that the run named as its ledger")
    begun = [path for path in paths if b"\n" in path.read_bytes()]
    return merge([read_ledger(path) for path in begun or paths])


def merge(histories: Sequence[History]) -> History:
    """The job as all its workers saw it.

    Two workers may both have taken themselves for the leader: the one of the newer generation is believed, among equals the
    lower one. Each GPU's own worker is believed about its own time while the leader counts it as live.

    Raises:
        ConfigError: nothing to merge.
    """
    if not histories:
        raise ConfigError("merge needs at least one ledger")
    lead = min(histories, key=lambda history: (-history.generation, history.worker))
    own: dict[int, list[History]] = {}
    for history in sorted(histories, key=lambda history: history.worker):
        for gpu in history.header.get("own", ()):
            own.setdefault(int(gpu), []).append(history)
    segments = {gpu: _seen_by(own.get(gpu, ()), gpu, lead) for gpu in lead.segments}
    return replace(
        lead,
        segments=segments,
        events=_joined_events(histories, lead),
        num_damaged=sum(history.num_damaged for history in histories),
    )


def _seen_by(owners: Sequence[History], gpu: int, lead: History) -> list[Segment]:
    """A GPU's time by the leader, and by the workers that sat on it one after the other.

    Of a replacement only what it wrote since it came: of the time before it knows sums alone.
    """
    found = list(lead.segments[gpu])
    for number, history in enumerate(owners):
        since = int(history.header.get("t", 0)) if number else 0
        if history is not lead:
            found = _overlaid(found, [each for each in history.segments.get(gpu, ()) if each.start_ns >= since])
    return found


def _overlaid(base: Sequence[Segment], own: Iterable[Segment]) -> list[Segment]:
    """`base`, with `own` in place of it where both know the time and `base` has the GPU at work."""
    result: list[Segment] = []
    others = deque(own)
    for segment in base:
        if IDLE in segment.spent:
            result.append(segment)
            continue
        result += _replaced(segment, others)
    return result


def _replaced(segment: Segment, others: deque[Segment]) -> Iterator[Segment]:
    rest: Segment | None = segment
    while rest is not None:
        while others and others[0].end_ns <= rest.start_ns:
            others.popleft()
        if not others or others[0].start_ns >= rest.end_ns:
            yield rest
            return
        before, rest = rest.until(others[0].start_ns)
        if before is not None:
            yield before
        if rest is not None:
            _, mine = others[0].until(rest.start_ns)
            assert mine is not None
            mine, _ = mine.until(rest.end_ns)
            assert mine is not None
            yield mine
            _, rest = rest.until(mine.end_ns)


def _joined_events(histories: Sequence[History], lead: History) -> list[dict[str, Any]]:
    """Every event once: survivors all write down the same loss, each by its own clock."""
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for history in (lead, *(each for each in histories if each is not lead)):
        for number, event in enumerate(history.events):
            key = event.get("key") or [history.worker, number]
            seen.setdefault((event["event"], *key), event)
    return sorted(seen.values(), key=lambda event: int(event["t"]))
