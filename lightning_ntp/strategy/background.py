"""Work that may block for minutes, such as a table for a service that is down, beside the training."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

_log = logging.getLogger(__name__)

MAX_WAITING = 100


class Background:
    """One thread, which exists only while there is work.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_failed = 0
        self._waiting: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, key: Hashable, work: Callable[[], None]) -> bool:
        """Do `work` some time soon, in place of other work of this key that has not begun. False: too much is waiting."""
        with self._lock:
            if key not in self._waiting and len(self._waiting) >= MAX_WAITING:
                self.num_failed += 1
                return False
            self._waiting[key] = work
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
                self._thread.start()
            return True

    def wait(self, seconds: float) -> bool:
        """Wait until everything is done, but not longer; whether it is."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return self._thread is None

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                _, work = self._waiting.popitem(last=False)
            try:
                work()
            except Exception as error:  # noqa: BLE001  whatever it was: training goes on
                self.num_failed += 1
                if self.num_failed <= 3:
                    _log.warning("%s: %s: %s", self.name, type(error).__name__, error)
