"""How unevenly cut tensors change their placements: gather, exchange, cut. Also `distribute`, the way in.

    UnevenShard -> Replicate      all-gather of each role's part, put together in logical order
    UnevenShard -> UnevenShard    all-to-all of what a role lacks; what it already stores stays
    Replicate   -> UnevenShard    a local cut
    UnevenShard <-> Shard         through Replicate along that axis

`DTensor.redistribute`, `DTensor.full_tensor` and their gradients come here through the hooks in `_torch_private.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_ntp.dtensor._torch_private import (
    DTensorSpec,
    Redistribute,
    hook_global_info,
    hook_local_shape,
    hook_redistribute,
)
from lightning_ntp.dtensor.collectives import broadcast_in_place, exchange_rows, gather_stacked
from lightning_ntp.dtensor.placement import (
    UnevenShard,
    check_placements,
    chunk,
    coordinate_of,
    is_uneven,
    local_shape,
    whole_stride,
    wrap_local,
)
from lightning_ntp.errors import ConfigError, UnsupportedOpError
from lightning_ntp.layout import Span, intersect, subtract


def distribute(
    tensor: torch.Tensor, mesh: DeviceMesh, placement: Placement | Sequence[Placement], src: int | None = None
) -> DTensor:
    """Cut a whole tensor into a leaf DTensor.

    Args:
        tensor: the logical tensor; with `src` only its shape and dtype matter elsewhere.
        mesh: the tp mesh, or one with more axes.
        placement: an `UnevenShard` for a mesh of one axis, else one placement per axis.
        src: position along each axis whose tensor counts, as `src_data_rank` of `distribute_tensor`; None: every worker
            trusts its own.

    Raises:
        ConfigError: placements that do not fit mesh and shape.

    Local without `src`, else collective over the mesh.
    """
    placements = check_placements(mesh, [placement] if isinstance(placement, Placement) else placement, tensor.shape)
    whole = tensor.detach()
    if src is not None:
        whole = whole.clone(memory_format=torch.contiguous_format)
        for axis in range(mesh.ndim):
            group = mesh.get_group(axis)
            broadcast_in_place(whole, torch.distributed.get_global_rank(group, src), group)
    local = _cut(whole, placements, mesh)
    with torch.no_grad():
        cut = wrap_local(local, mesh, placements, tensor.shape)
    cut.requires_grad_(tensor.requires_grad)
    return cut


def _cut(whole: torch.Tensor, placements: Sequence[Placement], mesh: DeviceMesh) -> torch.Tensor:
    """The local part of a tensor that is whole on every worker. Local."""
    everywhere: list[Placement] = [Replicate()] * mesh.ndim
    move = _Move(whole, mesh, list(whole.shape), everywhere)
    move.cut_unevenly(placements)
    move.cut_evenly(placements)
    return move.local


def redistribute_local(
    stock: Redistribute, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, options: dict[str, Any]
) -> torch.Tensor:
    """Local tensor for `target` of the one for `source`; passes on to torch what has no `UnevenShard`.

    Collective over the axes whose placement changes (and those that cut the same dims).
    """
    if not is_uneven(source.placements) and not is_uneven(target.placements):
        return stock(local, source, target, **options)
    if source.mesh != target.mesh:
        raise UnsupportedOpError(
            f"{list(source.placements)}: redistribute works within one mesh; go through .full_tensor()"
        )
    start = _without_partial(source, target)
    if start is not source:
        local = stock(local, source, start)
    whole = [Replicate() if isinstance(p, Partial) else p for p in target.placements]
    check_placements(source.mesh, whole, source.shape)
    move = _Move(local, source.mesh, list(source.shape), list(start.placements))
    move.run(target.placements)
    return move.local


def _without_partial(source: DTensorSpec, target: DTensorSpec) -> DTensorSpec:
    """`source` with pending sums resolved along the axes that change."""
    pairs = list(zip(source.placements, target.placements, strict=True))
    if any(isinstance(new, Partial) and new != old for old, new in pairs):
        raise UnsupportedOpError(
            f"cannot redistribute {list(source.placements)} to {list(target.placements)}: Partial target"
        )
    resolved = tuple(Replicate() if isinstance(old, Partial) and old != new else old for old, new in pairs)
    if resolved == source.placements:
        return source
    if is_uneven(source.placements):
        raise UnsupportedOpError(
            f"cannot redistribute {list(source.placements)} to {list(target.placements)} in one step: "
            f".redistribute() to {list(resolved)} first"
        )
    return DTensorSpec(source.mesh, resolved, tensor_meta=source.tensor_meta)


class _Move:
    """A local tensor on its way: `placements` says at every moment how it is cut. See [Note: order of the cuts]."""

    def __init__(self, local: torch.Tensor, mesh: DeviceMesh, shape: list[int], placements: list[Placement]) -> None:
        self.local, self.mesh, self.shape, self.placements = local, mesh, shape, placements
        self.coordinate = coordinate_of(mesh)

    def run(self, target: Sequence[Placement]) -> None:
        """Undo the inner cuts (Shard, last axis first), change the outer ones, redo the inner ones."""
        changed = [axis for axis, (old, new) in enumerate(zip(self.placements, target, strict=True)) if old != new]
        pairs = [p for axis in changed for p in (self.placements[axis], target[axis])]
        dims = {p.dim for p in pairs if isinstance(p, UnevenShard | Shard)}
        for axis in reversed(range(self.mesh.ndim)):
            placement = self.placements[axis]
            if isinstance(placement, Shard) and placement.dim in dims:
                self.gather_evenly(axis, placement)
        for axis in changed:
            old, new = self.placements[axis], target[axis]
            if isinstance(old, UnevenShard):
                if isinstance(new, UnevenShard) and new.dim == old.dim:
                    self.exchange(axis, old, new)
                else:
                    self.gather_unevenly(axis, old)
        self.cut_unevenly(target)
        self.cut_evenly(target)

    def gather_evenly(self, axis: int, placement: Shard) -> None:
        """Shard -> Replicate. Collective over the axis."""
        self.placements[axis] = Replicate()
        length = local_shape(self.shape, self.placements, self.mesh.shape, self.coordinate)[placement.dim]
        rows = _padded(self.local.movedim(placement.dim, 0), -(-length // self.mesh.size(axis)))
        stacked = gather_stacked(rows, self._group(axis))
        self.local = stacked.narrow(0, 0, length).movedim(0, placement.dim).contiguous()

    def gather_unevenly(self, axis: int, placement: UnevenShard) -> None:
        """UnevenShard -> Replicate; an element with copies is taken from its owner. Collective over the axis."""
        self.placements[axis] = Replicate()
        positions = range(self.mesh.size(axis))
        longest = max(placement.local_size(position) for position in positions)
        stacked = gather_stacked(_padded(self.local.movedim(placement.dim, 0), longest), self._group(axis))
        runs = [
            (run.span.start, position * longest + run.second_offset, len(run.span))
            for position in positions
            for run in intersect(placement.owned(position), placement.spans(position))
        ]
        whole = _rows(stacked, [(start, length) for _, start, length in sorted(runs)])
        self.local = whole.movedim(0, placement.dim).contiguous()

    def exchange(self, axis: int, old: UnevenShard, new: UnevenShard) -> None:
        """UnevenShard -> UnevenShard of the same dim: each role gets what it lacks from the owner. Collective over the axis."""
        self.placements[axis] = new
        me, peers = self.coordinate[axis], range(self.mesh.size(axis))
        rows = self.local.movedim(old.dim, 0)
        give = [_runs(_lacking(old, new, peer, me), old.spans(me)) for peer in peers]
        get = [_runs(_lacking(old, new, me, peer), new.spans(me)) for peer in peers]
        sent = _rows(rows, [run for runs in give for run in runs])
        received = exchange_rows(sent, _lengths(give), _lengths(get), self._group(axis))
        kept = [(run.first_offset, run.second_offset, len(run.span)) for run in intersect(new.spans(me), old.spans(me))]
        pieces = [(at, rows.narrow(0, start, length)) for at, start, length in kept]
        starts = [at for runs in get for at, _ in runs]
        lengths = [length for runs in get for _, length in runs]
        pieces += zip(starts, received.split(lengths), strict=True) if lengths else []
        ordered = [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]
        merged = torch.cat(ordered) if ordered else rows.narrow(0, 0, 0).clone()
        self.local = merged.movedim(0, old.dim).contiguous()

    def cut_unevenly(self, target: Sequence[Placement]) -> None:
        """Replicate -> UnevenShard. Local."""
        for axis, new in enumerate(target):
            if isinstance(new, UnevenShard) and isinstance(self.placements[axis], Replicate):
                self.placements[axis] = new
                runs = [(span.start, len(span)) for span in new.spans(self.coordinate[axis])]
                self.local = _rows(self.local.movedim(new.dim, 0), runs).movedim(0, new.dim).contiguous()

    def cut_evenly(self, target: Sequence[Placement]) -> None:
        """Replicate -> Shard. Local."""
        for axis, new in enumerate(target):
            if isinstance(new, Shard) and isinstance(self.placements[axis], Replicate):
                self.placements[axis] = new
                run = chunk(self.local.shape[new.dim], self.mesh.size(axis), self.coordinate[axis])
                self.local = _rows(self.local.movedim(new.dim, 0), [run]).movedim(0, new.dim).contiguous()

    def _group(self, axis: int) -> ProcessGroup:
        return self.mesh.get_group(axis)


def _lacking(old: UnevenShard, new: UnevenShard, receiver: int, sender: int) -> tuple[Span, ...]:
    """What the receiver needs, does not store yet, and the sender owns; in the receiver's storage order."""
    if receiver == sender:
        return ()
    wanted = subtract(new.spans(receiver), old.spans(receiver))
    return tuple(run.span for run in intersect(wanted, old.owned(sender)))


