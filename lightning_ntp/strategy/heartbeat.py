"""A worker's signs of life, from a thread of its own: where its main thread is, how long steps take, and who wants to leave."""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

from lightning_ntp.strategy import rendezvous
from lightning_ntp.strategy.coordinator import UNWATCHED_PHASES
from lightning_ntp.strategy.life_signs import StepClock, being_debugged


class Heartbeat:
    """What the main thread tells about itself, and what the supervisor asks of it.

    Args:
        store: the connection of the thread that runs `run`.
        seconds: between two signs.
    """

    def __init__(self, worker: int, store: dist.Store, seconds: float) -> None:
        self.worker, self.store, self.seconds = worker, store, seconds
        self.leave_why = ""  # why this worker shall leave at a step boundary; "" if it shall not
        self._steps = StepClock(time.monotonic)
        self._main_thread = threading.get_ident()
        self._progress, self._phase = 0, "start"
        self._leave_told = False

    def enter(self, phase: str) -> None:
        """The main thread has reached `phase`. Local."""
        self._progress += 1
        self._phase = phase
        if phase in UNWATCHED_PHASES:
            self._steps.pause()

    def commit(self) -> None:
        """A step has been decided: what it took is a measure."""
        self._steps.commit()

    def pause(self) -> None:
        """The step that runs now is no measure."""
        self._steps.pause()

    def request_leave(self, why: str) -> None:
        """The first reason stands. May be called in a signal handler."""
        self.leave_why = self.leave_why or why

    def run(self, closed: threading.Event) -> None:
        """Beats until `closed`; ``DistNetworkError`` when the connection breaks."""
        beats = 0
        while not closed.wait(self.seconds if beats else 0.0):
            beats += 1
            self._beat(beats)

    def _beat(self, beats: int) -> None:
        store, key = self.store, f"leave/{self.worker}"
        phase = "debugger" if being_debugged(self._main_thread) else self._phase
        sign = {"beats": beats, "progress": self._progress, "phase": phase} | self._steps.sign()
        rendezvous.put_json(store, f"heartbeat/{self.worker}", sign)
        # A write to a dead server goes unnoticed, a question does not.
        if store.check([key]) and not self.leave_why:
            self.leave_why = str(rendezvous.get_json(store, key))
        elif self.leave_why and not self._leave_told:
            self._leave_told = True
            rendezvous.put_json(store, key, self.leave_why)
            store.add("leaves", 1)
