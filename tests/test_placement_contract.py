"""What torch does with placements that it does not know: the facts on which `UnevenShard` is built.

A test that fails here after an upgrade of torch says which part of `dtensor/` has to be looked at again.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from lightning_ntp.dtensor.placement import UnevenShard
from lightning_ntp.dtensor.redistribute import distribute
from lightning_ntp.layout import ShardLayout
from tests.pool import WorkerPool
from tests.test_placement import PLAIN, grid, line, same, whole


class Sized(Shard):
    """A Shard with one more field and nothing else."""

    def __init__(self, dim: int, sizes: tuple[int, ...]) -> None:
        super().__init__(dim)
        self.sizes = sizes


class Honest(Sized):
    """The same with an equality that looks at the field."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Honest and (other.dim, other.sizes) == (self.dim, self.sizes)

    def __hash__(self) -> int:
        return hash((self.dim, self.sizes))


class Foreign(Placement):
    """A direct subclass of Placement for which nothing is hooked."""

    def __init__(self) -> None:
        super().__init__()
        self.dim = 0

    def is_shard(self, dim: int | None = None) -> bool:
        return False

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return type(other) is Foreign

    def __hash__(self) -> int:
        return 7


@dataclass(frozen=True)
class Uninitialised(Placement):
    """A dataclass never calls Placement.__init__."""

    dim: int = 0


def _dtensor(local: torch.Tensor, mesh: Any, placement: Placement, shape: tuple[int, ...]) -> DTensor:
    meta = torch.empty(shape)
    spec = DTensorSpec(mesh, (placement,), tensor_meta=TensorMeta(meta.shape, meta.stride(), local.dtype))
    return DTensor(local, spec, requires_grad=False)


def test_a_subclass_of_shard_loses_its_fields() -> None:
    one, two = Sized(0, (4, 3)), Sized(0, (3, 4))
    assert one == two and hash(one) == hash(two) and "4" not in repr(one)
    for copied in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert getattr(copied, "sizes", None) is None or type(copied) is Shard


def _subclass_of_shard(rank: int, world: int) -> tuple[str, bool]:
    """What an operator makes of its placement, and whether a redistribution to other sizes has moved anything."""
    mesh = line(world)
    cut = _dtensor(torch.ones(4 - rank, 2), mesh, Sized(0, (4, 3)), (7, 2))
    made = type((cut * 2).placements[0]).__name__
    moved = cut.redistribute(placements=[Sized(0, (3, 4))]).to_local().shape != cut.to_local().shape
    with pytest.raises(AssertionError, match="shard"):
        _dtensor(torch.ones(4 - rank, 2), mesh, Honest(0, (4, 3)), (7, 2))
    return made, moved


def test_a_subclass_of_shard_in_a_dtensor(pool: WorkerPool) -> None:
    assert pool.run(_subclass_of_shard, 2) == [("Shard", False)] * 2


def _uninitialised(rank: int, world: int) -> bool:
    placement = Uninitialised(0)
    placement.is_shard()
    _dtensor(torch.ones(2), line(world), placement, (2,)) * 2
    return True


def test_a_placement_whose_base_is_not_initialised_kills_the_process(pool: WorkerPool) -> None:
    assert pool.run(_uninitialised, 1, deaths=(0,)) == [None]


def _foreign(rank: int, world: int) -> None:
    mesh = line(world)
    cut = _dtensor(torch.ones(4 - rank, 2), mesh, Foreign(), (7, 2))
    shape, _ = compute_local_shape_and_global_offset((7, 2), mesh, [Foreign()])
    assert tuple(shape) == (7, 2)
    with pytest.raises(RuntimeError):
        cut.redistribute(placements=[Replicate()])
    leaf = cut.requires_grad_()
    with pytest.raises(RuntimeError, match="placement type .*not supported"):
        leaf.to_local().sum().backward()


def test_a_placement_without_our_hooks(pool: WorkerPool) -> None:
    pool.run(_foreign, 2)


