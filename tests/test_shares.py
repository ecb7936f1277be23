"""Unequal shares of one global batch: 7 samples as 4 and 3, by samples, by tokens and by the user's own weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import RandomSampler

from lightning_ntp.strategy.sampler import global_order
from tests import lightning_jobs as jobs


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
    named = dict(twin.named_parameters())
    state = results[0][0]
    assert state.keys() == named.keys()
    assert max(float((state[name] - named[name].detach()).abs().max()) for name in state) < 1e-9
    assert {tuple(sizes) for _, sizes in results} == {(4, 4), (3, 3)}
