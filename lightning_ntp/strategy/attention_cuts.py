"""Attention by query head: how q, k, v and o of one attention module are cut, packed or not.

The unit is the query head. KV heads follow: a role stores each KV head that one of its query heads needs, so that a
head may have copies on several roles. The attention code itself runs unchanged, on local head counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

from torch import nn

from lightning_ntp.layout import NestedLayouts
from lightning_ntp.model_spec import HeadCut, ModuleRule, Style
from lightning_ntp.strategy.cuts import CutState, ParamCut, split
from lightning_ntp.strategy.planned import GATHERED, Planned, PlanStyle, own_parameters, refusal

_QUERY, _KEY, _VALUE = ("q_proj", "query", "wq"), ("k_proj", "key", "wk"), ("v_proj", "value", "wv")
_PACKED = ("qkv_proj", "c_attn", "query_key_value")
_HEAD_DIMS = ("head_dim", "head_size", "attention_head_size")
_QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_head", "n_heads")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads")

_PACKED_BY_PART = ("GPT2Attention", "Phi3Attention")
"""Attention classes of transformers whose packed projection is ``q|k|v``; codegen's, for one, is not."""

_PACKED_BY_HEAD = ("GPTNeoXAttention",)
"""Those that keep q, k and v of one head together."""


def is_attention(members: Sequence[Planned]) -> bool:
    """Whether the planned layers of one module are projections to and from heads."""
    return any(one.name in (*_QUERY, *_PACKED) for one in members)


def cut_attention(
    state: CutState, parent: str, attention: nn.Module, members: Sequence[Planned], styles: Mapping[str, PlanStyle]
) -> None:
    """Adds the rules of an attention module and of its projections; q/k norms become partial.

    Raises:
        UnsupportedModelError: projections we do not know, sizes that are no whole heads, norms across heads, or a
            parameter of the attention that the plan does not name.
    """
    columns, rows = split(members)
    if len(rows) != 1 or not columns:
        raise refusal(
            parent,
            attention,
            members[0].word,
            f"needs q, k, v and one row layer after them, the plan names {len(rows)}",
        )
    output, head_dim = rows[0], _head_dim(parent, attention, members[0].word)
    num_queries, rest = divmod(output.in_features, head_dim)
    if rest:
        raise output.refused(f"its {output.in_features} inputs are not whole heads of {head_dim} features")
    _cut_inner_parameters(state, parent, attention, head_dim, styles)
    queries = state.granules(output, num_queries, "query heads")
    packed = next((one for one in columns if one.name in _PACKED), None)
    if packed is not None:
        heads = _cut_packed(state, attention, packed, len(columns), queries, head_dim)
    else:
        heads = _cut_separate(state, parent, attention, columns, queries, head_dim)
    state.linear(output, queries.scaled(head_dim))
    state.rules.append(_attention_rule(parent, attention, heads, output.layer))


