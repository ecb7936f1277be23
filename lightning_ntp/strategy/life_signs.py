"""What can be said of a worker's main thread from beside it: how long steps take, who debugs it, whether it is stuck."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

_DEBUGGERS = frozenset({"pdb", "bdb", "ipdb", "pudb", "pydevd", "debugpy", "_pydevd_bundle"})


_WAITING_IN = ("torch.distributed", "torch._ops", "torch.autograd")
"""Where the innermost Python frame of a thread is that waits in a collective (in its own call, or inside of backward)."""


def show_stacks_on_request() -> None:
    """SIGUSR2 from now on writes the Python stacks of all threads to stderr, also while the interpreter is stuck.

    Call it again after somebody has put signal handlers "back": Lightning does so at the end of every `fit`, knows of no handler
    that was not set in Python, and would leave the default one, which ends the process. The one below it is for that while.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR2, lambda number, frame: faulthandler.dump_traceback(all_threads=True))
    faulthandler.unregister(signal.SIGUSR2)  # else it takes its own handler for being in place
    faulthandler.register(signal.SIGUSR2, all_threads=True)


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


class StandstillProbe:
    """Looks at a thread again and again: does it wait in a collective, or does it still get somewhere?"""

    def __init__(self, thread_ident: int, native_id: int) -> None:
        self._ident = thread_ident
        self._schedstat = Path(f"/proc/self/task/{native_id}/schedstat")
        self._before: tuple[int, int, str] | None = None

    def stands_still(self) -> bool:
        """Whether it has not run at all since the last look, and its innermost frame is the same one of torch's."""
        now = self._look()
        stands = now is not None and now == self._before
        self._before = now
        return stands

    def _look(self) -> tuple[int, int, str] | None:
        """Frame, instruction and CPU time; None outside of torch's collectives."""
        frame = sys._current_frames().get(self._ident)
        name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
        if frame is None or not name.startswith(_WAITING_IN):
            return None
        return id(frame), frame.f_lasti, self._schedstat.read_text().split()[0]
