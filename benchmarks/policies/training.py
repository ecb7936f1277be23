"""A small float64 llama under our strategy, paced: a step takes at least a fixed time per sample, longer in proportion to the GPUs that a
replica lacks.

Whoever is ready earlier sleeps before the vote. That stands for the work of GPUs that do not share cores, as the processes of this
benchmark do. It assumes that a replica of two of three GPUs takes 3/2 of the time, which large models come close to.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from benchmarks.policies.drill import PHASE, SAVE_EVERY, last_step, note_kills
from benchmarks.policies.model import LEARNING_RATE, LENGTH, SEED, SIZES, training_data
from benchmarks.recovery_job import EventLog, Job
from lightning_ntp import NTPStrategy, ReshardOnGPULoss
from lightning_ntp.strategy.config import RecoveryConfig
from lightning_ntp.strategy.events import CommitEvent, Observer, RecoveryEvent
from lightning_ntp.strategy.joining import is_late


def model_options() -> argparse.Namespace:
    """What `recovery_job.Job` reads."""
    return argparse.Namespace(**SIZES, length=LENGTH, seed=SEED, lr=LEARNING_RATE, dropout=0.0, pace=0.0)


class Pace(Observer):
    """The least time of a step, from the end of the one before or of a recovery."""

    def __init__(self) -> None:
        self._restart()

    def wait(self) -> None:
        """Until the samples of this step are due."""
        time.sleep(max(0.0, self.began_seconds + self.due_seconds - time.monotonic()))

    def on_commit(self, event: CommitEvent) -> None:
        self._restart()

    def on_recovery(self, event: RecoveryEvent) -> None:
        self._restart()

    def _restart(self) -> None:
        self.began_seconds, self.due_seconds = time.monotonic(), 0.0


class PacedJob(Job):
    """`Job` at the pace of GPUs of its own, hit by the drill."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(model_options())
        self.run = options
        self.script = options.drill.script(whole=options.policy == "drop")
        self.gpu = options.gpus[int(os.environ.get("LOCAL_RANK", "0"))]

    def on_train_start(self) -> None:
        """From here on there is somebody to lose."""
        self.log_file = EventLog(self.run.out, self.gpu)
        note_kills(self.script, self.log_file.write)
        self.log_file.write("start", pid=os.getpid(), step=self.global_step)
        self.trainer.strategy.observers.add(self.log_file)
        self.pace = Pace()
        self.trainer.strategy.observers.add(self.pace)

    def training_step(self, samples: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.run.policy != "undisturbed":
            self.script.fire(self.gpu, self.global_step, PHASE)
        loss = super().training_step(samples, batch_idx)
        mine = self.trainer.strategy.topology.replica_of(int(os.environ["NTP_WORKER_ID"]))
        self.pace.due_seconds += self.run.pace * len(samples["index"]) * self.run.drill.degree / len(mine.workers)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """After backward and sync, before the vote."""
        self.pace.wait()


def await_mates(options: argparse.Namespace) -> None:
    """A dropped replica comes back as a whole: its workers go to the door together."""
    gpu = options.gpus[int(os.environ["LOCAL_RANK"])]
    round_ = len([back for back in options.drill.returns if back.step <= last_step(options.out) + 1])
    files = {mate: options.out / f"ready-{mate}-{round_}" for mate in options.drill.mates(gpu)}
    files[gpu].touch()
    while not all(file.exists() for file in files.values()):
        time.sleep(0.01)


def train(options: argparse.Namespace) -> None:
    """One life of the job; its weights are in `options.out` at its end."""
    degree, num_replicas = options.drill.degree, len(options.gpus) // options.drill.degree
    restarts = options.policy == "restart"
    recovery = RecoveryConfig(not restarts)
    callbacks: list[Any] = [ReshardOnGPULoss(folder=options.out / "ledger")]
    if restarts:
        callbacks.append(ModelCheckpoint(options.checkpoints, every_n_train_steps=SAVE_EVERY, save_top_k=1, save_last=True))
    trainer = L.Trainer(
        strategy=NTPStrategy(replica_sizes=[degree] * num_replicas, seed=SEED, recovery=recovery),
        accelerator="cpu",
        devices=len(options.gpus),
        precision="64-true",
        max_steps=options.until,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=restarts,
        callbacks=callbacks,
    )
    # the global batch is that of the healthy job however many replicas a life has
    batch = options.batch * options.drill.replicas // num_replicas
    data = DataLoader(training_data(), batch)
    last = "last" if restarts and options.checkpoints.exists() else None
    module = PacedJob(options)
    if options.policy == "drop" and is_late(os.environ):
        await_mates(options)
    trainer.fit(module, data, ckpt_path=last)
    trainer.strategy.save_pretrained(options.out / "weights")
    trainer.strategy.barrier()  # whoever ends first would cut the last exchange of the others short
