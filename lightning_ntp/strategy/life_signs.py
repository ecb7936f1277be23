"""What a worker's heartbeat says of its main thread: how long steps take, and whether somebody debugs it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

_DEBUGGERS = frozenset({"pdb", "bdb", "ipdb", "pudb", "pydevd", "debugpy", "_pydevd_bundle"})


class StepClock:
    """The time between two commits in a row. What was paused in between (compile, evaluate, save, join) does not count."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: float | None = None
        self._sign: dict[str, float] = {}
        self._num_commits = 0

    def commit(self) -> None:
        """A step has been decided."""
        now = self._clock()
        if self._last is not None:
            self._num_commits += 1
            self._sign = {"commits": self._num_commits, "step_seconds": now - self._last}
        self._last = now

    def pause(self) -> None:
        """The step that runs now is no measure."""
        self._last = None

    def sign(self) -> dict[str, float]:
        """The last measured step, for the heartbeat; empty before the first."""
        return self._sign


def being_debugged(thread_ident: int) -> bool:
    """Whether this process is traced (gdb, py-spy, strace) or the thread is inside a Python debugger."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    if "TracerPid:\t0\n" not in status:
        return True
    frame = sys._current_frames().get(thread_ident)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).split(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False
