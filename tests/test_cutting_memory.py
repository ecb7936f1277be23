"""While a model is cut, what has been replaced is freed: a whole parameter once it has its cell, a cell once FSDP has sharded it."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import fully_shard

from lightning_ntp.strategy import fsdp
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.huggingface import plan_model
from lightning_ntp.topology import Topology
from tests.models import tiny


def _cut(rank: int, world: int) -> tuple[list[int], list[int], list[int]]:
    """How many whole parameters that are cut already live at each cut; cells alive, and cells not sharded yet, at each FSDP unit."""
    topology, model = Topology.from_shapes([(1, world)]), tiny("llama")
    wholes: list[weakref.ref[torch.Tensor]] = []
    cells: list[weakref.ref[torch.Tensor]] = []
    wholes_alive, cells_alive, cells_left = [], [], []

    def take(whole: torch.Tensor, *args: Any) -> torch.Tensor:
        wholes_alive.append(sum(ref() is not None for ref in wholes))
        wholes.append(weakref.ref(whole))
        return take_cell(whole, *args)

    def shard(unit: torch.nn.Module, **options: Any) -> Any:
        if not cells:
            cells.extend(weakref.ref(parameter) for parameter in model.parameters())
        cells_alive.append(sum(ref() is not None for ref in cells))
        cells_left.append(sum(1 for parameter in model.parameters() if any(ref() is parameter for ref in cells)))
        return fully_shard(unit, **options)

    take_cell = fsdp.take_cell
    with mock.patch.object(fsdp, "take_cell", take), mock.patch.object(fsdp, "fully_shard", shard):
        fsdp.shard_model(model, plan_model(model, world, topology.loss_order), Groups(topology, rank))
    return wholes_alive, cells_alive, cells_left


def test_nothing_is_held_twice(pool):
    for wholes_alive, cells_alive, cells_left in pool.run(_cut, 2):
        assert len(wholes_alive) > 10 and max(wholes_alive) == 0
        assert cells_alive == cells_left and len(cells_alive) > 2
        assert cells_alive[-1] < cells_alive[0]
