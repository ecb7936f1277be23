"""torch.compile over a whole cut model: the same loss and gradients as without it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor

from lightning_ntp.strategy.fsdp import local_of
from tests.models import batch, tiny
from tests.pool import WorkerPool
from tests.test_model_features import cut_model


def compiled_case(rank: int, world: int, kind: str, dropout: dict[str, float]) -> tuple[int, float]:
    """(graphs made, largest difference to the uncompiled model) of loss and all gradients."""
    found: list[list[Tensor]] = []
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    for is_compiled in (False, True):
        model = tiny(kind, **dropout)
        sharded = cut_model(model, rank, world)
        if is_compiled:
            model.compile(backend=counter)
        torch.manual_seed(3)
        output = model(**batch(101, 2, 6), use_cache=False)
        output.loss.backward()
        assert isinstance(output.logits, DTensor), "logits are cut, compiled or not"
        found.append([output.loss.detach(), *(local_of(parameter.grad) for _, parameter in sharded.parameters())])
    differences = [(got - wanted).abs().max().item() for got, wanted in zip(*found, strict=True) if got.numel()]
    return counter.frame_count, max(differences)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "dropout"),
    [("llama", {}), *(pytest.param("gpt2", d, marks=pytest.mark.full) for d in ({}, {"attn_pdrop": 0.2}))],
)
def test_a_compiled_model_has_the_same_loss_and_gradients(
    pool: WorkerPool, kind: str, dropout: dict[str, float]
) -> None:
    """FSDP2 and the head break the graph; what matters is that nothing fails and nothing changes."""
    for num_graphs, difference in pool.run(compiled_case, 3, kind, dropout, timeout=240):
        assert num_graphs > 0
        assert difference < 1e-12
