"""LoRA adapters of peft on ragged replicas against one process in float64; saved adapters load in plain peft."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn

from lightning_ntp.errors import UnsupportedModelError
from lightning_ntp.strategy.fsdp import local_of
from lightning_ntp.strategy.huggingface import plan_model, train_without_cache
from tests import lightning_jobs as jobs
from tests.models import KINDS, batch, float64_norms, randomize, tiny
from tests.test_model_features import EXACT, cut_model, errors, packed, run
from tests.test_trainer_features import BATCH, SIZE

TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"]}


def adapted(kind: str, lora_dropout: float = 0.0, **sizes: Any) -> nn.Module:
    """A tiny model with LoRA on every linear layer, its adapters away from zero."""
    targets = TARGETS.get(kind, "all-linear")
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM", fan_in_fan_out=kind == "gpt2",
        lora_dropout=lora_dropout,
    )  # fmt: skip
    model = peft.get_peft_model(tiny(kind, **sizes), config)
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


COMMON = ("llama", "phi3", "gpt2")


@pytest.mark.parametrize("kind", [k if k in COMMON else pytest.param(k, marks=pytest.mark.full) for k in KINDS])
def test_adapters_follow_the_layout_of_their_base(pool, kind):
    for found in pool.run(parity_case, 4, kind):
        assert {name: error for name, error in found.items() if error > EXACT} == {}


def test_packed_sequences_do_not_see_each_other_while_training():
    twin, model = adapted("llama"), adapted("llama")
    train_without_cache(model)
    wanted = twin(**packed(101), use_cache=False).loss
    assert torch.equal(model(**packed(101)).loss, wanted)
    assert not torch.equal(twin(**packed(101)).loss, wanted), "else nothing was tried"


def dropout_case(rank: int, world: int, kind: str, sizes: dict[str, Any]) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients of adapters that all roles hold; and how far a recompute under checkpointing is from the stored pass."""
    gradients: list[dict[str, torch.Tensor]] = []
    for is_checkpointed in (False, True):
        model = adapted(kind, 0.5, **sizes)
        sharded = cut_model(model, rank, world)
        if is_checkpointed:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
        torch.manual_seed(7)
        run(model, batch(101, 3, 7))
        after = torch.rand(3, dtype=torch.float64)
        found = {spec.fqn: local_of(p.grad) for spec, p in sharded.parameters() if p.requires_grad}
        gradients.append(found | {"random numbers afterwards": after})
    worst_replay = max(float((gradients[1][name] - grad).abs().max()) for name, grad in gradients[0].items() if grad.numel())
    plan = sharded.plan.by_fqn
    return {n: g for n, g in gradients[0].items() if n not in plan or plan[n].dim is None}, worst_replay


@pytest.mark.parametrize(("kind", "sizes"), [("llama", {"attention_dropout": 0.3}), ("gpt2", {"attn_pdrop": 0.3})])
def test_dropout_of_adapters_is_one_mask_on_what_roles_share(pool, kind, sizes):
    results = pool.run(dropout_case, 4, kind, sizes)
    whole, _ = results[0]
    assert any("lora_A" in name for name in whole) and any("lora_B" in name for name in whole)
    for found, worst_replay in results:
        assert worst_replay < 1e-12
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, whole[name], rtol=0, atol=1e-12, msg=name)


class TunedLlama(jobs.TinyLlama):
    """Trains adapters and the last norm."""

    def __init__(self) -> None:
        super().__init__()
        config = peft.LoraConfig(r=3, target_modules=["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"])
        self.model = peft.get_peft_model(self.model, config)
        randomize(self.model)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit_case(rank: int, world: int, sizes: Any, folder: str) -> dict[str, torch.Tensor]:
    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=sizes)
        trainer = jobs.trainer(strategy, world, gradient_clip_val=0.05, max_steps=3)
        trainer.fit(TunedLlama(), jobs.loader(SIZE, BATCH))
        strategy.save_pretrained(folder)
        trainer.save_checkpoint(f"{folder}.ckpt")
        return jobs.whole_state(strategy)


def test_three_steps_of_fine_tuning_equal_one_process_and_plain_peft_loads_the_adapters(pool, tmp_path):
    state = pool.run(fit_case, 5, [(1, 2), (1, 3)], str(tmp_path / "adapters"))[0]
    twin = TunedLlama()
    with float64_norms():
        jobs.trainer("auto", 1, gradient_clip_val=0.05, max_steps=3).fit(twin, jobs.loader(SIZE, 2 * BATCH))
    assert jobs.worst(state, twin) < 1e-9
    files = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= files and not any("model-" in name for name in files)
    loaded = peft.PeftModel.from_pretrained(tiny("llama"), str(tmp_path / "adapters"))
    named = {f"model.{name}": tensor for name, tensor in loaded.named_parameters() if "lora_" in name}
    assert named.keys() == {name for name in state if "lora_" in name}
    assert all(torch.equal(tensor, state[name]) for name, tensor in named.items())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"use_dora": True, "target_modules": ["up_proj"]}, r"mlp.up_proj \(Linear\).*DoraLinearVariant looks at whole weights"),
        ({"target_modules": ["embed_tokens"]}, r"embed_tokens \(Embedding\).*peft.tuners.lora.layer.Embedding is no layer"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, r"lm_head \(ModulesToSaveWrapper\)"),
    ],
)
def test_other_adapters_are_refused_by_name(options, match):
    model = peft.get_peft_model(tiny("llama"), peft.LoraConfig(r=2, **options))
    with pytest.raises(UnsupportedModelError, match=match):
        plan_model(model, 2, (1,))
    assert plan_model(model, 1).rules == ()


def test_a_merged_adapter_is_refused():
    model = adapted("llama")
    model.merge_adapter()
    with pytest.raises(UnsupportedModelError, match="merged into the base weights; unmerge it first"):
        plan_model(model, 2, (1,))
