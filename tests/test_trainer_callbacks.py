"""Callbacks, loggers, the command line and loaders that users bring, on ragged replicas against one process."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ntp.errors import ConfigError
from tests import lightning_jobs as jobs
from tests.models import float64_norms
from tests.test_trainer_features import BATCH, EXACT, SIZE


class Noted(jobs.TinyLlama):
    """Keeps its hyperparameters; logs an extreme and a sum per epoch; predicts."""

    def __init__(self, kind: str = "llama", rate: float = 1e-2) -> None:
        super().__init__(kind)
        self.save_hyperparameters()

    def validation_step(self, samples: jobs.Sample, batch_idx: int) -> None:
        super().validation_step(samples, batch_idx)
        self.log("lowest", samples["index"].min().float(), reduce_fx="min", sync_dist=True)
        self.log("count", float(len(samples["index"])), reduce_fx="sum", sync_dist=True)

    def predict_step(self, samples: jobs.Sample, batch_idx: int) -> list[int]:
        return samples["index"].tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])


def callbacks(folder: Path) -> list[Any]:
    return [
        ModelCheckpoint(
            folder / "best", filename="{epoch}", monitor="val_epoch", save_top_k=2, save_last=True, mode="max"
        ),
        LearningRateMonitor(logging_interval="step"),
        GradientAccumulationScheduler({0: 1, 1: 2}),
    ]


def noted_fit(module: Any, strategy: Any, devices: int, batch_size: int, folder: Path) -> dict[str, Any]:
    trainer = jobs.trainer(
        strategy,
        devices,
        max_epochs=4,
        callbacks=callbacks(folder),
        logger=CSVLogger(folder, version=0),
        log_every_n_steps=1,
        enable_checkpointing=True,
    )
    # Full batches: plain Lightning counts every batch of a window alike, however small.
    trainer.fit(module, jobs.loader(32, batch_size), jobs.loader(9, batch_size))
    saver = trainer.checkpoint_callback
    return {
        "best": {Path(path).name: float(score) for path, score in saver.best_k_models.items()},
        "last": Path(saver.last_model_path).name,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "step": trainer.global_step,
    }


def run_noted(rank: int, world: int, folder: str) -> dict[str, Any]:
    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=[3, 2])
        found = noted_fit(Noted(rate=2e-2), strategy, world, BATCH, Path(folder))
        return found | {"state": jobs.whole_state(strategy)}


def logged(folder: Path, name: str) -> list[float]:
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def test_checkpoints_rates_and_logs_are_those_of_one_process(pool, tmp_path):
    results = pool.run(run_noted, 5, str(tmp_path / "ours"))
    module = Noted(rate=2e-2)
    with float64_norms():
        wanted = noted_fit(module, "auto", 1, 2 * BATCH, tmp_path / "theirs")
    assert jobs.worst(results[0]["state"], module) < EXACT
    for found in results:
        assert found["step"] == wanted["step"]
        assert found["best"] == pytest.approx(wanted["best"], abs=EXACT)
        assert found["last"] == wanted["last"]
        for name in ("lowest", "count", "val_epoch"):
            assert found["metrics"][name] == pytest.approx(wanted["metrics"][name], abs=EXACT), name
    names = {path.name for path in (tmp_path / "theirs" / "best").iterdir()}
    assert {path.name for path in (tmp_path / "ours" / "best").iterdir()} == names
    for name in ("lr-AdamW", "train_step", "val_epoch"):
        assert logged(tmp_path / "ours", name) == pytest.approx(logged(tmp_path / "theirs", name), abs=EXACT), name
    hparams = "lightning_logs/version_0/hparams.yaml"
    assert (tmp_path / "ours" / hparams).read_text() == (tmp_path / "theirs" / hparams).read_text()


def run_predict(rank: int, world: int, sizes: Any) -> Any:
    with jobs.as_worker(rank, world):
        trainer = jobs.trainer(jobs.ntp(replica_sizes=sizes), world)
        metrics = trainer.test(Predicting(), jobs.loader(11, 2), verbose=False)[0]
        predicted = trainer.predict(Predicting(), [jobs.loader(11, 2), jobs.loader(3, 2)])
        trainer.limit_predict_batches = 1
        return metrics, predicted, trainer.predict(Predicting(), jobs.loader(11, 2)), trainer.strategy.control.row


class Predicting(Noted):
    def test_step(self, samples: jobs.Sample, batch_idx: int) -> None:
        self.log("test", self.loss(samples), sync_dist=True)

    def predict_step(self, samples: jobs.Sample, batch_idx: int, dataloader_idx: int = 0) -> list[int]:
        return samples["index"].tolist()


def test_predictions_keep_their_order_over_rows_and_test_is_exact(pool):
    results = pool.run(run_predict, 5, [(2, 1), (1, 3)])
    with float64_norms(), torch.no_grad():
        wanted = Predicting().loss(jobs.batch_of(range(11))).item()
    rows: dict[int, Any] = {}
    limited: dict[int, Any] = {}
    for metrics, predicted, few, row in results:
        limited[row] = few
        assert metrics["test"] == pytest.approx(wanted, abs=EXACT)
        assert rows.setdefault(row, predicted) == predicted, "roles of a row must predict the same"
    for loader, size in ((0, 11), (1, 3)):
        batches = zip(*(rows[row][loader] for row in range(3)), strict=True)
        in_order = [index for batch in batches for part in batch for index in part or ()]
        assert in_order == list(range(size))
    assert [limited[row] for row in range(3)] == [[[0, 1]], [[2, 3]], [[4, 5]]], "one global batch"


class Averaged(jobs.TinyLlama):
    """Validates with the average; remembers what it saw there."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[float] = []

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.trainer.callback_metrics["val_epoch"].item())


