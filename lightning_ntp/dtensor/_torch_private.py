"""Private torch names that the placement needs, each with its reason. Tried on torch 2.13.0 (read for 2.11 to 2.14).

DTensor has no public way to give a new placement its rules. What we hook, once, when `lightning_ntp.dtensor` is imported:

| name | reason |
|---|---|
| `DTensorSpec`, `TensorMeta`, `OpSchema`, `OutputSharding` | the values in which DTensor asks for and takes a sharding rule |
| `ShardingPropagator.propagate_op_sharding(_non_cached)` | where a rule is looked up. Successful answers are cached (here, and in a C++ cache keyed by the operator, the specs and the static arguments), errors never are |
| `RuntimeSchemaInfo`, `op_to_schema_info` | which plain arguments belong to that key: an operator unknown to DTensor has none, and its rule would be reused for other arguments |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, RuntimeSchemaInfo
from torch.distributed.tensor._sharding_prop import LocalLRUCache

__all__ = [
    "DTensorSpec", "OpSchema", "OutputSharding", "Propagate", "TensorMeta", "hook_propagation", "output_meta", "static_arguments",
]  # fmt: skip

Propagate = Callable[[OpSchema], OutputSharding]

_propagator = DTensor._op_dispatcher.sharding_propagator
OpOverload = torch._ops.OpOverload
"""Type of one operator overload, for annotations; public nowhere."""


def hook_propagation(rule: Callable[[OpSchema, Propagate], OutputSharding]) -> None:
    """From now on DTensor asks ``rule(schema, stock)``; what it does not know it passes on to `stock`."""
    stock = _propagator.propagate_op_sharding_non_cached

    def hooked(schema: OpSchema) -> OutputSharding:
        return rule(schema, stock)

    _propagator.propagate_op_sharding_non_cached = hooked  # type: ignore[method-assign,assignment]
    _propagator.propagate_op_sharding = LocalLRUCache(hooked)


def output_meta(schema: OpSchema) -> Any:
    """`TensorMeta` (or a list of them, or None) of the operator's result on the logical tensors."""
    return _propagator._propagate_tensor_meta_non_cached(schema)


def static_arguments(operators: dict[torch._ops.OpOverload, int]) -> None:
    """Put the plain arguments from the given position on into the cache key of operators that DTensor has no entry for."""
    single = getattr(_propagator, "op_to_schema_info_for_single_dim_strategy", {})
    for operator, first in operators.items():
        if operator not in single:
            _propagator.op_to_schema_info.setdefault(operator, RuntimeSchemaInfo(first))
