"""A fit of four workers under the faults of NTP_FAULTS, with W&B offline: what `test_goodput_losses` starts as a user would."""

from __future__ import annotations

import sys

import wandb
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger

import lightning_ntp
from lightning_ntp.strategy.events import LossEvent, RecoveryEvent
from tests import lightning_jobs as jobs
from tests.models import float64_norms


class Told(lightning_ntp.ReshardOnGPULoss):  # type: ignore[misc, name-defined]
    """Prints what users are told."""

    def on_gpu_lost(self, event: LossEvent) -> None:
        print(f"LOST {event.workers}", flush=True)

    def on_recovered(self, event: RecoveryEvent) -> None:
        print(f"RECOVERED {event.degrees}", flush=True)


def main() -> None:
    folder = sys.argv[1]
    saver = ModelCheckpoint(f"{folder}/checkpoints", every_n_train_steps=5)
    trainer = jobs.trainer(
        jobs.ntp(replica_sizes=[2, 2]), 4, max_epochs=3, default_root_dir=folder, callbacks=[saver, Told(log_every_n_steps=2)],
        logger=WandbLogger(project="p", offline=True, save_dir=folder), enable_checkpointing=True,
    )  # fmt: skip
    with float64_norms():
        trainer.fit(jobs.TinyLlama(), jobs.loader(60, 2), jobs.loader(4, 2))
    wandb.finish()


if __name__ == "__main__":
    main()
