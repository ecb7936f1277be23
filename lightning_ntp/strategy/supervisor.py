"""The process that is no worker: it starts the workers of one node, hosts their store, and ends the job as a whole.

    Supervisor(command, num_workers, env).run()  ->  exit code

Without recovery the first worker that fails ends the job within seconds, its traceback printed before all others.
With recovery a worker that is killed, hangs or leaves with `EXIT_LOST` is a loss: the others are told (coordinator.py) and
never touched. An exception of the program itself still ends the job, because it would strike again.
Death is noticed at once (a pidfd per worker). No worker outlives the supervisor, however that one ends.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy import rendezvous
from lightning_ntp.strategy.coordinator import Coordinator, Event, Patience
from lightning_ntp.strategy.signals import SignalWatch
from lightning_ntp.strategy.worker_process import (
    StartWorker,
    StderrRelay,
    WorkerProcess,
    describe_exit,
    shell_code,
    start_worker,
)

_log = logging.getLogger(__name__)

TURN_SECONDS = 0.05
"""The longest sleep of the loop. Deaths, output and signals wake it at once."""

FORMING_SECONDS = 0.005
"""The same while a generation forms: joining workers write to the store, which wakes nobody here."""

STACKS_SECONDS = 0.1
"""What a worker that is given up has for writing down where it is."""

HOLD_SECONDS = 2.0
"""A traceback of a worker that lives on this long was a log message: it is passed on."""


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """How patient a supervisor is.

    listen: HOST:PORT of the store; loopback and any free port unless told otherwise.
    token: the job's secret; made up if None.
    settle_seconds: after a failure, how long to wait for the traceback of the worker that caused it.
    grace_seconds: between asking workers to end (SIGTERM, or SIGINT after Ctrl-C) and SIGKILL.
    abandon_seconds: after SIGKILL; a process that is stuck in the kernel by then is left behind and named.
    patience: with recovery, when a living worker is taken for lost.
    max_respawns: with recovery, how many replacements are started at once after losses, without being asked to.
    """

    listen: str = rendezvous.LOOPBACK
    token: str | None = None
    settle_seconds: float = 1.0
    grace_seconds: float = 3.0
    abandon_seconds: float = 5.0
    patience: Patience = field(default_factory=Patience)
    max_respawns: int = 0

    def __post_init__(self) -> None:
        rendezvous.Endpoint.parse(self.listen)
        if self.token is not None:
            rendezvous.check_token(self.token)
        for name in ("settle_seconds", "grace_seconds", "abandon_seconds", "max_respawns"):
            if getattr(self, name) < 0:
                raise ConfigError(f"SupervisorConfig.{name} is {getattr(self, name)}: wanted 0 or more")


@dataclass(slots=True)
class EndingState:
    """How a job ends before its workers have: when the next, harder means is due (times of the supervisor's clock).

    told: somebody ended the supervisor by a signal, no worker is to blame.
    """

    why: str
    exit_code: int
    means: int
    ask_seconds: float
    kill_seconds: float
    abandon_seconds: float
    told: bool
    asked: bool = False
    killed: bool = False


@dataclass(slots=True)
class ErrorReport:
    """An exception that a worker reported over the store before it ended."""

    worker: int
    text: str


class Supervisor:
    """Starts `num_workers` times `command` on this node and watches them; see the module docstring.

    Each worker gets the supervisor's environment, `env`, NTP_WORKER_ID, NTP_STORE_ENDPOINT, NTP_JOB_TOKEN, RANK,
    LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT (the store: `env://` just works).
    `run` must be called on a thread that lives as long as the job, best the main one: Linux kills the workers when the
    thread that started them is gone.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int,
        env: Mapping[str, str] | None = None,
        *,
        recovery: bool = False,
        config: SupervisorConfig | None = None,
        on_event: Callable[[Event], None] | None = None,
        start: StartWorker = start_worker,
        write: Callable[[bytes], None] | None = None,
    ) -> None:
        if not command:
            raise ConfigError("Supervisor: the command is empty; wanted the program of a worker and its arguments")
        if num_workers < 1:
            raise ConfigError(f"Supervisor: num_workers is {num_workers}; wanted 1 or more")
        self.command = tuple(command)
        self.num_workers = num_workers
        self.env = dict(env or {})
        self.config = config or SupervisorConfig()
        self.token = self.config.token or rendezvous.new_token()
        self.recovery = recovery
        self._on_event = on_event or (lambda event: None)
        self._start_process = start
        self._write = write or _write_stderr
        self._workers: dict[int, WorkerProcess] = {}
        self._ended: list[WorkerProcess] = []
        self._ended_alone: list[WorkerProcess] = []  # failed before anybody was asked to end
        self._reports: list[ErrorReport] = []
        self._ending: EndingState | None = None
        self._coordinator: Coordinator | None = None
        self._slots: dict[int, int] = {}  # worker -> local rank, which a replacement inherits
        self._free_slots: list[int] = []
        self._num_respawns = 0
        self._num_asked = 0  # replacements that members asked for, so far

    def run(self) -> int:
        """Runs the job to its end. 0 if every worker ended well, else the code of the first one that did not.

        128 + number for a worker or a supervisor ended by a signal. `ConfigError` if the store's port is taken.
        """
        with SignalWatch() as signals, selectors.DefaultSelector() as self._selector:
            self._store, self.endpoint = rendezvous.host_store(
                self.config.listen, self.token, {"num_workers": self.num_workers}
            )
            if signals.wake is not None:
                self._selector.register(signals.wake, selectors.EVENT_READ)
            if self.recovery:
                self._coordinator = Coordinator(
                    self._store, range(self.num_workers), self.config.patience, time.monotonic, self._note_event
                )
            try:
                for worker in range(self.num_workers):
                    self._start(worker, local_rank=worker)
                while self._workers:
                    self._turn(signals)
            finally:
                self._kill_rest()
                self._coordinator = None
                del self._store
        return self._conclude()

    def _start(self, worker: int, local_rank: int) -> None:
        environ = {**os.environ, **self.env, **self._worker_env(worker, local_rank)}
        process = WorkerProcess(
            worker, self._start_process(self.command, environ), StderrRelay(self._write), time.monotonic()
        )
        self._workers[worker] = process
        self._slots[worker] = local_rank
        self._selector.register(process.pidfd, selectors.EVENT_READ)
        if process.stderr_fd >= 0:
            self._selector.register(process.stderr_fd, selectors.EVENT_READ)

    def _worker_env(self, worker: int, local_rank: int) -> dict[str, str]:
        address = rendezvous.JobAddress(self.endpoint, self.token, worker, self.recovery)
        return address.to_env() | {
            "RANK": str(local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.num_workers),
            "LOCAL_WORLD_SIZE": str(self.num_workers),
            "NODE_RANK": "0",
            "MASTER_ADDR": self.endpoint.host,
            "MASTER_PORT": str(self.endpoint.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # else torch's env:// lets rank 0 host a second store on this port
        }

    def _turn(self, signals: SignalWatch) -> None:
        """Sleeps until something happens, and deals with all of it."""
        forming = self._coordinator is not None and self._coordinator.forming
        self._selector.select(FORMING_SECONDS if forming else TURN_SECONDS)
        now = time.monotonic()
        signals.drain()
        for process in list(self._workers.values()):
            pidfd, stderr_fd = process.pidfd, process.stderr_fd
            if not process.pump(now):
                _forget(self._selector, stderr_fd)  # closed by the worker; a readable end of file would spin the loop
            self._read_reports()
            if process.reap(now) is not None:
                _forget(self._selector, pidfd, stderr_fd)
                self._on_exit(self._workers.pop(process.worker), now)
        while signals.pending:
            self._on_signal(signals.pending.pop(0), now)
        self._read_reports()
        self._tick(now)

    def _on_exit(self, process: WorkerProcess, now_seconds: float) -> None:
        self._ended.append(process)
        assert process.exit_code is not None
        if process.exit_code == 0:
            process.relay.release()
            if self._coordinator is not None:
                self._coordinator.finish(process.worker)
            return
        if self._coordinator is not None and self._ending is None and _is_loss(process.exit_code):
            process.relay.release()
            self._lose(self._coordinator, process.worker, describe_exit(process.exit_code))
            return
        process.relay.hold(now_seconds)
        code, why = shell_code(process.exit_code), f"worker {process.worker}: {describe_exit(process.exit_code)}"
        cause_is_known = process.relay.has_traceback and not process.relay.blames_a_peer
        if self._ending is None:
            self._end(why, code, signal.SIGTERM, 0.0 if cause_is_known else self.config.settle_seconds)
        elif self._ending.told or self._ending.asked:
            return
        elif cause_is_known:
            self._ending.ask_seconds = now_seconds
        self._ended_alone.append(process)

    def _lose(self, coordinator: Coordinator, worker: int, how: str) -> None:
        """A worker is gone: tells the others, and starts a replacement while there is a budget for it."""
        if worker in coordinator.fenced:
            return
        coordinator.lose({worker: f"worker {worker}: {how}"})
        self._free_slots.append(self._slots[worker])
        if coordinator.active and self._num_respawns < self.config.max_respawns:
            self._respawn(coordinator)

    def _respawn(self, coordinator: Coordinator) -> None:
        if not self._free_slots:
            _log.warning("a replacement was asked for, but no worker is missing")
            return
        worker = max(self._slots) + 1
        self._num_respawns += 1
        self._start(worker, self._free_slots.pop(0))
        coordinator.expect(worker)

    def _coordinate(self, coordinator: Coordinator) -> None:
        """One look at the membership: fences whom it gives up, starts whom the members ask for, ends an empty job."""
        verdict = coordinator.tick()
        if verdict.write_stacks:
            self._signal_all(signal.SIGUSR2)
        for worker, why in verdict.fence.items():
            _log.error("%s: ending it", why)
            if worker in self._workers:
                self._workers[worker].signal(signal.SIGUSR2)  # its stacks, see Member
                time.sleep(STACKS_SECONDS)
                self._workers[worker].signal(signal.SIGKILL)
            self._lose(coordinator, worker, why)
        num_asked = self._store.add("respawn", 0)
        if num_asked > self._num_asked:
            self._num_asked += 1
            self._respawn(coordinator)
        if coordinator.active or not self._ended:
            return
        if any(process.exit_code == 0 for process in self._ended):
            self._end("all members have ended", 0, signal.SIGTERM, 0.0, told=True)
        else:
            self._end(
                "all workers are lost", shell_code(self._ended[-1].exit_code or 1), signal.SIGTERM, 0.0, told=True
            )

    def _note_event(self, event: Event) -> None:
        _log.info("generation %d %s %s %s", event.generation, event.kind, list(event.workers), event.why)
        self._on_event(event)

    def _read_reports(self) -> None:
        """Takes in what workers reported; a reported exception ends the job as soon as its worker has had its say."""
        while len(self._reports) < self._store.add("errors", 0):
            key = f"error/{len(self._reports) + 1}"
            report = rendezvous.peek_json(self._store, key)
            if report is None:  # counted, but its text is still on the way
                return
            self._reports.append(ErrorReport(int(report["worker"]), str(report["text"])))
            if self._ending is None:
                why = f"worker {report['worker']} raised {report['type']}"
                self._end(why, 1, signal.SIGTERM, self.config.settle_seconds)

    def _on_signal(self, number: int, now_seconds: float) -> None:
        """Ctrl-C and SIGTERM end the job gently the first time, at once the second time."""
        if self._ending is None or not self._ending.asked:
            name = signal.Signals(number).name
            _log.warning("%s: ending %d workers", name, len(self._workers))
            means = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            self._ending = None
            self._end(f"the supervisor got {name}", 128 + number, means, 0.0, told=True)
        else:
            self._ending.kill_seconds = now_seconds

    def _end(self, why: str, exit_code: int, means: int, delay_seconds: float, told: bool = False) -> None:
        ask = time.monotonic() + delay_seconds
        kill = ask + self.config.grace_seconds
        self._ending = EndingState(why, exit_code, means, ask, kill, kill + self.config.abandon_seconds, told)

    def _tick(self, now_seconds: float) -> None:
        """What is due by the clock."""
        ending = self._ending
        if ending is None:
            for process in self._workers.values():
                held_since = process.relay.held_since
                if held_since is not None and now_seconds - held_since > HOLD_SECONDS:
                    process.relay.release()
            if self._coordinator is not None and self._workers:
                self._coordinate(self._coordinator)
            return
        for process in self._workers.values():
            process.relay.hold(now_seconds)
        if now_seconds >= ending.ask_seconds and not ending.asked:
            ending.asked = True
            self._signal_all(ending.means)
        if now_seconds >= ending.kill_seconds and not ending.killed:
            ending.killed = True
            # From here on the patience is counted anew: a second Ctrl-C may have brought this forward.
            ending.abandon_seconds = now_seconds + self.config.abandon_seconds
            self._signal_all(signal.SIGKILL)
        if ending.killed and now_seconds >= ending.abandon_seconds:
            for process in self._workers.values():
                _log.error("worker %d (pid %d) ignores SIGKILL and is left behind", process.worker, process.pid)
                process.close()
            self._workers.clear()

    def _signal_all(self, number: int) -> None:
        for process in self._workers.values():
            process.signal(number)

    def _kill_rest(self) -> None:
        """Whatever went wrong in the supervisor itself, no worker stays."""
        self._signal_all(signal.SIGKILL)
        deadline = time.monotonic() + self.config.abandon_seconds
        while self._workers and time.monotonic() < deadline:
            now = time.monotonic()
            for process in list(self._workers.values()):
                if process.reap(now) is not None:
                    self._ended.append(self._workers.pop(process.worker))
            time.sleep(0.005)

    def _conclude(self) -> int:
        """Prints what was held back, the cause first, and gives the job's exit code."""
        if self._ending is None:
            return self._code_of_losses()
        cause = self._cause()
        if cause is not None:
            if not cause.relay.has_traceback:
                reports = [report.text for report in self._reports if report.worker == cause.worker]
                self._write("".join(reports[:1]).encode())
            cause.relay.release()
            if cause.exit_code and not self._ending.told:
                self._ending.exit_code = shell_code(cause.exit_code)
                self._ending.why = f"worker {cause.worker}: {describe_exit(cause.exit_code)}"
        self._write(f"[supervisor] {self._ending.why}; the job of {self.num_workers} workers has ended.\n".encode())
        for process in sorted(self._ended, key=lambda process: process.worker):
            if process.relay.has_traceback:
                self._write(f"[supervisor] worker {process.worker} ended later ({_exit_words(process)}):\n".encode())
            process.relay.release()
        return self._ending.exit_code

    def _code_of_losses(self) -> int:
        """Without a failure: 0, unless every worker was lost."""
        if not self._ended or any(process.exit_code == 0 for process in self._ended):
            return 0
        self._write(f"[supervisor] all {len(self._ended)} workers are lost.\n".encode())
        return shell_code(self._ended[-1].exit_code or 1)

    def _cause(self) -> WorkerProcess | None:
        """The worker whose failure came first: reported, else with a traceback of its own, else killed, else first."""
        for report in self._reports:
            for process in self._ended:
                if process.worker == report.worker:
                    return process
        failed = self._ended_alone or [process for process in self._ended if process.exit_code]
        own = [process for process in failed if process.relay.has_traceback and not process.relay.blames_a_peer]
        if own:
            return min(own, key=lambda process: process.relay.held_since or 0.0)
        killed = [process for process in failed if process.exit_code is not None and process.exit_code < 0]
        return next(iter(killed or failed), None)


def _is_loss(exit_code: int) -> bool:
    return exit_code < 0 or exit_code == rendezvous.EXIT_LOST


def _forget(selector: selectors.BaseSelector, *fds: int) -> None:
    for fd in fds:
        if fd >= 0 and fd in selector.get_map():
            selector.unregister(fd)


def _exit_words(process: WorkerProcess) -> str:
    return "still running" if process.exit_code is None else describe_exit(process.exit_code)


def _write_stderr(data: bytes) -> None:
    stream = getattr(sys.stderr, "buffer", None)
    if stream is None:  # a notebook's stderr takes text only
        sys.stderr.write(data.decode(errors="replace"))
    else:
        sys.stderr.flush()
        stream.write(data)
        stream.flush()
