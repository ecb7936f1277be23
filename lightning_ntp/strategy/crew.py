"""The workers of one node as processes: started, listened to, signalled, reaped. Decides nothing."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from lightning_ntp.strategy.job_log import JobLog
from lightning_ntp.strategy.worker_process import StartWorker, StderrRelay, WorkerProcess

STACKS_SECONDS = 0.1
"""What a worker that is given up has for writing down where it is."""

HOLD_SECONDS = 2.0
"""A traceback of a worker that lives on this long was a log message: it is passed on."""


class Crew:
    """Live workers by id. The thread that calls `start` must live as long as the workers: Linux kills them with it."""

    def __init__(self, command: Sequence[str], start: StartWorker, write: Callable[[bytes], None], log: JobLog) -> None:
        self.workers: dict[int, WorkerProcess] = {}
        self._command = tuple(command)
        self._start_process = start
        self._write = write
        self._log = log
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._selector.close()

    def watch(self, fd: int) -> None:
        """Something else that shall wake `wait`."""
        self._selector.register(fd, selectors.EVENT_READ)

    def start(self, worker: int, environ: Mapping[str, str]) -> None:
        """Starts one worker with exactly this environment."""
        relay = StderrRelay(self._write, lambda data: self._log.output(worker, data))
        process = WorkerProcess(worker, self._start_process(self._command, environ), relay, time.monotonic())
        self.workers[worker] = process
        self.watch(process.pidfd)
        if process.stderr_fd >= 0:
            self.watch(process.stderr_fd)

    def wait(self, seconds: float) -> None:
        """Sleeps until a worker dies or says something, or what is watched wakes, at most so long."""
        self._selector.select(seconds)

    def collect(self, now_seconds: float) -> list[WorkerProcess]:
        """Takes in what was said, and hands out those that have ended."""
        ended = []
        for process in list(self.workers.values()):
            pidfd, stderr_fd = process.pidfd, process.stderr_fd
            if not process.pump(now_seconds):
                self._forget(stderr_fd)  # closed by the worker; a readable end of file would spin the loop
            if process.reap(now_seconds) is not None:
                self._forget(pidfd, stderr_fd)
                ended.append(self.workers.pop(process.worker))
        return ended

    def pass_on_old_tracebacks(self, now_seconds: float) -> None:
        """Prints what was held back of workers that have lived on since."""
        for process in self.workers.values():
            held_since = process.relay.held_since
            if held_since is not None and now_seconds - held_since > HOLD_SECONDS:
                process.relay.release()

    def hold_output(self, now_seconds: float) -> None:
        """While a job ends everything is held back, so that the cause is printed first."""
        for process in self.workers.values():
            process.relay.hold(now_seconds)

    def signal_all(self, number: int) -> None:
        """Sends a signal to all workers; SIGKILL also to what they started."""
        for process in self.workers.values():
            process.signal(number)

    def give_up(self, worker: int, why: str) -> None:
        """Ends a worker that is of no use: its stacks first (Python's if it can, the kernel's view in any case)."""
        process = self.workers.get(worker)
        if process is None:
            return
        process.why = why
        process.signal(signal.SIGUSR2)  # see Member: the traceback of all threads, on stderr
        time.sleep(STACKS_SECONDS)
        process.pump(time.monotonic())
        self._log.output(worker, kernel_view(process.pid).encode())
        process.signal(signal.SIGKILL)

    def is_traced(self, worker: int) -> bool:
        """Whether somebody has stopped a worker in a debugger (gdb, strace, py-spy): then its silence says nothing."""
        process = self.workers.get(worker)
        if process is None:
            return False
        try:
            return "TracerPid:\t0\n" not in Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            return False

    def abandon(self) -> list[WorkerProcess]:
        """Leaves behind who ignores SIGKILL (stuck in the kernel); returns them."""
        left = list(self.workers.values())
        for process in left:
            self._forget(process.pidfd, process.stderr_fd)
            process.close()
        self.workers.clear()
        return left

    def kill_rest(self, limit_seconds: float) -> list[WorkerProcess]:
        """SIGKILL to whoever is left; returns those that ended within the limit."""
        self.signal_all(signal.SIGKILL)
        deadline = time.monotonic() + limit_seconds
        ended = []
        while self.workers and time.monotonic() < deadline:
            ended += self.collect(time.monotonic())
            time.sleep(0.005)
        return ended

    def _forget(self, *fds: int) -> None:
        for fd in fds:
            if fd >= 0 and fd in self._selector.get_map():
                self._selector.unregister(fd)


def kernel_view(pid: int) -> str:
    """State and place in the kernel of each thread: the only stack there is of a stopped process."""
    lines = [f"--- process {pid} as the kernel sees it\n"]
    try:
        tasks = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except OSError:
        return ""
    for task in tasks:
        folder = Path(f"/proc/{pid}/task/{task}")
        try:
            state = folder.joinpath("stat").read_text().rsplit(")", 1)[1].split()[0]
            name, where = folder.joinpath("comm").read_text().strip(), folder.joinpath("wchan").read_text()
        except OSError:
            continue
        lines.append(f"thread {task} {name}: state {state}, in {where or 'user space'}\n")
    return "".join(lines)
