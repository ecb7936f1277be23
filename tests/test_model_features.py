"""One uneven replica against one process, for what users switch on: attention kernels, packed sequences, checkpointing.

Several replicas, fsdp and optimizer steps are the business of the parity tests; here every model meets every feature.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, GPTNeoXConfig
from transformers.models.glm import GlmConfig
from transformers.models.gptj import GPTJConfig
from transformers.models.granite import GraniteConfig
from transformers.models.olmo import OlmoConfig
from transformers.models.phi import PhiConfig
from transformers.models.qwen3 import Qwen3ForSequenceClassification
from transformers.models.starcoder2 import Starcoder2Config

from lightning_ntp.strategy.fsdp import local_of, shard_model
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.huggingface import plan_model
from lightning_ntp.topology import Topology
from tests.models import KINDS, batch, float64_norms, randomize, tiny
from tests.pool import WorkerPool

EXACT = 1e-10

Batch = dict[str, Tensor]


def cut_model(model: nn.Module, rank: int, world: int, plan: Any = "auto") -> Any:
    """The model as one replica of `world` roles, no fsdp."""
    topology = Topology.from_shapes([(1, world)], tuple(range(world - 1, 0, -1)), world)
    return shard_model(model, plan_model(model, world, topology.loss_order, plan), Groups(topology, rank))


def run(model: nn.Module, inputs: Batch) -> tuple[Tensor, Tensor]:
    """(logits, loss) of one forward and backward."""
    model.zero_grad()
    # With a cache, transformers does not look for packed sequences.
    output = model(**inputs, use_cache=False)
    output.loss.backward()
    return output.logits.detach(), output.loss.detach()


def errors(twin: nn.Module, model: nn.Module, sharded: Any, inputs: Batch) -> dict[str, float]:
    """Largest error of logits, loss and each parameter's gradient, relative to the largest value."""
    twin.zero_grad()
    for _, parameter in sharded.parameters():
        parameter.grad = None
    wanted_logits, wanted_loss = run(twin, inputs)
    logits, loss = run(model, inputs)
    assert isinstance(logits, DTensor), "training logits are cut by vocabulary"
    found = {"logits": relative(logits.full_tensor(), wanted_logits), "loss": relative(loss, wanted_loss)}
    return found | gradient_errors(twin, sharded)


def gradient_errors(twin: nn.Module, sharded: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for spec, parameter in sharded.parameters():
        if not parameter.requires_grad:
            continue
        cell, whole = spec.cell(sharded.coordinates), twin.get_parameter(spec.fqn).grad
        rows = [i for span in cell.rows for i in range(span.start, span.stop)]
        columns = [i for span in cell.columns for i in range(span.start, span.stop)]
        part = whole.reshape(spec.matrix_shape)[rows][:, columns]
        found[spec.fqn] = relative(local_of(parameter.grad).reshape(cell.shape), part, whole)
    return found


def relative(mine: Tensor, wanted: Tensor, scale: Tensor | None = None) -> float:
    assert mine.shape == wanted.shape and mine.isfinite().all(), (mine.shape, wanted.shape)
    return (
        ((mine - wanted).abs().max() / (wanted if scale is None else scale).abs().max()).item() if mine.numel() else 0.0
    )


def packed(vocab: int, seed: int = 0) -> Batch:
    """Three sequences in one row, told apart by position ids only."""
    samples = [
        {"input_ids": list(range(seed + 1, seed + 1 + size)), "labels": list(range(seed + 1, seed + 1 + size))}
        for size in (5, 3, 6)
    ]
    collated = DataCollatorWithFlattening(return_tensors="pt")(samples)
    return {
        name: collated[name] % vocab if name == "input_ids" else collated[name]
        for name in ("input_ids", "labels", "position_ids")
    }


def feature_case(rank: int, world: int, kind: str, sizes: dict[str, Any]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    with float64_norms():
        for attention in ("eager", "sdpa"):
            twin, model = (tiny(kind, attn_implementation=attention, **sizes) for _ in range(2))
            sharded = cut_model(model, rank, world)
            found[attention] = errors(twin, model, sharded, batch(101, 3, 7))
            found[f"{attention} packed"] = errors(twin, model, sharded, packed(101))
            found[f"{attention} evaluation"] = evaluation_errors(twin, model, batch(101, 3, 7, seed=2))
            model.gradient_checkpointing_enable()
            found[f"{attention} checkpointing"] = errors(twin, model, sharded, batch(101, 2, 6, seed=1))
    return found


@torch.no_grad()
def evaluation_errors(twin: nn.Module, model: nn.Module, inputs: Batch) -> dict[str, float]:
    """Without labels, whole plain logits; with labels, the same loss."""
    twin.eval(), model.eval()
    prompt = {"input_ids": inputs["input_ids"]}
    found = {
        "logits": relative(model(**prompt).logits, twin(**prompt).logits),
        "loss": relative(model(**inputs).loss, twin(**inputs).loss),
    }
    twin.train(), model.train()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "sizes"), [(4, {}), (3, {"num_attention_heads": 14, "num_key_value_heads": 2})])
