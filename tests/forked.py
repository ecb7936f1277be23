"""Workers forked from the test process, which has torch already: a job of four starts in 50 ms instead of 10 s.

    job = ForkedJob(program, 4, tmp_path, faults=FaultScript(...));  job.run();  job.lines

`program(address, log)` is the worker; ``log(key=value)`` appends a line that the test reads afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import stat
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from lightning_ntp.strategy.coordinator import Event, Patience
from lightning_ntp.strategy.node_agent import NodeAgent
from lightning_ntp.strategy.rendezvous import LOOPBACK, JobAddress
from lightning_ntp.strategy.respawn import RespawnConfig
from lightning_ntp.strategy.restart import Restart, with_restarts
from lightning_ntp.strategy.supervisor import Supervisor
from lightning_ntp.strategy.supervisor_config import SupervisorConfig
from lightning_ntp.strategy.worker_process import die_with_parent
from lightning_ntp.testing import ENV_FAULTS, FaultScript

Log = Callable[..., None]
Program = Callable[[JobAddress, Log], None]

PATIENT = Patience(hang_seconds=20.0, join_seconds=30.0, start_seconds=40.0)


class ForkedProcess:
    """A child that runs `program` once it is told its environment; what `subprocess.Popen` would be to the supervisor.

    It is forked before the supervisor has a store: a fork beside the store's busy thread now and then leaves a lock of
    torch or libc taken in the child for ever.
    """

    def __init__(self, program: Program, log_path: Path) -> None:
        read_end, write_end = os.pipe()
        hear, self._tell = os.pipe()
        arm = die_with_parent(os.getpid())
        self.pid = os.fork()
        if self.pid == 0:
            arm()
            _live(program, log_path, hear, write_end)
        os.close(write_end)
        os.close(hear)
        self.stderr: IO[bytes] | None = os.fdopen(read_end, "rb", buffering=0)
        self._exit_code: int | None = None

    def begin(self, environ: Mapping[str, str]) -> None:
        os.write(self._tell, json.dumps(dict(environ)).encode())
        os.close(self._tell)

    def dismiss(self) -> None:
        """Ends a child that was not needed."""
        os.close(self._tell)
        os.waitpid(self.pid, 0)
        assert self.stderr is not None
        self.stderr.close()

    def poll(self) -> int | None:
        if self._exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._exit_code = os.waitstatus_to_exitcode(status) if pid else None
        return self._exit_code


def _live(program: Program, log_path: Path, hear_fd: int, stderr_fd: int) -> None:
    """The child's life; never returns. Nothing of the parent may be closed or collected in it."""
    gc.freeze()
    os.setsid()
    os.dup2(hear_fd, 0)
    os.dup2(stderr_fd, 2)
    _close_connections()
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  pytest has put its own in place
    with open(0, "rb", closefd=False) as control:
        text = control.read()
    if not text:
        os._exit(0)
    environ = json.loads(text)
    code = 1
    try:
        os.environ.clear()
        os.environ.update(environ)
        address = JobAddress.from_env(os.environ)
        log_fd = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

        def log(**values: Any) -> None:
            line = {"worker": address.worker, "seconds": time.monotonic(), **values}
            os.write(log_fd, json.dumps(line).encode() + b"\n")

        program(address, log)
        code = 0
    except BaseException:  # noqa: BLE001  the child must not return into pytest
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _close_connections() -> None:
    """Closes the sockets and pipes that were open at the fork, and nothing else.

    pytest's capture and its handler of log records, which writes to /dev/null, go on writing in the child: a socket that got the
    number of a file closed under them would be told what a progress bar says.
    """
    for fd in (int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2):
        with contextlib.suppress(OSError):  # that of the listing itself
            kind = os.fstat(fd).st_mode
            if not stat.S_ISREG(kind) and not stat.S_ISCHR(kind):
                os.close(fd)


class ForkedJob:
    """A job whose workers run `program`; collects events, log lines and what was printed."""

    def __init__(
        self,
        program: Program,
        num_workers: int,
        folder: Path,
        *,
        faults: FaultScript | None = None,
        patience: Patience = PATIENT,
        max_respawns: int = 0,
        max_losses_per_place: int = 100,
        num_renewals: int = 0,
        num_nodes: int = 1,
        listen: str = LOOPBACK,
        token: str | None = None,
        max_restarts: int = 0,
        **config_fields: Any,
    ) -> None:
        self.events: list[Event] = []
        self.max_restarts = max_restarts
        self.printed = b""
        self.pids: dict[int, int] = {}
        self._log_path = folder / "log.jsonl"
        self._ready = [ForkedProcess(program, self._log_path) for _ in range(num_workers * (1 + max_restarts) + max_respawns + num_renewals)]
        respawn = RespawnConfig(max_respawns=max_respawns, cool_down_seconds=0, max_losses_per_place=max_losses_per_place)
        config = SupervisorConfig(
            listen=listen,
            token=token,
            settle_seconds=0.5,
            grace_seconds=1.0,
            patience=patience,
            respawn=respawn,
            num_nodes=num_nodes,
            **config_fields,
        )

        def make(resume: Restart | None) -> Supervisor:
            return Supervisor(
                ["forked"],
                num_workers,
                {ENV_FAULTS: (faults or FaultScript()).to_json()},
                recovery=True,
                config=replace(config, resume=resume),
                on_event=self.events.append,
                start=self._start,
                write=self._print,
            )

        self._make, self.supervisor = make, make(None)

    def _start(self, command: Sequence[str], environ: Mapping[str, str]) -> ForkedProcess:
        process = self._ready.pop(0)
        process.begin(environ)
        self.pids[int(environ["NTP_WORKER_ID"])] = process.pid
        return process

    def _print(self, data: bytes) -> None:
        self.printed += data

    def run(self) -> int:
        began = time.monotonic()
        code = with_restarts(self._life, self.max_restarts, self._print)
        self.wall_seconds = time.monotonic() - began
        for spare in self._ready:
            spare.dismiss()
        return code

    def _life(self, resume: Restart | None) -> tuple[int, Restart | None]:
        if resume is not None:
            self.supervisor = self._make(resume)
        return self.supervisor.run(), self.supervisor.restart

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What the workers logged, in the order of writing."""
        return [json.loads(line) for line in self._log_path.read_text().splitlines()]

    def worlds(self) -> list[tuple[int, ...]]:
        """The members of each generation that stood."""
        return [event.workers for event in self.events if event.kind == "formed"]


class ForkedNode:
    """Another node of a job, in a process of its own: a `NodeAgent` with workers that run `program`.

    Make it before anything in this process has a store.
    """

    def __init__(
        self, program: Program, num_workers: int, folder: Path, *, node: int | None, listen: str, token: str
    ) -> None:
        self.pid = os.fork()
        self._code: int | None = None
        if self.pid:
            return
        code = 1
        try:
            gc.freeze()
            ready = [ForkedProcess(program, folder / "log.jsonl") for _ in range(num_workers)]
            config = SupervisorConfig(listen=listen, token=token, grace_seconds=1.0, patience=PATIENT)

            def start(command: Sequence[str], environ: Mapping[str, str]) -> ForkedProcess:
                process = ready.pop(0)
                process.begin(environ)
                return process

            agent = NodeAgent(["forked"], num_workers, node=node, config=config, start=start, write=lambda data: None)
            code = agent.run()
        except BaseException:  # noqa: BLE001  the child must not return into pytest
            traceback.print_exc()
        finally:
            os._exit(code)

    def wait(self) -> int:
        """The node's exit code; negative for a signal."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code
