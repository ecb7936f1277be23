"""`UnevenShard`: a dim cut by a `ShardLayout`, and how a local tensor becomes a DTensor that carries it.

[Note: why the placement is not a Shard]
A subclass of `Shard` loses its fields in equality, hash, pickle and arithmetic, and DTensor's spec refuses one that compares
honestly. A direct subclass of `Placement` keeps them, and stock code that knows only its own placements then stops at ours
instead of assuming equal chunks. What stock code must do with it is in `dispatch.py` and `redistribute.py`.

[Note: order of the cuts]
On a mesh with several axes an `UnevenShard` is applied first and the `Shard` of other axes cut the role's local tensor. This
is what FSDP2 does when it shards a parameter that is already a DTensor on the tp axis: ``(Shard(0), UnevenShard(0))`` means
that each role's rows are divided over the fsdp axis.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_ntp.errors import ConfigError
from lightning_ntp.layout import ShardLayout, Span, merge_runs, slice_storage


class UnevenShard(Placement):
    """Dim `dim` is cut by `layout`; the worker at position i along the mesh axis plays the role ``layout.roles[i]``.

    An immutable value: equal exactly when dim and layout are. Layouts may overlap; the lowest role owns a shared element.

    Args:
        dim: the dim that is cut, counted from the front.
        layout: which elements of it each role stores, in storage order.

    Raises:
        ConfigError: `dim` is negative.
    """

    def __init__(self, dim: int, layout: ShardLayout) -> None:
        super().__init__()  # the C++ base crashes at the first op without it
        if dim < 0:
            raise ConfigError(f"UnevenShard counts dims from the front, got dim={dim}; add the number of dims to it")
        self.dim = dim
        self.layout = layout
        self._hash = hash((dim, layout))

    def local_size(self, position: int) -> int:
        """Elements of the dim that the worker at `position` along the mesh axis stores."""
        return self.layout.local_size(self.layout.roles[position])

    def spans(self, position: int) -> tuple[Span, ...]:
        """The logical spans that it stores, in storage order."""
        return self.layout.of(self.layout.roles[position])

    def owned(self, position: int) -> tuple[Span, ...]:
        """The spans that it stores and no lower role does."""
        return self.layout.owned(self.layout.roles[position])

    def moved_to(self, dim: int) -> UnevenShard:
        """The same cut of another dim: what a transpose or a broadcast makes of it."""
        return self if dim == self.dim else UnevenShard(dim, self.layout)

    def is_shard(self, dim: int | None = None) -> bool:
        """False: see [Note: why the placement is not a Shard]."""
        return False

    def is_replicate(self) -> bool:
        """False."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """False."""
        return False

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, UnevenShard) and self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    @property
    def _key(self) -> tuple[int, ShardLayout]:
        return (self.dim, self.layout)

    def __reduce__(self) -> tuple[type[UnevenShard], tuple[int, ShardLayout]]:
        return UnevenShard, self._key

    def __deepcopy__(self, memo: dict[int, object]) -> UnevenShard:
        return self

    def __repr__(self) -> str:
        """Sizes, and a digest where they do not tell the layout: torch keys its compile cache by repr."""
        sizes = "|".join(str(self.layout.local_size(role)) for role in self.layout.roles)
        in_order = merge_runs(span for role in self.layout.roles for span in self.layout.of(role))
        plain = self.layout.roles == tuple(range(self.layout.degree)) and in_order in ((), (Span(0, self.layout.size),))
        digest = "" if plain else f" #{hashlib.sha256(repr(self.layout).encode()).hexdigest()[:8]}"
        return f"UnevenShard(dim={self.dim}, {sizes}{digest})"

    __str__ = __repr__

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """An expression that makes it again, and the names in it: how torch.compile writes a constant into a graph."""
        held = (
            f"({role}, ({''.join(f'Span({s.start}, {s.stop}), ' for s in spans)}))" for role, spans in self.layout.spans
        )
        layout = f"ShardLayout({self.layout.size}, ({''.join(f'{part}, ' for part in held)}))"
        return f"UnevenShard({self.dim}, {layout})", {
            "UnevenShard": UnevenShard,
            "ShardLayout": ShardLayout,
            "Span": Span,
        }


def is_uneven(placements: Sequence[Placement]) -> bool:
    """Whether one of the placements is an `UnevenShard`."""
    return any(isinstance(placement, UnevenShard) for placement in placements)


def chunk(length: int, num_chunks: int, position: int) -> tuple[int, int]:
    """Start and length of a chunk as `torch.chunk` cuts it: the first ones are full, the last may be short or empty."""
    width = -(-length // num_chunks)
    start = min(position * width, length)
    return start, min(width, length - start)


def local_shape(
    whole_shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> list[int]:
    """Shape that the worker at `coordinate` of the mesh stores; see [Note: order of the cuts]. Local."""
    shape = list(whole_shape)
    for placement, position in zip(placements, coordinate, strict=True):
        if isinstance(placement, UnevenShard):
            shape[placement.dim] = placement.local_size(position)
    for placement, axis_size, position in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] = chunk(shape[placement.dim], axis_size, position)[1]
    return shape


def local_spans(
    dim: int,
    size: int,
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    owned: bool = False,
) -> tuple[Span, ...]:
    """The logical spans of `dim` that the worker at `coordinate` stores, in storage order.

    With `owned` the spans that a lower role stores as well are left out (they no longer tell the storage positions).
    """
    spans: tuple[Span, ...] = (Span(0, size),) if size else ()
    mine: tuple[Span, ...] | None = None
    for placement, position in zip(placements, coordinate, strict=True):
        if isinstance(placement, UnevenShard) and placement.dim == dim:
            spans, mine = placement.spans(position), placement.owned(position)
    for placement, axis_size, position in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            start, length = chunk(sum(map(len, spans)), axis_size, position)
            spans = slice_storage(spans, start, start + length)
    if not owned or mine is None:
        return spans
    kept = (
        Span(max(s.start, o.start), min(s.stop, o.stop))
        for s in spans
        for o in mine
        if s.start < o.stop and o.start < s.stop
    )
    return merge_runs(kept)


def whole_stride(whole_shape: Sequence[int], local: torch.Tensor) -> tuple[int, ...]:
    """Stride of the logical tensor: dense, its dims in the memory order of the local one."""
    local_stride = local.stride()
    order = sorted(range(local.ndim), key=lambda dim: (-local_stride[dim], dim))
    stride, step = [0] * local.ndim, 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(whole_shape[dim], 1)
    return tuple(stride)


def check_placements(
    mesh: DeviceMesh, placements: Sequence[Placement], whole_shape: Sequence[int]
) -> tuple[Placement, ...]:
    """The placements as a tuple, once they fit the mesh and the shape.

    Raises:
        ConfigError: a placement too many or too few, a kind that cannot stand beside an `UnevenShard`, a layout of another
            size or degree, two layouts on one dim.
    """
    checked = tuple(placements)
    if len(checked) != mesh.ndim:
        raise ConfigError(f"a mesh of {mesh.ndim} axes needs as many placements, got {list(checked)}")
    cut_dims: set[int] = set()
    for axis, placement in enumerate(checked):
        if not isinstance(placement, UnevenShard | Replicate) and type(placement) is not Shard:
            raise ConfigError(
                f"{placement} cannot stand beside an UnevenShard; use Shard or Replicate on mesh axis {axis}"
            )
        if isinstance(placement, Replicate):
            continue
        if not 0 <= placement.dim < len(whole_shape):
            raise ConfigError(f"{placement} cuts a dim that a tensor of shape {tuple(whole_shape)} does not have")
        if not isinstance(placement, UnevenShard):
            continue
        layout = placement.layout
        if layout.size != whole_shape[placement.dim]:
            raise ConfigError(
                f"{placement} has a layout of {layout.size} elements, but dim {placement.dim} of a tensor of shape "
                f"{tuple(whole_shape)} has {whole_shape[placement.dim]}"
            )
        if layout.degree != mesh.size(axis):
            raise ConfigError(
                f"{placement} has {layout.degree} roles, but mesh axis {axis} has {mesh.size(axis)} workers"
            )
        if placement.dim in cut_dims:
            raise ConfigError(f"two layouts cut dim {placement.dim}: {list(checked)}")
        cut_dims.add(placement.dim)
    return checked


def wrap_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placement: Placement | Sequence[Placement],
    whole_shape: Sequence[int],
) -> DTensor:
    """The DTensor of shape `whole_shape` whose part on this worker is `local` (not copied). Local; differentiable.

    Args:
        local: this worker's part, in storage order.
        mesh: the tp mesh, or one with more axes.
        placement: an `UnevenShard` for a mesh of one axis, else one placement per axis.
        whole_shape: shape of the logical tensor.

    Raises:
        ConfigError: placements that do not fit mesh and shape, or a `local` of another shape than the placements give.
    """
    placements = check_placements(mesh, [placement] if isinstance(placement, Placement) else placement, whole_shape)
    wanted = local_shape(whole_shape, placements, mesh.shape, coordinate_of(mesh))
    if list(local.shape) != wanted:
        raise ConfigError(
            f"{list(placements)} of {tuple(whole_shape)} stores {tuple(wanted)} here, got {tuple(local.shape)}"
        )
    return DTensor.from_local(
        local,
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(whole_shape),
        stride=whole_stride(whole_shape, local),
    )


def coordinate_of(mesh: DeviceMesh) -> list[int]:
    """This worker's coordinate in the mesh.

    Raises:
        ConfigError: it is not part of the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(f"this worker is not part of the mesh {mesh}")
    return list(coordinate)