def averaged_fit(module: Any, strategy: Any, devices: int, batch_size: int, epochs: int, **options: Any) -> Any:
    """A fit with an average over the steps; checkpoints at the end of each epoch where a folder is given."""
    folder = options.pop("folder", None)
    extra = [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)] if folder else []
    trainer = jobs.trainer(
        strategy, devices, max_epochs=epochs, val_check_interval=2, num_sanity_val_steps=1,
        callbacks=[EMAWeightAveraging(decay=0.5, update_starting_at_step=1), *extra], enable_checkpointing=bool(folder),
    )  # fmt: skip
    trainer.fit(module, jobs.loader(SIZE, batch_size), jobs.loader(9, batch_size), **options)
    return trainer


def run_averaged(rank: int, world: int, folder: str) -> Any:
    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=[3, 2])
        module = Averaged()
        averaged_fit(module, strategy, world, BATCH, 2, folder=folder)
        with pytest.raises(ConfigError, match="an earlier fit, validate or test of this module has cut it"):
            averaged_fit(module, jobs.ntp(replica_sizes=[3, 2]), world, BATCH, 3)
        return jobs.whole_state(strategy), module.validated


def resume_averaged(rank: int, world: int, checkpoint: str) -> Any:
    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=[(2, 1)] if world == 2 else [(1, 2), (1, 1)])
        averaged_fit(Averaged(), strategy, world, BATCH, 2, ckpt_path=checkpoint)
        return jobs.whole_state(strategy)


def test_an_average_of_weights_is_that_of_one_process(pool, tmp_path):
    results = pool.run(run_averaged, 5, str(tmp_path))
    twin = Averaged()
    with float64_norms():
        averaged_fit(twin, "auto", 1, 2 * BATCH, 2)
    for _, validated in results:
        assert validated == pytest.approx(twin.validated, abs=EXACT)
    assert jobs.worst(results[0][0], twin) < EXACT
    for world in (2, 3):  # two data rows each: the same global batches
        state = pool.run(resume_averaged, world, str(tmp_path / "epoch=0.ckpt"))[0]
        assert jobs.worst(state, twin) < EXACT


class Data(L.LightningDataModule):
    """What a command line would name."""

    def __init__(self, size: int = SIZE, stateful: bool = False) -> None:
        super().__init__()
        self.size, self.stateful = size, stateful

    def train_dataloader(self) -> Any:
        kind = StatefulDataLoader if self.stateful else DataLoader
        return kind(jobs.Samples(self.size), batch_size=BATCH)


QUIET = (
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.accelerator=cpu",
    "--trainer.precision=64-true",
    "--trainer.max_epochs=1",
)


def run_cli(rank: int, world: int, folder: str, arguments: list[str]) -> Any:
    with jobs.as_worker(rank, world):
        options = [*QUIET, f"--trainer.devices={world}", f"--trainer.default_root_dir={folder}", *arguments]
        cli = LightningCLI(Noted, Data, args=["fit", *options], seed_everything_default=5)
        shapes = cli.trainer.strategy.topology.replicas
        return jobs.whole_state(cli.trainer.strategy), [(r.fsdp_size, r.degree) for r in shapes]


CLI_CASES = {
    "name": (["--trainer.strategy=ntp", "--data.stateful=true"], 2),
    "class": (
        ["--trainer.strategy=lightning_ntp.NTPStrategy", "--trainer.strategy.replica_sizes=[2,1]", "--model.rate=2e-2"],
        3,
    ),
}


@pytest.mark.parametrize("name", CLI_CASES)
def test_the_command_line_and_stateful_loaders(pool, tmp_path, name):
    arguments, world = CLI_CASES[name]
    results = pool.run(run_cli, world, str(tmp_path), arguments)
    twin = Noted(rate=2e-2 if name == "class" else 1e-2)
    with float64_norms():
        jobs.trainer("auto", 1).fit(twin, jobs.loader(SIZE, 2 * BATCH))
    assert jobs.worst(results[0][0], twin) < EXACT
    assert results[0][1] == ([(1, 2), (1, 1)] if name == "class" else [(1, 1), (1, 1)])
