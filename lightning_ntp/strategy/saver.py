"""Saves that run beside training, one at a time: who waits for whom, what becomes of errors, when old checkpoints may go.

    save: settle the one before -> path from the leader -> stage own part (copies) -> thread: write own part
                                                             leader's thread: wait for all parts on the disk -> commit
    settle: own thread has written -> all say how it went (one small message) -> the leader commits or gives up

The collective messages are at the start; a worker that is lost later can only keep that save from being finished, and the
checkpoint before it stands. Deletions wait for the commit, so that there is a good one at any time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lightning_ntp.dtensor.bucket import Bucket, forget_aside
from lightning_ntp.dtensor.checkpoint import missing_parts
from lightning_ntp.dtensor.checkpoint_files import aside_of, delete, remove_leftovers

Place = TypeVar("Place", Path, Bucket)

_log = logging.getLogger(__name__)

POLL_SECONDS, BUCKET_POLL_SECONDS = 0.02, 0.5
LATE_SECONDS = 10.0
"""How long a part that its worker has written may take to show on a shared file system."""


@dataclass
class Save:
    """One save of one worker.

    Args:
        target: name of the finished checkpoint.
        token: of this save, the same on all workers.
        part: this worker's number.
        parts: all workers' numbers.
        write: puts this worker's part, and what else it has to write, to the path aside.
        finish: makes what is aside the checkpoint; None on all workers but the leader.
    """

    target: Path | Bucket
    token: str
    part: int
    parts: Sequence[int]
    write: Callable[[Path], None]
    finish: Callable[[Path], None] | None
    written: threading.Event = field(default_factory=threading.Event)
    all_written: threading.Event = field(default_factory=threading.Event)
    given_up: threading.Event = field(default_factory=threading.Event)
    gone: frozenset[int] = frozenset()
    error: str | None = None

    @property
    def leads(self) -> bool:
        """Whether this worker makes the checkpoint complete."""
        return self.finish is not None

    @property
    def aside(self) -> Path:
        """What becomes the checkpoint, or is uploaded."""
        return self.target.aside(self.token) if isinstance(self.target, Bucket) else aside_of(self.target, self.token)

    def run(self) -> None:
        """Write, and on the leader commit. Never raises: `error` says what went wrong."""
        try:
            if self.leads:
                self._remove_leftovers()
            self.write(self.aside)
            if isinstance(self.target, Bucket):
                self.target.upload(self.aside, self.token, self.part)
        except Exception as error:  # noqa: BLE001  a thread has nobody to raise to; `settle` reports it
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.written.set()
        if self.finish is not None and self.error is None:
            self._finish(self.finish)
        if isinstance(self.target, Bucket):
            forget_aside(self.aside)

    def discard(self) -> None:
        """Delete what a save that is given up has written. By the leader."""
        if isinstance(self.target, Bucket):
            _tried(self.target, lambda bucket: bucket.discard(self.token))
        else:
            _tried(self.aside, delete)

    def _remove_leftovers(self) -> None:
        if isinstance(self.target, Bucket):
            self.target.remove_leftovers(self.token)
        else:
            remove_leftovers(self.target, keep=self.token)

    def _missing(self) -> list[int]:
        if isinstance(self.target, Bucket):
            return self.target.missing_parts(self.token, self.parts)
        return missing_parts(self.aside, self.parts)

    def _finish(self, finish: Callable[[Path], None]) -> None:
        try:
            if self._all_parts_arrive():
                finish(self.aside)
        except Exception as error:  # noqa: BLE001  as above
            self.error = f"{type(error).__name__}: {error}"

    def _all_parts_arrive(self) -> bool:
        deadline = float("inf")
        pause = BUCKET_POLL_SECONDS if isinstance(self.target, Bucket) else POLL_SECONDS
        while missing := self._missing():
            if self.given_up.is_set():
                return False
            if self.all_written.is_set():
                deadline = min(deadline, time.monotonic() + LATE_SECONDS)
            if time.monotonic() > deadline or self.gone.intersection(missing):
                self.error = f"the parts of workers {missing} never came; a worker was lost while it saved"
                return False
            time.sleep(pause)
        return True


class Saver:
    """The saves of one worker.

    Args:
        agree: the message of some worker that has one, or None where nobody has. Collective over all workers with a role.
        live: numbers of the workers that are there now; a part that another one has not left behind never comes.

    Attributes:
        newest: the last checkpoint that this run has completed, as far as this worker knows.
    """

    newest: Path | Bucket | None = None

    def __init__(self, agree: Callable[[str | None], str | None], live: Callable[[], Collection[int]]) -> None:
        self._agree, self._live = agree, live
        self._current: Save | None = None
        self._thread: threading.Thread | None = None
        self._doomed: list[Path | Bucket] = []
        self._last_error: str | None = None

    def start(self, save: Save) -> None:
        """Begin a save; the one before is settled. Local."""
        self._current = save
        self._thread = threading.Thread(target=save.run, name=f"save {save.target.name}")
        self._thread.start()

    def settle(self) -> str | None:
        """Finish the save that is under way: committed, or given up on all workers. Returns what went wrong.

        Collective over all workers with a role.
        """
        save, thread = self._current, self._thread
        if save is not None:
            save.written.wait()
        error = self._agree(save.error if save is not None else None)
        if save is not None and thread is not None:
            save.gone = frozenset(save.parts) - set(self._live())
            (save.given_up if error else save.all_written).set()
            thread.join()
            if save.leads:
                error = error or save.error
                self._close(save, error)
            self.newest = self.newest if error else save.target
        self._doomed.clear()
        self._current = self._thread = None
        return error

    def drop(self) -> None:
        """Give up a save that not all workers have begun; what it was to replace stays. Local."""
        save, thread = self._current, self._thread
        if save is None or thread is None:
            return
        save.given_up.set()
        thread.join()
        if save.leads:
            save.discard()
        self._current = self._thread = None

    def abandon(self) -> None:
        """Finish alone, where others may be gone: the save is committed if all parts are there in time. Local."""
        save, thread = self._current, self._thread
        if save is None or thread is None:
            return
        save.written.wait()
        save.all_written.set()
        thread.join()
        if save.leads:
            self._close(save, save.error)
            self.newest = self.newest if save.error else save.target
        self._doomed.clear()
        self._current = self._thread = None

    def remove(self, target: Path | Bucket) -> None:
        """Delete a checkpoint, once a save that is under way has succeeded. Local, by the leader."""
        if self._current is None:
            _delete(target)
        else:
            self._doomed.append(target)

    def _close(self, save: Save, error: str | None) -> None:
        """The leader's end of a save: old checkpoints go only if the new one is there."""
        if error is None:
            for target in self._doomed:
                if target != save.target:
                    _delete(target)
        else:
            save.discard()
            if error != self._last_error:
                _log.error(
                    "%s was not saved (%s). Training goes on with the checkpoint before it, and the next save tries again; the same "
                    "error is not reported twice.",
                    save.target,
                    error,
                )
        self._last_error = error


def _delete(place: Path | Bucket) -> None:
    if isinstance(place, Bucket):
        _tried(place, Bucket.delete)
    else:
        _tried(place, delete)


def _tried(place: Place, act: Callable[[Place], None]) -> None:
    """What cannot be deleted stays: no reason to stop training."""
    try:
        act(place)
    except OSError as error:
        _log.warning("%s could not be deleted: %s", place, error)
