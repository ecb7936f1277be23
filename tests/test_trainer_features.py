"""What people lean on in Lightning, on ragged replicas against one process in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests import lightning_jobs as jobs
from tests.models import float64_norms

SIZE, BATCH = 29, 4
GLOBAL = [list(range(SIZE))[i : i + 8] for i in range(0, SIZE, 8)]
"""The global batches that two data rows at batch_size 4 run, in the order of the data set."""

EXACT = 1e-9


class Scheduled(jobs.TinyLlama):
    """One schedule by epoch, one by a validated metric; notes when validation ran and what the rates were."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.validated_at: list[int] = []
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": by_epoch, "interval": "epoch", "name": "by epoch"}]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_epoch_end(self) -> None:
        self.validated_at.append(self.trainer.global_step)


class OnPlateau(Scheduled):
    """Halves the rate when the validation loss stops falling: every worker must see the same value."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_epoch"}}


OPTIONS: dict[str, dict[str, Any]] = {
    "val_check_interval": {"max_epochs": 2, "val_check_interval": 2, "limit_val_batches": 1, "limit_train_batches": 3},
    "check_val_every_n_epoch": {"max_epochs": 4, "check_val_every_n_epoch": 2, "limit_train_batches": 1},
    "overfit_batches": {"max_epochs": 3, "overfit_batches": 1},
    "inference_mode": {"max_epochs": 2, "inference_mode": False, "num_sanity_val_steps": 1},
}


def fit(module: Any, strategy: Any, devices: int, batch_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """What a run with these Trainer options leaves behind."""
    trainer = jobs.trainer(strategy, devices, **options)
    trainer.fit(module, jobs.loader(SIZE, batch_size), jobs.loader(9, batch_size))
    seen = {name: getattr(module, name, None) for name in ("validated_at", "rates")}
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return seen | {"metrics": metrics, "step": trainer.global_step, "trainer": trainer}


def run_fit(rank: int, world: int, sizes: Any, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=sizes)
        found = fit(globals()[kind](), strategy, world, BATCH, options)
        del found["trainer"]
        return found | {"state": jobs.whole_state(strategy)}


def run_twin(kind: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    module = globals()[kind]()
    with float64_norms():
        found = fit(module, "auto", 1, 2 * BATCH, options)
    return module, found


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "Scheduled") for name in OPTIONS), ("val_check_interval", "OnPlateau")]
)
def test_loops_schedules_and_metrics_are_those_of_one_process(pool, name, kind):
    results = pool.run(run_fit, 5, [3, 2], kind, OPTIONS[name])
    module, wanted = run_twin(kind, OPTIONS[name])
    assert jobs.worst(results[0]["state"], module) < EXACT
    for found in results:
        for key in ("validated_at", "rates", "step"):
            assert found[key] == wanted[key], key
        for metric in ("val_epoch", "train_epoch", "train_step", "samples"):
            assert found["metrics"][metric] == pytest.approx(wanted["metrics"][metric], abs=EXACT), metric



class Grouped(jobs.TinyLlama):
    """No weight decay for vectors; the embedding and the first layer are frozen."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        for part in (self.model.model.embed_tokens, self.model.model.layers[0], self.model.model.layers[1].mlp.up_proj):
            part.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.5},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-2},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)


class Checkpointed(jobs.TinyLlama):
    """Hugging Face's activation checkpointing."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.model.gradient_checkpointing_enable()


class Sums(jobs.TinyLlama):
    """SGD: no state, and a clipping norm over the optimizer's own parameters only."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.model.layers.parameters(), lr=0.1, momentum=0.9)


def run_compiled(rank: int, world: int) -> Any:
    with jobs.as_worker(rank, world):
        module = Scheduled(num_hidden_layers=1)
        calls = CompileCounterWithBackend("eager")
        strategy = jobs.ntp(replica_sizes=[2, 1])
        trainer = jobs.trainer(strategy, world, max_steps=2)
        trainer.fit(torch.compile(module, backend=calls), jobs.loader(SIZE, BATCH))
        return jobs.whole_state(strategy), calls.frame_count


@pytest.mark.timeout(300)
def test_a_compiled_module_is_trained_the_same(pool):
    results = pool.run(run_compiled, 3, timeout=240)
    module = Scheduled(num_hidden_layers=1)
    with float64_norms():
        fit(module, "auto", 1, 2 * BATCH, {"max_steps": 2, "limit_val_batches": 0})
    assert jobs.worst(results[0][0], module) < EXACT
    assert all(num_graphs > 0 for _, num_graphs in results)


@pytest.mark.parametrize("kind", ["Grouped", "Checkpointed", "Sums"])
def test_groups_frozen_parameters_and_checkpointing(pool, kind):
    options = {"gradient_clip_val": 0.05, "max_steps": 3, "limit_val_batches": 0}
    results = pool.run(run_fit, 5, [(1, 2), (3, 1)] if kind == "Grouped" else [3, 2], kind, options)
    module = globals()[kind]()
    with float64_norms():
        fit(module, "auto", 1, (4 if kind == "Grouped" else 2) * BATCH, options)
    assert jobs.worst(results[0]["state"], module) < EXACT
