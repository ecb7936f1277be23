"""LoRA adapters of peft on ragged replicas against one process in float64; saved adapters load in plain peft."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn

from lightning_ntp.errors import UnsupportedModelError
from lightning_ntp.strategy.fsdp import local_of
from lightning_ntp.strategy.huggingface import plan_model
from tests import lightning_jobs as jobs
from tests.models import KINDS, batch, float64_norms, randomize, tiny
from tests.test_model_features import EXACT, cut_model, errors, run
from tests.test_trainer_features import BATCH, SIZE, worst

TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"]}


def adapted(kind: str, **options: Any) -> nn.Module:
    """A tiny model with LoRA on every linear layer, its adapters away from zero."""
    targets = TARGETS.get(kind, "all-linear")
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM", fan_in_fan_out=kind == "gpt2", **options
    )
    model = peft.get_peft_model(tiny(kind), config)
    randomize(model)
    return model


def parity_case(rank: int, world: int, kind: str) -> dict[str, float]:
    with float64_norms():
        twin, model = adapted(kind), adapted(kind)
        sharded = cut_model(model, rank, world)
        found = errors(twin, model, sharded, batch(101, 3, 7))
        twin.eval(), model.eval()
        with torch.no_grad():
            wanted, got = (one(**batch(101, 2, 5)).loss for one in (twin, model))
        return found | {"evaluation": float((wanted - got).abs())}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_follow_the_layout_of_their_base(pool, kind):
    for found in pool.run(parity_case, 4, kind):
        assert {name: error for name, error in found.items() if error > EXACT} == {}
