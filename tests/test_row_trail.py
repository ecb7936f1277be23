"""Rows of one replica that run different parts of a model get one error that names the parts, before anything is updated."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import nn

from lightning_ntp.errors import PlanMismatchError
from lightning_ntp.strategy import row_trail
from lightning_ntp.strategy.generation import Generation
from lightning_ntp.strategy.row_trail import BACKWARD, MICRO_BATCH, check_rows, check_told, rows_agree
from lightning_ntp.topology import Topology
from tests import lightning_jobs as jobs

NAMES = ("layers.0", "layers.1", "model")
BEGUN = [MICRO_BATCH, 2, 0]


@pytest.mark.parametrize(
    ("trails", "said"),
    [
        ([[*BEGUN, 1], [*BEGUN, BACKWARD]], "1 of the step, after layers.0: data row 0 runs layers.1; data row 1 begins its backward"),
        ([[MICRO_BATCH, 0], [MICRO_BATCH, 1]], "1 of the step, at its beginning: data row 0 runs layers.0; data row 1 runs layers.1"),
        ([[*BEGUN, BACKWARD, *BEGUN], [*BEGUN, BACKWARD, MICRO_BATCH, 2, 1]], "2 of the step, after model: data row 0 runs layers.0;"),
        ([BEGUN, BEGUN[:-1]], "1 of the step, after model: data row 0 runs layers.0; data row 1 is done"),
        ([[*BEGUN, BACKWARD, 1], [*BEGUN, BACKWARD]], "after the beginning of backward: data row 0 runs layers.1; data row 1 is done"),
    ],
)
def test_the_error_names_the_place_and_what_each_row_does(trails, said):
    with pytest.raises(PlanMismatchError, match="rows of one replica run different parts of the model") as caught:
        check_rows(Topology.from_shapes([(2, 1)]), trails, NAMES)
    assert said in str(caught.value) and "fsdp_size=1" in str(caught.value)


def test_a_row_that_is_behind_and_replicas_that_differ_are_no_mismatch():
    topology = Topology.from_shapes([(2, 1), (2, 1)])
    check_rows(topology, [[*BEGUN, 1], BEGUN, [MICRO_BATCH], None], NAMES, ended=False)
    check_rows(topology, [BEGUN, BEGUN, [*BEGUN, 1], [*BEGUN, 1]], NAMES)
    with pytest.raises(PlanMismatchError, match="data row 2 runs layers.0; data row 3 runs layers.1"):
        check_rows(topology, [BEGUN, BEGUN, [2, 0], [2, 1]], NAMES, ended=False)


def test_a_maximum_tells_whether_the_rows_of_each_replica_agree():
    assert rows_agree([7, 9, -7, -9])
    assert not rows_agree([7, 9, -7, -8])


def test_after_a_hang_the_rows_are_held_against_each_other():
    topology = Topology.from_shapes([(2, 2), (1, 2)])
    infos = [{"ran": ran} for ran in ([*BEGUN, 1], [*BEGUN, 1], BEGUN, [*BEGUN, BACKWARD])] + [{"ran": [2]}, {}]
    generation = Generation(2, 0, tuple(range(6)), tuple(infos), 0.0, 0.0)
    check_told(topology, generation, NAMES)  # the first role of row 1 is only behind
    survivors = Generation(2, 0, (0, 1, 3, 4, 5), tuple(infos[:2] + infos[3:]), 0.0, 0.0)
    with pytest.raises(PlanMismatchError, match="data row 0 runs layers.1; data row 1 begins its backward"):
        check_told(topology, survivors, NAMES)


class Skipping(jobs.TinyLlama):
    """The last data row leaves out the last layer."""

    def loss(self, samples: jobs.Sample) -> torch.Tensor:
        if self.trainer.strategy.control.row == self.trainer.strategy.control.num_rows - 1:
            self.model.config.num_hidden_layers = 1
        return super().loss(samples)


class Swapping(L.LightningModule):
    """Two parts of one size, which data row 1 runs the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, samples: jobs.Sample, batch_idx: int) -> torch.Tensor:
        parts = [self.first, self.second]
        hidden = torch.ones(1, 4, dtype=torch.float64)
        for part in parts if self.trainer.strategy.control.row != 1 else reversed(parts):
            hidden = part(hidden)
        return hidden.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(rank: int, world: int, sizes: Any) -> str:
    with jobs.as_worker(rank, world):
        trainer = jobs.trainer(jobs.ntp(replica_sizes=sizes), world)
        with pytest.raises(PlanMismatchError) as caught:
            trainer.fit(Skipping(), jobs.loader(8, 2))
        return str(caught.value)


def _swap_unchecked(rank: int, world: int) -> tuple[str, bool]:
    with jobs.as_worker(rank, world), mock.patch.object(row_trail, "gather_numbers", lambda number, group: [number]):
        trainer, module = jobs.trainer(jobs.ntp(replica_sizes=[(2, 1), (1, 1)]), world), Swapping()
        with pytest.raises(PlanMismatchError) as caught:
            trainer.fit(module, jobs.loader(6, 2))
        return str(caught.value), trainer.global_step == 0


@pytest.mark.parametrize("sizes", [[(2, 1)], [(2, 2)]])
def test_a_row_that_skips_a_layer_is_told_so_by_all(pool, sizes):
    world = sum(rows * degree for rows, degree in sizes)
    for said in pool.run(_fit, world, sizes):
        assert "after model.model.layers.0: data row 0 runs model.model.layers.1; data row 1 begins its backward" in said
        assert "multiply its output by 0" in said


def test_what_no_gather_has_noticed_shows_at_the_vote(pool):
    for said, untouched in pool.run(_swap_unchecked, 3):
        assert "at its beginning: data row 0 runs first; data row 1 runs second" in said
        assert untouched
