"""The ledger inside a Trainer, as a user gets it: every logger, a loss, a resumed run, the other Lightning."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.throughput import measure_flops
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

import lightning_ntp
from lightning_ntp.errors import ConfigError
from lightning_ntp.goodput_merge import read_run
from lightning_ntp.goodput_totals import BADPUT
from lightning_ntp.strategy import throughput
from tests import lightning_jobs as jobs

SIZE, BATCH = 30, 2


def _fit(rank: int, world: int, folder: str, resume: str | None = None) -> Any:
    with jobs.as_worker(rank, world):
        saver = ModelCheckpoint(f"{folder}/checkpoints", filename="{step}", every_n_train_steps=3, save_top_k=-1)
        callback = lightning_ntp.ReshardOnGPULoss(log_every_n_steps=2)
        trainer = jobs.trainer(
            jobs.ntp(replica_sizes=[2, 1]), world, max_epochs=2 if resume else 1, default_root_dir=folder, logger=CSVLogger(folder),
            callbacks=[saver, callback], enable_checkpointing=True,
        )  # fmt: skip
        trainer.fit(jobs.TinyLlama(), jobs.loader(SIZE, BATCH), jobs.loader(3, BATCH), ckpt_path=resume)
        return callback.job, callback.ledger.totals(), trainer.global_step


def test_every_logger_gets_the_numbers_and_a_resumed_run_goes_on_with_the_ledger(pool: Any, tmp_path: Path) -> None:
    first = pool.run(_fit, 3, str(tmp_path))
    (job, totals, steps), *_ = first
    assert {each[0] for each in first} == {job}
    history = read_run(tmp_path / "ntp_logs" / job)
    assert sum(history.gpu_ns().values()) == 3 * (history.at_ns - history.start_ns)
    assert history.step == steps == 8
    for bucket in ("productive", "init", "data_wait", "eval", "checkpoint_save"):
        assert history.gpu_ns()[bucket] > 0, bucket
    with (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["goodput/cumulative"]]
    wanted = {"goodput/window", "goodput/capacity_weighted", "ntp/degree_min", "ntp/live_gpus", "ntp/generation", "ntp/wall_s"}
    assert wanted | {f"badput_s/{bucket}" for bucket in BADPUT} <= rows[-1].keys()
    assert float(rows[0]["ntp/degree_min"]) == 1 and float(rows[0]["ntp/live_gpus"]) == 3
    spent = float(rows[-1]["goodput/productive_gpu_s"]) + sum(float(rows[-1][f"badput_s/{bucket}"]) for bucket in BADPUT)
    assert spent == pytest.approx(3 * float(rows[-1]["ntp/wall_s"]), abs=1e-6)

    (again, later, _), *_ = pool.run(_fit, 3, str(tmp_path), str(tmp_path / "checkpoints" / "step=6.ckpt"))
    assert again == job
    assert later.gpu_ns["lost_step"] > 0, "steps 7 and 8 were trained after the checkpoint"
    history = read_run(tmp_path / "ntp_logs" / job)
    assert sum(history.gpu_ns().values()) == 3 * (history.at_ns - history.start_ns)
    assert [event["event"] for event in history.events] == ["start", "end", "start", "end"]
    assert history.start_ns < totals.at_ns < history.at_ns


def _default(rank: int, world: int, folder: str) -> Any:
    os.chdir(folder)
    with jobs.as_worker(rank, world):
        trainer = jobs.trainer("ntp", world, max_steps=2)
        trainer.fit(jobs.TinyLlama(), jobs.loader(SIZE, BATCH))
        [ours] = [callback for callback in trainer.callbacks if type(callback).__name__ == "ReshardOnGPULoss"]
        bare = L.Trainer(strategy=jobs.ntp(), accelerator="cpu", devices=world, barebones=True, max_steps=1)
        bare.fit(jobs.TinyLlama().float(), jobs.loader(SIZE, BATCH))
        return ours.ledger.step, len(os.listdir(folder)), len(bare.callbacks)


def test_the_strategy_alone_brings_the_ledger_and_writes_nothing_without_a_logger(pool: Any, tmp_path: Path) -> None:
    [(step, num_files, num_bare)] = pool.run(_default, 1, str(tmp_path))
    assert (step, num_files, num_bare) == (2, 0, 0)


def test_another_strategy_or_wrong_numbers_are_refused() -> None:
    trainer = L.Trainer(strategy="auto", accelerator="cpu", devices=1, logger=False, callbacks=[lightning_ntp.ReshardOnGPULoss()])
    with pytest.raises(ConfigError, match='needs Trainer\\(strategy="ntp"\\)'):
        trainer.fit(jobs.TinyLlama(), jobs.loader(4, 2))
    with pytest.raises(ConfigError, match="log_every_n_steps is 1 or more"):
        lightning_ntp.ReshardOnGPULoss(log_every_n_steps=0)
    with pytest.raises(ConfigError, match="window_seconds is more than 0"):
        lightning_ntp.ReshardOnGPULoss(window_seconds=0)


def test_flops_of_the_formula_are_those_that_lightning_measures() -> None:
    module = jobs.TinyLlama().float()
    batch = jobs.batch_of(range(2))
    length = throughput.tokens_of(batch)
    assert length is not None
    ids = batch["input_ids"]
    size = sum(parameter.numel() for parameter in module.parameters())
    measured = measure_flops(module, lambda: module.model(input_ids=ids, labels=ids, use_cache=False).loss, lambda loss: loss)
    formula = throughput.flops_per_token(throughput.hf_config(module), size, length)
    assert formula is not None
    assert formula * length * len(ids) == pytest.approx(measured, rel=0.03)
    assert throughput.flops_per_token(torch.nn.Linear(2, 2), 4, 8) is None


def test_rates_are_per_live_and_per_owned_gpu() -> None:
    meter = throughput.Meter("lightning.pytorch", counts_tokens=False, peak_flops=1e6)
    meter.work = throughput.Work(tokens=64.0, flops=1e5)
    assert meter.rates(5, 6) == {}
    for step in range(throughput.WINDOW_STEPS + 3):
        meter.commit(10.0 + 0.5 * step, 12.0)
        meter.commit(10.0 + 0.5 * step, 0.0)
    rates = meter.rates(num_live=5, num_owned=6)
    assert rates["throughput/samples_per_s"] == pytest.approx(24)
    assert rates["throughput/tokens_per_s"] == pytest.approx(24 * 64)
    assert rates["throughput/tokens_per_s_per_live_gpu"] == pytest.approx(24 * 64 / 5)
    assert rates["throughput/mfu_owned"] == pytest.approx(24 * 1e5 / 6e6)
    tokens = throughput.Meter("lightning.pytorch", counts_tokens=True, peak_flops=None)
    for step in range(throughput.WINDOW_STEPS):
        tokens.commit(float(step + 1), 700.0)
    assert tokens.rates(1, 1)["throughput/tokens_per_s"] == pytest.approx(700)
