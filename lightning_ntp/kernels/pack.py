"""Rectangles of flat buffers gathered into one send buffer, and what arrived put back; `reference.move_blocks` defines it.

    buffer --pack--> run of peer 0 | pad | run of peer 1 | pad ... --exchange--> ... --unpack--> buffer

[Note: one kernel for all plans] Slices in a Python loop would be unrolled into one kernel per piece and compiled anew for every
bucket. The compiled version reads the rectangles from a small table instead and finds each element's place from its number, so
that one kernel per pair of dtypes serves all buckets, before and after a loss.
"""

from __future__ import annotations

import torch

from lightning_ntp.errors import PlanMismatchError
from lightning_ntp.kernels.blocks import Moves, PackedRuns
from lightning_ntp.kernels.compile import compiled
from lightning_ntp.kernels.reference import move_blocks as reference_move_blocks

__all__ = ["move_blocks", "pack", "unpack"]


def _places(table: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(numel,) each: where every element comes from, and where it goes to."""
    number = torch.arange(numel, device=table.device)
    which = torch.bucketize(number, table[0], right=True) - 1
    first, columns, source_offset, source_stride, offset, stride = table[:, which].unbind(0)
    row = (number - first) // columns
    column = (number - first) - row * columns
    return source_offset + row * source_stride + column, offset + row * stride + column


def _copy_indexed(
    source: torch.Tensor, destination: torch.Tensor, table: torch.Tensor, numel: int, scale: float
) -> None:
    origin, to = _places(table, numel)
    moved = source[origin].to(torch.promote_types(source.dtype, destination.dtype)) * scale
    destination.index_put_((to,), moved.to(destination.dtype))


def _add_indexed(
    source: torch.Tensor, destination: torch.Tensor, table: torch.Tensor, numel: int, scale: float
) -> None:
    origin, to = _places(table, numel)
    wide = torch.promote_types(source.dtype, destination.dtype)
    total = destination[to].to(wide) + source[origin].to(wide) * scale
    destination.index_put_((to,), total.to(destination.dtype))


# Two functions: dynamo keeps at most eight compiled versions of each, and every pair of dtypes is one.
_copy_generated = torch.compile(_copy_indexed, dynamic=True, fullgraph=True)
_add_generated = torch.compile(_add_indexed, dynamic=True, fullgraph=True)


@torch.no_grad()
def _move_compiled(
    source: torch.Tensor, destination: torch.Tensor, moves: Moves, add: bool = False, scale: float = 1.0
) -> None:
    # Sizes of 1 would each be compiled apart.
    if min(moves.numel, source.numel(), destination.numel()) < 2:
        reference_move_blocks(source, destination, moves, add, scale)
        return
    run = _add_generated if add else _copy_generated
    run(source, destination, moves.table(source.device), moves.numel, scale)


move_blocks = compiled(reference_move_blocks, _move_compiled)


@torch.no_grad()
def pack(buffer: torch.Tensor, runs: PackedRuns, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
    """Gather each peer's rectangles into one flat buffer.

    Args:
        buffer: 1-D.
        runs: what goes to whom; its ``item_bytes`` are those of `dtype`.
        dtype: of the result; that of `buffer` by default.
        scale: factor, applied in the wider of the two dtypes.

    Returns:
        1-D, ``sum(runs.sizes)`` elements; padding is 0.

    Raises:
        PlanMismatchError: the buffer is too short for the rectangles, or `dtype` has another width than planned.

    Local.
    """
    packed = torch.zeros(sum(runs.sizes), dtype=dtype or buffer.dtype, device=buffer.device)
    _check(buffer, runs.packing.source_end, packed, runs)
    move_blocks(buffer, packed, runs.packing, scale=scale)
    return packed


@torch.no_grad()
def unpack(packed: torch.Tensor, runs: PackedRuns, buffer: torch.Tensor, add: bool = False, scale: float = 1.0) -> None:
    """Put each peer's run back into the rectangles of `buffer`, in place, peer after peer.

    Args:
        packed: 1-D, ``sum(runs.sizes)`` elements.
        runs: what came from whom.
        buffer: 1-D.
        add: add to what is there rather than overwrite it.
        scale: factor of what is put, applied in the wider of the two dtypes.

    Raises:
        PlanMismatchError: a buffer has another size, or a dtype of another width, than planned.

    Local.
    """
    if packed.numel() != sum(runs.sizes):
        raise PlanMismatchError(f"got {packed.numel()} packed elements, planned {runs.sizes}")
    _check(buffer, runs.unpacking.destination_end, packed, runs)
    for moves in runs.unpacking_by_peer if add else (runs.unpacking,):
        move_blocks(packed, buffer, moves, add=add, scale=scale)


def _check(buffer: torch.Tensor, end: int, packed: torch.Tensor, runs: PackedRuns) -> None:
    if end > buffer.numel():
        raise PlanMismatchError(f"rectangles reach to element {end} of a buffer of {buffer.numel()}")
    if packed.element_size() != runs.item_bytes:
        raise PlanMismatchError(f"packed elements of {runs.item_bytes} bytes were planned, got {packed.dtype}")
