"""The process that is no worker: it starts the workers of one node, hosts the job's store, and ends the job as a whole.

    Supervisor(command, num_workers, env).run()  ->  exit code

Without recovery the first worker that fails ends the job within seconds, its traceback printed before all others.
With recovery a worker that is killed, hangs or leaves with `EXIT_LOST` is a loss: the others are told (coordinator.py),
never touched, and its place is filled again while the budget lasts (respawn.py). An exception of the program itself still
ends the job, because it would strike again. With several nodes this is the first one's supervisor; each other node has a
`NodeAgent` that follows it. Death is noticed at once (a pidfd per worker). No worker outlives its supervisor.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_ntp.strategy import rendezvous
from lightning_ntp.strategy.coordinator import Coordinator, Event
from lightning_ntp.strategy.ending import EndedWorker
from lightning_ntp.strategy.health import GpuProbe, HealthEvent
from lightning_ntp.strategy.job_log import LossReport, last_lines
from lightning_ntp.strategy.node_board import NodeBoard, NodeState
from lightning_ntp.strategy.respawn import Place
from lightning_ntp.strategy.signals import SignalWatch
from lightning_ntp.strategy.supervisor_base import ENDED_WELL, FINISHED, SupervisorBase
from lightning_ntp.strategy.supervisor_config import place_environ
from lightning_ntp.strategy.worker_process import OUT_OF_STEP, WorkerProcess, describe_exit, is_out_of_step, shell_code

_log = logging.getLogger(__name__)

TURN_SECONDS = 0.05
"""The longest sleep of the loop. Deaths, output and signals wake it at once."""

FORMING_SECONDS = 0.005
"""The same while a generation forms: joining workers write to the store, which wakes nobody here."""


class Supervisor(SupervisorBase):
    """Starts `num_workers` times `command` on this node and watches them; see the module docstring.

    Each worker gets the supervisor's environment, `env`, NTP_WORKER_ID, NTP_STORE_ENDPOINT, NTP_JOB_TOKEN, RANK,
    LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT (the store: `env://` just works).
    `run` must be called on a thread that lives as long as the job, best the main one: Linux kills the workers when the
    thread that started them is gone.
    """

    def run(self) -> int:
        """Runs the job to its end. 0 if every worker ended well, else the code of the first one that did not.

        128 + number for a worker or a supervisor ended by a signal; EXIT_SAVED, EXIT_RESTART and
        EXIT_TOO_MANY_RECOVERIES as documented in rendezvous.py; where the job would start again is in `restart`. `ConfigError` if the store's port is taken.
        """
        with SignalWatch() as signals, self._log, self._crew:
            self._store, self.endpoint = rendezvous.host_store(self.config.listen, self.token, self._job())
            self._board = NodeBoard(self._store)
            self._log.note_job(
                endpoint=str(self.endpoint), token=self.token, pid=os.getpid(), host=socket.gethostname()
            )
            if signals.wake is not None:
                self._crew.watch(signals.wake.fileno())
            if self.recovery:
                self._coordinator = Coordinator(
                    self._store, range(self.world_size), self.config.patience, time.monotonic, self._note_event
                )
            self._log.event("start", workers=self.world_size, nodes=self.config.num_nodes, recovery=self.recovery)
            self._began_seconds = time.monotonic()
            try:
                for worker in range(self.world_size):
                    self._places[worker] = divmod(worker, self.num_workers)
                    self._live.add(worker)
                self._note_places()
                for slot in range(self.num_workers):
                    self._start(slot)
                while self._live:
                    self._turn(signals)
            finally:
                self._ended += [EndedWorker.of(each) for each in self._crew.kill_rest(self.config.abandon_seconds)]
                code = self._conclude()
                self._log.event("end", exit_code=code, why=self._ending.why if self._ending else "")
                self._say_goodbye(code)
                self._health.close()
                self._coordinator = None
                del self._store, self._board
        return code

    def _job(self) -> dict[str, object]:
        folder = None if self.config.log_folder is None else str(self.config.log_folder)
        return {
            "num_workers": self.world_size,
            "num_slots": self.num_workers,
            "num_nodes": self.config.num_nodes,
            "log_folder": folder,
        }

    def _note_places(self) -> None:
        """For `ntp drain`: which workers there are, and on which node."""
        rendezvous.put_json(self._store, "places", {str(worker): place for worker, place in self._places.items()})

    def _start(self, worker: int) -> None:
        """Starts a worker at its place, on this node or by an order to another."""
        node, slot = self._places[worker]
        address = rendezvous.JobAddress(self.endpoint, self.token, worker, self.recovery)
        environ = place_environ(address, (node, slot), self.num_workers, self.world_size)
        if self.config.resume is not None:
            environ |= self.config.resume.to_env()
        if node == 0:
            self._crew.start(worker, self.config.worker_environ(self.env, environ, slot))
        else:
            self._board.order(node, "start", worker=worker, slot=slot, environ=environ)
        self._live.add(worker)

    def _turn(self, signals: SignalWatch) -> None:
        """Sleeps until something happens, and deals with all of it."""
        forming = self._coordinator is not None and self._coordinator.forming
        self._crew.wait(FORMING_SECONDS if forming else TURN_SECONDS)
        now = time.monotonic()
        signals.drain()
        ended = self._crew.collect(now)
        self._read_reports()  # a worker that reports does so before it ends
        for process in ended:
            self._take_exit(process, now)
        self._look_at_nodes(now)
        for event in self._health.poll():
            self._on_gpu(event)
        while signals.pending:
            self._on_signal(signals.pending.pop(0), now)
        self._read_reports()
        self._tick(now)

    def _tick(self, now_seconds: float) -> None:
        """What is due by the clock."""
        ending = self._ending
        if ending is None or ending.saving:
            self._crew.pass_on_old_tracebacks(now_seconds)
            if self._coordinator is not None and self._live:
                self._coordinate(self._coordinator, now_seconds)
            ending = self._ending
        if ending is None:
            return
        asked = ending.asked
        left = ending.tick(self._crew, now_seconds, self.config.abandon_seconds)
        self._live -= set(left)
        if ending.asked and not asked:
            self._board.order_all("end", why=ending.why, exit_code=ending.exit_code, means=ending.means)
        if ending.killed and now_seconds >= ending.abandon_seconds:
            self._live.clear()

    # Ends of workers.

    def _take_exit(self, process: WorkerProcess, now_seconds: float) -> None:
        assert process.exit_code is not None
        last_words = last_lines(bytes(process.relay.tail))
        if process.exit_code in ENDED_WELL or self._is_loss(process.worker, process.exit_code, last_words):
            process.relay.release()
        else:
            process.relay.hold(now_seconds)
        self._log.forget(process.worker)
        self._on_exit(EndedWorker.of(process), last_words, now_seconds)

    def _on_exit(self, ended: EndedWorker, last_words: list[str], now_seconds: float) -> None:
        worker = ended.worker
        self._live.discard(worker)
        self._ended.append(ended)
        self._log.event("exit", worker=worker, node=ended.node, exit_code=ended.exit_code)
        if ended.exit_code in ENDED_WELL:
            if self._coordinator is not None:
                self._coordinator.finish(worker)
                if ended.exit_code == rendezvous.EXIT_PARKED and self._ending is None and self.config.respawn.max_respawns:
                    self._add_worker(self._coordinator, self._places[worker], waits=True)
            return
        if self._coordinator is not None and self._is_loss(worker, ended.exit_code, last_words):
            self._take_loss(self._coordinator, ended, last_words, now_seconds)
            return
        if is_out_of_step(last_words):
            ended = replace(ended, why=f"{describe_exit(ended.exit_code)}; {OUT_OF_STEP}")
        if self._ending is None:
            delay = 0.0 if ended.is_cause else self.config.settle_seconds
            self._end(str(ended), shell_code(ended.exit_code), signal.SIGTERM, delay)
        elif self._ending.told or self._ending.asked:
            return
        elif ended.is_cause:
            self._ending.ask_seconds = now_seconds
        self._failed_alone.append(ended)

    def _take_loss(
        self, coordinator: Coordinator, ended: EndedWorker, last_words: list[str], now_seconds: float
    ) -> None:
        """Tells the others, and says what becomes of the place. A worker that has lost a neighbour is replaced at once: it is no loss more."""
        worker, place = ended.worker, self._places[ended.worker]
        if ended.exit_code == rendezvous.EXIT_RENEW:
            self._lose(coordinator, {worker: f"worker {worker}: starts again, a neighbour was lost"}, is_new=False)
            if self._ending is None:
                self._add_worker(coordinator, place)
            return
        self._lose(coordinator, {worker: str(ended)}, last_words)
        what = self._book.lose(place, now_seconds)
        self._log.event("place", node=ended.node, slot=place[1], what=what)

    def _is_loss(self, worker: int, exit_code: int, last_words: Sequence[str]) -> bool:
        if self._coordinator is None or (self._ending is not None and not self._ending.saving):
            return False
        if not self.config.members_expected and not self._coordinator.in_use:
            return False
        if is_out_of_step(last_words):
            return False
        return exit_code < 0 or exit_code in _LOST_CODES or worker in self._coordinator.fenced

    def _lose(
        self, coordinator: Coordinator, losses: Mapping[int, str], last_words: Sequence[str] = (), is_new: bool = True
    ) -> None:
        """Workers are gone or given up (worker -> why): tells the others. is_new: not in consequence of another loss."""
        fresh = {worker: why for worker, why in losses.items() if worker not in coordinator.fenced}
        if not fresh:
            return
        now = time.monotonic()
        if self._loss is None:
            self._loss, self._loss_seconds = LossReport(coordinator.generation), now
        for worker, why in fresh.items():
            self._loss.add(self._who(worker), why, last_words)
        if not coordinator.lose(fresh):
            self._print_loss((), None)
        elif is_new and not self._book.recover(now):
            limit = self.config.respawn.max_recoveries_per_hour
            self._leave(f"more than {limit} recoveries within an hour", rendezvous.EXIT_TOO_MANY_RECOVERIES)

    def _who(self, worker: int) -> str:
        node, slot = self._places[worker]
        board = self._board.nodes.get(node)
        host = socket.gethostname() if node == 0 else board.host if board else "never arrived"
        gpus = self.config.gpus if node == 0 else board.gpus if board else ()
        gpu = f", {gpus[slot]}" if slot < len(gpus) else ""
        return f"worker {worker} (node {node} {host}, slot {slot}{gpu})"

    def _on_gpu(self, event: HealthEvent) -> None:
        """The worker on a broken GPU cannot go on. Without recovery its process says how it ends."""
        _log.error("%s", event)
        self._log.event("gpu", gpu=event.gpu, what=event.kind, code=event.code, fatal=event.is_fatal, detail=event.detail)
        if self._coordinator is None or not event.is_fatal:
            return
        for worker in sorted(self._live):
            node, slot = self._places[worker]
            if node == 0 and self.config.gpus[slot : slot + 1] == (event.gpu,):
                self._crew.give_up(worker, str(event))
                self._lose(self._coordinator, {worker: f"worker {worker}: {event}"})

    # Membership.

    def _coordinate(self, coordinator: Coordinator, now_seconds: float) -> None:
        """One look at the membership: fences whom it gives up, fills empty places, ends an empty job."""
        verdict = coordinator.tick()
        fence = {worker: why for worker, why in verdict.fence.items() if not self._crew.is_traced(worker)}
        if fence or verdict.write_stacks:  # whoever waits for a hung worker shows where, while it still waits
            self._crew.signal_all(signal.SIGUSR2)
            self._board.order_all("stacks")
        for worker, why in fence.items():
            _log.error("%s: ending it", why)
            if self._places[worker][0] == 0:
                self._crew.give_up(worker, why)
            else:
                self._board.order(self._places[worker][0], "give-up", worker=worker, why=why)
            self._live.discard(worker)
            self._lose(coordinator, {worker: why})
        if self._ending is None:
            self._fill_places(coordinator, now_seconds)
        if coordinator.active or not self._ended or self._ending is not None:
            return
        if any(each.exit_code in FINISHED for each in self._ended):
            self._end("all members have ended", self._code_of_losses(), signal.SIGTERM, 0.0, told=True)
        elif self._live <= coordinator.pending | coordinator.waiting:  # else some have left, and are about to exit
            self._end("all workers are lost", self._code_of_losses(), signal.SIGTERM, 0.0, told=True)

    def _fill_places(self, coordinator: Coordinator, now_seconds: float) -> None:
        """Starts the replacements that are due."""
        for place in self._book.due(now_seconds) if coordinator.active else []:
            if self._is_sound(place, now_seconds):
                self._book.fill(place)
                self._add_worker(coordinator, place)

    def _is_sound(self, place: Place, now_seconds: float) -> bool:
        """Whether the GPU at a place of this node is still there; False while that is not known."""
        node, slot = place
        if node != 0 or slot >= len(self.config.gpus):
            return True
        probe = self._probes.setdefault(place, GpuProbe(self.config.gpus[slot]))
        if probe.answer is None:
            return False
        del self._probes[place]
        if not probe.answer:
            self._log.event("probe-failed", node=node, slot=slot, gpu=self.config.gpus[slot])
            self._book.postpone(place, now_seconds)
        return probe.answer

    def _add_worker(self, coordinator: Coordinator, place: Place, waits: bool = False) -> None:
        worker = max(self._places) + 1
        self._places[worker] = place
        self._note_places()
        self._log.event("spare" if waits else "respawn", worker=worker, node=place[0], slot=place[1])
        self._start(worker)
        coordinator.expect(worker, waits)

    def _note_event(self, event: Event) -> None:
        self._log.event(event.kind, generation=event.generation, workers=event.workers, why=event.why)
        if event.kind == "formed":
            self._log.enter_generation(event.generation, event.workers)
            self._board.order_all("generation", generation=event.generation, workers=event.workers)
            self._print_loss(event.workers, event.seconds - self._loss_seconds)
        elif event.kind == "broken" and self._loss is None:  # nobody died: a stall or a mismatch
            self._loss, self._loss_seconds = LossReport(event.generation), event.seconds
            self._loss.add("nobody", event.why)
        self._on_event(event)

    # Other nodes.

    def _look_at_nodes(self, now_seconds: float) -> None:
        for node in self._board.arrivals(now_seconds):
            self._log.event("node", node=node.number, host=node.host, slots=node.num_slots, gpus=node.gpus)
            self._welcome(node)
        for exit_ in self._board.exits(now_seconds):
            self._on_exit(exit_.ended, exit_.last_words, now_seconds)
        patience = self.config.patience
        in_doubt = self._coordinator is not None and self._coordinator.suspected
        limit = patience.doubted_node_seconds if in_doubt else patience.node_seconds
        for node in self._board.silent(now_seconds, limit):
            self._lose_node(node, f"its supervisor gave no sign of life for {limit:g} s")
        started = now_seconds - self._began_seconds <= patience.start_seconds
        if self._coordinator is None and self._ending is None and not started:
            missing = [node for node in range(1, self.config.num_nodes) if node not in self._board.nodes]
            if missing:
                why = f"nodes {missing} did not come within {patience.start_seconds:g} s"
                self._end(why, 1, signal.SIGTERM, 0.0, told=True)

    def _welcome(self, node: NodeState) -> None:
        """Gives a node its workers: those that the job starts with, or as many new ones as it has slots."""
        initial = [worker for worker, place in self._places.items() if place[0] == node.number and worker in self._live]
        if node.number < self.config.num_nodes and node.num_slots != self.num_workers:
            why = (
                f"node {node.number} ({node.host}) has {node.num_slots} workers, the first node has {self.num_workers}"
            )
            self._end(f"{why}: start all nodes with the same number", 2, signal.SIGTERM, 0.0, told=True)
        elif initial:
            for worker in initial:
                self._start(worker)
        elif self._coordinator is not None and self._ending is None:
            for slot in range(node.num_slots):
                self._add_worker(self._coordinator, (node.number, slot))
        else:
            self._board.order(node.number, "end", why="this job takes nobody in", exit_code=2, means=signal.SIGTERM)

    def _lose_node(self, node: NodeState, how: str) -> None:
        why = f"node {node.number} ({node.host}): {how}"
        lost = [worker for worker, place in self._places.items() if place[0] == node.number and worker in self._live]
        self._log.event("node-lost", node=node.number, host=node.host, why=how, workers=lost)
        self._live -= set(lost)
        for slot in range(node.num_slots):
            self._book.retire((node.number, slot))
        if self._coordinator is None:
            if lost and self._ending is None:
                self._end(why, 1, signal.SIGTERM, 0.0, told=True)
        elif lost:
            self._lose(self._coordinator, dict.fromkeys(lost, why))


_LOST_CODES = (rendezvous.EXIT_LOST, rendezvous.EXIT_NO_SUPERVISOR, rendezvous.EXIT_RENEW)