def test_attention_kernels_packing_and_checkpointing(
    pool: WorkerPool, kind: str, world: int, sizes: dict[str, int]
) -> None:
    for rank, found in enumerate(pool.run(feature_case, world, kind, sizes)):
        wrong = {
            (case, name): error for case, by_name in found.items() for name, error in by_name.items() if error > EXACT
        }
        assert not wrong, (rank, wrong)


def flex_case(rank: int, world: int) -> tuple[dict[str, float], str]:
    twin, model = (tiny("llama", attn_implementation="flex_attention").float() for _ in range(2))
    cut_model(model, rank, world)
    return evaluation_errors(twin, model, batch(101, 2, 7)), model.config._attn_implementation


@pytest.mark.full
@pytest.mark.timeout(600)
def test_flex_attention_is_left_as_it_is(pool: WorkerPool) -> None:
    """Forward only: torch has no backward of it on CPU, and flash attention needs a GPU."""
    for found, kernel in pool.run(flex_case, 4, timeout=500):
        assert kernel == "flex_attention"
        assert max(found.values()) < 1e-5


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_sequences_do_not_see_each_other(attention: str) -> None:
    """The reference of the packed cases is right itself: each sequence has the logits that it has alone."""
    model, inputs = tiny("llama", attn_implementation=attention), packed(101)
    together = model(**inputs, use_cache=False).logits[0]
    alone = [model(input_ids=inputs["input_ids"][:, a:b]).logits[0] for a, b in ((0, 5), (5, 8), (8, 14))]
    assert relative(together, torch.cat(alone)) < 1e-6


SMALL = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 33,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SMALL | {"num_key_value_heads": 3, "head_dim": 4}

OTHERS = {
    "glm": partial(GlmConfig, **GROUPED),
    "gpt_neox": partial(GPTNeoXConfig, **SMALL),
    "gptj": partial(
        GPTJConfig, vocab_size=53, n_embd=24, n_inner=33, n_layer=2, n_head=6, n_positions=64, rotary_dim=4
    ),
    "granite": partial(GraniteConfig, **GROUPED),
    "olmo": partial(OlmoConfig, **SMALL),
    "phi": partial(PhiConfig, **SMALL),
    "starcoder2": partial(Starcoder2Config, **SMALL, num_key_value_heads=3),
}


def other_model_case(rank: int, world: int, kind: str) -> dict[str, float]:
    twin, model = (AutoModelForCausalLM.from_config(OTHERS[kind](), dtype=torch.float64) for _ in range(2))
    for one in (twin, model):
        randomize(one)
        one.eval()  # no dropout
    sharded = cut_model(model, rank, world)
    return errors(twin, model, sharded, batch(53, 2, 6))


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_with_a_plan(pool: WorkerPool, kind: str) -> None:
    """Models that we did not write anything for. Their norms and loss compute in float32: tolerances are wider."""
    for found in pool.run(other_model_case, 4, kind):
        assert {name: error for name, error in found.items() if error > 2e-4} == {}


