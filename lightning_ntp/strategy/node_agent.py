"""The supervisor of every node but the first: holds this node's workers and does what the first node's supervisor says.

    NodeAgent(command, num_slots, endpoint, token, ...).run()  ->  exit code

It decides nothing about the job. It ends its workers and itself with EXIT_NO_SUPERVISOR when the store is gone: whoever
started the nodes (SLURM, an operator) shall start the job again, which goes on from its last checkpoint.
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from lightning_ntp.errors import ConfigError, RankLostError
from lightning_ntp.strategy import rendezvous
from lightning_ntp.strategy.crew import Crew
from lightning_ntp.strategy.ending import EndingState
from lightning_ntp.strategy.health import GpuProbe, HealthEvent, HealthWatch, child_command
from lightning_ntp.strategy.job_log import JobLog, last_lines
from lightning_ntp.strategy.node_board import BEAT_SECONDS
from lightning_ntp.strategy.signals import SignalWatch
from lightning_ntp.strategy.supervisor_config import SupervisorConfig
from lightning_ntp.strategy.worker_process import StartWorker, WorkerProcess, start_worker, write_stderr

_log = logging.getLogger(__name__)

TURN_SECONDS = 0.05
RETRY_SECONDS = 0.3
STRANGER_ATTEMPTS = 5
"""A store that still does not know the job's token after so many looks belongs to another job."""


