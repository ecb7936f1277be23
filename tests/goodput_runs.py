"""A job of six GPUs that loses and regains some, told to a `LedgerObserver` by hand: no process, no torch group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_ntp.goodput import Ledger
from lightning_ntp.goodput_file import LedgerFile
from lightning_ntp.strategy.events import CommitEvent, LossEvent, RecoveryEvent
from lightning_ntp.strategy.ledger_observer import LedgerObserver
from lightning_ntp.topology import Topology

MS = 1_000_000
START_NS = 1_796_000_000 * 10**9


class HandClock:
    """Nanoseconds since 1970, by hand."""

    def __init__(self, now_ns: int) -> None:
        self.now = now_ns

    def __call__(self) -> int:
        return self.now


class Job:
    """Two replicas of (1 fsdp, 3 tp) under a scripted life, seen by `worker`.

    Args:
        folder: where the ledger goes; None: memory only.
        worker: whose ledger it is.
    """

    def __init__(self, folder: Path | None = None, worker: int = 0, start_ns: int = START_NS) -> None:
        self.clock = HandClock(start_ns)
        self.topology = Topology.from_shapes([(1, 3), (1, 3)])
        self.records: list[dict[str, Any]] = []
        sink = self.records.append
        if folder is not None:
            sink = LedgerFile(folder / f"ledger-{worker}.jsonl", {"worker": worker, "own": [worker], "job": "demo"}).write
        self.ledger = Ledger(range(6), self.clock, sink)
        self.observer = LedgerObserver(self.ledger, {w: w for w in range(6)}, lambda: self.topology)
        self.step = 0
        self.generation = 1
        self.pass_ms(8_000)
        self.observer.place()
        self.observer.note("start", key=[0], step=0, placed=self.observer.placed(), topology="2 x (1x3)")

    def pass_ms(self, ms: float, phase: str | None = None) -> None:
        if phase is not None:
            self.observer.on_phase(phase)
        self.clock.now += round(ms * MS)
        self.ledger.totals()

    def train(self, steps: int, ms: float = 400) -> None:
        for _ in range(steps):
            self.ledger.enter("data_wait")
            self.pass_ms(30)
            self.pass_ms(ms, "step")
            self.observer.on_commit(CommitEvent(self.step, 12, True, 1, self.generation, self.clock.now / 1e9))
            self.step += 1
            self.observer.on_phase("commit")

    def lose(self, worker: int, topology: Topology, notice_ms: float = 50) -> None:
        """A worker dies in the middle of a step."""
        self.ledger.enter("data_wait")
        self.pass_ms(30)
        self.pass_ms(250, "step")
        self.pass_ms(notice_ms, "broken")
        self.pass_ms(180, "regrouping")
        self.observer.on_loss(LossEvent(self.step, (worker,), f"worker {worker}: killed by SIGKILL", 0.0))
        self._go_on((worker,), (), topology)

    def rejoin(self, worker: int, topology: Topology) -> None:
        """A newcomer is taken in between two steps."""
        self.pass_ms(10, "broken")
        self.pass_ms(200, "regrouping")
        self._go_on((), (worker,), topology)

    def _go_on(self, lost: tuple[int, ...], joined: tuple[int, ...], topology: Topology) -> None:
        self.pass_ms(20, "planning")
        self.pass_ms(300, "moving")
        self.topology = topology
        self.generation += 1
        seconds = {"broken": 0.05, "regrouping": 0.18, "planning": 0.02, "moving": 0.3, "total": 0.55}
        shapes = ", ".join(f"{r.fsdp_size}x{r.degree}" for r in topology.replicas)
        event = RecoveryEvent(
            self.step, self.generation, lost, joined, seconds, 3_145_728, shapes, min(topology.workers), planned=bool(joined)
        )
        self.observer.on_recovery(event)


def eventful(folder: Path | None = None) -> Job:
    """Six losses and two returns."""
    job = Job(folder)
    job.train(40)
    states = [job.topology]
    for worker in (4, 2):
        states.append(states[-1].without(worker))
        job.lose(worker, states[-1])
        job.train(30, 520)
    back = states[-1].with_worker(0, 6)  # a new process on the GPU of one that was lost
    job.rejoin(6, back)
    job.train(25, 440)
    for worker in (5, 1):
        back = back.without(worker)
        job.lose(worker, back, notice_ms=900)
        job.train(20, 600)
    job.pass_ms(2_000, "save")
    job.pass_ms(3_000, "evaluate")
    back = back.with_worker(1, 7)
    job.rejoin(7, back)
    job.train(20)
    for worker in (0, 7):
        back = back.without(worker)
        job.lose(worker, back)
        job.train(15, 700)
    job.observer.note("end", step=job.step)
    return job
