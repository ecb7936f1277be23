"""How an operator's sharding rule is written: shared pieces, and the two rules that most operators follow.

elementwise      cut like the operands; replicated operands are cut locally to match (no communication)
foreach, fused   the same, position by position of the lists
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_ntp.dtensor._torch_private import (
    DTensorSpec,
    OpOverload,
    OpSchema,
    OutputSharding,
    TensorMeta,
    output_meta,
)
from lightning_ntp.dtensor.placement import UnevenShard, is_uneven
from lightning_ntp.errors import UnsupportedOpError

Rule = Callable[[OpSchema, list[DTensorSpec]], OutputSharding]


def refuse(operator: OpOverload, specs: Sequence[DTensorSpec], why: str) -> NoReturn:
    """Raises `UnsupportedOpError` for an operator that would need a rule that we do not have.

    A `NotImplementedError` passes through DTensor's dispatch as it is, and lets it take composite operators apart first.
    """
    met = ", ".join(f"{tuple(spec.shape)} {list(spec.placements)}" for spec in specs)
    raise UnsupportedOpError(
        f"{operator} on tensors cut by an UnevenShard ({met}): {why}. Call .full_tensor() to compute on the whole tensor "
        "(collective), or .to_local() to compute on this worker's part"
    )


def tensor_specs(arguments: Sequence[Any]) -> Iterator[DTensorSpec]:
    """All tensor arguments in order, those in lists too."""
    for argument in arguments:
        if isinstance(argument, DTensorSpec):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from tensor_specs(argument)


def is_scalar(spec: DTensorSpec) -> bool:
    """A replicated tensor of one element: it fits beside any placement, on whatever mesh it is."""
    return all(isinstance(p, Replicate) for p in spec.placements) and spec.shape.numel() == 1


def align(
    operator: OpOverload, specs: Sequence[DTensorSpec], shape: torch.Size
) -> tuple[DTensorSpec, list[DTensorSpec]]:
    """The spec of an elementwise result of `shape`, and those that the operands must have for it.

    Only a replicated operand changes its spec: cutting it is local. Scalars stay as they are.
    """
    lead = next((spec for spec in specs if is_uneven(spec.placements)), specs[0])
    tensors = [spec for spec in specs if spec is lead or not is_scalar(spec)]
    if any(spec.mesh != lead.mesh for spec in tensors):
        refuse(operator, tensors, "they live on different meshes")
    placements = tuple(_common(operator, tensors, shape, axis) for axis in range(lead.mesh.ndim))
    operands = [_cut_like(spec, placements, shape) if spec is lead or not is_scalar(spec) else spec for spec in specs]
    return DTensorSpec(lead.mesh, placements), operands


def _common(operator: OpOverload, specs: Sequence[DTensorSpec], shape: torch.Size, axis: int) -> Placement:
    """The one cut along a mesh axis that all operands agree on, in the dims of the result."""
    found: Placement | None = None
    for spec in specs:
        placement = spec.placements[axis]
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, UnevenShard) and type(placement) is not Shard:
            refuse(operator, specs, f"{placement} cannot be combined with it")
        dim = placement.dim + len(shape) - spec.ndim
        if spec.shape[placement.dim] != shape[dim]:
            refuse(operator, specs, f"dim {placement.dim} is cut and would be broadcast")
        moved = on_dim(placement, dim)
        if found is not None and moved != found:
            refuse(
                operator,
                specs,
                "the operands are cut differently; .redistribute() one of them to the other's placements",
            )
        found = moved
    return found or Replicate()


def on_dim(placement: UnevenShard | Shard, dim: int) -> UnevenShard | Shard:
    """The same cut of another dim."""
    return placement.moved_to(dim) if isinstance(placement, UnevenShard) else Shard(dim)


def _cut_like(spec: DTensorSpec, placements: Sequence[Placement], shape: torch.Size) -> DTensorSpec:
    """The spec of an operand once it is cut where the result is cut, except along dims that it broadcasts."""
    cut: list[Placement] = []
    for placement in placements:
        kept: Placement = Replicate()
        if isinstance(placement, UnevenShard | Shard):
            dim = placement.dim - len(shape) + spec.ndim
            if dim >= 0 and spec.shape[dim] == shape[dim - spec.ndim]:
                kept = on_dim(placement, dim)
        cut.append(kept)
    return DTensorSpec(spec.mesh, tuple(cut), tensor_meta=spec.tensor_meta)


def answer(
    schema: OpSchema, output: Any, wanted: Sequence[DTensorSpec], specs: Sequence[DTensorSpec]
) -> OutputSharding:
    """What DTensor takes as the answer: the result's spec, and the operands' specs where some have to be cut first."""
    fits = all(want.placements == spec.placements for want, spec in zip(wanted, specs, strict=True))
    if fits:
        return OutputSharding(output, schema)
    num_keyword = sum(1 for _ in tensor_specs(list(schema.kwargs_schema.values())))
    positional = len(specs) - num_keyword
    if any(w.placements != s.placements for w, s in zip(wanted[positional:], specs[positional:], strict=True)):
        refuse(schema.op, specs, "a keyword argument is not cut like the others")
    remaining = iter(wanted)
    args = _replace_specs(schema.args_schema, remaining)
    return OutputSharding(output, OpSchema(schema.op, args, schema.kwargs_schema), needs_redistribute=True)


def _replace_specs(arguments: Any, remaining: Iterator[DTensorSpec]) -> Any:
    if isinstance(arguments, DTensorSpec):
        return next(remaining)
    if isinstance(arguments, list | tuple):
        return type(arguments)(_replace_specs(argument, remaining) for argument in arguments)
    return arguments


def elementwise_rule(schema: OpSchema, specs: list[DTensorSpec]) -> OutputSharding:
    """The result is cut where the operands are; an operand that is written to must be cut that way already."""
    meta = output_meta(schema)
    if meta is None:
        refuse(schema.op, specs, "its result is no tensor")
    shape = meta.shape if isinstance(meta, TensorMeta) else meta[0].shape
    result, wanted = align(schema.op, specs, shape)
    writes_first = schema.is_inplace_op() and specs[0].placements != result.placements
    if writes_first:
        refuse(schema.op, specs, "the tensor that is written to is not cut like its operands; .redistribute() it first")
    return answer(schema, with_meta(result, meta), wanted, specs)


def with_meta(result: DTensorSpec, meta: Any) -> Any:
    """The spec with the shape, stride and dtype of the result, or one per result."""
    if meta is None:
        return None
    if isinstance(meta, TensorMeta):
        return result.shallow_copy_with_tensor_meta(meta)
    return tuple(None if one is None else result.shallow_copy_with_tensor_meta(one) for one in meta)


def list_rule(schema: OpSchema, specs: list[DTensorSpec]) -> OutputSharding:
    """foreach and fused operators: position i of every list is one elementwise operation; what is no list joins each."""
    arguments = (*schema.args_schema, *schema.kwargs_schema.values())
    lists = [a for a in arguments if isinstance(a, list | tuple) and a and isinstance(a[0], DTensorSpec)]
    shared = [a for a in arguments if isinstance(a, DTensorSpec)]
    if not all(is_scalar(spec) for spec in shared):
        refuse(schema.op, specs, "an operand outside the lists is no scalar")
    metas = output_meta(schema)
    results: list[DTensorSpec] = []
    aligned: dict[tuple[int, int], DTensorSpec] = {}
    for position in range(len(lists[0])):
        operands = [one[position] for one in lists]
        shape = operands[0].shape if metas is None else metas[position].shape
        result, wanted = align(schema.op, operands, shape)
        if metas is None and operands[0].placements != result.placements:
            refuse(
                schema.op,
                operands,
                "the tensor that is written to is not cut like its operands; .redistribute() it first",
            )
        results.append(result)
        aligned.update({(number, position): spec for number, spec in enumerate(wanted)})
    wanted_specs = _in_argument_order(arguments, aligned)
    output = (
        None
        if metas is None
        else tuple(r.shallow_copy_with_tensor_meta(m) for r, m in zip(results, metas, strict=True))
    )
    return answer(schema, output, wanted_specs, specs)


def _in_argument_order(arguments: Sequence[Any], aligned: dict[tuple[int, int], DTensorSpec]) -> list[DTensorSpec]:
    ordered, number = [], 0
    for argument in arguments:
        if isinstance(argument, DTensorSpec):
            ordered.append(argument)
        elif isinstance(argument, list | tuple) and argument and isinstance(argument[0], DTensorSpec):
            ordered += [aligned[number, position] for position in range(len(argument))]
            number += 1
    return ordered
