"""Sums, extrema and norms of unevenly cut tensors: each element counts once, at its owner.

Collective over the axes that cut a reduced dim; local otherwise. Half precision is summed in float32.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_ntp.dtensor._torch_private import DTensorSpec, OpOverload, local_of, make_dtensor, spec_of
from lightning_ntp.dtensor.collectives import reduce_over
from lightning_ntp.dtensor.placement import UnevenShard, coordinate_of, local_spans
from lightning_ntp.dtensor.rules import on_dim, refuse
from lightning_ntp.layout import intersect

Dims = Sequence[int] | int | None


def owned_part(tensor: DTensor, dims: Sequence[int]) -> torch.Tensor:
    """The local tensor without what a lower role stores as well, along `dims`. Local."""
    spec, local = spec_of(tensor), local_of(tensor)
    at = coordinate_of(spec.mesh)
    for placement in spec.placements:
        if isinstance(placement, UnevenShard) and placement.layout.overlaps and placement.dim in dims:
            cut = (placement.dim, spec.shape[placement.dim], spec.placements, spec.mesh.shape, at)
            kept = intersect(local_spans(*cut, owned=True), local_spans(*cut))
            pieces = [local.narrow(placement.dim, run.second_offset, len(run.span)) for run in kept]
            local = torch.cat(pieces, placement.dim) if pieces else local.narrow(placement.dim, 0, 0)
    return local


def reduce_dims(
    operator: OpOverload, tensor: DTensor, dims: Dims, keepdim: bool, combine: str, prepare: Any = None
) -> tuple[torch.Tensor, tuple[Placement, ...], list[int]]:
    """Reduce over `dims` (None or empty: all): (local result, its placements, its logical shape).

    Args:
        combine: "sum", "max" or "min".
        prepare: an elementwise function that comes first.
    """
    spec = spec_of(tensor)
    gone = _normal(dims, spec.ndim)
    groups = cut_groups(operator, spec, gone)
    local = owned_part(tensor, gone)
    result = _locally(local if prepare is None else prepare(local), gone, keepdim, combine)
    for group in groups:
        result = reduce_over(result, combine, group)
    kept = [at for at in range(spec.ndim) if keepdim or at not in gone]
    placements = tuple(
        on_dim(p, kept.index(p.dim)) if isinstance(p, UnevenShard | Shard) and p.dim not in gone else Replicate()
        for p in spec.placements
    )
    return result, placements, [1 if at in gone else spec.shape[at] for at in kept]


def cut_groups(operator: OpOverload, spec: DTensorSpec, dims: Sequence[int]) -> list[ProcessGroup]:
    """The groups over which a reduction of `dims` has to be completed."""
    groups = []
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, UnevenShard) and type(placement) is not Shard:
            refuse(operator, [spec], f"{placement} has no rule here")
        if placement.dim in dims:
            groups.append(spec.mesh.get_group(axis))
    return groups


def _normal(dims: Dims, ndim: int) -> list[int]:
    named = [dims] if isinstance(dims, int) else list(dims or range(ndim))
    return sorted({dim % ndim for dim in named})


def _locally(local: torch.Tensor, dims: list[int], keepdim: bool, combine: str) -> torch.Tensor:
    if combine == "sum":
        return local.sum(dims, keepdim)
    if all(local.shape[dim] for dim in dims):
        return local.amax(dims, keepdim) if combine == "max" else local.amin(dims, keepdim)
    bounds = torch.finfo(local.dtype) if local.dtype.is_floating_point else torch.iinfo(local.dtype)
    infinite = math.inf if local.dtype.is_floating_point else bounds.max
    nothing = -infinite if combine == "max" else infinite
    return local.new_full(
        [1 if at in dims else n for at, n in enumerate(local.shape) if keepdim or at not in dims], nothing
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _wrapped(
    tensor: DTensor, parts: tuple[torch.Tensor, tuple[Placement, ...], list[int]], dtype: torch.dtype
) -> DTensor:
    local, placements, shape = parts
    return make_dtensor(local.to(dtype), spec_of(tensor), shape, placements)


def sum_handler(
    operator: OpOverload, tensor: DTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> DTensor:
    """``sum`` and ``sum.dim_IntList``."""
    out = dtype or (tensor.dtype if tensor.dtype.is_floating_point or tensor.dtype.is_complex else torch.int64)
    parts = reduce_dims(operator, tensor, dim, keepdim, "sum", lambda local: local.to(_wide(out)))
    return _wrapped(tensor, parts, out)


def mean_handler(
    operator: OpOverload, tensor: DTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> DTensor:
    """``mean`` and ``mean.dim``."""
    out = dtype or tensor.dtype
    local, placements, shape = reduce_dims(operator, tensor, dim, keepdim, "sum", lambda x: x.to(_wide(out)))
    count = math.prod(tensor.shape[at] for at in _normal(dim, tensor.ndim))
    return _wrapped(tensor, (local / count, placements, shape), out)


def amax_handler(operator: OpOverload, tensor: DTensor, dim: Dims = None, keepdim: bool = False) -> DTensor:
    """``amax`` and ``max`` without a dim."""
    return _wrapped(tensor, reduce_dims(operator, tensor, dim, keepdim, "max"), tensor.dtype)


def amin_handler(operator: OpOverload, tensor: DTensor, dim: Dims = None, keepdim: bool = False) -> DTensor:
    """``amin`` and ``min`` without a dim."""
    return _wrapped(tensor, reduce_dims(operator, tensor, dim, keepdim, "min"), tensor.dtype)


def any_handler(operator: OpOverload, tensor: DTensor) -> DTensor:
    """``any`` over the whole tensor."""
    return _wrapped(
        tensor, reduce_dims(operator, tensor, None, False, "max", lambda x: (x != 0).to(torch.uint8)), torch.bool
    )


def all_handler(operator: OpOverload, tensor: DTensor) -> DTensor:
    """``all`` over the whole tensor."""
    return _wrapped(
        tensor, reduce_dims(operator, tensor, None, False, "min", lambda x: (x != 0).to(torch.uint8)), torch.bool
    )


def _powers(order: float, dtype: torch.dtype) -> tuple[str, Any]:
    """How elements enter a norm: (combine, elementwise function)."""
    if order in (math.inf, -math.inf):
        return ("max" if order > 0 else "min"), lambda local: local.abs().to(dtype)
    if order == 0:
        return "sum", lambda local: (local != 0).to(dtype)
    return "sum", lambda local: local.to(dtype).abs().pow(order)


def _root(powers: torch.Tensor, order: float) -> torch.Tensor:
    return powers if order in (0, math.inf, -math.inf) else powers.pow(1.0 / order)


def vector_norm_handler(
    operator: OpOverload,
    tensor: DTensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> DTensor:
    """``linalg_vector_norm``."""
    out = dtype or tensor.dtype
    combine, prepare = _powers(ord, _wide(out))
    local, placements, shape = reduce_dims(operator, tensor, dim, keepdim, combine, prepare)
    return _wrapped(tensor, (_root(local, ord), placements, shape), out)


def foreach_norm_handler(
    operator: OpOverload,
    tensors: Sequence[DTensor],
    ord: float = 2,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """``_foreach_norm``: plain scalars, equal on all workers, one reduction per set of groups.

    Plain, so that ``clip_grad_norm_`` can stack the norms of parameters that live on different meshes.
    """
    out = [dtype or tensor.dtype for tensor in tensors]
    norms: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    together: dict[tuple[torch.dtype, tuple[ProcessGroup, ...]], list[int]] = defaultdict(list)
    combine, _ = _powers(ord, torch.float32)
    for number, tensor in enumerate(tensors):
        dims = range(tensor.ndim)
        together[_wide(out[number]), tuple(cut_groups(operator, spec_of(tensor), dims))].append(number)
        _, prepare = _powers(ord, _wide(out[number]))
        norms[number] = _locally(prepare(owned_part(tensor, dims)), list(dims), False, combine)
    for (_, groups), numbers in together.items():
        stacked = torch.stack([norms[number] for number in numbers])
        for group in groups:
            stacked = reduce_over(stacked, combine, group)
        for number, powers in zip(numbers, stacked.unbind(), strict=True):
            norms[number] = _root(powers, ord).to(out[number])
    return norms


aten = torch.ops.aten
HANDLERS: dict[OpOverload, Any] = {
    aten.sum.default: sum_handler,
    aten.sum.dim_IntList: sum_handler,
    aten.mean.default: mean_handler,
    aten.mean.dim: mean_handler,
    aten.amax.default: amax_handler,
    aten.max.default: amax_handler,
    aten.amin.default: amin_handler,
    aten.min.default: amin_handler,
    aten.any.default: any_handler,
    aten.all.default: all_handler,
    aten.linalg_vector_norm.default: vector_norm_handler,
    aten._foreach_norm.Scalar: foreach_norm_handler,
}