class NodeAgent:
    """One node of a job whose store is elsewhere.

    node: its number among the nodes that the job starts with; None: a newcomer, which gets a number of its own.
    `config` as for the supervisor: token, grace and abandon times, gpus; `config.listen` is where the store is.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_slots: int,
        env: Mapping[str, str] | None = None,
        *,
        node: int | None,
        config: SupervisorConfig,
        start: StartWorker = start_worker,
        write: Callable[[bytes], None] = write_stderr,
    ) -> None:
        if config.token is None:
            raise ConfigError(
                "a node that is not the first needs the job's token: NTP_JOB_TOKEN, the same on all nodes"
            )
        self.command = tuple(command)
        self.num_slots = num_slots
        self.env = dict(env or {})
        self.node = node
        self.config = config
        self._token = config.token
        self._start_process = start
        self._write = write
        self._ending: EndingState | None = None
        self._num_orders = 0
        self._slots: dict[int, int] = {}
        self._probes: dict[int, tuple[GpuProbe, Mapping[str, str]]] = {}
        self._health = HealthWatch(child_command(config.gpus), time.monotonic)
        self._num_exits = 0
        self._beat_seconds = 0.0
        self._leaving_since: float | None = None

    def run(self) -> int:
        """Serves the job to its end; the exit code is the job's, or EXIT_NO_SUPERVISOR.

        `RankLostError` if no store answers within `patience.start_seconds`, `ConfigError` if it is another job's.
        """
        self._store = self._connect()
        job = rendezvous.get_json(self._store, "job")
        if self.node is None:
            self.node = int(job["num_nodes"]) - 1 + self._store.add("nodes/newcomers", 1)
        folder = None if job["log_folder"] is None else Path(job["log_folder"])
        self.config = replace(self.config, log_folder=folder)
        with SignalWatch() as signals, JobLog(folder, with_events=False) as log:
            self._log = log
            with Crew(self.command, self._start_process, self._write, log) as crew:
                self._crew = crew
                if signals.wake is not None:
                    crew.watch(signals.wake.fileno())
                try:
                    return self._serve(signals)
                except dist.DistNetworkError:
                    self._write(b"[ntp] the store is gone, and with it the first node: this node ends its workers\n")
                    return rendezvous.EXIT_NO_SUPERVISOR
                finally:
                    self._health.close()
                    self._end_rest()

    def _connect(self) -> dist.Store:
        """The first node may start later than this one, and needs a moment from its store's start to its first key."""
        endpoint = rendezvous.Endpoint.parse(self.config.listen)
        deadline = time.monotonic() + self.config.patience.start_seconds
        num_strangers = 0
        while True:
            try:
                return rendezvous.connect_store(endpoint, self._token)
            except RankLostError:
                if time.monotonic() > deadline:
                    raise
            except ConfigError:
                num_strangers += 1
                if num_strangers == STRANGER_ATTEMPTS:
                    raise
            time.sleep(RETRY_SECONDS)

    def _serve(self, signals: SignalWatch) -> int:
        gpus = list(self.config.gpus)
        hello = {"node": self.node, "host": socket.gethostname(), "num_slots": self.num_slots, "gpus": gpus}
        number = self._store.add("nodes/hello-numbers", 1)
        rendezvous.put_json(self._store, f"nodes/hello/{number}", hello)
        self._store.add("nodes/hellos", 1)
        while self._ending is None or self._crew.workers:
            self._crew.wait(TURN_SECONDS)
            now = time.monotonic()
            signals.drain()
            for process in self._crew.collect(now):
                self._report(process)
            while signals.pending:
                self._on_signal(signals.pending.pop(0), now)
            for event in self._health.poll():
                self._on_gpu(event)
            self._look_at_probes()
            self._beat(now)
            self._obey()
            self._tick(now)
        self._store.set(f"node/{self.node}/gone", "1")
        return self._ending.exit_code

    def _start(self, worker: int, slot: int, environ: Mapping[str, str]) -> None:
        """Starts a worker; a second one at the same place only if its GPU is still there."""
        again = slot in self._slots.values()
        self._slots[worker] = slot
        if again and slot < len(self.config.gpus):
            self._probes[worker] = (GpuProbe(self.config.gpus[slot]), environ)
        else:
            self._crew.start(worker, self.config.worker_environ(self.env, environ, slot))

    def _look_at_probes(self) -> None:
        for worker, (probe, environ) in list(self._probes.items()):
            if probe.answer is None:
                continue
            del self._probes[worker]
            slot = self._slots[worker]
            if probe.answer:
                self._crew.start(worker, self.config.worker_environ(self.env, environ, slot))
            else:
                why = f"the driver does not list {self.config.gpus[slot]} any more"
                self._tell({"worker": worker, "exit_code": rendezvous.EXIT_LOST, "why": why})

    def _on_gpu(self, event: HealthEvent) -> None:
        """The worker on a broken GPU cannot go on."""
        _log.error("%s", event)
        for worker in list(self._crew.workers):
            slot = self._slots[worker]
            if event.is_fatal and self.config.gpus[slot : slot + 1] == (event.gpu,):
                self._crew.give_up(worker, str(event))

    def _beat(self, now_seconds: float) -> None:
        if now_seconds - self._beat_seconds >= BEAT_SECONDS:
            self._beat_seconds = now_seconds
            self._store.add(f"node/{self.node}/beats", 1)

    def _report(self, process: WorkerProcess) -> None:
        """Tells the first node how a worker has ended. It was the cause, if its traceback came first: print it here."""
        relay = process.relay
        report = {
            "worker": process.worker,
            "exit_code": process.exit_code,
            "why": process.why,
            "has_traceback": relay.has_traceback,
            "blames_a_peer": relay.blames_a_peer,
            "last_words": last_lines(bytes(relay.tail)),
        }
        relay.release()
        self._log.forget(process.worker)
        self._tell(report)

    def _tell(self, report: Mapping[str, object]) -> None:
        self._num_exits += 1
        rendezvous.put_json(self._store, f"node/{self.node}/exit/{self._num_exits}", report)
        self._store.add(f"node/{self.node}/exits", 1)

    def _obey(self) -> None:
        """Carries out the orders that have come."""
        num_orders = self._store.add(f"node/{self.node}/orders", 0)
        while self._num_orders < num_orders:
            order = rendezvous.peek_json(self._store, f"node/{self.node}/order/{self._num_orders + 1}")
            if order is None:
                return
            self._num_orders += 1
            self._carry_out(order)

    def _carry_out(self, order: Mapping[str, object]) -> None:
        match order:
            case {"do": "start", "worker": int(worker), "slot": int(slot), "environ": dict(environ)}:
                self._start(worker, slot, environ)
            case {"do": "give-up", "worker": int(worker), "why": str(why)}:
                self._crew.give_up(worker, why)
            case {"do": "stacks"}:
                self._crew.signal_all(signal.SIGUSR2)
            case {"do": "generation", "generation": int(number), "workers": list(workers)}:
                self._log.enter_generation(number, tuple(worker for worker in workers if worker in self._crew.workers))
            case {"do": "end", "why": str(why), "exit_code": int(exit_code), "means": int(means)}:
                self._end(why, exit_code, means)
            case _:
                _log.warning("an order that this release does not know: %s", order)

    def _on_signal(self, number: int, now_seconds: float) -> None:
        """SIGTERM and SIGUSR1: this node shall leave; its workers hand out what they hold, the job goes on. Twice: at once."""
        name = signal.Signals(number).name
        if self._ending is not None:
            self._ending.kill_seconds = now_seconds
        elif number == signal.SIGINT or number == signal.SIGHUP or self._leaving_since is not None:
            self._end(f"node {self.node} got {name}", 128 + number, number)
        else:
            _log.warning("%s: asking the workers of node %s to leave", name, self.node)
            for worker in self._crew.workers:
                rendezvous.put_json(self._store, f"leave/{worker}", name)
            self._store.add("leaves", 1)
            self._leaving_since = now_seconds

    def _end(self, why: str, exit_code: int, means: int) -> None:
        if self._ending is None:
            now = time.monotonic()
            kill = now + self.config.grace_seconds
            self._ending = EndingState(why, exit_code, means, now, kill, kill + self.config.abandon_seconds, told=True)

    def _tick(self, now_seconds: float) -> None:
        if self._ending is not None:
            self._ending.tick(self._crew, now_seconds, self.config.abandon_seconds)
            return
        self._crew.pass_on_old_tracebacks(now_seconds)
        if self._leaving_since is not None:  # asked to leave
            since = now_seconds - self._leaving_since
            if not self._crew.workers:
                self._end("all workers of this node have left", 0, signal.SIGTERM)
            elif since > self.config.save_seconds:
                self._end(f"the workers of node {self.node} did not leave in time", 1, signal.SIGTERM)

    def _end_rest(self) -> None:
        """Without a store: the workers notice by themselves; the grace time is theirs, nobody stays."""
        self._crew.signal_all(signal.SIGTERM)
        deadline = time.monotonic() + self.config.grace_seconds
        while self._crew.workers and time.monotonic() < deadline:
            for process in self._crew.collect(time.monotonic()):
                process.relay.release()
            time.sleep(0.01)
        for process in self._crew.kill_rest(self.config.abandon_seconds):
            process.relay.release()
