"""Plans of Hugging Face models with no code by the user, and of a user's own modules from a small dictionary.

    config.base_model_tp_plan, _tp_plan --+
    built-in plans (gpt2)               --+--> planned modules, by parent --+-- q/k/v/o ---------> attention_cuts
    input embedding, output head        --+                                 +-- gate/up/down ----> cuts
    the user's plan (overrides)         --+                                 +-- embedding, head -> vocabulary rows
                                                                            +-- partial ---------> gradients summed

Only the dictionaries of transformers are used; the code around them cuts rows where we cut heads, and moves between
releases.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_ntp.errors import ConfigError, UnsupportedModelError
from lightning_ntp.model_spec import ModelPlan, ParamSpec
from lightning_ntp.strategy.adapters import is_adapted
from lightning_ntp.strategy.attention_cuts import cut_attention, is_attention
from lightning_ntp.strategy.cuts import CutState, ParamCut, cut_feed_forward
from lightning_ntp.strategy.planned import (
    FSDP_ONLY,
    Planned,
    PlanStyle,
    join,
    refusal,
    require_own_forward,
    require_stock_class,
)

_WORDS = {
    "colwise": PlanStyle.COLUMN,
    "packed_colwise": PlanStyle.COLUMN,
    "colwise_gather_output": PlanStyle.COLUMN,
    "rowwise": PlanStyle.ROW,
    "packed_rowwise": PlanStyle.ROW,
    "rowwise_split_input": PlanStyle.ROW,
    "embedding_rowwise": PlanStyle.VOCAB_EMBEDDING,
    "replicated_with_grad_allreduce": PlanStyle.PARTIAL,
    "replicate": PlanStyle.REPLICATE,
}
"""Hugging Face's words for styles. Any other word in a plan is refused where it matches something."""

