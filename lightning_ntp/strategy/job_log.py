"""What a job leaves behind in ``ntp_logs/<run>/``: the output of each worker and generation, and what happened.

    worker3.generation2.log    stderr of worker 3 while generation 2 stood (stacks of a hang included)
    events.jsonl               one event per line, appended by one write each: readable whenever the writer died
    job.json                   where the job's store is, for `ntp drain` and `ntp launch --join`; only its owner may read it

The supervisor of each node writes the files of its own workers; the first node's writes the events.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

LOG_ROOT = Path("ntp_logs")
EVENTS_FILE = "events.jsonl"
JOB_FILE = "job.json"
LAST_LINES = 5
"""So many of a lost worker's last lines are shown with the loss."""


def new_run_folder(environ: Mapping[str, str], root: Path = LOG_ROOT) -> Path:
    """A folder of its own for this run; under SLURM one per job id and attempt, so that all nodes mean the same."""
    if "SLURM_JOB_ID" in environ:
        attempt, step = environ.get("SLURM_RESTART_COUNT", "0"), environ.get("SLURM_STEP_ID", "0")
        return root / f"slurm-{environ['SLURM_JOB_ID']}.{attempt}.{step}"
    return root / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"


class JobLog:
    """The log folder of one supervisor. Without a folder it swallows everything."""

    def __init__(self, folder: Path | None, with_events: bool = True) -> None:
        self.folder = folder
        self._outputs: dict[int, int] = {}  # worker -> fd of its current file
        self._generations: dict[int, int] = {}
        self._events = -1
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if with_events:
                self._events = _open_events(folder / EVENTS_FILE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def output(self, worker: int, data: bytes) -> None:
        """Appends what a worker wrote to its file of the current generation."""
        if self.folder is None:
            return
        if worker not in self._outputs:
            name = f"worker{worker}.generation{self._generations.get(worker, 0)}.log"
            self._outputs[worker] = os.open(self.folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        _write_all(self._outputs[worker], data)

    def enter_generation(self, generation: int, workers: tuple[int, ...]) -> None:
        """From now on these workers write to the files of `generation`."""
        for worker in workers:
            self._generations[worker] = generation
            self.forget(worker)

    def forget(self, worker: int) -> None:
        """Closes a worker's file."""
        if worker in self._outputs:
            os.close(self._outputs.pop(worker))

    def event(self, kind: str, **what: Any) -> None:
        """Appends one event; ``time`` is seconds since 1970 on this machine."""
        if self._events >= 0:
            line = json.dumps({"time": round(time.time(), 3), "kind": kind, **what})
            _write_all(self._events, line.encode() + b"\n")

    def note_job(self, **what: Any) -> None:
        """Writes job.json, which holds the job's secret: readable for the owner alone."""
        if self.folder is not None:
            fd = os.open(self.folder / JOB_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "w") as file:
                json.dump(what, file)

    def close(self) -> None:
        """Closes all files; the secret of an ended job is of no use to anybody."""
        for worker in list(self._outputs):
            self.forget(worker)
        if self._events >= 0:
            os.close(self._events)
            self._events = -1
            assert self.folder is not None
            (self.folder / JOB_FILE).unlink(missing_ok=True)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file in order. A line that its writer could not finish is left out."""
    for line in path.read_bytes().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


@dataclass(slots=True)
class LossReport:
    """What is printed of one loss, as one block, once the others go on (or the job ends)."""

    generation: int
    _lines: list[str] = field(default_factory=list)

    def add(self, who: str, why: str, last_words: Sequence[str] = ()) -> None:
        """One more worker that this generation lost, with the last lines of its stderr."""
        self._lines += [f"  {who}: {why}", *(f"    | {line}" for line in last_words)]

    def render(self, members: tuple[int, ...], generation: int, seconds: float | None) -> str:
        """The block. seconds: from noticing the loss until `generation` stood with `members`; None: nobody went on."""
        lines = [f"generation {self.generation} has ended:", *self._lines]
        if seconds is None:
            lines.append("  nobody went on")
        else:
            after = f"{seconds:.2f} s after the loss was noticed"
            lines.append(f"  generation {generation} stands with {len(members)} workers {list(members)}, {after}")
        return "".join(f"[ntp] {line}\n" for line in lines)


def last_lines(tail: bytes, count: int = LAST_LINES) -> list[str]:
    """The last lines of a worker's stderr that say something."""
    lines = [line.strip() for line in tail.decode(errors="replace").splitlines()]
    return [line for line in lines if line][-count:]


def _open_events(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        os.write(fd, b"\n")  # an earlier writer died in the middle of a line
    return fd


def _write_all(fd: int, data: bytes) -> None:
    """A full disk costs the log, not the job."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        return
