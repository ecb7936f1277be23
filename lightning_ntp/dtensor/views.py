"""Operators that change shapes around a cut dim: views, factories with a size argument, and their backwards.

A cut dim must come out as a dim of its own, whole and in its order. Every rule says where each dim of the result comes from,
and which arguments (sizes, strides) the local operator needs instead of the logical ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_ntp.dtensor._torch_private import DTensorSpec, OpSchema, OutputSharding, output_meta
from lightning_ntp.dtensor.placement import UnevenShard, coordinate_of, local_shape
from lightning_ntp.dtensor.rules import on_dim, refuse, with_meta

Origins = Callable[[OpSchema, torch.Size, torch.Size], "list[int | None]"]
"""(schema, shape before, shape after) -> for each dim of the result the dim that it is, or None for a new one."""


def view_rule(
    origins: Origins, size_argument: int | None = None
) -> Callable[[OpSchema, list[DTensorSpec]], OutputSharding]:
    """The rule of an operator with one tensor argument whose result's dims are those of the argument, moved."""

    def rule(schema: OpSchema, specs: list[DTensorSpec]) -> OutputSharding:
        (spec,) = specs
        meta = output_meta(schema)
        placements = _moved(schema, spec, meta.shape, origins(schema, spec.shape, meta.shape))
        output = with_meta(DTensorSpec(spec.mesh, placements), meta)
        return _with_local_sizes(schema, output, size_argument)

    return rule


def _moved(schema: OpSchema, spec: DTensorSpec, shape: torch.Size, origins: list[int | None]) -> tuple[Placement, ...]:
    """The placements with each cut on the dim that it has become."""
    moved: list[Placement] = []
    for placement in spec.placements:
        if isinstance(placement, Replicate):
            moved.append(placement)
            continue
        if not isinstance(placement, UnevenShard) and type(placement) is not Shard:
            refuse(schema.op, [spec], f"{placement} has no rule here")
        if placement.dim not in origins or shape[origins.index(placement.dim)] != spec.shape[placement.dim]:
            refuse(schema.op, [spec], f"dim {placement.dim} is cut and would not stay a whole dim of its own")
        moved.append(on_dim(placement, origins.index(placement.dim)))
    return tuple(moved)


def _with_local_sizes(schema: OpSchema, output: DTensorSpec, size_argument: int | None) -> OutputSharding:
    """The answer, with the size argument (and a stride after it) as the local operator needs them."""
    if size_argument is None or size_argument >= len(schema.args_schema):
        return OutputSharding(output, schema)
    sizes = local_shape(output.shape, output.placements, output.mesh.shape, coordinate_of(output.mesh))
    args = list(schema.args_schema)
    args[size_argument] = sizes
    if schema.op is torch.ops.aten.new_empty_strided.default:
        args[size_argument + 1] = _dense_stride(sizes, output.stride)
    local = OpSchema(schema.op, tuple(args), schema.kwargs_schema)
    return OutputSharding(output, local, needs_redistribute=True, use_val_from_redistribute_schema=True)


def _dense_stride(sizes: Sequence[int], like: Sequence[int]) -> list[int]:
    """Dense strides for `sizes` in the memory order of the strides `like`."""
    stride, step = [0] * len(sizes), 1
    for dim in sorted(range(len(sizes)), key=lambda dim: (like[dim], -dim)):
        stride[dim] = step
        step *= max(sizes[dim], 1)
    return stride


def _argument(schema: OpSchema, position: int, default: Any) -> Any:
    return schema.args_schema[position] if len(schema.args_schema) > position else default


def _dim(schema: OpSchema, position: int, ndim: int, default: int = 0) -> int:
    return _argument(schema, position, default) % max(ndim, 1)


def _slice(schema: OpSchema, before: torch.Size, after: torch.Size) -> list[int | None]:
    dim = _dim(schema, 1, len(before))
    start, stop, step = (_argument(schema, position, None) for position in (2, 3, 4))
    uncut = (start or 0) in (0, -before[dim]) and (stop is None or stop >= before[dim]) and step in (None, 1)
    return [at if at != dim or uncut else None for at in range(len(before))]


def _select(schema: OpSchema, before: torch.Size, after: torch.Size) -> list[int | None]:
    dim = _dim(schema, 1, len(before))
    return [at for at in range(len(before)) if at != dim]


