"""The leader is lost: the lowest worker that lives writes the logs, shows the progress bar and leads the checkpoints.

Lightning decides at the start who does these things. Checkpoints are collective and need no more than the new global rank; W&B is in
wandb_log.py. Rows of a CSVLogger that the old leader had not flushed yet are lost with it.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

VERSIONED = ("CSVLogger", "TensorBoardLogger")
"""Loggers that number their folders by what they find on the disk: another worker would find another number."""


def versions(trainer: Any) -> list[Any]:
    """Of each logger the version that its folder is named by; None where there is none. Local."""
    return [logger.version if type(logger).__name__ in VERSIONED else None for logger in trainer.loggers]


def adopt_versions(trainer: Any, told: list[Any]) -> None:
    """Log, should this worker ever lead, where the leader logs now. Local."""
    for logger, version in zip(trainer.loggers, told, strict=True):
        if version is not None:
            logger._version = version


def take_over(trainer: Any) -> None:
    """What the leader does and nobody else. Local."""
    for logger in trainer.loggers:
        if type(logger).__name__ == "CSVLogger":
            _continue_csv(logger)
    bar = trainer.progress_bar_callback
    if bar is not None and trainer.state.fn == "fit":
        bar.enable()
        bar.on_train_start(trainer, trainer.lightning_module)
        bar.on_train_epoch_start(trainer, trainer.lightning_module)


def _continue_csv(logger: Any) -> None:
    """A CSVLogger that begins deletes what it finds: put it back, header and rows."""
    file = Path(logger.log_dir) / "metrics.csv"
    before = file.read_text() if file.is_file() else ""
    writer = logger.experiment
    if before:
        file.write_text(before)
        writer.metrics_keys = next(csv.reader([before.splitlines()[0]]))
