"""Lightning modules and Trainers that the strategy's tests share: a tiny llama in float64, on the pool or in one process."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lightning_ntp.strategy.strategy import strategy_class
from lightning_ntp.strategy.whole import whole_tensors
from tests.models import batch, float64_norms, tiny

VOCAB, LENGTH = 101, 7
Sample = dict[str, torch.Tensor]


class Samples(Dataset[Sample]):
    """Random tokens; about 30 % of the labels ignored."""

    def __init__(self, size: int) -> None:
        self.size, self.data = size, batch(VOCAB, 64, LENGTH)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return {name: values[index] for name, values in self.data.items()} | {"index": torch.tensor(index)}


class SampleStream(IterableDataset[Sample]):
    """The same samples, one after the other."""

    def __init__(self, size: int) -> None:
        self.samples = Samples(size)

    def __iter__(self) -> Iterator[Sample]:
        return (self.samples[index] for index in range(len(self.samples)))


def batch_of(indices: Iterable[int]) -> Sample:
    """These samples as one collated batch."""
    data = Samples(64)
    return default_collate([data[index] for index in indices])


class TinyLlama(L.LightningModule):
    """Logs its loss in all ways; remembers what it saw."""

    def __init__(self, kind: str = "llama", **config: Any) -> None:
        super().__init__()
        self.model = tiny(kind, **config)
        self.seen: list[list[int]] = []
        self.history: list[dict[str, float]] = []
        self.hooks: list[str] = []

    def loss(self, samples: Sample) -> torch.Tensor:
        """Every token counts, so that the mean over tokens is the mean over samples."""
        ids = samples["input_ids"]
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def training_step(self, samples: Sample, batch_idx: int) -> torch.Tensor:
        loss = self.loss(samples)
        self.seen.append(samples["index"].tolist())
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("samples", torch.tensor(float(len(samples["index"]))), reduce_fx="sum", on_step=True, sync_dist=True)
        self.log("highest", samples["index"].max().float(), reduce_fx="max", on_step=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.history.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})

    def on_train_epoch_end(self) -> None:
        self.history.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})

    def validation_step(self, samples: Sample, batch_idx: int) -> None:
        self.log("val", self.loss(samples), on_step=True, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TokenLlama(TinyLlama):
    """Ignored labels: a mean over tokens."""

    def loss(self, samples: Sample) -> torch.Tensor:
        inputs = {name: samples[name] for name in ("input_ids", "labels")}
        return self.model(**inputs, use_cache=False).loss


def trainer(strategy: Any, devices: int, **options: Any) -> L.Trainer:
    """A quiet Trainer on CPU in float64."""
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    settings: dict[str, Any] = {"precision": "64-true", "accelerator": "cpu", "max_epochs": 1} | quiet | options
    return L.Trainer(strategy=strategy, devices=devices, **settings)


@contextmanager
def as_worker(rank: int, world: int) -> Iterator[None]:
    """The environment that torchrun gives to a worker; float64 all the way."""
    names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        with float64_norms():
            yield
    finally:
        for name in names:
            os.environ.pop(name, None)


def ntp(**options: Any) -> Any:
    """An `NTPStrategy` of ``lightning``."""
    return strategy_class()(**{"seed": 5} | options)


def whole_state(strategy: Any) -> dict[str, torch.Tensor]:
    """All parameters in one piece; empty outside of the first replica."""
    return {name: tensor.clone() for name, tensor in whole_tensors(strategy.sharded)}


def worst(state: dict[str, torch.Tensor], twin: torch.nn.Module) -> float:
    """Largest difference between any parameter of a `whole_state` and the twin's."""
    named = dict(twin.named_parameters())
    assert state.keys() == named.keys()
    return max(float((tensor - named[name].detach()).abs().max()) for name, tensor in state.items())


def loader(size: int, batch_size: int, **options: Any) -> DataLoader:
    return DataLoader(Samples(size), batch_size=batch_size, **options)


def in_one_process(make: Callable[[], TinyLlama], batches: list[list[int]], **options: Any) -> TinyLlama:
    """The module after plain Lightning has trained it on these global batches."""
    module = make()
    with float64_norms():
        plain = trainer("auto", 1, **options)
        plain.fit(module, DataLoader(Samples(64), batch_sampler=batches))
    return module
