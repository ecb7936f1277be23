"""Steps that run the model twice, in part or not at all, differently on each replica, equal one process; unused parameters stay None."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests import lightning_jobs as jobs

SIZE, BATCH = 22, 4


class Branching(jobs.TinyLlama):
    """What a sample goes through depends on its number: some skip the last layer, some meet a probe, some layers meet none."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.probe, self.never = nn.Linear(24, 1).double(), nn.Linear(3, 2).double()
        self.model.model.layers[1].spare = nn.Linear(5, 2).double()
        for index, part in enumerate((self.probe, self.never, self.model.model.layers[1].spare)):
            torch.nn.init.constant_(part.weight, 0.5 + index)
            torch.nn.init.constant_(part.bias, 0.25)
        self.gradients: list[bool] = []

    def loss(self, samples: jobs.Sample) -> torch.Tensor:
        number = samples["index"] % 8
        if self.mode == "twice":
            return self._part(samples["input_ids"]) + self._part(samples["input_ids"].flip(1))
        total, count = torch.zeros((), dtype=torch.float64), len(number)
        for chosen, num_layers in ((number < 5, 2), (number >= 5, 1)):
            if chosen.any():
                part = self._part(samples["input_ids"][chosen], num_layers)
                total = total + part * (int(chosen.sum()) / count)
        if (probed := number < 2).any():
            total = total + self.probe(torch.ones(int(probed.sum()), 24, dtype=torch.float64)).square().sum() / count
        return total

    def _part(self, ids: torch.Tensor, num_layers: int = 2) -> torch.Tensor:
        self.model.config.num_hidden_layers = num_layers
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        parameters = (*self.never.parameters(), *self.model.model.layers[1].spare.parameters())
        self.gradients.append(any(parameter.grad is not None for parameter in parameters))


def _fit(rank: int, world: int, sizes: Any, mode: str, accumulate: int) -> Any:
    with jobs.as_worker(rank, world):
        module, strategy = Branching(mode), jobs.ntp(replica_sizes=sizes)
        trainer = jobs.trainer(strategy, world, accumulate_grad_batches=accumulate, max_epochs=2)
        trainer.fit(module, jobs.loader(SIZE, BATCH))
        return jobs.whole_state(strategy), module.gradients, list(strategy.sharded.window.order)


@pytest.mark.parametrize(
    ("sizes", "mode", "accumulate"),
    [([3, 2], "twice", 2), ([(2, 1), (1, 1)], "twice", 1), ([3, 2], "branches", 1), ([2, 1], "branches", 2)],
)
def test_forwards_that_differ_between_replicas_equal_one_process(pool, sizes, mode, accumulate):
    world = sum(size if isinstance(size, int) else size[0] * size[1] for size in sizes)
    results = pool.run(_fit, world, sizes, mode, accumulate)
    rows = sum(1 if isinstance(size, int) else size[0] for size in sizes)
    per_step = BATCH * rows * accumulate
    batches = [list(range(SIZE))[at : at + per_step] for at in range(0, SIZE, per_step)] * 2
    twin = jobs.in_one_process(lambda: Branching(mode), batches)
    state = results[0][0]
    assert jobs.worst(state, twin) < 1e-9
    assert not any(any(gradients) for _, gradients, _ in results), "unused parameters must not meet the optimizer"
    assert float(state["never.weight"].min()) == 1.5, "weight decay must not touch what nobody used"
    assert all(len(set(order)) == len(order) for _, _, order in results), "each bucket once"
    assert len({tuple(order) for _, _, order in results}) == 1