def _runs(spans: Sequence[Span], stored: Sequence[Span]) -> list[tuple[int, int]]:
    """Stored positions of `spans`, as (start, length), in the order of `spans`."""
    return [(run.second_offset, len(run.span)) for run in intersect(spans, stored)]


def _lengths(side: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    """Rows per peer."""
    return [sum(length for _, length in runs) for runs in side]


def _rows(tensor: torch.Tensor, runs: Iterable[tuple[int, int]]) -> torch.Tensor:
    """A copy of some runs of rows, one after the other."""
    pieces = [tensor.narrow(0, start, length) for start, length in runs]
    return torch.cat(pieces) if pieces else tensor.narrow(0, 0, 0).clone()


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - rows.shape[0]
    return rows if missing == 0 else torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])


def _global_info(stock: Any, local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Any:
    """Logical shape and stride of a local tensor; a `Shard` beside an `UnevenShard` is taken to divide, as torch does."""
    if not is_uneven(placements):
        return stock(local, mesh, placements)
    shape = list(local.shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shape[placement.dim] *= mesh.size(axis)
    for placement in placements:
        if isinstance(placement, UnevenShard):
            shape[placement.dim] = placement.layout.size
    return shape, list(whole_stride(shape, local))


def _refuse_chunks(placements: Sequence[Placement]) -> None:
    if is_uneven(placements):
        raise ConfigError(
            f"{list(placements)} stores no single chunk of the whole tensor, so torch's checkpoint planner and its DTensor "
            "factories cannot describe it; save with the strategy's checkpoints, build with distribute(), or pass .full_tensor()"
        )


def install() -> None:
    """Hook the moves into DTensor; done once, by the package's import."""
    hook_redistribute(redistribute_local)
    hook_global_info(_global_info)
    hook_local_shape(_refuse_chunks)
