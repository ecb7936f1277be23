"""What a supervisor knows of its job, and how the job ends; supervisor.py says what happens before."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy import rendezvous
from lightning_ntp.strategy.coordinator import Coordinator, Event
from lightning_ntp.strategy.crew import Crew
from lightning_ntp.strategy.ending import EndedWorker, EndingState, ErrorReport, conclude
from lightning_ntp.strategy.health import GpuProbe, HealthWatch, child_command
from lightning_ntp.strategy.job_log import JobLog, LossReport
from lightning_ntp.strategy.node_board import NodeBoard
from lightning_ntp.strategy.respawn import Place, RespawnBook
from lightning_ntp.strategy.restart import Restart, offered
from lightning_ntp.strategy.supervisor_config import SupervisorConfig
from lightning_ntp.strategy.worker_process import StartWorker, shell_code, start_worker, write_stderr

_log = logging.getLogger(__name__)

GOODBYE_SECONDS = 3.0
"""So long the store outlives the last worker, for the other nodes to read that the job has ended."""

FINISHED = (0, rendezvous.EXIT_SAVED)
ENDED_WELL = (*FINISHED, rendezvous.EXIT_PARKED)


class SupervisorBase:
    """The state of a job, and its end."""

    _store: dist.Store
    _board: NodeBoard

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
        self.config = config or SupervisorConfig()
        self.command = tuple(command)
        self.num_workers = num_workers
        self.world_size = num_workers * self.config.num_nodes
        self.env = dict(env or {})
        self.token = self.config.token or rendezvous.new_token()
        self.recovery = recovery
        self.restart: Restart | None = None
        self._on_event = on_event or (lambda event: None)
        self._write = write or write_stderr
        self._log = JobLog(self.config.log_folder)
        self._crew = Crew(self.command, start, self._write, self._log)
        self._places: dict[int, Place] = {}  # of every worker ever started
        self._live: set[int] = set()
        self._ended: list[EndedWorker] = []
        self._failed_alone: list[EndedWorker] = []  # before anybody was asked to end
        self._reports: list[ErrorReport] = []
        self._ending: EndingState | None = None
        self._coordinator: Coordinator | None = None
        self._book = RespawnBook(self.config.respawn)
        self._health = HealthWatch(child_command(self.config.gpus), time.monotonic)
        self._probes: dict[Place, GpuProbe] = {}
        self._loss: LossReport | None = None  # not printed yet
        self._loss_seconds = 0.0
        self._num_news = 0

    def _read_news(self) -> None:
        """Notes and prints what members have told."""
        while self._num_news < self._store.add("news", 0):
            news = rendezvous.peek_json(self._store, f"news/{self._num_news + 1}")
            if news is None:  # counted, but still on the way
                return
            self._num_news += 1
            self._log.event(str(news["kind"]), told_by=news["worker"], words=news["words"], **news["facts"])
            self._write("".join(f"[ntp] {line}\n" for line in news["words"]).encode())

    def _read_reports(self) -> None:
        """Takes in what workers reported; a reported exception ends the job as soon as its worker has had its say."""
        self._read_news()
        while len(self._reports) < self._store.add("errors", 0):
            key = f"error/{len(self._reports) + 1}"
            report = rendezvous.peek_json(self._store, key)
            if report is None:  # counted, but its text is still on the way
                return
            self._reports.append(ErrorReport(int(report["worker"]), str(report["text"])))
            if self._ending is None or self._ending.saving:
                why = f"worker {report['worker']} raised {report['type']}"
                self._end(why, 1, signal.SIGTERM, self.config.settle_seconds)

    def _on_signal(self, number: int, now_seconds: float) -> None:
        """Ctrl-C and SIGTERM end the job gently the first time, at once the second time. SIGUSR1: the node shall leave.

        With recovery SIGTERM and SIGUSR1 let the members save first.
        """
        name = signal.Signals(number).name
        if self._ending is not None and self._ending.asked:
            self._ending.kill_seconds = now_seconds
        elif (
            number != signal.SIGINT
            and self._ending is None
            and self._coordinator is not None
            and self._coordinator.active
        ):
            _log.warning("%s: asking the workers to save and leave", name)
            if number == signal.SIGUSR1 and self._board.live:
                here = [worker for worker in self._live if self._places[worker][0] == 0]
                self._coordinator.ask_to_leave(here, name)
            else:
                self._leave(f"the supervisor got {name}", 128 + number)
        elif number != signal.SIGUSR1:
            _log.warning("%s: ending %d workers", name, len(self._live))
            means = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            self._end(f"the supervisor got {name}", 128 + number, means, 0.0, told=True)

    def _leave(self, why: str, exit_code: int) -> None:
        """The whole job shall save and end: members are asked first, then told."""
        assert self._coordinator is not None
        self._coordinator.ask_to_leave(sorted(self._coordinator.active), why)
        self._end(why, exit_code, signal.SIGTERM, self.config.save_seconds, told=True)
        assert self._ending is not None
        self._ending.saving = True

    def _end(self, why: str, exit_code: int, means: int, delay_seconds: float, told: bool = False) -> None:
        ask = time.monotonic() + delay_seconds
        kill = ask + self.config.grace_seconds
        self._ending = EndingState(why, exit_code, means, ask, kill, kill + self.config.abandon_seconds, told)

    def _conclude(self) -> int:
        """Prints what was held back, the cause first, and gives the job's exit code."""
        self._print_loss((), None)
        if self._ending is None:
            return self._code_of_losses()
        self.restart = None if self._ending.told else offered(self._store)
        by_signal = self._ending.told and self._ending.exit_code != rendezvous.EXIT_TOO_MANY_RECOVERIES
        if by_signal and any(each.exit_code == rendezvous.EXIT_SAVED for each in self._ended):
            self._ending.exit_code = rendezvous.EXIT_SAVED
        ended = [each for each in self._ended if each.exit_code != rendezvous.EXIT_PARKED]
        code = conclude(self._ending, ended, self._failed_alone, self._reports, self.world_size, self._write)
        return code if self.restart is None else rendezvous.EXIT_RESTART

    def _code_of_losses(self) -> int:
        """Without a failure: 0 or EXIT_SAVED, unless every worker was lost."""
        codes = [each.exit_code for each in self._ended]
        well = [code for code in codes if code in FINISHED]
        if well or not codes:
            return well[-1] if well else 0
        self._write(f"[supervisor] all {len(codes)} workers are lost.\n".encode())
        return shell_code(codes[-1] or 1)

    def _say_goodbye(self, exit_code: int) -> None:
        """Lets the other nodes know that the job has ended, before the store goes."""
        gone = [f"node/{node.number}/gone" for node in self._board.live]
        self._board.order_all("end", why="the job has ended", exit_code=exit_code, means=signal.SIGTERM)
        deadline = time.monotonic() + GOODBYE_SECONDS
        while gone and not self._store.check(gone) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _print_loss(self, members: tuple[int, ...], seconds: float | None) -> None:
        if self._loss is not None and self._coordinator is not None:
            self._write(self._loss.render(members, self._coordinator.generation, seconds).encode())
        self._loss = None
