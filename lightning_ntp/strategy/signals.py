"""Signals as something a loop can wait for."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Self


@contextmanager
def default_signal(number: int) -> Iterator[None]:
    """Inside, the signal does what the system does with it, at once: Python's handlers wait for calls into C to return.

    Outside the main thread Python cannot change it; then this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)


@dataclass(slots=True)
class SignalWatch:
    """While open, SIGINT, SIGTERM, SIGHUP and SIGUSR1 are collected in `pending` and make `wake` readable, nothing else.

    Outside the main thread Python cannot handle signals; then this does nothing.
    """

    pending: list[int] = field(default_factory=list)
    wake: socket.socket | None = None
    _sender: socket.socket | None = None
    _before: dict[int, Any] = field(default_factory=dict)
    _fd_before: int = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self.wake, self._sender = socket.socketpair()
        self.wake.setblocking(False)
        self._sender.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pending.append(number)

    def drain(self) -> None:
        """Makes `wake` unreadable until the next signal."""
        try:
            while self.wake is not None and self.wake.recv(256):
                continue
        except BlockingIOError:
            return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.wake is not None and self._sender is not None:
            signal.set_wakeup_fd(self._fd_before)
            self.wake.close()
            self._sender.close()
