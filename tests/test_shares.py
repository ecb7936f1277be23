"""Unequal shares of one global batch: 7 samples as 4 and 3, by samples, by tokens and by the user's own weight."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler
from transformers import DataCollatorWithFlattening

from lightning_ntp.strategy.sampler import global_order
from tests import lightning_jobs as jobs
from tests.models import float64_norms


class WeightedLlama(jobs.TinyLlama):
    """A mean over samples that the user weights by their first token."""

    def loss(self, samples: dict[str, torch.Tensor]) -> torch.Tensor:
        weights = first_tokens(samples)
        ids = samples["input_ids"]
        logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]  # in training cut by vocabulary; stays usable
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
        return (losses.mean(1) * weights).sum() / weights.sum()


def first_tokens(samples: dict[str, torch.Tensor]) -> torch.Tensor:
    return 1.0 + samples["input_ids"][:, 0].double()


def their_sum(samples: dict[str, torch.Tensor]) -> float:
    """The user's callable: what a micro-batch counts."""
    return float(first_tokens(samples).sum())


WEIGHTS: dict[str, Any] = {"TinyLlama": "samples", "TokenLlama": "tokens", "WeightedLlama": their_sum}


def _fit(rank: int, world: int, kind: str) -> Any:
    with jobs.as_worker(rank, world):
        module = make(kind)
        strategy = jobs.ntp(replica_sizes=[3, 2], batch_weight=WEIGHTS[kind])
        trainer = jobs.trainer(strategy, world, max_epochs=2)
        trainer.fit(module, jobs.loader(7, 4, shuffle=True))
        return jobs.whole_state(strategy), [len(micro) for micro in module.seen]


def make(kind: str) -> jobs.TinyLlama:
    return WeightedLlama() if kind == "WeightedLlama" else getattr(jobs, kind)()


@pytest.mark.parametrize("kind", WEIGHTS)
def test_seven_samples_as_four_and_three_are_the_mean_of_one_process(pool, kind):
    results = pool.run(_fit, 5, kind)
    batches = [global_order(RandomSampler(range(7)), 5, epoch) for epoch in range(2)]
    twin = jobs.in_one_process(lambda: make(kind), batches)
    assert jobs.worst(results[0][0], twin) < 1e-9
    assert {tuple(sizes) for _, sizes in results} == {(4, 4), (3, 3)}


class PackedLlama(jobs.TinyLlama):
    """Whole sequences of unequal length in one row, told apart by ``position_ids``; never heard of caches, as most users."""

    cache: ClassVar[dict[str, bool]] = {}

    def training_step(self, packed: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(**packed, **self.cache).loss


class ToldLlama(PackedLlama):
    """The twin, in which nobody else switches the cache off."""

    cache: ClassVar[dict[str, bool]] = {"use_cache": False}


class Sequences(torch.utils.data.Dataset[dict[str, list[int]]]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = [(3 * index + 5 * position) % jobs.VOCAB for position in range(3 + index % 4)]
        return {"input_ids": ids, "labels": ids}


def _packed_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Sequences(), collate_fn=DataCollatorWithFlattening(return_tensors="pt"), **options)


def _fit_packed(rank: int, world: int) -> Any:
    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=[3, 2], batch_weight="tokens")
        jobs.trainer(strategy, world, max_epochs=2).fit(PackedLlama(), _packed_loader(batch_size=4))
        return jobs.whole_state(strategy)


def test_packed_sequences_are_shared_and_do_not_see_each_other(pool):
    state = pool.run(_fit_packed, 5)[0]
    twin = ToldLlama()
    with float64_norms():
        jobs.trainer("auto", 1, max_epochs=2).fit(twin, _packed_loader(batch_size=7))
    assert jobs.worst(state, twin) < 1e-9