def _other_sizes(rank: int, world: int) -> None:
    full = whole(7, 2)
    cut = distribute(
        full, line(world), UnevenShard(0, ShardLayout.from_indices(7, {0: [0], 1: [1, 2, 3], 2: [4, 5, 6]}))
    )
    stock = DTensor.from_local(cut.to_local(), cut.device_mesh, [Shard(0)], shape=full.shape, stride=full.stride())
    try:
        gathered = stock.full_tensor()
    except RuntimeError:
        gathered = torch.zeros_like(full)
    assert not torch.equal(gathered, full)
    same(cut, full)


def test_from_local_with_sizes_that_torch_would_not_choose(pool: WorkerPool) -> None:
    """pytorch #144109: silently wrong for Shard; an UnevenShard carries its sizes."""
    pool.run(_other_sizes, 3)


class Two(nn.Module):
    """A weight cut over roles and a replicated one, as a layer of ours has them."""

    def __init__(self, placement: Placement, mesh: Any, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        tp = mesh["tp"]
        self.weight = nn.Parameter(distribute(whole(7, 4, seed=3, dtype=dtype), tp, placement))
        self.norm = nn.Parameter(whole(4, seed=4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.norm) @ self.weight.to_local().t()


def _clipping(rank: int, world: int) -> None:
    mesh, full = grid(2, 3), whole(7, 4)
    stock = [distribute(full, mesh, [Shard(0), Shard(1)]), distribute(full, mesh["fsdp"], [Shard(0)])]
    with pytest.raises(RuntimeError, match="mesh"):
        torch.nn.utils.get_total_norm(stock)
    mixed = [distribute(full, mesh, [Shard(0), UnevenShard(0, PLAIN)]), stock[1]]
    torch.testing.assert_close(torch.nn.utils.get_total_norm(mixed), (2 * full.square().sum()).sqrt())
    leaf = nn.Parameter(mixed[0])
    leaf.grad = mixed[0].clone()
    torch.nn.utils.clip_grad_norm_([leaf], 0.1)
    same(leaf.grad, full * (0.1 / (full.norm() + 1e-6)))
    torch.nn.utils.clip_grad_value_([leaf], 0.01)
    assert leaf.grad.full_tensor().abs().max() <= 0.01


def test_clipping_over_meshes(pool: WorkerPool) -> None:
    """torch refuses norms that live on different meshes; ours are plain."""
    pool.run(_clipping, 6)


def _fsdp(rank: int, world: int, dim: int) -> None:
    mesh = grid(2, 3)
    module = Two(UnevenShard(0, PLAIN), mesh)
    buckets: list[int] = []
    fully_shard(module, mesh=mesh["fsdp"], shard_placement_fn=lambda p: Shard(dim) if p.ndim == 2 else None)
    module.set_all_reduce_hook(lambda bucket: buckets.append(bucket.numel()))
    assert module.weight.placements == (Shard(dim), UnevenShard(0, PLAIN)) and module.weight.shape == (7, 4)
    x = whole(5, 4, seed=rank // 3)
    module(x).sum().backward()
    assert len(buckets) == 1
    assert module.weight.grad.placements == module.weight.placements
    same(module.weight, whole(7, 4, seed=3))
    norm = whole(4, seed=4)
    rows = [(whole(5, 4, seed=row) * norm).sum(0).expand(7, 4) for row in range(2)]
    same(module.weight.grad, (rows[0] + rows[1]) / 2)


@pytest.mark.parametrize("dim", [0, 1])
def test_stock_fully_shard_takes_it(pool: WorkerPool, dim: int) -> None:
    pool.run(_fsdp, 6, dim)


def _uneven_inner_dim(rank: int, world: int) -> None:
    mesh = grid(2, 2)
    module = Two(UnevenShard(0, ShardLayout.balanced(7, 2)), mesh)
    module.weight = nn.Parameter(distribute(whole(7, 3), mesh["tp"], UnevenShard(0, ShardLayout.balanced(7, 2))))
    with pytest.raises(NotImplementedError, match="uneven sharding on dim 1"):
        fully_shard(module, mesh=mesh["fsdp"], shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
    with pytest.raises(ValueError, match="layout of 7 elements"):
        distribute(whole(8, 3), mesh["tp"], UnevenShard(0, ShardLayout.balanced(7, 2)))


def test_fsdp_does_not_cut_an_inner_dim_that_does_not_divide(pool: WorkerPool) -> None:
    pool.run(_uneven_inner_dim, 4)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False, maximize=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), fused=True, weight_decay=0.1),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True, weight_decay=0.1),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "Adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.9),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1, foreach=False),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
}


