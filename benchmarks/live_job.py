"""A running training script (`recovery_job` unless told otherwise), as its driver sees it: start, follow the log, kill a worker, wait, clean up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

Event = dict[str, Any]

POLL_SECONDS = 0.01


class JobFailedError(RuntimeError):
    """The job ended, or did not get on, where it should have gone on; the text ends with its output."""


class LiveJob:
    """One supervisor and its workers.

    Args:
        out: folder of the job; its logs are read from there.
        arguments: for the module.
        environ: on top of this process's environment.
        module: the training script.
    """

    def __init__(
        self, out: Path, arguments: list[str], environ: Mapping[str, str] | None = None, module: str = "benchmarks.recovery_job"
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        self.printed = out / f"printed-{time.monotonic_ns()}.txt"
        quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
        with self.printed.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, "--out", str(out), *arguments],
                env={**quiet, **os.environ, **(environ or {})},
                stdout=sink,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    @property
    def events(self) -> list[Event]:
        """Everything that all workers have written, in time."""
        return read_events(self.out)

    def wait_for(self, wanted: Callable[[Event], bool], limit_seconds: float) -> Event:
        """The first event that is wanted. `JobFailedError` when the job ends or the limit passes before."""
        until = time.monotonic() + limit_seconds
        while True:
            ended = self.process.poll()
            for event in self.events:
                if wanted(event):
                    return event
            if ended is not None or time.monotonic() > until:
                why = f"ended with {ended}" if ended is not None else f"did not get on within {limit_seconds:g} s"
                raise JobFailedError(f"the job in {self.out} {why}:\n{self.printed.read_text()[-3000:]}")
            time.sleep(POLL_SECONDS)

    def kill(self, worker: int) -> float:
        """SIGKILL to the newest process of a worker; the monotonic time of it."""
        pid = [event["pid"] for event in self.events if event["kind"] == "start" and event["worker"] == worker][-1]
        seconds = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return seconds

    def finish(self, limit_seconds: float) -> int:
        """Waits for the end; the exit code. `JobFailedError` after the limit."""
        try:
            return self.process.wait(limit_seconds)
        except subprocess.TimeoutExpired as error:
            raise JobFailedError(
                f"the job in {self.out} did not end within {limit_seconds:g} s:\n{self.printed.read_text()[-3000:]}"
            ) from error


def read_events(out: Path) -> list[Event]:
    """All complete lines of all workers, in time."""
    return sorted(_lines(out), key=lambda event: event["seconds"])


def _lines(out: Path) -> Iterator[Event]:
    for file in out.glob("*-*.jsonl"):
        for line in file.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # the writer was killed in the middle of it
                continue
