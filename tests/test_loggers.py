"""What users watch: one offline W&B run with the values of one process, one progress bar, both on the leader only."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import wandb
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import WandbLogger
from torch.utils.data import RandomSampler
from wandb.proto.wandb_internal_pb2 import Record

from lightning_ntp.strategy.sampler import global_order
from tests import lightning_jobs as jobs

SIZE, BATCH = 22, 4


class Shown(jobs.TinyLlama):
    """Also logs to the bar."""

    def training_step(self, samples: jobs.Sample, batch_idx: int) -> Any:
        loss = super().training_step(samples, batch_idx)
        self.log("shown", loss, prog_bar=True, sync_dist=True)
        return loss


class Bar(TQDMProgressBar):
    """Remembers what it showed last."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, *args)
        self.shown = (self.train_progress_bar.n, self.train_progress_bar.total, self.get_metrics(trainer, module))


def _fit(rank: int, world: int, folder: str) -> Any:
    with jobs.as_worker(rank, world):
        bar, logger = Bar(), WandbLogger(name="watched", offline=True, save_dir=folder)
        options = {"log_every_n_steps": 1, "callbacks": [bar], "enable_progress_bar": True, "logger": logger}
        trainer = jobs.trainer(jobs.ntp(replica_sizes=[2, 1]), world, **options)
        trainer.fit(Shown(), jobs.loader(SIZE, BATCH, shuffle=True), jobs.loader(5, BATCH))
        n, total, metrics = bar.shown
        wandb.finish()
        return bar.is_disabled, n, total, metrics.get("shown")


def _records(data: bytes) -> Iterator[bytes]:
    """W&B's file: a header of 7 bytes, then LevelDB's log: blocks of 32 KiB of (checksum, length, part, payload)."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, part = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def _history(folder: Path) -> list[dict[str, float]]:
    """Rows of the one run's history as they are on disk."""
    [path] = folder.rglob("*.wandb")
    rows = []
    for data in _records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_one_run_and_one_bar_with_the_values_of_one_process(pool, tmp_path):
    results = pool.run(_fit, 3, str(tmp_path))
    order = global_order(RandomSampler(range(SIZE)), 5, 0)
    twin = jobs.in_one_process(jobs.TinyLlama, [order[at : at + 8] for at in range(0, SIZE, 8)])
    wanted = [entry["train_step"] for entry in twin.history[:3]]
    rows = [row for row in _history(tmp_path) if "train_step" in row]
    assert [row["train_step"] for row in rows] == pytest.approx(wanted, abs=1e-6)
    assert [row["trainer/global_step"] for row in rows] == [0, 1, 2]
    assert any("val_epoch" in row for row in _history(tmp_path))
    assert [disabled for disabled, *_ in results] == [False, True, True]
    assert results[0][1:3] == (3, 3)
    assert results[0][3] == pytest.approx(wanted[-1], abs=1e-3)
