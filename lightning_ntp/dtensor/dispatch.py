"""Which operators an `UnevenShard` may meet: an explicit list; everything else raises.

A rule answers once per combination of operator, placements and static arguments, and DTensor caches the answer. Operators that
need communication or the worker's own elements are handled before DTensor sees them, in `reductions.py` and `loss.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_ntp.dtensor import loss, reductions
from lightning_ntp.dtensor._torch_private import (
    OpOverload,
    OpSchema,
    OutputSharding,
    Propagate,
    clear_caches,
    hook_handlers,
    hook_propagation,
    static_arguments,
)
from lightning_ntp.dtensor.placement import is_uneven
from lightning_ntp.dtensor.rules import Rule, elementwise_rule, list_rule, refuse, tensor_specs
from lightning_ntp.dtensor.views import STATIC_FROM, VIEW_RULES

ELEMENTWISE = frozenset({
    "_to_copy", "abs_", "alias", "copy_", "copysign_", "detach", "detach_", "empty_like", "eq_", "fill", "fill_", "float_power",
    "full_like", "ge_", "gt_", "le_", "lift_fresh", "lt_", "masked_fill", "masked_fill_", "ne_", "ones_like", "polygamma_",
    "xlogy_", "zero", "zero_", "zeros_like",
})  # fmt: skip
"""Elementwise operators without torch's pointwise tag; those with the tag are allowed by it."""

_FOREACH_NAMES = (
    "abs", "acos", "add", "addcdiv", "addcmul", "asin", "atan", "ceil", "clamp_max", "clamp_min", "clone", "copy", "cos", "cosh",
    "div", "erf", "erfc", "exp", "expm1", "floor", "frac", "lerp", "lgamma", "log", "log10", "log1p", "log2", "maximum",
    "minimum", "mul", "neg", "pow", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "sub", "tan",
    "tanh", "trunc", "zero",
)  # fmt: skip
FOREACH = frozenset(f"_foreach_{name}{suffix}" for name in _FOREACH_NAMES for suffix in ("", "_"))
UNFIT = frozenset({torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output})
"""Tags of pointwise operators that do not act on each element by itself: random ones, and `equal`."""

FUSED = frozenset(f"_fused_{name}_" for name in ("adagrad", "adam", "adamw", "sgd"))


def name_of(operator: OpOverload) -> str:
    """``add.Tensor`` of ``aten::add.Tensor``; "" outside aten: a foreign operator of the same name is another one."""
    namespace, _, name = operator.name().partition("::")
    return name if namespace == "aten" else ""


def propagate(schema: OpSchema, stock: Propagate) -> OutputSharding:
    """The sharding rule of every DTensor operator: ours where an `UnevenShard` takes part, else torch's own."""
    specs = list(tensor_specs([*schema.args_schema, *schema.kwargs_schema.values()]))
    if not any(is_uneven(spec.placements) for spec in specs):
        return stock(schema)
    rule = rule_of(schema.op)
    if rule is None:
        refuse(schema.op, specs, "this operator has no rule")
    return rule(schema, specs)


def rule_of(operator: OpOverload) -> Rule | None:
    """The rule of an operator, or None. Random operators have none: equal elements would differ between the roles."""
    name = name_of(operator)
    base = name.split(".")[0]
    if base in FOREACH or base in FUSED:
        return list_rule
    if base in ELEMENTWISE or (name and torch.Tag.pointwise in operator.tags and not UNFIT.intersection(operator.tags)):
        return elementwise_rule
    return VIEW_RULES.get(name)


def _overload(name: str) -> OpOverload:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def forget_meshes() -> None:
    """Drop the meshes that DTensor's caches hold. Local; to be called when the process groups of a generation are gone.

    Meshes of the same ranks and shape are equal, so results of the next generation would carry the old mesh and its groups.
    """
    clear_caches()


def install() -> None:
    """Hook the rules into DTensor; done once, by the package's import."""
    static_arguments({_overload(name): STATIC_FROM for name in VIEW_RULES})
    hook_propagation(propagate)
    hook_handlers({**reductions.HANDLERS, **loss.HANDLERS}, _has_uneven)


def _has_uneven(arguments: Sequence[Any]) -> bool:
    return any(
        is_uneven(argument.placements) if isinstance(argument, DTensor) else _has_uneven(argument)
        for argument in arguments
        if isinstance(argument, DTensor | list | tuple)
    )
