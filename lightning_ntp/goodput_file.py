"""Ledgers on disk: one append-only file of JSON lines per worker, readable at any moment, also after a crash in mid-write.

    LedgerFile(path).write    the sink of a `Ledger`
    read_ledger(path)         one worker's view of the job, as `History`
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_ntp.errors import ConfigError
from lightning_ntp.goodput_totals import BUCKETS, IDLE, numbers

VERSION = 1
MAX_WAITING = 10_000
"""Records that are kept for later while the disk does not take them."""


class LedgerFile:
    """Appends records; never raises once it is open, as a full disk must not stop training.

    Args:
        path: created with its folder. An existing file is continued.
        header: facts about this process, written first.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.num_failed = 0
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._cut = _ends_mid_line(path)
        self.write({"kind": "open", "version": VERSION, **header})

    def write(self, record: Mapping[str, Any]) -> None:
        """One record as one line, with one system call."""
        self._waiting.append(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        data = (b"\n" if self._cut else b"") + b"".join(self._waiting)
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                written = os.write(descriptor, data)
            finally:
                os.close(descriptor)
        except OSError:
            self.num_failed += 1
            return
        self._cut = written < len(data)
        if self._cut:  # a full disk took a part of it: whole lines stay, the rest is tried again
            self.num_failed += 1
            return
        self._waiting.clear()


def _ends_mid_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of one GPU's time and what it went to; the parts sum to its length.

    Args:
        start_ns: nanoseconds since 1970.
        end_ns: likewise.
        spent: bucket -> nanoseconds.
    """

    start_ns: int
    end_ns: int
    spent: Mapping[str, int]

    def __post_init__(self) -> None:
        if not self.start_ns < self.end_ns or sum(self.spent.values()) != self.end_ns - self.start_ns:
            raise ValueError(f"parts {dict(self.spent)} do not make {self.end_ns - self.start_ns} ns")

    def until(self, ns: int) -> tuple[Segment | None, Segment | None]:
        """Cut in two at a moment, each part in proportion; None for an empty piece."""
        if ns <= self.start_ns:
            return None, self
        if ns >= self.end_ns:
            return self, None
        first = _proportional(self.spent, ns - self.start_ns)
        rest = {bucket: spent - first[bucket] for bucket, spent in self.spent.items()}
        return Segment(self.start_ns, ns, first), Segment(ns, self.end_ns, rest)


def _proportional(spent: Mapping[str, int], length_ns: int) -> dict[str, int]:
    """Parts of a shorter stretch that sum to it exactly."""
    total, passed, given, parts = sum(spent.values()), 0, 0, {}
    for bucket, ns in spent.items():
        passed += ns
        parts[bucket] = passed * length_ns // total - given
        given += parts[bucket]
    return parts


@dataclass(slots=True)
class History:
    """What a ledger file says.

    Args:
        header: of the newest process that wrote it.
        segments: GPU -> its time, in order and without holes while it is owned.
        events: in order, each with ``t`` (ns) and ``event``.
        at_ns: the last moment it knows.
        step: optimizer steps that stood then.
        generation: of the membership then.
        num_damaged: lines that were no records.
        job: bucket -> nanoseconds of the job.
        idle: GPUs without work at the end.
        totals_only: nanoseconds of all GPUs where no segments are known, and `began_ns`, when the job began then.
    """

    header: dict[str, Any] = field(default_factory=dict)
    segments: dict[int, list[Segment]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    at_ns: int = 0
    step: int = 0
    generation: int = 0
    num_damaged: int = 0
    job: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0))
    idle: frozenset[int] = frozenset()
    released: set[int] = field(default_factory=set)
    totals_only: dict[str, int] | None = None
    began_ns: int | None = None

    @property
    def worker(self) -> int:
        """Whose file it is."""
        return int(self.header.get("worker", 0))

    @property
    def start_ns(self) -> int:
        """The first moment of the job."""
        if self.began_ns is not None:
            return self.began_ns
        return min((segments[0].start_ns for segments in self.segments.values() if segments), default=self.at_ns)

    def gpu_ns(self) -> dict[str, int]:
        """Nanoseconds summed over all GPUs, by bucket."""
        if self.totals_only is not None:
            return dict(self.totals_only)
        total = dict.fromkeys(BUCKETS, 0)
        for segments in self.segments.values():
            for segment in segments:
                for bucket, ns in segment.spent.items():
                    total[bucket] += ns
        return total

    def state(self) -> dict[str, Any]:
        """As `Ledger.state_dict` would give it."""
        spent = {}
        for gpu, segments in self.segments.items():
            row = dict.fromkeys(BUCKETS, 0)
            for segment in segments:
                for bucket, ns in segment.spent.items():
                    row[bucket] += ns
            spent[str(gpu)] = list(row.values())
        owned = self.segments.keys() - self.released
        return {
            "at_ns": self.at_ns,
            "step": self.step,
            "generation": self.generation,
            "live": sorted(owned - self.idle),
            "idle": sorted(owned & self.idle),
            "spent": spent,
            "job": list(self.job.values()),
        }


def read_ledger(path: Path) -> History:
    """One worker's file. Lines that a crash cut off are counted and left out.

    Raises:
        ConfigError: no such file, or nothing in it is a ledger's.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read the ledger {path}: {error.strerror}") from error
    history = History()
    for line in lines:
        if not line:
            continue
        try:
            record = json.loads(line)
            _READERS[record["kind"]](history, record)
        except (ValueError, KeyError, TypeError, AttributeError):
            history.num_damaged += 1
    if not history.header:
        raise ConfigError(f"{path} is no ledger: none of its {len(lines)} lines opens one")
    return history


def _read_open(history: History, record: dict[str, Any]) -> None:
    if record["version"] != VERSION:
        raise ConfigError(f"a ledger of version {record['version']}; this package reads version {VERSION}")
    history.header = record


def _read_time(history: History, record: dict[str, Any]) -> None:
    start, end = int(record["start"]), int(record["t"])
    rows = [(list(numbers(gpus)), Segment(start, end, _checked(spent))) for gpus, spent in record["spans"]]
    idle = frozenset(numbers(record["idle"]))
    at_work = next((segment.spent for gpus, segment in rows if not idle.issuperset(gpus)), {IDLE: end - start})
    for bucket, ns in at_work.items():
        history.job[bucket] += ns
    for gpus, segment in rows:
        for gpu in gpus:
            known = history.segments.setdefault(gpu, [])
            if gpu not in history.released:
                known += _hole(known, start)
            history.released.discard(gpu)
            _, rest = segment.until(known[-1].end_ns) if known else (None, segment)
            if rest is not None:
                known.append(rest)
    history.idle = idle
    _stamp(history, record)


def _hole(known: list[Segment], start_ns: int) -> list[Segment]:
    """Time that nobody wrote down, because the disk was full or lines were damaged."""
    if known and known[-1].end_ns < start_ns:
        return [Segment(known[-1].end_ns, start_ns, {"other": start_ns - known[-1].end_ns})]
    return []


def _checked(spent: Mapping[str, int]) -> dict[str, int]:
    unknown = spent.keys() - set(BUCKETS)
    if unknown or any(not isinstance(ns, int) or ns < 0 for ns in spent.values()):
        raise ValueError(f"buckets {sorted(unknown)} or amounts {spent}")
    return dict(spent)


def _read_move(history: History, record: dict[str, Any]) -> None:
    source, destination = record["source"], record["destination"]
    for gpus, ns in record["spans"]:
        for gpu in numbers(gpus):
            history.segments[gpu] = _moved(history.segments[gpu], int(ns), source, destination)
    history.job[source] -= int(record["job"])
    history.job[destination] += int(record["job"])
    _stamp(history, record)


def _moved(segments: list[Segment], ns: int, source: str, destination: str) -> list[Segment]:
    """The latest `ns` of one bucket go to another."""
    result = list(segments)
    for index in range(len(result) - 1, -1, -1):
        if not ns:
            break
        spent = dict(result[index].spent)
        taken = min(ns, spent.get(source, 0))
        if taken:
            spent[source] -= taken
            spent[destination] = spent.get(destination, 0) + taken
            result[index] = replace(result[index], spent=spent)
            ns -= taken
    return result


def _read_release(history: History, record: dict[str, Any]) -> None:
    history.released |= set(numbers(record["gpus"]))
    _stamp(history, record)


def _read_event(history: History, record: dict[str, Any]) -> None:
    history.events.append(record)
    _stamp(history, record)


def _read_state(history: History, record: dict[str, Any]) -> None:
    """A process went on with an older ledger. Its totals rule; earlier segments are adapted so that they give them."""
    state = record["state"]
    history.job = dict(zip(BUCKETS, (int(ns) for ns in state["job"]), strict=True))
    for name, row in state["spent"].items():
        wanted = dict(zip(BUCKETS, (int(ns) for ns in row), strict=True))
        history.segments[int(name)] = _adapted(history.segments.get(int(name), []), wanted, int(record["t"]))
    _stamp(history, record)


def _adapted(segments: list[Segment], wanted: Mapping[str, int], end_ns: int) -> list[Segment]:
    """Segments that end at `end_ns` and have these totals: moves what is too much, and puts what is missing in the holes."""
    length = sum(wanted.values())
    start = end_ns - length
    kept = [rest for segment in segments if (rest := segment.until(start)[1]) is not None]
    kept = [first for segment in kept if (first := segment.until(end_ns)[0]) is not None]
    missing = dict(wanted)
    for segment in kept:
        for bucket, ns in segment.spent.items():
            missing[bucket] -= ns
    for bucket in BUCKETS:
        while missing[bucket] < 0:
            other = max(missing, key=lambda name: missing[name])
            if missing[other] <= 0:
                break
            ns = min(-missing[bucket], missing[other])
            kept = _moved(kept, ns, bucket, other)
            missing[bucket] += ns
            missing[other] -= ns
    return _filled(kept, {bucket: ns for bucket, ns in missing.items() if ns > 0}, start, end_ns)


def _filled(segments: list[Segment], missing: dict[str, int], start_ns: int, end_ns: int) -> list[Segment]:
    """Puts `missing` into the holes between segments, in order."""
    result: list[Segment] = []
    at = start_ns
    ends = [*((segment.start_ns, segment) for segment in segments), (end_ns, None)]
    for until, segment in ends:
        if until > at and missing:
            parts = _proportional(missing, min(until - at, sum(missing.values())))
            result.append(Segment(at, at + sum(parts.values()), {k: ns for k, ns in parts.items() if ns}))
            missing = {bucket: ns - parts[bucket] for bucket, ns in missing.items() if ns > parts[bucket]}
        if segment is not None:
            result.append(segment)
            at = segment.end_ns
    return result


def _stamp(history: History, record: Mapping[str, Any]) -> None:
    history.at_ns = max(history.at_ns, int(record["t"]))
    history.step, history.generation = int(record["step"]), int(record["generation"])


_READERS = {
    "open": _read_open, "time": _read_time, "move": _read_move, "release": _read_release, "event": _read_event, "state": _read_state,
}  # fmt: skip