def _unsqueeze(schema: OpSchema, before: torch.Size, after: torch.Size) -> list[int | None]:
    dim = _dim(schema, 1, len(after))
    return [at - (at > dim) if at != dim else None for at in range(len(after))]


def _squeeze(schema: OpSchema, before: torch.Size, after: torch.Size) -> list[int | None]:
    """Only dims named by the call: locally a cut dim of size 1 would vanish with ``squeeze()``."""
    named = _argument(schema, 1, ())
    dims = {dim % len(before) for dim in ([named] if isinstance(named, int) else named)}
    kept = [at for at in range(len(before)) if at not in dims or before[at] != 1]
    return [at if at not in dims else None for at in kept] if dims else [None] * len(after)


def _transpose(schema: OpSchema, before: torch.Size, after: torch.Size) -> list[int | None]:
    order: list[int | None] = list(range(len(before)))
    one, two = _dim(schema, 1, len(before), 0), _dim(schema, 2, len(before), 1)
    if len(before) > 1:
        order[one], order[two] = order[two], order[one]
    return order


def _permute(schema: OpSchema, before: torch.Size, after: torch.Size) -> list[int | None]:
    return [dim % len(before) for dim in _argument(schema, 1, ())]


def _expand(schema: OpSchema, before: torch.Size, after: torch.Size) -> list[int | None]:
    added = len(after) - len(before)
    return [at - added if at >= added else None for at in range(len(after))]


def _view(schema: OpSchema, before: torch.Size, after: torch.Size) -> list[int | None]:
    """A dim survives where as many elements stand before it and it has the same length."""
    origins: list[int | None] = [None] * len(after)
    for dim, length in enumerate(before):
        ahead = math.prod(before[:dim])
        for at, new_length in enumerate(after):
            if length == new_length and math.prod(after[:at]) == ahead and origins[at] is None:
                origins[at] = dim
                break
    return origins


def _new(schema: OpSchema, before: torch.Size, after: torch.Size) -> list[int | None]:
    return list(range(len(before))) if before == after else [None] * len(after)


def new_rule(schema: OpSchema, specs: list[DTensorSpec]) -> OutputSharding:
    """``new_zeros`` and its kin: cut like the tensor for its own shape, replicated for any other."""
    (spec,) = specs
    meta = output_meta(schema)
    if meta.shape != spec.shape:
        everywhere = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim)
        return OutputSharding(with_meta(everywhere, meta), schema)
    return _with_local_sizes(schema, with_meta(DTensorSpec(spec.mesh, spec.placements), meta), 1)


def backward_rule(schema: OpSchema, specs: list[DTensorSpec]) -> OutputSharding:
    """``slice_backward`` and ``select_backward``: the gradient's cuts, on the dims of the tensor that was sliced."""
    (spec,) = specs
    meta = output_meta(schema)
    dim = _dim(schema, 2, len(meta.shape))
    selected = len(meta.shape) > spec.ndim
    origins = [at - (selected and at > dim) if at != dim else None for at in range(len(meta.shape))]
    if not selected and meta.shape[dim] == spec.shape[dim]:
        origins[dim] = dim
    output = with_meta(DTensorSpec(spec.mesh, _moved(schema, spec, meta.shape, origins)), meta)
    return _with_local_sizes(schema, output, 1)


VIEW_RULES = {
    "slice.Tensor": view_rule(_slice),
    "select.int": view_rule(_select),
    "unsqueeze": view_rule(_unsqueeze),
    "squeeze.dim": view_rule(_squeeze),
    "squeeze.dims": view_rule(_squeeze),
    "transpose.int": view_rule(_transpose),
    "t": view_rule(_transpose),
    "permute": view_rule(_permute),
    "expand": view_rule(_expand, 1),
    "view": view_rule(_view, 1),
    "_unsafe_view": view_rule(_view, 1),
    "reshape": view_rule(_view, 1),
    "slice_backward": backward_rule,
    "select_backward": backward_rule,
    "new_empty": new_rule,
    "new_empty_strided": new_rule,
    "new_full": new_rule,
    "new_ones": new_rule,
    "new_zeros": new_rule,
}
"""Name with overload -> rule. All take their tensor first; plain arguments from position 1 on decide about the answer."""

STATIC_FROM = 1
