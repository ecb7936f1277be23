"""Plans of Hugging Face models: what is cut where, every element exactly once, and what is refused in which words."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, GPTNeoXConfig, Olmo2Config, PreTrainedModel
from transformers.models.apertus import ApertusConfig
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gpt2 import GPT2Config
from transformers.models.mixtral import MixtralConfig

from lightning_ntp.errors import ConfigError, UnsupportedModelError
from lightning_ntp.model_spec import Coordinates, ModelPlan, ParamSpec, Style
from lightning_ntp.strategy.huggingface import plan_model
from tests.models import KINDS, tiny

ROLES, LOSS_ORDER = 4, (2, 0)


def planned(kind: str, **overrides: Any) -> ModelPlan:
    return plan_model(tiny(kind, **overrides), ROLES, LOSS_ORDER)


def on_meta(config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def owners(spec: ParamSpec, degree: int, fsdp_size: int) -> Tensor:
    """How many workers of one replica own each element."""
    counts = torch.zeros(spec.matrix_shape, dtype=torch.int64)
    roles = [role for role in range(ROLES) if role not in LOSS_ORDER[: ROLES - degree]]
    for role in roles:
        for coordinate in range(fsdp_size):
            cell = spec.owned_cell(Coordinates(degree, role, fsdp_size, coordinate), min(roles))
            for rows in cell.rows:
                for columns in cell.columns:
                    counts[rows.start : rows.stop, columns.start : columns.stop] += 1
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_every_element_of_every_parameter_has_one_owner(kind: str) -> None:
    plan = planned(kind)
    assert [spec.fqn for spec in plan.params] == [name for name, _ in tiny(kind).named_parameters()]
    for spec in plan.params:
        for degree in (4, 3, 2):
            for fsdp_size in (1, 2):
                assert (owners(spec, degree, fsdp_size) == 1).all(), (spec.fqn, degree, fsdp_size)


@pytest.mark.parametrize("kind", KINDS)
def test_all_layers_are_cut_and_become_units(kind: str) -> None:
    plan, model = planned(kind), tiny(kind)
    matrices = {name for name, parameter in model.named_parameters() if parameter.ndim == 2} - {
        "transformer.wpe.weight"
    }
    assert {spec.fqn for spec in plan.params if spec.dim is not None and len(spec.shape) == 2} == matrices
    assert plan.units == tuple(f"{'transformer.h' if kind == 'gpt2' else 'model.layers'}.{layer}" for layer in (0, 1))
    styles = [rule.style for rule in plan.rules]
    assert (
        styles.count(Style.ATTENTION) == 2
        and styles.count(Style.VOCAB_HEAD) == styles.count(Style.VOCAB_EMBEDDING) == 1
    )


def test_key_value_heads_follow_their_query_heads() -> None:
    plan = planned("llama")
    heads = {rule.fqn: rule.heads for rule in plan.rules}["model.layers.0.self_attn"]
    assert heads is not None and heads.group_size == 2 and heads.queries.size == 6
    keys, queries = (plan.by_fqn[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "kq")
    # 6 query heads over 4 roles: 0 1 | 2 3 | 4 | 5, so that KV head 2 has a copy on roles 2 and 3
    assert [queries.role_cell(4, role).shape[0] for role in range(4)] == [8, 8, 4, 4]
    assert keys.role_cell(4, 2) == keys.role_cell(4, 3) and keys.role_cell(4, 2).shape[0] == 4


def test_packed_projections_are_cut_part_by_part() -> None:
    plan = planned("phi3")
    packed = plan.by_fqn["model.layers.0.self_attn.qkv_proj.weight"]  # q 24 | k 12 | v 12
    assert [str(span) for span in packed.role_cell(4, 0).rows] == ["[0:8)", "[24:28)", "[36:40)"]
    gate_up = plan.by_fqn["model.layers.0.mlp.gate_up_proj.weight"]
    assert [str(span) for span in gate_up.role_cell(4, 1).rows] == ["[25:49)", "[122:146)"]
    transposed = planned("gpt2").by_fqn["transformer.h.0.attn.c_attn.weight"]
    assert transposed.dim == 1 and [str(s) for s in transposed.role_cell(4, 1).columns] == [
        "[8:16)",
        "[32:40)",
        "[56:64)",
    ]


def test_biases_follow_column_layers_only() -> None:
    plan = planned("gpt2")
    layer = "transformer.h.0"
    assert plan.by_fqn[f"{layer}.attn.c_attn.bias"].dim == plan.by_fqn[f"{layer}.mlp.c_fc.bias"].dim == 0
    for name in ("attn.c_proj.bias", "mlp.c_proj.bias", "ln_1.weight"):
        spec = plan.by_fqn[f"{layer}.{name}"]
        assert spec.dim is None and not spec.partial


def test_norms_of_single_heads_are_partial() -> None:
    partial = [spec.fqn for spec in planned("qwen3").params if spec.partial]
    assert partial == [f"model.layers.{layer}.self_attn.{name}_norm.weight" for layer in (0, 1) for name in "qk"]


def test_tied_weights_have_one_spec_under_the_first_name() -> None:
    plan = planned("llama", tie_word_embeddings=True)
    assert plan.by_fqn["model.embed_tokens.weight"].dim == 0 and "lm_head.weight" not in plan.by_fqn
    assert {rule.fqn for rule in plan.rules} >= {"model.embed_tokens", "lm_head"}


def test_sizes_that_forwards_read_are_named() -> None:
    phi3 = {rule.fqn: rule for rule in planned("phi3").rules}["model.layers.1.self_attn"]
    assert [name for name, _ in phi3.local_config] == ["num_attention_heads"] and phi3.key_counts == (
        "num_key_value_heads",
    )
    gpt2 = {rule.fqn: rule for rule in planned("gpt2").rules}["transformer.h.1.attn"]
    sizes = {name: layouts[4].local_size(1) for name, layouts in gpt2.local_sizes}
    assert sizes == {"num_heads": 2, "split_size": 8}
    assert gpt2.output_projection == "transformer.h.1.attn.c_proj"


def test_visible_key_heads_after_expansion() -> None:
    rules = plan_model(tiny("llama", num_attention_heads=14, num_key_value_heads=2), 3, (1,)).rules
    heads = next(rule.heads for rule in rules if rule.style is Style.ATTENTION)
    assert heads is not None
    # queries 0..4 | 5..9 | 10..13, groups of 7: role 1 has 2 queries of KV head 0 and 3 of KV head 1
    assert [heads.uniform_group(3, role) for role in range(3)] == [5, None, 4]
    assert [heads.visible_keys(3, role) for role in range(3)] == [1, 5, 1]


def test_models_inside_other_modules() -> None:
    class Distillation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher, self.probe = tiny("llama"), tiny("gpt2"), nn.Linear(24, 3)

    plan = plan_model(Distillation(), 3, (2,))
    assert plan.by_fqn["student.lm_head.weight"].dim == 0 and plan.by_fqn["teacher.transformer.wte.weight"].dim == 0
    assert plan.by_fqn["probe.weight"].dim is None
    assert plan.units == (
        "student.model.layers.0",
        "student.model.layers.1",
        "teacher.transformer.h.0",
        "teacher.transformer.h.1",
    )
    kept = plan_model(Distillation(), 3, (2,), {"teacher": "replicate"})
    assert all(spec.dim is None for spec in kept.params if spec.fqn.startswith("teacher."))
    assert any(spec.dim is not None for spec in kept.params if spec.fqn.startswith("student."))


def test_one_role_accepts_every_model_and_cuts_nothing() -> None:
    model = BertForMaskedLM(
        BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
    )
    plan = plan_model(model, 1)
    assert not plan.rules and all(spec.dim is None for spec in plan.params)
    assert plan_model(nn.Linear(2, 2), 1).units == ()


def test_interleaved_heads_of_gpt_neox() -> None:
    sizes = {
        "vocab_size": 50,
        "hidden_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "intermediate_size": 33,
    }
    plan = plan_model(on_meta(GPTNeoXConfig(**sizes)), 4, (3,))
    packed = plan.by_fqn["gpt_neox.layers.0.attention.query_key_value.weight"]
    assert [packed.role_cell(4, role).shape[0] for role in range(4)] == [24, 24, 12, 12]


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width, 4)
        self.mlp = nn.Sequential(nn.Linear(width, 30), nn.GELU(), nn.Linear(30, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks, self.head = (
            nn.Embedding(20, 16),
            nn.ModuleList(Block(16) for _ in range(2)),
            nn.Linear(16, 20),
        )


OWN_PLAN = {
    "table": "vocab_embedding",
    "blocks.*.attention.w*": "column",
    "blocks.*.attention.wo": "row",
    "blocks.*.mlp.0": "column",
    "blocks.*.mlp.2": "row",
    "head": "vocab_head",
}


def test_a_users_own_plan() -> None:
    plan = plan_model(OwnModel(), 3, (2,), OWN_PLAN)
    assert plan.units == ("blocks.0", "blocks.1")
    assert {spec.fqn for spec in plan.params if spec.dim is None} == {
        f"blocks.{block}.{name}.bias" for block in (0, 1) for name in ("attention.wo", "mlp.2")
    }
    assert plan.by_fqn["head.bias"].dim == 0
    assert next(rule for rule in plan.rules if rule.style is Style.ATTENTION).heads.group_size == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"blocks.*.mlp.0": "colwise"},
            r"plan\['blocks.\*.mlp.0'\] = 'colwise' is no style; .* column, row, vocab_embedding",
        ),
        ({"layers.*.mlp": "row"}, r"plan\['layers.\*.mlp'\] matches no module.*its children: table, blocks, head"),
        ("none", r'plan must be "auto" or a mapping .* got \'none\''),
    ],
)
def test_wrong_plans(plan: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_model(OwnModel(), 2, (), plan)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("auto", r"OwnModel holds no Hugging Face model and no plan was given. Pass plan=.*tensor_parallel_size=1"),
        (
            {"blocks.*.mlp.0": "column"},
            r"blocks.0.mlp.0 \(Linear\), style 'column': no row layer in blocks.0.mlp takes its 30",
        ),
        (
            {"blocks.*.mlp.2": "row"},
            r"blocks.0.mlp.2 \(Linear\), style 'row': no column layer in blocks.0.mlp makes the 30",
        ),
        (
            {"blocks.*.mlp.1": "column"},
            r"blocks.0.mlp.1 \(GELU\), style 'column': torch.*GELU is no layer that we can cut",
        ),
        (
            {"blocks.*.attention.wq": "column"},
            r"blocks.0.attention \(Attention\), style 'column': needs q, k, v and one row",
        ),
    ],
)
def test_own_models_that_cannot_be_cut(plan: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        plan_model(OwnModel(), 2, (), plan)


def test_dropout_on_cut_features() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4), nn.Dropout(0.1))
    plan = {"net.0": "column", "net.2": "row"}
    with pytest.raises(
        UnsupportedModelError, match=r"net.0 .*dropout '1' after it acts on features that are cut.*Move it"
    ):
        plan_model(nn.ModuleDict({"net": net}), 2, (), plan)
    net[1].p = 0.0
    assert plan_model(nn.ModuleDict({"net": net}), 2, (), plan).by_fqn["net.2.weight"].dim == 1


def test_more_roles_than_query_heads() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"6 query heads cannot be shared by 7 roles. Use tensor_parallel_size <= 6"
    ):
        plan_model(tiny("llama"), 7)
    with pytest.raises(
        UnsupportedModelError, match=r"mlp.gate_proj .*: 3 feed-forward columns cannot be shared by 4 roles"
    ):
        plan_model(tiny("llama", intermediate_size=3), 4)


def swapped(name: str, make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = tiny("llama")
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, make(model.get_submodule(name)))
    return model


class LigerLinear(nn.Linear):
    pass


def other_forward(self: Any, x: Tensor) -> Tensor:
    return x


other_forward.__module__ = "liger_kernel.transformers.model.llama"


def test_patched_layers_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    q_proj = "model.layers.0.self_attn.q_proj"
    model = swapped(q_proj, lambda _: LigerLinear(24, 24))
    with pytest.raises(
        UnsupportedModelError, match=rf"{q_proj} \(LigerLinear\), style 'colwise': .*LigerLinear is no layer"
    ):
        plan_model(model, 2)
    model = tiny("llama")
    layer = model.get_submodule(q_proj)
    layer.forward = MethodType(other_forward, layer)
    with pytest.raises(
        UnsupportedModelError, match=rf"{q_proj} .*forward was replaced by liger_kernel.*Load the model without"
    ):
        plan_model(model, 2)
    model = tiny("llama")
    monkeypatch.setattr(type(model), "forward", other_forward)
    with pytest.raises(
        UnsupportedModelError, match=r"the model \(LlamaForCausalLM\), style 'vocab_head': its forward was replaced"
    ):
        plan_model(model, 2)


def test_patches_that_call_their_layers_are_accepted() -> None:
    def swiglu(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    swiglu.__module__ = "liger_kernel.transformers.swiglu"
    model = tiny("llama")
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(swiglu, layer.mlp)
    assert plan_model(model, 2).by_fqn["model.layers.0.mlp.up_proj.weight"].dim == 0


MIXTRAL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def test_experts_are_refused_unless_kept_whole() -> None:
    model = on_meta(MixtralConfig(**MIXTRAL, num_key_value_heads=2, num_local_experts=2))
    with pytest.raises(UnsupportedModelError, match=r"model.layers.0.mlp.experts.*replicate"):
        plan_model(model, 2)
    plan = plan_model(model, 2, (), {"model.layers.*.mlp": "replicate"})
    assert {spec.dim for spec in plan.params if ".mlp." in spec.fqn} == {None}
    assert plan.by_fqn["model.layers.0.self_attn.q_proj.weight"].dim == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: BertForMaskedLM(
                BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
            ),
            r"the model \(BertForMaskedLM\), style 'auto': transformers has no tensor-parallel plan for model type 'bert'",
        ),
        (
            lambda: Olmo2Config(
                vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4
            ),
            r"self_attn.q_norm \(Olmo2RMSNorm\), style 'none': it normalises over a whole projection \(16 features\)",
        ),
        (
            lambda: ApertusConfig(
                vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4
            ),
            r"mlp.act_fn \(XIELUActivation\), style 'none': its alpha_p \[1\] may act on features that are cut.*\"partial\"",
        ),
        (
            lambda: Gemma3TextConfig(
                vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=4
            ),
            r"model.embed_tokens \(Gemma3TextScaledWordEmbedding\), style 'vocab_embedding': .*only Embedding itself is supported",
        ),
    ],
)
def test_models_that_cannot_be_cut(make: Callable[[], Any], message: str) -> None:
    made = make()
    with pytest.raises(UnsupportedModelError, match=message):
        plan_model(made if isinstance(made, nn.Module) else on_meta(made), 2)


def test_unknown_styles_name_module_and_way_out() -> None:
    model = tiny("llama")
    model._tp_plan = {**model._tp_plan, "model.layers.*.self_attn": "sequence_parallel"}
    with pytest.raises(
        UnsupportedModelError,
        match=r"model.layers.0.self_attn \(LlamaAttention\), style 'sequence_parallel': we do not support this style yet. "
        r'Pass plan={"model.layers.\*.self_attn": "replicate"} to keep it whole on every role, or: tensor_parallel_size=1',
    ):
        plan_model(model, 2)


def test_quantised_models() -> None:
    model = tiny("llama")
    model.hf_quantizer = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match=r"its weights are quantised; .*Load it in bf16"):
        plan_model(model, 2)


def test_an_attention_parameter_without_style() -> None:
    model = tiny("llama")
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(6))
    with pytest.raises(
        UnsupportedModelError, match=r"layers.1.self_attn \(LlamaAttention\), style 'none': its sinks \[6\]"
    ):
        plan_model(model, 2)


def test_tied_weights_that_disagree() -> None:
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens.weight and lm_head.weight are one tied parameter"):
        plan_model(tiny("llama", tie_word_embeddings=True), 2, (), {"lm_head": "replicate"})


def test_large_vocabularies_are_planned_quickly() -> None:
    plan = plan_model(on_meta(GPT2Config(n_embd=12, n_layer=1, n_head=6)), 3, (2,))
    assert plan.by_fqn["transformer.wte.weight"].shape == (50257, 12)
    assert [plan.by_fqn["transformer.wte.weight"].role_cell(3, role).shape[0] for role in range(3)] == [
        16753,
        16752,
        16752,
    ]