def classification_case(rank: int, world: int) -> dict[str, float]:
    config = tiny("qwen3").config
    config.pad_token_id, config.num_labels = 0, 3
    twin, model = (Qwen3ForSequenceClassification(config).double() for _ in range(2))
    randomize(twin)
    randomize(model)
    inputs = {"input_ids": batch(101, 3, 7)["input_ids"], "labels": torch.tensor([0, 2, 1])}
    with float64_norms():
        wanted_logits, wanted_loss = run(twin, inputs)
        sharded = cut_model(model, rank, world)
        logits, loss = run(model, inputs)
    found = {"logits": relative(logits, wanted_logits), "loss": relative(loss, wanted_loss)}
    return found | gradient_errors(twin, sharded)


def test_a_classification_head_stays_whole(pool: WorkerPool) -> None:
    for found in pool.run(classification_case, 4):
        assert {name: error for name, error in found.items() if error > EXACT} == {}


def generation_case(rank: int, world: int, kind: str) -> tuple[Tensor, Tensor]:
    twin, model = tiny(kind).eval(), tiny(kind).eval()
    cut_model(model, rank, world)
    prompt = batch(101, 2, 5)["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(prompt, **options), twin.generate(prompt, **options)


@pytest.mark.parametrize("kind", ["llama", "phi3", "gpt2"])
def test_generation_with_a_cache(pool: WorkerPool, kind: str) -> None:
    for mine, wanted in pool.run(generation_case, 4, kind):
        assert wanted.shape == (2, 13) and torch.equal(mine, wanted)


def checkpointing_dropout_case(rank: int, world: int, kind: str, dropout: dict[str, float]) -> list[list[Tensor]]:
    gradients = []
    for checkpointing in (False, True):
        model = tiny(kind, **dropout)
        sharded = cut_model(model, rank, world)
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(3)
        run(model, batch(101, 2, 6))
        gradients.append([local_of(parameter.grad) for _, parameter in sharded.parameters()])
    return gradients


@pytest.mark.parametrize(
    ("kind", "dropout"),
    [("gpt2", {"resid_pdrop": 0.1, "attn_pdrop": 0.2, "embd_pdrop": 0.1}), ("llama", {"attention_dropout": 0.2})],
)
def test_recompute_replays_the_dropout_masks(pool: WorkerPool, kind: str, dropout: dict[str, float]) -> None:
    for stored, recomputed in pool.run(checkpointing_dropout_case, 4, kind, dropout):
        for one, two in zip(stored, recomputed, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


class Attention(nn.Module):
    """A user's own: grouped heads, biases, one norm for queries and keys."""

    def __init__(self, width: int, num_heads: int, num_keys: int) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups = width // num_heads, num_heads // num_keys
        self.wq, self.wo = nn.Linear(width, width), nn.Linear(width, width)
        self.wk, self.wv = (nn.Linear(width, num_keys * self.head_dim) for _ in range(2))
        self.norm = nn.RMSNorm(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        k, v = (one.repeat_interleave(self.num_key_value_groups, dim=1) for one in (k, v))
        mixed = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(-2))


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(31, 24), nn.Linear(24, 31)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention": Attention(24, 6, 3),
                    "mlp": nn.Sequential(nn.Linear(24, 17), nn.GELU(), nn.Linear(17, 24)),
                }
            )
            for _ in range(2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block["attention"](x)
            x = x + block["mlp"](x)
        return self.head(x)


OWN_PLAN = {
    "table": "vocab_embedding",
    "blocks.*.attention.w*": "column",
    "blocks.*.attention.wo": "row",
    "blocks.*.mlp.0": "column",
    "blocks.*.mlp.2": "row",
}


def own_model_case(rank: int, world: int) -> dict[str, float]:
    twin, model = OwnModel().double(), OwnModel().double()
    randomize(twin)
    randomize(model)
    sharded = cut_model(model, rank, world, OWN_PLAN)
    ids = torch.randint(31, (2, 5), generator=torch.Generator().manual_seed(1))
    logits = []
    for one in (twin, model):
        logits.append(one(ids))
        F.cross_entropy(logits[-1].flatten(0, 1), ids.flatten()).backward()
    return {"logits": relative(logits[1].detach(), logits[0].detach())} | gradient_errors(twin, sharded)


def test_a_users_own_module_with_its_own_plan(pool: WorkerPool) -> None:
    for found in pool.run(own_model_case, 4):
        assert {name: error for name, error in found.items() if error > EXACT} == {}
