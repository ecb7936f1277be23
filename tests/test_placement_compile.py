"""torch.compile over unevenly cut tensors: one graph, the same values and gradients as eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_ntp.dtensor.placement import UnevenShard, wrap_local
from lightning_ntp.dtensor.redistribute import distribute
from tests.pool import WorkerPool
from tests.test_placement import NESTED, PLAIN, line, same, whole

FROM, TO = UnevenShard(0, NESTED), UnevenShard(0, PLAIN)


def _layer(weight: DTensor) -> torch.Tensor:
    return (whole_input @ weight.to_local().t()).relu().sum()


def _whole(weight: DTensor) -> torch.Tensor:
    return ((weight * 2).sigmoid() + weight).full_tensor().square().sum()


def _moved(weight: DTensor) -> torch.Tensor:
    return weight.redistribute(placements=[TO]).to_local().square().sum()


def _wrapped(weight: DTensor) -> torch.Tensor:
    return (wrap_local(weight.to_local(), weight.device_mesh, FROM, (7, 4)) * 3).to_local().square().sum()


def _loss(weight: DTensor) -> torch.Tensor:
    return F.cross_entropy(weight.t().float(), torch.arange(4) + 1)


whole_input = whole(3, 4, seed=8)
FORWARDS = {"layer": _layer, "whole": _whole, "moved": _moved, "wrapped": _wrapped, "loss": _loss}


def _compiled(rank: int, world: int, backend: str, names: list[str]) -> list[str]:
    """Which forwards gave the same value and gradient compiled as eager."""
    mesh, equal = line(world), []
    for name in names:
        torch.compiler.reset()
        gradients = []
        for run in (FORWARDS[name], torch.compile(FORWARDS[name], backend=backend, fullgraph=True)):
            weight = nn.Parameter(distribute(whole(7, 4), mesh, FROM))
            value = run(weight)
            value.backward()
            assert weight.grad.placements == weight.placements
            gradients.append((value.detach(), weight.grad.to_local()))
        torch.testing.assert_close(gradients[0], gradients[1], msg=lambda text: f"{name}: {text}")  # noqa: B023
        equal.append(name)
    return equal


def test_forward_and_backward_are_one_graph(pool: WorkerPool) -> None:
    assert pool.run(_compiled, 3, "aot_eager", list(FORWARDS), timeout=150) == [list(FORWARDS)] * 3


@pytest.mark.full
@pytest.mark.timeout(450)
def test_inductor(pool: WorkerPool) -> None:
    assert pool.run(_compiled, 3, "inductor", ["layer", "whole"], timeout=400) == [["layer", "whole"]] * 3


def _step(rank: int, world: int) -> list[str]:
    """Which implementations of AdamW step the same compiled as eager."""
    mesh, equal = line(world), []
    for options in ({"foreach": True}, {"fused": True}):
        torch.compiler.reset()
        results: list[Any] = []
        for compiled in (False, True):
            weight = nn.Parameter(distribute(whole(7, 4), mesh, FROM))
            optimizer = torch.optim.AdamW([weight], lr=0.1, **options)
            step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
            for seed in range(2):
                weight.grad = distribute(whole(7, 4, seed=seed), mesh, FROM)
                step()
            results.append(weight.detach())
        # compiled AdamW computes its bias correction in float32, on plain tensors too
        torch.testing.assert_close(results[0].full_tensor(), results[1].full_tensor(), rtol=1e-4, atol=1e-5)
        same(results[1].to_local(), distribute(results[1].full_tensor(), mesh, FROM).to_local())
        equal += options
    return equal


def test_an_optimizer_step(pool: WorkerPool) -> None:
    assert pool.run(_step, 3, timeout=150) == [["foreach", "fused"]] * 3