def _optimizers(rank: int, world: int) -> None:
    mesh = grid(2, 2)
    layout = ShardLayout.from_indices(7, {0: [4, 5, 6, 0, 1], 3: [2, 3]})
    for make in OPTIMIZERS.values():
        module = Two(UnevenShard(0, layout), mesh)
        fully_shard(module, mesh=mesh["fsdp"])
        twins = [nn.Parameter(whole(7, 4, seed=3)), nn.Parameter(whole(4, seed=4))]
        ours, theirs = make(module.parameters()), make(twins)
        for step in range(3):
            for parameter, twin in zip(module.parameters(), twins, strict=True):
                twin.grad = whole(*twin.shape, seed=10 + step)
                parameter.grad = distribute(twin.grad, parameter.device_mesh, parameter.placements)
            ours.step()
            theirs.step()
        for parameter, twin in zip(module.parameters(), twins, strict=True):
            torch.testing.assert_close(parameter.full_tensor(), twin, rtol=1e-9, atol=1e-9)
            for key, moment in ours.state[parameter].items():
                if isinstance(moment, DTensor):
                    assert moment.placements == parameter.placements
                    torch.testing.assert_close(moment.full_tensor(), theirs.state[twin][key], rtol=1e-9, atol=1e-9)
        again = make(module.parameters())
        again.load_state_dict(copy.deepcopy(ours.state_dict()))
        assert again.state[module.weight].keys() == ours.state[module.weight].keys()


def test_optimizers_over_fsdp_and_roles(pool: WorkerPool) -> None:
    pool.run(_optimizers, 4)


def _copies(rank: int, world: int) -> None:
    cut = nn.Parameter(distribute(whole(7, 4), line(world), UnevenShard(0, PLAIN)))
    local = pickle.loads(pickle.dumps(cut.placements[0]))
    assert local == cut.placements[0]
    twin = copy.deepcopy(cut)
    assert type(twin) is type(cut) and twin.placements == cut.placements and twin.requires_grad
    same(twin.detach(), whole(7, 4))
    twin.data.zero_()
    same(cut.detach(), whole(7, 4))
    module = nn.Linear(4, 7, dtype=torch.float64)
    module.weight = cut
    assert module.state_dict()["weight"].placements == cut.placements
    module.load_state_dict(
        {"weight": distribute(whole(7, 4, seed=2), line(world), UnevenShard(0, PLAIN)), "bias": torch.ones(7)}
    )
    same(module.weight.detach(), whole(7, 4, seed=2))
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        module(whole(2, 4))
    with pytest.raises(NotImplementedError, match=r"full_tensor\(\)"):  # it writes through a boolean index
        cut.grad = torch.ones_like(cut)
        torch.optim.Rprop([cut]).step()


def test_copies_and_state_dicts(pool: WorkerPool) -> None:
    pool.run(_copies, 3)


def _sharded_modules(rank: int, world: int) -> None:
    mesh = grid(2, 2)
    module = Two(UnevenShard(0, ShardLayout.balanced(7, 2)), mesh)
    fully_shard(module, mesh=mesh["fsdp"])
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(module)
    leaf = distribute(whole(7, 4), mesh["tp"], UnevenShard(0, ShardLayout.balanced(7, 2)))
    leaf.data = leaf.data.to(torch.bfloat16)
    assert leaf.dtype is torch.bfloat16 and leaf.to_local().dtype is torch.float64
    with pytest.raises(RuntimeError, match="[Nn]o backend|[Ii]nvalid|size|gloo|split"):
        dist.all_gather([torch.empty(1), torch.empty(2), torch.empty(1), torch.empty(1)], torch.empty(1 + (rank == 1)))


def test_what_users_may_try_on_sharded_modules(pool: WorkerPool) -> None:
    """EMA callbacks copy the module; ``param.data = ...`` changes only the outer dtype; gloo refuses uneven lists."""
    pool.run(_sharded_modules, 4)
