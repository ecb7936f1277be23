"""Where a step's time goes: computing, or waiting in collectives. One per process, as collectives are called from everywhere.

    begin ... waited(group, began) ... mark ... end  ->  Lap.read()

Computing lasts from `begin` to the last `mark` (where the last bucket of gradients is about to be exchanged), less what was waited in
between. On CPU host clocks tell; on CUDA events on the streams do, and only those of the stream that computes are taken off.
Compiled code is one piece: what is waited inside of it counts as computing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

Moment = int | torch.cuda.Event
"""Nanoseconds, or a recorded event."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One collective: the name of its group, and whether it held up the computing."""

    group: str
    began: Moment
    ended: Moment
    in_the_way: bool


@dataclass(frozen=True, slots=True)
class Lap:
    """What was measured. num_waits: those before the last mark."""

    began: Moment
    marked: Moment
    waits: tuple[Wait, ...]
    num_waits: int

    def read(self) -> tuple[int, dict[str, int]]:
        """Nanoseconds of computing, and in collectives by group. On CUDA once the work is done."""
        groups: dict[str, int] = {}
        waited = 0
        for index, wait in enumerate(self.waits):
            spent = _between(wait.began, wait.ended)
            groups[wait.group] = groups.get(wait.group, 0) + spent
            waited += spent if index < self.num_waits and wait.in_the_way else 0
        return max(0, _between(self.began, self.marked) - waited), groups


class Stopwatch:
    """See the module docstring. Not running, it costs a look at an attribute."""

    def __init__(self) -> None:
        self.running = False
        self._waits: list[Wait] = []
        self._cuda = False

    def begin(self, cuda: bool) -> None:
        """Start anew."""
        self.running, self._cuda = True, cuda
        self._stream = torch.cuda.current_stream() if cuda else None
        self._waits = []
        self._began = self.now()
        self._marked: tuple[Moment, int] | None = None

    def now(self) -> Moment:
        """This moment."""
        if not self._cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def waited(self, group: ProcessGroup, began: Moment) -> None:
        """A collective that began then is over."""
        in_the_way = not self._cuda or torch.cuda.current_stream() == self._stream
        self._waits.append(Wait(group.group_name, began, self.now(), in_the_way))

    def mark(self) -> None:
        """Computing has got as far as this."""
        if self.running:
            self._marked = self.now(), len(self._waits)

    def end(self) -> Lap:
        """Stop; what was measured since `begin`."""
        self.running = False
        moment, num_waits = self._marked or (self.now(), len(self._waits))
        lap = Lap(self._began, moment, tuple(self._waits), num_waits)
        self._waits = []
        return lap


STOPWATCH = Stopwatch()


def _between(began: Moment, ended: Moment) -> int:
    if isinstance(began, torch.cuda.Event):
        assert isinstance(ended, torch.cuda.Event)
        return int(began.elapsed_time(ended) * 1e6)
    assert isinstance(ended, int)
    return ended - began
