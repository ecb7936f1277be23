"""What the driver says of this node's GPUs: Xid errors, memory errors, a GPU that has fallen off the bus, failing links.

    HealthWatch  --starts-->  nvml_child.py  --one JSON line per event-->  poll()

The driver is asked in a child with a deadline: a call into a broken driver may never return, and then only the child hangs.
Needs ``nvidia-ml-py`` (optional); without it, or without a driver, there are no events and nothing else changes.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_ntp.strategy.gpus import ask_driver, select_gpus
from lightning_ntp.strategy.worker_process import die_with_parent

_log = logging.getLogger(__name__)

DEADLINE_SECONDS = 20.0
"""A child that says nothing for so long hangs in the driver: it is ended and started again."""

MAX_STARTS = 3

FATAL_XIDS = {
    48: "uncorrectable memory error",
    62: "internal micro-controller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered memory error",
}
"""Xid errors after which a worker cannot go on with this GPU. Others (13, 31, 43, 45, ...) come from the program itself:
they are noted, and its process says how it ends."""


@dataclass(frozen=True, slots=True)
class HealthEvent:
    """Something that happened to a GPU. kind: "xid", "ecc", "gone", or "link": `code` new errors of the link in `detail`."""

    kind: str
    gpu: str
    code: int = 0
    detail: str = ""

    @property
    def is_fatal(self) -> bool:
        """Whether the worker on this GPU is lost."""
        return self.kind in ("gone", "ecc") or (self.kind == "xid" and self.code in FATAL_XIDS)

    def __str__(self) -> str:
        if self.kind == "gone":
            return f"{self.gpu} has fallen off the bus"
        if self.kind == "ecc":
            return f"{self.gpu}: {self.code} new uncorrected memory errors"
        if self.kind == "link":
            return f"{self.gpu}: {self.code} new errors of {self.detail}: a failing link makes all exchanges over it slow"
        return f"{self.gpu}: Xid {self.code} ({FATAL_XIDS.get(self.code, 'raised by the program')})"


def child_command(gpus: Sequence[str]) -> tuple[str, ...] | None:
    """How to listen to these GPUs; None where nobody can."""
    if not gpus or importlib.util.find_spec("pynvml") is None:
        return None
    return (sys.executable, "-P", str(Path(__file__).with_name("nvml_child.py")), *gpus)


class HealthWatch:
    """Listens through `command`, which is started again when it hangs. None: hears nothing."""

    def __init__(self, command: Sequence[str] | None, clock: Callable[[], float]) -> None:
        self._command = command
        self._clock = clock
        self._child: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        self._heard_seconds = 0.0
        self._rest = b""

    def poll(self) -> list[HealthEvent]:
        """What has happened since the last call. Does not wait."""
        if self._command is None:
            return []
        if self._child is None and not self._begin(self._command):
            return []
        events = self._read()
        assert self._child is not None
        silent = self._clock() - self._heard_seconds > DEADLINE_SECONDS
        if silent or self._child.poll() is not None:
            how = f"has said nothing for {DEADLINE_SECONDS:g} s" if silent else "has ended"
            _log.warning("the process that listens to the GPU driver %s", how)
            events += self._read()
            self._end()
        return events

    def _begin(self, command: Sequence[str]) -> bool:
        if self._num_starts == MAX_STARTS:
            _log.warning("nobody listens to the GPU driver any more: Xid and memory errors go unnoticed")
            self._command = None
            return False
        self._num_starts += 1
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509  two system calls, no lock, no import
        )
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)
        self._heard_seconds, self._rest = self._clock(), b""
        return True

    def _read(self) -> list[HealthEvent]:
        assert self._child is not None and self._child.stdout is not None
        events = []
        while data := _read_now(self._child.stdout.fileno()):
            self._heard_seconds = self._clock()
            *lines, self._rest = (self._rest + data).split(b"\n")
            events += [event for event in map(_parse, lines) if event is not None]
        return events

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            assert self._child.stdout is not None
            self._child.stdout.close()
            # One that is stuck in the driver cannot be waited for; it is our child, and reaped when it can be.
            threading.Thread(target=self._child.wait, name="ntp-reap", daemon=True).start()
            self._child = None

    def close(self) -> None:
        """Ends the child."""
        self._end()
        self._command = None


class GpuProbe:
    """Whether the driver still lists a GPU, asked in the background. `answer` is None until it is known."""

    def __init__(self, gpu: str, ask: Callable[[], str] = ask_driver) -> None:
        self.answer: bool | None = None
        self._gpu, self._ask = gpu, ask
        threading.Thread(target=self._find_out, name="ntp-probe", daemon=True).start()

    def _find_out(self) -> None:
        self.answer = self._gpu in select_gpus(self._ask(), None)


def _read_now(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return b""


def _parse(line: bytes) -> HealthEvent | None:
    try:
        event: Mapping[str, object] = json.loads(line)
    except ValueError:
        return None
    if event.get("kind") not in ("xid", "ecc", "gone", "link"):
        return None
    return HealthEvent(
        str(event["kind"]), str(event["gpu"]), int(str(event.get("code", 0))), str(event.get("detail", ""))
    )
