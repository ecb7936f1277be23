"""One worker as its supervisor sees it: a process id, a death notice (pidfd), and what it says on stderr.

A worker runs in a session of its own, so that a Ctrl-C at the terminal reaches the supervisor alone, and so that
whatever the worker has started (data loaders, loggers) can be ended with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol

TAIL_BYTES = 64 * 1024
"""How much of a worker's last words is kept."""

_TRACEBACK = b"Traceback (most recent call last)"
_PEER_LOSS = (
    b"Connection closed by peer",
    b"Connection reset by peer",
    b"Broken pipe",
    b"RankLostError",
    b"GenerationBrokenError",
    b"remote process exited",
)
_OUT_OF_STEP = "Received data size doesn't match expected size"
"""What gloo says when it ends a process whose peer is in another collective (pair.cc); there is no exception to catch."""

OUT_OF_STEP = (
    "gloo has ended it because a peer was in another collective, so the ranks do not do the same: look for a branch that only some "
    "ranks take (a skipped module, a collective under `if rank == 0`)"
)
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(
    None
).prctl  # looked up here: between fork and exec nobody may ask the dynamic linker, its lock may be held


class Process(Protocol):
    """What is needed of a started process; `subprocess.Popen` is one."""

    pid: int
    stderr: IO[bytes] | None

    def poll(self) -> int | None:
        """The exit code (negative: killed by that signal), None while it runs. Reaps the process."""


StartWorker = Callable[[Sequence[str], Mapping[str, str]], Process]


def start_worker(command: Sequence[str], environ: Mapping[str, str]) -> Process:
    """Starts `command` with exactly `environ`. It is killed when the thread that called this is gone.

    Only a lone worker (WORLD_SIZE 1) keeps the terminal's stdin.
    """
    return subprocess.Popen(
        command,
        env=dict(environ),
        stdin=None if environ.get("WORLD_SIZE") == "1" else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509  two system calls, no lock, no import
    )


def die_with_parent(parent_pid: int) -> Callable[[], None]:
    """A function for the child: SIGKILL for itself as soon as its parent is gone, also if that was before the call."""

    def arm() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)

    return arm


class StderrRelay:
    """Passes a worker's stderr on as it comes, but holds a traceback back until it is known whose came first."""

    def __init__(self, write: Callable[[bytes], None], keep: Callable[[bytes], None] = lambda data: None) -> None:
        self._write = write
        self._keep = keep  # the worker's log file: everything, at once
        self._held = bytearray()
        self.holding = False
        self.held_since: float | None = None
        self.tail = bytearray()

    def feed(self, data: bytes, now_seconds: float) -> None:
        """Takes what the worker wrote."""
        self._keep(data)
        self.tail += data
        del self.tail[:-TAIL_BYTES]
        if not self.holding:
            # The mark may straddle two reads; then the hold begins a read late, which costs order, not content.
            start = data.find(_TRACEBACK)
            if start < 0:
                self._write(data)
                return
            self._write(data[:start])
            data = data[start:]
            self.hold(now_seconds)
        self._held += data

    def hold(self, now_seconds: float) -> None:
        """Keeps back everything from now on."""
        if not self.holding:
            self.holding, self.held_since = True, now_seconds

    def release(self) -> None:
        """Writes what was held back and goes on live."""
        if self._held:
            self._write(bytes(self._held))
        self._held.clear()
        self.holding, self.held_since = False, None

    @property
    def has_traceback(self) -> bool:
        return _TRACEBACK in self._held

    @property
    def blames_a_peer(self) -> bool:
        """Whether the last words are those of somebody who lost a peer, and so not the cause."""
        return blames_a_peer(bytes(self._held))


class WorkerProcess:
    """A started worker. `exit_code` is None while it runs, and negative if a signal ended it."""

    def __init__(self, worker: int, process: Process, relay: StderrRelay, started_seconds: float) -> None:
        self.worker = worker
        self.relay = relay
        self.started_seconds = started_seconds
        self.exit_code: int | None = None
        self.why = ""  # it was ended by its supervisor
        self._process = process
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)
        self.stderr_fd = -1
        if process.stderr is not None:
            self.stderr_fd = process.stderr.fileno()
            os.set_blocking(self.stderr_fd, False)

    def pump(self, now_seconds: float) -> bool:
        """Reads what is there of stderr. False once the other end is closed."""
        while self.stderr_fd >= 0:
            try:
                data = os.read(self.stderr_fd, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.relay.feed(data, now_seconds)
        return False

    def signal(self, number: int) -> None:
        """Sends a signal to the worker itself; SIGKILL also to all that it started. A dead worker is no error."""
        if self.exit_code is not None:
            return
        try:
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return

    def reap(self, now_seconds: float) -> int | None:
        """The exit code if the worker has ended: takes its last words, ends what it left behind, frees its handles."""
        if self.exit_code is not None:
            return self.exit_code
        if os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        # While the worker is a zombie, its group id cannot belong to anybody else.
        self.signal(signal.SIGKILL)
        self.exit_code = self._process.poll()
        self.pump(now_seconds)
        self.close()
        return self.exit_code

    def close(self) -> None:
        """Frees the handles; for a worker that cannot be ended as well."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        if self._process.stderr is not None:
            self._process.stderr.close()
            self.stderr_fd = -1


def blames_a_peer(text: bytes) -> bool:
    """Whether a traceback ends in the complaint of somebody who lost a peer."""
    return any(mark in text[-4096:] for mark in _PEER_LOSS)


def is_out_of_step(last_words: Sequence[str]) -> bool:
    """Whether a worker died of a difference between the ranks' programs. That is no loss: the others would run into it again."""
    return any(_OUT_OF_STEP in line for line in last_words)


def describe_exit(exit_code: int) -> str:
    """``killed by SIGKILL`` or ``exit code 3``."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def shell_code(exit_code: int) -> int:
    """The exit code a shell would report: 128 + the signal's number for a killed process."""
    return 128 - exit_code if exit_code < 0 else exit_code


def write_stderr(data: bytes) -> None:
    """Writes to this process's stderr, which in a notebook takes text only."""
    stream = getattr(sys.stderr, "buffer", None)
    if stream is None:
        sys.stderr.write(data.decode(errors="replace"))
    else:
        sys.stderr.flush()
        stream.write(data)
        stream.flush()
