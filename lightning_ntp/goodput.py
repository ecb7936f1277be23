"""Where the time of every GPU went: a ledger whose buckets sum exactly to wall time x GPUs owned.

    enter(bucket)            what the live GPUs do from now on; they work in lockstep, so one bucket holds for all of them
    lose / restore           a GPU leaves the job or comes back; in between it is ``degraded_capacity``
    commit / discard         the productive time since the last commit stands, or was ``lost_step``
    move                     time turns out to belong into another bucket
    totals                   the numbers so far

Integer nanoseconds, so sums are exact. The clock is injected and may jump backwards: time then stands still.
Every change is also given to `sink` as a plain dict; `goodput_file` writes and reads those.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ntp.errors import ConfigError
from lightning_ntp.goodput_totals import BUCKETS, IDLE, LOST, PRODUCTIVE, Totals, ranges

_NUMBER = {bucket: index for index, bucket in enumerate(BUCKETS)}
_PRODUCTIVE, _IDLE, _LOST, _INIT = (_NUMBER[name] for name in (PRODUCTIVE, IDLE, LOST, "init"))

Clock = Callable[[], int]
Sink = Callable[[dict[str, Any]], None]


def steady_clock() -> Clock:
    """Nanoseconds since 1970 that advance with the monotonic clock, so that a corrected wall clock changes nothing."""
    anchor = time.time_ns() - time.monotonic_ns()
    return lambda: anchor + time.monotonic_ns()


class Ledger:
    """The time of all GPUs of one job, as one worker sees it.

    Args:
        gpus: numbers of the GPUs that the job owns and uses; stable over the job.
        clock: nanoseconds.
        sink: gets every record.
        start_ns: when this process started, if the clock was not read then.
        bucket: what the GPUs have done since then.

    Raises:
        ConfigError: no GPU, or a bucket that does not exist.
    """

    def __init__(
        self,
        gpus: Iterable[int],
        clock: Clock,
        sink: Sink | None = None,
        start_ns: int | None = None,
        bucket: str = "init",
    ) -> None:
        self._live = set(gpus)
        if not self._live:
            raise ConfigError("a ledger needs at least one GPU")
        self._clock, self._sink = clock, sink or (lambda record: None)
        self._skew = 0
        self.step = 0
        self.generation = 0
        self._idle: set[int] = set()
        self._spent: dict[int, list[int]] = {gpu: [0] * len(BUCKETS) for gpu in self._live}
        self._job = [0] * len(BUCKETS)
        self._sum = [0] * len(BUCKETS)
        self._open = [0] * len(BUCKETS)
        self._idle_open = 0
        self._pending = 0
        self._bucket = _number(bucket)
        now = clock()
        self._opened = self._since = now if start_ns is None else min(start_ns, now)

    @property
    def bucket(self) -> str:
        """What the live GPUs do now."""
        return BUCKETS[self._bucket]

    @property
    def live(self) -> frozenset[int]:
        """GPUs at work."""
        return frozenset(self._live)

    @property
    def idle(self) -> frozenset[int]:
        """Owned GPUs that are lost or parked."""
        return frozenset(self._idle)

    @property
    def pending_ns(self) -> int:
        """Productive time of a live GPU since the last commit."""
        self._advance()
        return self._pending

    @property
    def productive_ns(self) -> int:
        """Productive time of the job so far."""
        self._advance()
        return self._job[_PRODUCTIVE]

    def attach(self, sink: Sink) -> None:
        """From now on `sink` gets the records; first the state so far, as it has not seen the earlier ones."""
        state = self.state_dict()
        self._sink = sink
        self._write("state", state=state)

    def now(self) -> int:
        """The clock, never running backwards."""
        now = self._clock() + self._skew
        if now < self._since:
            self._skew += self._since - now
            now = self._since
        return now

    def enter(self, bucket: str) -> None:
        """From now on the live GPUs do this."""
        number = _number(bucket)
        self._advance()
        self._bucket = number

    def lose(self, gpus: Iterable[int]) -> None:
        """These GPUs have left the job or are parked: ``degraded_capacity`` until `restore`. Unknown ones are ignored."""
        self._change(self._live, self._idle, gpus)

    def restore(self, gpus: Iterable[int]) -> None:
        """These GPUs work again."""
        self._change(self._idle, self._live, gpus)

    def own(self, gpus: Iterable[int]) -> None:
        """Further GPUs belong to the job and work from now on."""
        self._advance()
        self.flush()
        for gpu in set(gpus) - self._live - self._idle:
            self._spent.setdefault(gpu, [0] * len(BUCKETS))
            self._live.add(gpu)

    def release(self, gpus: Iterable[int]) -> None:
        """These GPUs no longer belong to the job. What they did stays in the ledger."""
        self._advance()
        self.flush()
        gone = set(gpus)
        gone &= self._live | self._idle
        self._live -= gone
        self._idle -= gone
        self._write("release", gpus=ranges(gone))

    def commit(self, step: int) -> None:
        """`step` optimizer steps stand: the productive time up to now is no longer in doubt."""
        self._advance()
        self._pending = 0
        self.step = step

    def discard(self) -> None:
        """The step in the making is void: the productive time since the last commit was ``lost_step``."""
        self._advance()
        lost, self._pending = self._pending, 0
        self._move(lost, _PRODUCTIVE, _LOST, self._live)

    def move(self, ns: int, source: str, destination: str) -> None:
        """Up to `ns` nanoseconds of each live GPU, the latest ones, belong into another bucket."""
        if ns < 0:
            raise ConfigError(f"Ledger.move of {ns} ns: wanted 0 or more")
        self._advance()
        if source == PRODUCTIVE:
            self._pending = max(0, self._pending - ns)
        self._move(ns, _number(source), _number(destination), self._live)

    def totals(self) -> Totals:
        """The numbers up to now."""
        self._advance()
        gpus = [folded + len(self._live) * spent for folded, spent in zip(self._sum, self._open, strict=True)]
        gpus[_IDLE] += len(self._idle) * self._idle_open
        return Totals(self._since, _named(gpus), _named(self._job), len(self._live | self._idle), len(self._live))

    def of(self, gpu: int) -> dict[str, int]:
        """Nanoseconds of one GPU by bucket."""
        self._advance()
        self.flush()
        return _named(self._spent[gpu])

    def flush(self) -> None:
        """Hand the time since the last record to the sink."""
        if self._since == self._opened:
            return
        spans = []
        if self._live:
            self._add(self._live, self._open)
            spans.append([ranges(self._live), _nonzero(self._open)])
        if self._idle:
            idle = [0] * len(BUCKETS)
            idle[_IDLE] = self._idle_open
            self._add(self._idle, idle)
            spans.append([ranges(self._idle), _nonzero(idle)])
        start, self._opened = self._opened, self._since
        self._open, self._idle_open = [0] * len(BUCKETS), 0
        self._write("time", start=start, spans=spans, idle=ranges(self._idle))

    def note(self, event: str, **facts: Any) -> None:
        """An event for the record, in order with the times around it."""
        self._advance()
        self.flush()
        self._write("event", event=event, **facts)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain data. Time goes on between this and `load_state_dict`; see there."""
        self._advance()
        self.flush()
        return {
            "at_ns": self._since,
            "step": self.step,
            "generation": self.generation,
            "live": sorted(self._live),
            "idle": sorted(self._idle),
            "spent": {str(gpu): list(spent) for gpu, spent in self._spent.items()},
            "job": list(self._job),
        }

    def load_state_dict(self, state: Mapping[str, Any], saved: Mapping[str, Any] | None = None) -> None:
        """Continue the ledger of an earlier process: its time comes before this one's, which has been counted so far.

        Between the two all GPUs were ``degraded_capacity``. Where they overlap the earlier one stands. What the job
        trained after `saved` (the ledger inside the checkpoint that training goes on from) is ``lost_step``.

        Raises:
            ConfigError: `state` is none of ours.
        """
        earlier = _EarlierState.read(state)
        self._advance()
        self.flush()
        start = self._since - sum(self._job)
        mine, job, live, idle = self._spent, self._job, self._live, self._idle
        for spent in (*mine.values(), job):
            _drop(spent, max(0, earlier.at_ns - (self._since - sum(spent))))
        gap = max(0, start - earlier.at_ns)
        self._skew += max(0, earlier.at_ns - self._since)
        self._since = max(self._since, earlier.at_ns)
        self._spent, self._job = earlier.spent, [a + b for a, b in zip(earlier.job, job, strict=True)]
        self._job[_IDLE] += gap
        for gpu in earlier.owned:
            self._spent[gpu][_IDLE] += gap
        for gpu, spent in mine.items():
            known = self._spent.setdefault(gpu, [0] * len(BUCKETS))
            known[:] = [a + b for a, b in zip(known, spent, strict=True)]
        for gpu in earlier.owned - live - idle:  # owned, but the new process does not use it
            idle.add(gpu)
            self._spent[gpu][_IDLE] += max(0, self._since - max(start, earlier.at_ns))
        self._live, self._idle = live, idle
        self._pending = 0
        self._sum = [sum(column) for column in zip(*self._spent.values(), strict=True)]
        self.step = earlier.step
        self._opened = self._since
        if saved is not None:
            self._roll_back(_EarlierState.read(saved))
        self._write("state", state=self.state_dict())

    def join(self, state: Mapping[str, Any]) -> None:
        """Become the ledger of a job that runs: this process is a newcomer, and its own start was never counted.

        The time from `state` to now goes to what the live GPUs do here now.

        Raises:
            ConfigError: `state` is none of ours.
        """
        earlier = _EarlierState.read(state)
        self._skew += max(0, earlier.at_ns - self.now())
        self._spent, self._job, self.step = earlier.spent, earlier.job, earlier.step
        self._live, self._idle = set(map(int, state["live"])), set(map(int, state["idle"]))
        self._sum = [sum(column) for column in zip(*self._spent.values(), strict=True)]
        self._open, self._idle_open, self._pending = [0] * len(BUCKETS), 0, 0
        self.generation = int(state["generation"])
        self._since = self._opened = earlier.at_ns
        self._write("state", state=self.state_dict())

    def _roll_back(self, saved: _EarlierState) -> None:
        for gpu, spent in self._spent.items():
            before = saved.spent.get(gpu, [0] * len(BUCKETS))
            _transfer(spent, max(0, spent[_PRODUCTIVE] - before[_PRODUCTIVE]), _PRODUCTIVE, _LOST)
        _transfer(self._job, max(0, self._job[_PRODUCTIVE] - saved.job[_PRODUCTIVE]), _PRODUCTIVE, _LOST)
        self._sum = [sum(column) for column in zip(*self._spent.values(), strict=True)]
        self.step = saved.step

    def _advance(self) -> None:
        now = self.now()
        passed, self._since = now - self._since, now
        if not passed:
            return
        self._idle_open += passed
        self._job[self._bucket if self._live else _IDLE] += passed
        if self._live:
            self._open[self._bucket] += passed
            if self._bucket == _PRODUCTIVE:
                self._pending += passed

    def _change(self, source: set[int], destination: set[int], gpus: Iterable[int]) -> None:
        moving = source & set(gpus)
        if moving:
            self._advance()
            self.flush()
            source -= moving
            destination |= moving

    def _move(self, ns: int, source: int, destination: int, gpus: Collection[int]) -> None:
        """Moves out of the open record if that holds enough, else out of what is written already."""
        if not ns or source == destination:
            return
        of_job = _transfer(self._job, ns, source, destination)
        in_open = _transfer(self._open, ns, source, destination)
        rest = ns - in_open
        if not rest:
            return
        self.flush()
        taken: dict[int, set[int]] = {}
        for gpu in gpus:
            moved = _transfer(self._spent[gpu], rest, source, destination)
            self._sum[source] -= moved
            self._sum[destination] += moved
            taken.setdefault(moved, set()).add(gpu)
        spans = [[ranges(members), moved] for moved, members in sorted(taken.items()) if moved]
        of_job -= in_open
        self._write("move", source=BUCKETS[source], destination=BUCKETS[destination], spans=spans, job=of_job)

    def _add(self, gpus: Iterable[int], spent: list[int]) -> None:
        for gpu in gpus:
            known = self._spent[gpu]
            for index, ns in enumerate(spent):
                if ns:
                    known[index] += ns
                    self._sum[index] += ns

    def _write(self, kind: str, **fields: Any) -> None:
        self._sink({"kind": kind, "t": self._since, "step": self.step, "generation": self.generation, **fields})


