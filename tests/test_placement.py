"""The placement against one process: what torch's own calls make of it, operator by operator, move by move."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, zeros

from lightning_ntp.dtensor.placement import UnevenShard, local_spans, whole_stride, wrap_local
from lightning_ntp.dtensor.redistribute import distribute
from lightning_ntp.errors import ConfigError
from lightning_ntp.layout import ShardLayout, Span, nested_layouts
from tests.pool import WorkerPool

PLAIN = ShardLayout.balanced(7, 3)
NESTED = nested_layouts(7, 4, (1,))[3]
"""Degree 3 after the loss of role 1: roles 0, 2, 3, some with two runs."""
COPIES = nested_layouts(14, 3)[3].grouped(2)
"""KV heads of 14 query heads over 3 roles: split groups have two holders."""
EMPTY = ShardLayout.from_indices(7, {0: [6, 5, 4], 1: [], 2: [0, 1, 2, 3]})
"""A role that stores nothing, and one that stores in falling order."""
LAYOUTS = {"plain": PLAIN, "nested": NESTED, "copies": COPIES, "empty": EMPTY}


def line(world: int) -> DeviceMesh:
    """The tp mesh."""
    return DeviceMesh("cpu", list(range(world)), mesh_dim_names=("tp",))


def grid(num_rows: int, num_roles: int) -> DeviceMesh:
    """A replica of (fsdp, tp)."""
    return DeviceMesh(
        "cpu", torch.arange(num_rows * num_roles).view(num_rows, num_roles), mesh_dim_names=("fsdp", "tp")
    )


def whole(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The same random tensor on every worker."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def same(got: torch.Tensor, wanted: torch.Tensor, name: str = "") -> None:
    got = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12, msg=lambda text: f"{name}: {text}")


# The value


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_value_survives_every_way_of_copying(layout: ShardLayout) -> None:
    placement = UnevenShard(1, layout)
    again = [
        pickle.loads(pickle.dumps(placement)),
        copy.deepcopy(placement),
        copy.copy(placement),
        UnevenShard(1, layout),
    ]
    assert all(other == placement and hash(other) == hash(placement) for other in again)
    assert placement.moved_to(1) is placement and placement.moved_to(0) == UnevenShard(0, layout)
    assert (
        not placement.is_shard()
        and not placement.is_shard(1)
        and not placement.is_replicate()
        and not placement.is_partial()
    )


def test_different_values_are_different() -> None:
    values = [UnevenShard(dim, layout) for dim in (0, 1) for layout in LAYOUTS.values()] + [
        Shard(0),
        Replicate(),
        Shard(1),
    ]
    for one, first in enumerate(values):
        assert [first == second for second in values] == [one == two for two in range(len(values))]


def test_repr_tells_layouts_apart() -> None:
    assert repr(UnevenShard(0, ShardLayout.balanced(1024, 3).scaled(1))) == "UnevenShard(dim=0, 342|341|341)"
    swapped = ShardLayout.from_indices(7, {0: [0, 1, 2], 1: [3, 4], 2: [6, 5]})
    assert repr(UnevenShard(0, PLAIN)) == "UnevenShard(dim=0, 3|2|2)" == str(UnevenShard(0, PLAIN))
    assert repr(UnevenShard(0, swapped)).startswith("UnevenShard(dim=0, 3|2|2 #")
    assert len({repr(UnevenShard(0, layout)) for layout in (*LAYOUTS.values(), swapped)}) == 5


def test_a_negative_dim_is_refused() -> None:
    with pytest.raises(ConfigError, match="counts dims from the front, got dim=-1"):
        UnevenShard(-1, PLAIN)


def test_spans_of_a_worker_follow_both_cuts() -> None:
    placements = (Shard(0), UnevenShard(0, NESTED))
    mine = [local_spans(0, 7, placements, (2, 3), (row, position)) for position in range(3) for row in range(2)]
    assert mine[0] + mine[1] == NESTED.of(0) or sum(map(len, mine[0] + mine[1])) == NESTED.local_size(0)
    assert sorted(i for spans in mine for span in spans for i in range(span.start, span.stop)) == list(range(7))
    owned = [local_spans(0, 7, (UnevenShard(0, COPIES),), (3,), (position,), owned=True) for position in range(3)]
    assert [span for spans in owned for span in spans] == [Span(0, 3), Span(3, 5), Span(5, 7)]


def test_the_logical_stride_keeps_the_memory_order() -> None:
    assert whole_stride((7, 4), torch.empty(3, 4)) == (4, 1)
    assert whole_stride((7, 4), torch.empty(4, 3).t()) == (1, 7)
    assert whole_stride((7, 4), torch.empty(0, 4)) == (4, 1)


# Ways in and out


def _ways_in_and_out(rank: int, world: int) -> list[str]:
    """The layouts that came through every way."""
    mesh, through = line(world), []
    for name, layout in LAYOUTS.items():
        for dim in range(3) if layout is NESTED else (1,):
            shape = [2, 3, 5]
            shape[dim] = layout.size
            full = whole(*shape)
            cut = distribute(full, mesh, UnevenShard(dim, layout))
            assert cut.is_leaf and cut.shape == full.shape and cut.stride() == full.stride() and not cut.requires_grad
            assert cut.to_local().shape[dim] == layout.local_size(layout.roles[rank])
            same(cut, full, name)
            same(DTensor.from_local(cut.to_local(), mesh, [UnevenShard(dim, layout)]), full, f"{name} from_local")
            for stock in (Replicate(), Shard(0), Shard(1), Shard(2)):
                there = cut.redistribute(placements=[stock])
                same(there.to_local(), distribute_tensor(full, mesh, [stock]).to_local(), f"{name} to {stock}")
                same(there.redistribute(placements=cut.placements).to_local(), cut.to_local(), f"{name} from {stock}")
            for other in LAYOUTS.values():
                if other.size == layout.size:
                    wanted = distribute(full, mesh, UnevenShard(dim, other))
                    same(
                        cut.redistribute(placements=wanted.placements).to_local(),
                        wanted.to_local(),
                        f"{name} to {other}",
                    )
        through.append(name)
    mine = whole(7, 2, seed=rank)
    same(distribute(mine, mesh, UnevenShard(0, PLAIN), src=1), whole(7, 2, seed=1))
    pending = DTensor.from_local(whole(7, 2), mesh, [Partial()])
    same(pending.redistribute(placements=[UnevenShard(0, NESTED)]), whole(7, 2) * world)
    return through


def test_distribute_full_tensor_and_redistribute(pool: WorkerPool) -> None:
    assert pool.run(_ways_in_and_out, 3) == [list(LAYOUTS)] * 3


def _two_axes(rank: int, world: int) -> None:
    mesh = grid(2, 3)
    full = whole(7, 4, 7)
    cases: list[tuple[Any, ...]] = [
        (Shard(0), UnevenShard(0, NESTED)),
        (Shard(1), UnevenShard(0, COPIES)),
        (Replicate(), UnevenShard(2, EMPTY)),
        (Shard(2), UnevenShard(0, PLAIN)),
        (Shard(0), UnevenShard(2, NESTED)),
        (Shard(0), Shard(2)),
        (Replicate(), Replicate()),
    ]
    for old in cases:
        cut = distribute_tensor(full, mesh, old) if old[1] in (Shard(2), Replicate()) else distribute(full, mesh, old)
        same(cut, full, str(old))
        for new in cases:
            moved = cut.redistribute(placements=new)
            same(moved, full, f"{old} to {new}")
            direct = (
                distribute_tensor(full, mesh, new) if new[1] in (Shard(2), Replicate()) else distribute(full, mesh, new)
            )
            same(moved.to_local(), direct.to_local(), f"{old} to {new}")


def test_moves_on_a_mesh_of_two_axes(pool: WorkerPool) -> None:
    pool.run(_two_axes, 6)


def _gradients(rank: int, world: int) -> None:
    mesh, weight = line(world), whole(7, 4, seed=5)
    for layout in LAYOUTS.values():
        leaf = distribute(whole(7, 4).requires_grad_(), mesh, UnevenShard(0, layout))
        (leaf.full_tensor() * weight).sum().backward()
        assert leaf.grad.placements == leaf.placements
        same(leaf.grad, weight)
        leaf.grad = None
        (leaf.to_local() * 3).sum().backward()
        assert leaf.grad.placements == leaf.placements
        same(leaf.grad, torch.full_like(weight, 3))
        leaf.grad = None
        moved = leaf.redistribute(placements=[Shard(1)])
        (moved.to_local() * distribute_tensor(weight, mesh, [Shard(1)]).to_local()).sum().backward()
        same(leaf.grad, weight)
        local = leaf.to_local().detach().requires_grad_()
        wrap_local(local, mesh, UnevenShard(0, layout), (7, 4)).full_tensor().mul(weight).sum().backward()
        same(local.grad, distribute(weight, mesh, UnevenShard(0, layout)).to_local())
    transposed = distribute(whole(4, 7).t(), mesh, UnevenShard(0, PLAIN)).requires_grad_()
    transposed.to_local().sum().backward()
    same(transposed.grad, torch.ones(7, 4, dtype=torch.float64))


def test_gradients_through_to_local_full_tensor_and_redistribute(pool: WorkerPool) -> None:
    pool.run(_gradients, 3)


def _raises(kind: type[Exception], match: str, fn: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=match):
        fn()


def _bad_input(rank: int, world: int) -> None:
    mesh, full = line(world), whole(7, 4)
    cut = UnevenShard(0, PLAIN)
    local = distribute(full, mesh, cut).to_local()
    _raises(ConfigError, r"stores \([32], 4\) here, got \(7, 4\)", lambda: wrap_local(full, mesh, cut, (7, 4)))
    _raises(ConfigError, "layout of 7 elements, but dim 0 .* has 8", lambda: wrap_local(local, mesh, cut, (8, 4)))
    _raises(ConfigError, "7 elements, but dim 1", lambda: distribute(full, mesh, UnevenShard(1, PLAIN)))
    _raises(ConfigError, "does not have", lambda: distribute(full, mesh, UnevenShard(2, PLAIN)))
    _raises(
        ConfigError,
        "2 roles, but mesh axis 0 has 3",
        lambda: distribute(full, mesh, UnevenShard(0, ShardLayout.balanced(7, 2))),
    )
    _raises(ConfigError, "as many placements", lambda: distribute(full, mesh, [cut, cut]))
    _raises(ConfigError, "cannot stand beside", lambda: distribute(full, mesh, Partial()))
    _raises(RuntimeError, "unsupported placements UnevenShard", lambda: distribute_tensor(full, mesh, [cut]))
    dtensor = distribute(full, mesh, cut)
    _raises(ConfigError, "layout of 7 elements", lambda: dtensor.redistribute(placements=[UnevenShard(1, PLAIN)]))
    _raises(
        RuntimeError, "internal use only|Can not redistribute", lambda: dtensor.redistribute(placements=[Partial()])
    )
    _raises(ConfigError, "strategy's checkpoints", lambda: dtensor.__create_chunk_list__())
    _raises(ConfigError, r"build with distribute\(\)", lambda: zeros(7, 4, device_mesh=mesh, placements=[cut]))
    _raises(ConfigError, "strategy's checkpoints", lambda: dtensor.__create_write_items__("w", dtensor))


def test_bad_input_is_refused_by_name(pool: WorkerPool) -> None:
    pool.run(_bad_input, 3)