def _head_dim(parent: str, attention: nn.Module, word: str) -> int:
    for name in _HEAD_DIMS:
        value = getattr(attention, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise refusal(
        parent, attention, word, f"it has none of the attributes {', '.join(_HEAD_DIMS)}", "Set head_dim on the module"
    )


def _head_cut(one: Planned, queries: NestedLayouts, key_features: int, head_dim: int) -> HeadCut:
    num_keys, rest = divmod(key_features, head_dim)
    if rest or num_keys < 1 or queries.size % num_keys:
        raise one.refused(
            f"its {one.out_features} outputs do not hold KV heads for {queries.size} query heads of {head_dim} features"
        )
    return HeadCut(queries, queries.size // num_keys, head_dim)


def _cut_packed(
    state: CutState, attention: nn.Module, packed: Planned, num_columns: int, queries: NestedLayouts, head_dim: int
) -> HeadCut:
    if num_columns != 1:
        raise packed.refused("other column layers stand beside a packed projection of queries, keys and values")
    key_features, rest = divmod(packed.out_features - queries.size * head_dim, 2)
    heads = _head_cut(packed, queries, key_features if not rest else 0, head_dim)
    class_name = type(attention).__name__
    if class_name in _PACKED_BY_HEAD and heads.group_size == 1:
        state.linear(packed, queries.scaled(3 * head_dim))
    elif class_name in _PACKED_BY_PART or not type(attention).__module__.startswith("transformers."):
        keys = heads.keys.scaled(head_dim)
        layouts = NestedLayouts.concat((queries.scaled(head_dim), keys, keys))
        state.linear(packed, layouts, heads if heads.group_size > 1 else None)
    else:
        raise packed.refused(f"we do not know in which order {class_name} packs queries, keys and values")
    return heads


def _cut_separate(
    state: CutState,
    parent: str,
    attention: nn.Module,
    columns: Sequence[Planned],
    queries: NestedLayouts,
    head_dim: int,
) -> HeadCut:
    key = next((one for one in columns if one.name in _KEY), None)
    if key is None:
        raise refusal(parent, attention, columns[0].word, f"none of {[one.name for one in columns]} makes the keys")
    heads = _head_cut(key, queries, key.out_features, head_dim)
    for one in columns:
        is_query = one.name in _QUERY
        if not is_query and one.name not in (*_KEY, *_VALUE):
            raise one.refused("it is no query, key or value projection that we know")
        wanted = (queries if is_query else heads.keys).scaled(head_dim)
        if one.out_features != wanted.size or one.word == GATHERED:
            raise one.refused(
                f"its {one.out_features} outputs are not used head by head; wanted {wanted.size}, {head_dim} per head"
            )
        state.linear(one, wanted, None if is_query or heads.group_size == 1 else heads)
    return heads


def _cut_inner_parameters(
    state: CutState, parent: str, attention: nn.Module, head_dim: int, styles: Mapping[str, PlanStyle]
) -> None:
    """Norms over one head see the local heads only: partial gradients. What else it holds must be in the plan."""
    for fqn, owner, name, shape in own_parameters(parent, attention):
        style = _style_at(fqn, parent, styles)
        if style not in (None, PlanStyle.PARTIAL):
            continue
        is_vector = len(shape) == 1 and fqn != parent
        if is_vector and shape[0] > head_dim and shape[0] % head_dim == 0:
            raise refusal(
                fqn,
                owner,
                style or "none",
                f"it normalises over a whole projection ({shape[0]} features), but its heads of {head_dim} are cut apart",
            )
        if style is None and not (is_vector and shape[0] == head_dim):
            raise refusal(
                fqn,
                owner,
                "none",
                f"its {name} {list(shape)} belongs to an attention that is cut by heads, and the plan does not name it",
                f'If each head uses all of it, pass plan={{"{fqn}": "partial"}}' if fqn != parent else "",
            )
        state.params[f"{fqn}.{name}"] = ParamCut(partial=True)


def _style_at(fqn: str, parent: str, styles: Mapping[str, PlanStyle]) -> PlanStyle | None:
    """The style of a module or of the planned layer that it is a part of (LoRA: ``q_proj.lora_A.default``)."""
    while fqn != parent and fqn not in styles:
        fqn = fqn.rpartition(".")[0]
    return styles.get(fqn)


def _attention_rule(parent: str, attention: nn.Module, heads: HeadCut, output_projection: str) -> ModuleRule:
    queries, features = heads.queries, heads.queries.scaled(heads.head_dim)
    sizes = [(name, queries) for name in _QUERY_COUNTS if getattr(attention, name, None) == queries.size]
    if getattr(attention, "split_size", None) == features.size:
        sizes.append(("split_size", features))
    return ModuleRule(
        parent,
        Style.ATTENTION,
        heads=heads,
        local_sizes=tuple(sizes),
        local_config=_local_config(parent, attention, queries),
        key_counts=tuple(name for name in _KEY_COUNTS if getattr(attention, name, None) == heads.keys.size),
        output_projection=output_projection,
    )


def _local_config(parent: str, attention: nn.Module, queries: NestedLayouts) -> tuple[tuple[str, NestedLayouts], ...]:
    """Head counts that the forward reads from the shared config (phi3: ``self.config.num_attention_heads``)."""
    code = getattr(inspect.unwrap(type(attention).forward), "__code__", None)
    config = getattr(attention, "config", None)
    if code is None or config is None:
        return ()
    read = [name for name in code.co_names if not hasattr(attention, name) and hasattr(config, name)]
    unknown = [name for name in read if name in _KEY_COUNTS]
    if unknown:
        raise refusal(
            parent, attention, "attention", f"its forward reads config.{unknown[0]}, which copies of KV heads change"
        )
    return tuple((name, queries) for name in read if name in _QUERY_COUNTS)