_BUILT_IN = {
    "gpt2": {
        "h.*.attn.c_attn": "colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
}
"""Plans of base models that transformers has none for, by ``config.model_type``."""


def plan_model(
    model: nn.Module,
    num_roles: int,
    loss_order: Sequence[int] = (),
    plan: Literal["auto"] | Mapping[str, str] = "auto",
) -> ModelPlan:
    """How `model` is cut over `num_roles` roles, at every degree that `loss_order` leads to. Local, changes nothing.

    Args:
        model: any module with Hugging Face models anywhere inside it (a LightningModule), or a user's own with `plan`.
            It may be on the meta device. Modules outside of the plans are replicated over roles.
        num_roles: tensor parallel size of the healthy replica; 1 cuts nothing and accepts every model.
        loss_order: roles, first lost first.
        plan: ``"auto"``, or ``{glob: style}`` over names of ``model.named_modules()``: ``*`` stands for anything inside
            one dotted part, ``**`` for anything; styles are column, row, vocab_embedding, vocab_head, replicate (also
            for all modules below it) and partial. Entries override what a Hugging Face model says about the same
            module. Column and row layers must be children of one module. That module is an attention if it has q_proj,
            k_proj, v_proj (or wq, wk, wv; query, key, value; or a packed ``q|k|v`` named qkv_proj or c_attn): it needs
            an attribute ``head_dim`` and a forward that views features as ``(..., -1, head_dim)``. No dropout may act
            between the column and row layers of another module: its masks would differ in number from role to role,
            and with them all later random numbers (refused in a Sequential; elsewhere we cannot see it).

    Raises:
        ConfigError: a plan of another type, an unknown style, a glob that matches no module.
        UnsupportedModelError: what cannot be cut; names module, class, style and a way out.
    """
    modules = dict(model.named_modules())
    own = _own_plan(modules, plan)
    models = _outermost_models(modules)
    planned = _collect(model, modules, models, own) if num_roles > 1 else []
    state = _cut(planned, modules, num_roles, loss_order)
    order = {name: position for position, name in enumerate(modules)}
    return ModelPlan(
        params=tuple(_param_specs(model, state.params)),
        rules=tuple(sorted(state.rules, key=lambda rule: order[rule.fqn])),
        units=_units(modules, models, own),
        num_roles=num_roles,
        loss_order=tuple(loss_order),
    )


def train_without_cache(model: nn.Module) -> None:
    """Hugging Face models inside keep no keys and values while training or wherever labels are given, unless the caller says so.

    With a cache, which is their default, transformers does not look for packed sequences in ``position_ids``: each would attend to
    those before it. Nobody reads the cache there, and it holds memory. Local; call once per model.
    """

    def say_no(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        wanted = module.training or options.get("labels") is not None
        return args, ({"use_cache": False} | options if wanted else options)

    # peft calls the forward of the model inside without its hooks.
    wrappers: list[Any] = [module for module in model.modules() if is_adapted(module)]
    for outermost in _outermost_models(dict(model.named_modules())).values():
        if "use_cache" in inspect.signature(type(outermost).forward).parameters:
            for called in (outermost, *(each for each in wrappers if each.get_base_model() is outermost)):
                called.register_forward_pre_hook(say_no, with_kwargs=True)


def _own_plan(modules: Mapping[str, nn.Module], plan: Literal["auto"] | Mapping[str, str]) -> dict[str, Planned]:
    """The user's entries by module name; the last glob that matches counts."""
    if plan == "auto":
        return {}
    if not isinstance(plan, Mapping):
        raise ConfigError(f'plan must be "auto" or a mapping from globs of module names to styles, got {plan!r}')
    found: dict[str, Planned] = {}
    for glob, word in plan.items():
        if word not in list(PlanStyle):
            known = ", ".join(PlanStyle)
            raise ConfigError(f"plan[{glob!r}] = {word!r} is no style; the styles of a plan are {known}")
        names = list(_matching(glob, modules))
        if not names:
            children = ", ".join(name for name in modules if name.count(".") == 0 and name) or "none"
            raise ConfigError(
                f"plan[{glob!r}] matches no module. Names are relative to the root; its children: {children}"
            )
        found |= {name: Planned.of(name, modules[name], PlanStyle(word), word) for name in names}
    return found


def _matching(glob: str, names: Iterable[str]) -> Iterator[str]:
    pattern = re.compile(re.escape(glob).replace(r"\*\*", ".*").replace(r"\*", "[^.]*"))
    return (name for name in names if pattern.fullmatch(name))


def _outermost_models(modules: Mapping[str, nn.Module]) -> dict[str, PreTrainedModel]:
    found: dict[str, PreTrainedModel] = {}
    for name, module in modules.items():
        if isinstance(module, PreTrainedModel) and not any(_is_below(name, outer) for outer in found):
            found[name] = module
    return found


def _is_below(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def _collect(
    root: nn.Module,
    modules: Mapping[str, nn.Module],
    models: Mapping[str, PreTrainedModel],
    own: Mapping[str, Planned],
) -> list[Planned]:
    """What each module becomes, from all sources; refuses models of which nothing would be cut."""
    if not models and not own:
        raise UnsupportedModelError(
            f"{type(root).__name__} holds no Hugging Face model and no plan was given. "
            f'Pass plan={{"layers.*.up": "column", "layers.*.down": "row", ...}}, or: {FSDP_ONLY}.'
        )
    replicated = [name for name, one in own.items() if one.style is PlanStyle.REPLICATE]
    planned: dict[str, Planned] = {}
    for name, model in models.items():
        if any(_is_below(name, outer) for outer in replicated):
            continue
        _require_plain(name, model)
        skipped = {inner for inner in modules for outer in replicated if _is_below(inner, outer)} | own.keys()
        planned |= _from_dictionaries(name, model, modules, skipped) | _vocabulary(name, model, modules)
        _require_some_cut(name, model, {**planned, **own})
    kept = {name: one for name, one in planned.items() if not any(_is_below(name, outer) for outer in replicated)}
    return list({**kept, **own}.values())


def _require_plain(name: str, model: PreTrainedModel) -> None:
    if (
        getattr(model, "hf_quantizer", None) is not None
        or getattr(model.config, "quantization_config", None) is not None
    ):
        raise refusal(
            name, model, "quantized", "its weights are quantised; a granule of them cannot be cut", "Load it in bf16"
        )
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise refusal(
            name, model, "DTensor", "its parameters are already distributed", "Load it without tp_plan and device_mesh"
        )


def _require_some_cut(name: str, model: PreTrainedModel, planned: Mapping[str, Planned]) -> None:
    linear = (PlanStyle.COLUMN, PlanStyle.ROW)
    if not any(_is_below(fqn, name) and one.style in linear for fqn, one in planned.items()):
        pattern = join(name, "**")
        raise refusal(
            name,
            model,
            "auto",
            f"transformers has no tensor-parallel plan for model type {model.config.model_type!r}, nor have we",
            f'Pass plan={{glob: style}} for its layers, {{"{pattern}": "replicate"}} to keep it whole on every role',
        )


def _from_dictionaries(
    prefix: str, model: PreTrainedModel, modules: Mapping[str, nn.Module], skipped: set[str]
) -> dict[str, Planned]:
    """What the model's dictionaries say about its modules, less those in `skipped`."""
    names = [name for name in modules if _is_below(name, prefix) and name not in skipped]
    parameters = [name for name, _ in model.named_parameters(prefix, remove_duplicate=False)]
    found: dict[str, Planned] = {}
    for glob, word in _dictionaries(prefix, model).items():
        for name in _matching(glob, names):
            if word not in _WORDS:
                raise refusal(name, modules[name], word, "we do not support this style yet", _keep_whole(name))
            found[name] = Planned.of(name, modules[name], _WORDS[word], word)
        for name in _matching(glob, parameters):
            owner = name.rpartition(".")[0]
            if owner in skipped:
                continue
            why = "a plan for a bare parameter (fused experts and the like) is not supported yet"
            raise refusal(name, modules[owner], word, why, _keep_whole(owner))
    return found


def _keep_whole(name: str) -> str:
    return f'Pass plan={{"{re.sub(r"[.][0-9]+(?=[.]|$)", ".*", name)}": "replicate"}} to keep it whole on every role'


def _dictionaries(prefix: str, model: PreTrainedModel) -> dict[str, str]:
    """``{glob: word}`` over names from the root: of the model, of the models inside it, and of their base models."""
    plan: dict[str, str] = {}
    for name, inner in model.named_modules(prefix=prefix):
        if not isinstance(inner, PreTrainedModel):
            continue
        sources = [getattr(inner, "_tp_plan", None)]
        if inner.base_model is inner:
            sources += [_BUILT_IN.get(inner.config.model_type), getattr(inner.config, "base_model_tp_plan", None)]
        plan |= {join(name, glob): word for source in sources for glob, word in (source or {}).items()}
    return plan


def _vocabulary(prefix: str, model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> dict[str, Planned]:
    """Input embedding and output head, which are always cut by vocabulary rows, whatever a plan says."""
    found: dict[str, Planned] = {}
    fqns = {id(module): name for name, module in modules.items()}
    for name, inner in model.named_modules(prefix=prefix):
        if not isinstance(inner, PreTrainedModel):
            continue
        for style, module in zip((PlanStyle.VOCAB_EMBEDDING, PlanStyle.VOCAB_HEAD), _ends(inner), strict=True):
            if module is None or id(module) not in fqns:
                continue
            if style is PlanStyle.VOCAB_HEAD:
                require_own_forward(name, inner, style)
            found[fqns[id(module)]] = Planned(fqns[id(module)], module, style, style)
    return found


def _ends(model: PreTrainedModel) -> tuple[nn.Module | None, nn.Module | None]:
    """(input embedding, output head) where they are tables over a vocabulary."""
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:  # models without token input, such as a vision tower
        embedding = None
    head = model.get_output_embeddings()
    return (
        embedding if isinstance(embedding, nn.Embedding) else None,
        head if isinstance(head, nn.Linear) else None,
    )


def _cut(
    planned: Sequence[Planned], modules: Mapping[str, nn.Module], num_roles: int, loss_order: Sequence[int]
) -> CutState:
    state = CutState(num_roles, tuple(loss_order))
    styles = {one.fqn: one.style for one in planned}
    families: dict[str, list[Planned]] = {}
    for one in planned:
        require_stock_class(one)
        if one.style is PlanStyle.PARTIAL:
            names = [name for name, _ in one.module.named_parameters()]
            state.params |= {f"{one.fqn}.{name}": ParamCut(partial=True) for name in names}
        elif one.style in (PlanStyle.COLUMN, PlanStyle.ROW):
            families.setdefault(one.parent, []).append(one)
        elif one.style is not PlanStyle.REPLICATE:
            state.vocabulary(one)
    for parent, members in families.items():
        require_own_forward(parent, modules[parent], members[0].word)
        cut_family = cut_attention if is_attention(members) else cut_feed_forward
        cut_family(state, parent, modules[parent], members, styles)
    return state


def _param_specs(model: nn.Module, cuts: Mapping[str, ParamCut]) -> Iterator[ParamSpec]:
    """One spec per distinct parameter; the names of a tied one must ask for the same cut."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    whole = ParamCut()
    for name, parameter in model.named_parameters():
        found = cuts.get(name, whole)
        for other in names[id(parameter)]:
            if cuts.get(other, whole) != found:
                raise UnsupportedModelError(
                    f"{name} and {other} are one tied parameter, but only one of them is cut over roles in this way. "
                    f"Give both modules the same style, or: {FSDP_ONLY}."
                )
        yield ParamSpec(name, tuple(parameter.shape), found.dim, found.layouts, found.partial)


def _units(
    modules: Mapping[str, nn.Module], models: Mapping[str, PreTrainedModel], own: Mapping[str, Planned]
) -> tuple[str, ...]:
    """FSDP units: layers that a Hugging Face model says must not be split, and list items that hold planned layers."""
    wanted: set[str] = set()
    for prefix, model in models.items():
        classes = set(getattr(model, "_no_split_modules", None) or ())
        wanted |= {name for name in modules if _is_below(name, prefix) and type(modules[name]).__name__ in classes}
    for name, one in own.items():
        if one.style in (PlanStyle.COLUMN, PlanStyle.ROW) and not any(_is_below(name, prefix) for prefix in models):
            wanted |= _list_item(name, modules)
    units: list[str] = []
    for name in modules:
        has_parameters = any(True for _ in modules[name].parameters())
        if name and name in wanted and has_parameters and not any(_is_below(name, unit) for unit in units):
            units.append(name)
    return tuple(units)


def _list_item(name: str, modules: Mapping[str, nn.Module]) -> set[str]:
    """The item of the outermost list that `name` is inside of, or the outermost part of that item that can be called."""
    parts = name.split(".")
    in_list = False
    for length in range(1, len(parts)):
        outer = modules[".".join(parts[:length])]
        if in_list and type(outer).forward is not nn.Module.forward:
            return {".".join(parts[:length])}
        numbered = isinstance(outer, nn.ModuleDict) and all(key.isdigit() for key in outer)  # torchtitan's layers
        in_list = in_list or numbered or isinstance(outer, nn.ModuleList | nn.Sequential)
    return set()