@dataclass(frozen=True, slots=True)
class _EarlierState:
    """A checked copy of `Ledger.state_dict`."""

    at_ns: int
    step: int
    owned: frozenset[int]
    spent: dict[int, list[int]]
    job: list[int]

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> _EarlierState:
        try:
            spent = {int(gpu): [int(ns) for ns in row] for gpu, row in state["spent"].items()}
            job = [int(ns) for ns in state["job"]]
            owned = frozenset(int(gpu) for gpu in (*state["live"], *state["idle"]))
            wrong = [row for row in (*spent.values(), job) if len(row) != len(BUCKETS)]
            if wrong or not owned <= spent.keys():
                raise ValueError(f"rows of {len(BUCKETS)} numbers for each owned GPU")
            return cls(int(state["at_ns"]), int(state["step"]), owned, spent, job)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"this is no state of a goodput ledger ({error!r}); start a new ledger without it") from error


def _number(bucket: str) -> int:
    if bucket not in _NUMBER:
        raise ConfigError(f"there is no goodput bucket {bucket!r}; there are {', '.join(BUCKETS)}")
    return _NUMBER[bucket]


def _named(spent: list[int]) -> dict[str, int]:
    return dict(zip(BUCKETS, spent, strict=True))


def _nonzero(spent: list[int]) -> dict[str, int]:
    return {bucket: ns for bucket, ns in zip(BUCKETS, spent, strict=True) if ns}


def _transfer(spent: list[int], ns: int, source: int, destination: int) -> int:
    moved = min(ns, spent[source])
    spent[source] -= moved
    spent[destination] += moved
    return moved


def _drop(spent: list[int], ns: int) -> None:
    """Takes `ns` out of a row: initialisation first, which is what overlaps."""
    for index in (_INIT, *(index for index in range(len(BUCKETS)) if index != _INIT)):
        dropped = min(ns, spent[index])
        spent[index] -= dropped
        ns -= dropped
