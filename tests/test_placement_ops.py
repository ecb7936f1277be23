"""Operators on unevenly cut tensors: equal to the operator on the whole tensor, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from lightning_ntp.dtensor.dispatch import forget_meshes
from lightning_ntp.dtensor.placement import UnevenShard
from lightning_ntp.dtensor.redistribute import distribute
from lightning_ntp.errors import UnsupportedOpError
from tests.pool import WorkerPool
from tests.test_placement import COPIES, EMPTY, LAYOUTS, NESTED, PLAIN, grid, line, same, whole

ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "add scalar": lambda x, y: x + 2 * y - 1,
    "rsub": lambda x, y: 1 - x,
    "div": lambda x, y: x / (y.abs() + 1),
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, y),
    "clamp": lambda x, y: x.clamp(min=-0.5, max=0.5),
    "gelu": lambda x, y: F.gelu(x) + F.silu(y),
    "lerp": lambda x, y: x.lerp(y, 0.3),
    "addcmul": lambda x, y: x.addcmul(y, x, value=2).addcdiv(x, y.abs() + 1),
    "nan_to_num": lambda x, y: (x / x.sign().clamp(min=0)).nan_to_num(),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 7.0),
    "float": lambda x, y: x.float().double(),
    "type as": lambda x, y: x.to(torch.bfloat16).to(y.dtype),
    "contiguous": lambda x, y: x.contiguous().clone().detach(),
    "like": lambda x, y: (
        torch.zeros_like(x) + torch.ones_like(y) + torch.full_like(x, 3) + torch.empty_like(x).fill_(2)
    ),
    "new": lambda x, y: (
        x.new_zeros(x.shape) + y.new_ones(y.shape) + x.new_full(x.shape, 4) + x.new_empty(x.shape).zero_()
    ),
    "in place": lambda x, y: x.clone().mul_(2).add_(y, alpha=3).copy_(y).sub_(1).zero_().add_(x),
    "comparison": lambda x, y: ((x >= y) & (x != 0) | ~(y < x)).double(),
    "view_as": lambda x, y: x.view_as(y) + x.expand_as(y),
}

NO_GRADIENT = ("comparison", "like", "new", "in place", "contiguous", "nan_to_num")

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    # [2, 3, cut, 4]
    "slice": lambda x: x[:, :-1, :, 1:3],
    "slice cut dim whole": lambda x: x[:, :, 0:, ::2] + x[:, :, :99, ::2],
    "select": lambda x: x[1] + x[0],
    "select last": lambda x: x[..., -1],
    "unsqueeze": lambda x: x.unsqueeze(1).unsqueeze(-1).unsqueeze(-3),
    "squeeze": lambda x: x[:1].squeeze(0) + x.unsqueeze(-1).squeeze(-1).squeeze(1)[0],
    "flatten leading": lambda x: x.flatten(0, 1),
    "view": lambda x: x.view(6, x.shape[2], 2, 2),
    "reshape of a slice": lambda x: x[:, 1:].reshape(-1, x.shape[2], 4),
    "flatten trailing of unsqueezed": lambda x: x.unsqueeze(3).flatten(3),
    "transpose": lambda x: x.transpose(1, 2).transpose(-1, 0),
    "permute": lambda x: x.permute(3, -2, 0, 1),
    "expand": lambda x: x[:1].expand(5, -1, -1, -1) * 2,
    "transpose contiguous": lambda x: x.transpose(2, 3).contiguous().flatten(0, 2),
}

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "sum cut": lambda x: x.sum(1),
    "sum other": lambda x: x.sum(0, keepdim=True),
    "sum both": lambda x: x.sum((0, -2), keepdim=True),
    "mean": lambda x: x.mean() + x.mean((0, 1)),
    "amax": lambda x: x.amax(1) + x.amax(),
    "amin": lambda x: x.amin((0, 1), keepdim=True),
    "max": lambda x: x.max() - x.min(),
    "norm": lambda x: x.norm(),
    "norm cut": lambda x: torch.linalg.vector_norm(x, 2, dim=1) + torch.linalg.vector_norm(x, 3, dim=(1,)),
    "norm other": lambda x: torch.linalg.vector_norm(x, 2, dim=(0,), keepdim=True),
    "norm inf": lambda x: torch.linalg.vector_norm(x, float("inf")) + torch.linalg.vector_norm(x, -float("inf")),
    "norm 0": lambda x: torch.linalg.vector_norm(x.clamp(min=0), 0),
    "any": lambda x: (x > 1).any().double() + (x > -99).all().double(),
    "isfinite": lambda x: torch.isfinite(x).all().double(),
    "int sum": lambda x: (x > 0).sum().double(),
    "bf16": lambda x: x.bfloat16().sum().double() * 0,
}


def _check(name: str, fn: Callable[..., Tensor], fulls: Sequence[Tensor], cuts: Sequence[DTensor], grad: bool) -> None:
    """Value, and the gradient of every operand, against the whole tensors."""
    fulls = [full.clone().requires_grad_(grad) for full in fulls]
    cuts = [cut.detach().requires_grad_(grad) for cut in cuts]
    wanted, got = fn(*fulls), fn(*cuts)
    assert isinstance(got, DTensor), name
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, name
    same(got, wanted.detach(), name)
    if grad and wanted.requires_grad:
        weight = whole(*wanted.shape, seed=9)
        (wanted * weight).sum().backward()
        (got.full_tensor() * weight).sum().backward()
        for full, cut in zip(fulls, cuts, strict=True):
            assert (full.grad is None) == (cut.grad is None), name
            if full.grad is not None:
                same(cut.grad, full.grad, f"gradient of {name}")


def _elementwise(rank: int, world: int) -> None:
    mesh = line(world)
    for label, layout in (("copies", COPIES), ("empty", EMPTY)):
        placement = UnevenShard(1, layout)
        fulls = [whole(3, 7, seed=seed) for seed in (1, 2)]
        cuts = [distribute(full, mesh, placement) for full in fulls]
        for name, fn in ELEMENTWISE.items():
            _check(f"{name} {label}", fn, fulls, cuts, grad=name not in NO_GRADIENT)
            mixed = [cuts[0], distribute_tensor(fulls[1], mesh, [Replicate()])]
            if name in ("add", "div", "masked_fill", "where"):
                _check(f"{name} {label} with a replicated operand", fn, fulls, mixed, grad=True)
        row, bias = whole(7, seed=3), whole(3, 1, seed=4)
        _check(
            "broadcast row", torch.add, [fulls[0], row], [cuts[0], distribute(row, mesh, UnevenShard(0, layout))], True
        )
        _check(
            "broadcast column",
            torch.mul,
            [fulls[0], bias],
            [cuts[0], distribute_tensor(bias, mesh, [Replicate()])],
            True,
        )
        _check("plain scalar", lambda x: x * torch.tensor(2.0), fulls[:1], cuts[:1], True)


def test_elementwise_operators(pool: WorkerPool) -> None:
    pool.run(_elementwise, 3)


def _shapes(rank: int, world: int) -> None:
    mesh = line(world)
    for label, layout in LAYOUTS.items():
        full = whole(2, 3, 7, 4)
        cut = distribute(full, mesh, UnevenShard(2, layout))
        for name, fn in SHAPES.items():
            _check(f"{name} {label}", fn, [full], [cut], grad=True)
        matrix = whole(7, 4)
        _check("t", lambda x: x.t() * 2, [matrix], [distribute(matrix, mesh, UnevenShard(0, layout))], True)
        assert cut.new_zeros(5).placements == (Replicate(),) and cut.new_zeros(5).shape == (5,)


def test_views_beside_the_cut_dim(pool: WorkerPool) -> None:
    pool.run(_shapes, 3)


def _reductions(rank: int, world: int) -> None:
    mesh = line(world)
    for label, layout in LAYOUTS.items():
        full = whole(3, 7, 2)
        cut = distribute(full, mesh, UnevenShard(1, layout))
        for name, fn in REDUCTIONS.items():
            _check(f"{name} {label}", fn, [full], [cut], grad="isfinite any int bf16 0".find(name.split()[-1]) < 0)
        for order in (2.0, 1.0, float("inf")):
            plain = distribute_tensor(full, mesh, [Shard(0)])
            norms = torch._foreach_norm([cut, plain, cut * 2], order)
            wanted = torch._foreach_norm([full, full, full * 2], order)
            assert not any(isinstance(norm, DTensor) for norm in norms)
            torch.testing.assert_close(norms, wanted)
    half = distribute(torch.full((1, 7), 100.0, dtype=torch.bfloat16), mesh, UnevenShard(1, COPIES))
    assert half.norm().item() == 264.0  # 100 * sqrt(7) in bfloat16: squares are summed in float32


def test_reductions_count_each_element_once(pool: WorkerPool) -> None:
    pool.run(_reductions, 3)


def _two_axes(rank: int, world: int) -> None:
    mesh, full = grid(2, 3), whole(7, 4)
    for placements in (
        [Shard(0), UnevenShard(0, COPIES)],
        [Shard(1), UnevenShard(0, NESTED)],
        [Shard(0), UnevenShard(0, EMPTY)],
    ):
        cut = distribute(full, mesh, placements)
        for name in ("sum", "norm", "max", "norm inf", "mean"):
            _check(f"{name} {placements}", REDUCTIONS[name], [full], [cut], grad=False)
        for name in ("add", "where", "new", "in place"):
            _check(f"{name} {placements}", ELEMENTWISE[name], [full, full], [cut, cut], grad=False)
        torch.testing.assert_close(torch._foreach_norm([cut, cut])[0], full.norm())


def test_on_a_mesh_of_two_axes(pool: WorkerPool) -> None:
    pool.run(_two_axes, 6)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "sum": lambda x, y: F.cross_entropy(x.view(-1, x.shape[-1]), y.flatten(), reduction="sum"),
    "none": lambda x, y: (F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none") * torch.arange(10.0)).sum(),
    "shifted": lambda x, y: F.cross_entropy(
        x[:, :-1].float().flatten(0, 1), y[:, 1:].flatten(), ignore_index=-100
    ).double(),
    "ignored": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten().where(y.flatten() >= 0, 3), ignore_index=3),
    "weights": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), weight=whole(x.shape[-1]).abs()),
    "one row": lambda x, y: F.cross_entropy(x[0, 0], y[0, 0]),
    "log_softmax": lambda x, y: (F.log_softmax(x, -1) * F.log_softmax(x, 0)).sum() / 10,
    "scaled": lambda x, y: F.cross_entropy((x / 0.7).masked_fill(x > 2, -100.0).flatten(0, 1), y.flatten()),
    "bf16": lambda x, y: F.cross_entropy(x.bfloat16().float().flatten(0, 1), y.flatten()).double(),
}


def _cross_entropy(rank: int, world: int) -> None:
    mesh = line(world)
    for label, layout in LAYOUTS.items():
        labels = torch.tensor([[0, 1, 2, 3, 4], [5, 6, -100, 3, 0]])
        for name, fn in LOSSES.items():
            full = whole(2, 5, 7).requires_grad_()
            cut = distribute(full, mesh, UnevenShard(2, layout))
            wanted, got = fn(full, labels), fn(cut, labels)
            got = got.full_tensor() if isinstance(got, DTensor) else got
            close = {"rtol": 1e-6, "atol": 1e-7} if name in ("shifted", "bf16") else {"rtol": 1e-12, "atol": 1e-12}
            torch.testing.assert_close(got, wanted, **close, msg=lambda text: f"{name} {label}: {text}")  # noqa: B023
            wanted.backward()
            got.backward()
            assert cut.grad.placements == cut.placements
            torch.testing.assert_close(cut.grad.full_tensor(), full.grad, **close)
    cut = distribute(whole(2, 5, 7), mesh, UnevenShard(2, PLAIN))
    nothing = F.cross_entropy(cut.flatten(0, 1), torch.full((10,), -100))
    assert nothing.isnan()
    with pytest.raises(RuntimeError, match="label outside 0..6"):
        F.cross_entropy(cut.flatten(0, 1), torch.full((10,), 7))
    with loss_parallel():
        stock = F.cross_entropy(distribute_tensor(whole(10, 6), mesh, [Shard(1)]), torch.arange(10) % 6)
    torch.testing.assert_close(stock.full_tensor(), F.cross_entropy(whole(10, 6), torch.arange(10) % 6))
    again = F.cross_entropy(cut.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(again, F.cross_entropy(whole(2, 5, 7).flatten(0, 1), labels.flatten()))
    replicated = distribute_tensor(whole(10, 6).requires_grad_(), mesh, [Replicate()])
    F.cross_entropy(replicated, distribute_tensor(torch.arange(10) % 6, mesh, [Replicate()])).backward()
    assert replicated.grad is not None


def test_cross_entropy_on_cut_classes(pool: WorkerPool) -> None:
    pool.run(_cross_entropy, 3)


REFUSED: dict[str, Callable[[DTensor], Any]] = {
    "matmul": lambda x: x @ x.t(),
    "linear": lambda x: F.linear(x, x),
    "dropout": lambda x: F.dropout(x, 0.5),
    "rand_like": torch.rand_like,
    "normal_": lambda x: x.normal_(),
    "softmax": lambda x: x.softmax(0),
    "cumsum": lambda x: x.cumsum(0),
    "argmax": lambda x: x.argmax(0),
    "sort": lambda x: x.sort(0),
    "topk": lambda x: x.topk(2, 0),
    "index_select": lambda x: x.index_select(0, distribute_tensor(torch.tensor([1]), x.device_mesh, [Replicate()])),
    "slice": lambda x: x[1:],
    "select": lambda x: x[0],
    "flatten": lambda x: x.flatten(),
    "view": lambda x: x.view(4, -1),
    "squeeze": lambda x: x.squeeze(),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "split": lambda x: x.split(2, 0),
    "cat": lambda x: torch.cat([x, x]),
    "prod": lambda x: x.prod(),
    "var": lambda x: x.var(),
    "triu": lambda x: x.triu(),
    "equal": lambda x: torch.equal(x, x),
    "svd": lambda x: torch.linalg.svd(x),
    "view dtype": lambda x: x.view(torch.int64),
}


def _refusals(rank: int, world: int) -> None:
    mesh, full = line(world), whole(7, 4)
    cut = distribute(full, mesh, UnevenShard(0, PLAIN))
    for name, fn in REFUSED.items():
        for inference in (False, True):  # torch takes composite operators apart only there
            with pytest.raises(UnsupportedOpError) as caught, torch.inference_mode(inference):
                fn(distribute(full, mesh, UnevenShard(0, PLAIN)))
            text = str(caught.value)
            assert "UnevenShard(dim=0, 3|2|2)" in text and ".full_tensor()" in text and "aten" in text, (
                f"{name}: {text}"
            )
    other = distribute(full, mesh, UnevenShard(0, NESTED))
    for fn in (lambda: cut + other, lambda: cut.copy_(other), lambda: torch._foreach_add_([cut], [other])):
        with pytest.raises(UnsupportedOpError, match="cut differently; .redistribute"):
            fn()
    whole_one = distribute_tensor(full, mesh, [Replicate()])
    with pytest.raises(UnsupportedOpError, match="that is written to is not cut like"):
        whole_one.add_(cut)
    with pytest.raises(UnsupportedOpError, match="Partial"):
        cut + DTensor.from_local(full, mesh, [Partial()])
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        cut + full
    one = distribute(full, mesh, UnevenShard(0, PLAIN))
    same(one + 1, full + 1)
    same(cut.copy_(whole_one), full)


def test_what_has_no_rule_is_refused_by_name(pool: WorkerPool) -> None:
    pool.run(_refusals, 3)


def _cached_answers(rank: int, world: int) -> None:
    mesh, full = line(world), whole(2, 7, 6)
    cut = distribute(full, mesh, UnevenShard(1, NESTED))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float32):
        made = [
            cut.to(dtype),
            torch.zeros_like(cut, dtype=dtype),
            torch.full_like(cut, 2, dtype=dtype),
            cut.sum(dtype=dtype),
        ]
        made += [
            cut.new_zeros(cut.shape, dtype=dtype),
            cut.new_empty(cut.shape, dtype=dtype),
            cut.new_ones(3, dtype=dtype),
        ]
        assert {one.dtype for one in made} == {dtype} == {one.to_local().dtype for one in made}
    sizes = [(6,), (2, 3), (3, 2), (1, 6), (6, 1), (1, 1, 6)]
    for k in range(6):
        for fn in (
            lambda x: x.select(2, k),  # noqa: B023
            lambda x: x[:, :, k:],  # noqa: B023
            lambda x: x.view(2, 7, *sizes[k]),  # noqa: B023
            lambda x: x.unsqueeze(0).expand(k + 1, -1, -1, -1),  # noqa: B023
            lambda x: x.unsqueeze(k % 4),  # noqa: B023
            lambda x: x.transpose(k % 3, (k + 1) % 3),  # noqa: B023
        ):
            got, wanted = fn(cut), fn(full)
            assert got.shape == wanted.shape and got.stride() == wanted.stride()
            same(got, wanted)


def test_a_cached_rule_is_not_used_for_other_arguments(pool: WorkerPool) -> None:
    pool.run(_cached_answers, 3)


def _generations(rank: int, world: int) -> tuple[bool, bool]:
    """Whether a result on the new mesh has the new one: before the caches are cleared, and after."""
    ranks = torch.arange(world)
    old, new = (DeviceMesh.from_group(dist.new_group(ranks.tolist()), "cpu", mesh_dim_names=("tp",)) for _ in range(2))
    assert old == new and old is not new
    first, second = (distribute(whole(7, 4), mesh, UnevenShard(0, NESTED)) for mesh in (old, new))
    assert (first * 2).device_mesh is old
    before = (second * 2).device_mesh is new
    forget_meshes()
    same(second * 2, whole(7, 4) * 2)
    return before, (second * 2).device_mesh is new


def test_equal_meshes_of_two_generations(pool: WorkerPool) -> None:
    """torch's caches would hand the old mesh, whose groups are gone, to results of the new generation."""
    assert pool.run(_generations, 3) == [(False, True)] * 3
