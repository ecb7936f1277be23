"""Kernels: the definitions against plain loops and torch, the compiled versions against the definitions."""

import shutil
import warnings

import pytest
import torch
import torch._dynamo.utils as dynamo
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.dtensor.vocab import lookup_table, vocab_parallel_cross_entropy
from lightning_ntp.errors import ConfigError, PlanMismatchError
from lightning_ntp.kernels import compile as compile_module
from lightning_ntp.kernels import pack as pack_module
from lightning_ntp.kernels import reference
from lightning_ntp.kernels.blocks import Block, Moves, PackedRuns, padded
from lightning_ntp.kernels.cross_entropy import local_gradient, local_max, local_sums
from lightning_ntp.kernels.pack import move_blocks, pack, unpack
from lightning_ntp.layout import nested_layouts

IGNORED = -100


@st.composite
def scattered(draw, max_blocks=5):
    """Disjoint rectangles in a flat buffer, empty and single-element ones among them, and the buffer's length."""
    blocks, at = [], draw(st.integers(0, 3))
    for _ in range(draw(st.integers(0, max_blocks))):
        rows, columns = draw(st.integers(0, 4)), draw(st.integers(0, 5))
        block = Block(at, columns + draw(st.integers(0, 3)), rows, columns)
        blocks.append(block)
        at = block.end + draw(st.integers(0, 2))
    return blocks, at


@st.composite
def peers(draw):
    """Runs for a few peers out of one buffer."""
    blocks, length = draw(scattered(8))
    owners = [draw(st.integers(0, 2)) for _ in blocks]
    return [[b for b, owner in zip(blocks, owners, strict=True) if owner == peer] for peer in range(3)], length


def elements(block):
    return [block.offset + row * block.stride + column for row in range(block.rows) for column in range(block.columns)]


@given(peers(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_pack_puts_each_peers_elements_in_order_and_pads_with_zeros(case, dtype):
    blocks, length = case
    buffer = torch.arange(1, length + 1, dtype=torch.float32)
    runs = PackedRuns.of(blocks, dtype.itemsize)
    packed = pack(buffer, runs, dtype)
    assert packed.dtype == dtype
    assert all(size * dtype.itemsize % 16 == 0 for size in runs.sizes)
    for run, mine in zip(packed.split(runs.sizes), blocks, strict=True):
        wanted = [buffer[i] for block in mine for i in elements(block)]
        assert run[: len(wanted)].tolist() == wanted
        assert not run[len(wanted) :].any()
    assert runs.numel == sum(block.numel for mine in blocks for block in mine)


@given(peers(), st.booleans())
def test_unpack_undoes_pack_and_touches_nothing_else(case, add):
    blocks, length = case
    runs = PackedRuns.of(blocks, 4)
    buffer = torch.arange(1.0, length + 1)
    back = torch.full_like(buffer, 100.0)
    unpack(pack(buffer, runs), runs, back, add=add)
    moved = torch.zeros(length, dtype=torch.bool)
    moved[[i for mine in blocks for block in mine for i in elements(block)]] = True
    assert torch.equal(back, torch.where(moved, buffer + (100 if add else 0), torch.tensor(100.0)))


def test_rectangles_of_different_peers_add_up():
    runs = PackedRuns.of([[Block(1, 2, 2, 2)], [], [Block(2, 1, 1, 1)]], 8)
    buffer = torch.zeros(6, dtype=torch.float64)
    unpack(torch.tensor([1.0, 2, 3, 4, 10, 0], dtype=torch.float64), runs, buffer, add=True)
    assert buffer.tolist() == [0, 1, 12, 3, 4, 0]


def test_bf16_is_sent_and_added_in_float32():
    """The sum keeps what bf16 could not hold; each summand is rounded once, on the wire."""
    runs = PackedRuns.of([[Block(0, 3, 1, 3)]], 2)
    buffer = torch.tensor([1.0, 1 / 3, 1000.0])
    packed = pack(buffer, runs, torch.bfloat16, scale=0.5)
    total = torch.tensor([512.25, 0.0, 1e-3])
    unpack(packed, runs, total, add=True, scale=2.0)
    assert torch.equal(total, torch.tensor([512.25, 0.0, 1e-3]) + (buffer * 0.5).bfloat16().float() * 2)
    assert total[0] == 513.25


def test_buffers_that_do_not_fit_the_plan_are_refused():
    runs = PackedRuns.of([[Block(0, 4, 2, 4)]], 4)
    with pytest.raises(PlanMismatchError, match="reach to element 8 of a buffer of 7"):
        pack(torch.zeros(7), runs)
    with pytest.raises(PlanMismatchError, match=r"of 4 bytes were planned, got torch\.bfloat16"):
        pack(torch.zeros(8), runs, torch.bfloat16)
    with pytest.raises(PlanMismatchError, match=r"got 7 packed elements, planned \(8,\)"):
        unpack(torch.zeros(7), runs, torch.zeros(8))
    with pytest.raises(ConfigError, match="differ in shape"):
        Moves(((Block.run(0, 2, 2), Block.run(0, 1, 4)),))
    with pytest.raises(ConfigError, match="do not overlap"):
        Block(0, 2, 2, 3)


def test_padding_fills_units_of_16_bytes():
    assert [padded(n, 2) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert [padded(n, 8) for n in (0, 1, 2, 3)] == [0, 2, 2, 4]


def full(value):
    """Left out of `make test`: every dtype is compiled anew."""
    return pytest.param(value, marks=pytest.mark.full)


DTYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float64),
]


def check_move(run, source_dtype, dtype, moves, length, add, scale):
    source = torch.randn(length, generator=torch.Generator().manual_seed(0)).to(source_dtype)
    wanted = torch.linspace(-1, 1, max(moves.destination_end, 1)).to(dtype)
    got = wanted.clone()
    reference.move_blocks(source, wanted, moves, add=add, scale=scale)
    run(source, got, moves, add=add, scale=scale)
    if scale == 1.0:
        assert torch.equal(got, wanted)
    else:
        torch.testing.assert_close(got, wanted)


@given(peers(), st.sampled_from(DTYPES), st.booleans(), st.sampled_from([1.0, 0.3]))
def test_the_formulation_that_is_compiled_equals_the_definition(case, dtypes, add, scale):
    blocks, length = case
    runs = PackedRuns.of(blocks, dtypes[1].itemsize)

    def uncompiled(source, destination, moves, add, scale):
        run = pack_module._add_indexed if add else pack_module._copy_indexed
        run(source, destination, moves.table(source.device), moves.numel, scale)

    check_move(uncompiled, *dtypes, runs.packing, length, add, scale)


@pytest.mark.timeout(600)  # the first use of the compiler costs more than a minute on a busy machine
@pytest.mark.parametrize("dtypes", [DTYPES[1], full(DTYPES[0]), full(DTYPES[2]), full(DTYPES[3])])
def test_compiled_move_equals_the_definition(dtypes):
    torch.compiler.reset()
    dynamo.counters.clear()
    plans = [
        [[Block(3, 10, 4, 5), Block(60, 1, 1, 1)], [], [Block(70, 7, 2, 3)]],
        [[], [], []],
        [[Block(0, 1, 1, 1)]],
        [[Block(9, 9, 9, 9)], [Block(0, 3, 3, 3)]],
    ]
    for plan in plans:
        runs = PackedRuns.of(plan, dtypes[1].itemsize)
        for add, scale in ((False, 1.0), (False, 0.3), (True, 1.0), (True, 0.3)):
            check_move(move_blocks.fused, *dtypes, runs.packing, 100, add, scale)
    assert dynamo.counters["stats"]["unique_graphs"] == 2, "one kernel to copy and one to add, whatever the plan"


def logits_and_targets(vocabulary, dtype, num_tokens=7):
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn((num_tokens, vocabulary), generator=generator, dtype=torch.float64)
    position = torch.randint(-1, max(vocabulary, 1), (num_tokens,), generator=generator)
    position[0] = -1
    return logits.to(dtype), position if vocabulary else torch.full_like(position, -1)


def check_cross_entropy(vocabulary, dtype):
    logits, position = logits_and_targets(vocabulary, dtype)
    logits = logits.float() if dtype is torch.bfloat16 else logits  # lifted, as the loss does
    top = local_max(logits).clamp(min=-1.0)
    sums = local_sums.fused(logits, top, position)
    torch.testing.assert_close(sums, local_sums.reference(logits, top, position))
    log_total, gradient = sums[0].clamp(min=1).log() + top, torch.linspace(0, 1, len(top)).to(logits.dtype)
    got = local_gradient.fused(logits, log_total, position, gradient)
    torch.testing.assert_close(got, local_gradient.reference(logits, log_total, position, gradient))
    assert got.shape == logits.shape


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", [torch.float32, full(torch.float64), full(torch.bfloat16)])
def test_compiled_cross_entropy_equals_the_definition(dtype):
    for vocabulary in (33, 1, 0, 40):
        check_cross_entropy(vocabulary, dtype)


def test_an_empty_vocabulary_adds_nothing():
    logits, position = logits_and_targets(0, torch.float64)
    assert local_max(logits).eq(float("-inf")).all()
    assert not local_sums(logits, torch.zeros(7, dtype=torch.float64), position).any()
    assert local_gradient(logits, torch.zeros(7), position, torch.ones(7)).shape == (7, 0)


def test_without_a_compiler_there_is_one_warning_and_the_definition_runs(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    compile_module.compiler_missing.cache_clear()
    compile_module._warn_once.cache_clear()
    try:
        logits, position = logits_and_targets(5, torch.float32)
        with pytest.warns(UserWarning, match=r"no C\+\+ compiler .* kernels run as plain torch"):
            got = local_sums.fused(logits, logits.amax(-1), position)
        assert torch.equal(got, local_sums.reference(logits, logits.amax(-1), position))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            local_sums.fused(logits, logits.amax(-1), position)
            move_blocks.fused(torch.ones(3), torch.zeros(3), Moves(((Block.run(0, 1, 3), Block.run(0, 1, 3)),)))
    finally:
        compile_module.compiler_missing.cache_clear()
        compile_module._warn_once.cache_clear()


def cross_entropy_against_torch(rank, world, vocabulary, dtype, ignored_share):
    """Summed errors of the losses and of a role's part of the gradient, against F.cross_entropy on all columns."""
    layout = nested_layouts(vocabulary, world)[world]
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn((5, vocabulary), generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (5,), generator=generator)
    targets[: round(5 * ignored_share)] = IGNORED
    columns = [i for span in layout.of(rank) for i in range(span.start, span.stop)]
    local = whole.detach()[:, columns].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(local, targets, lookup_table(layout, rank, "cpu"), dist.group.WORLD, IGNORED)
    wanted = F.cross_entropy(whole, targets, ignore_index=IGNORED, reduction="none")
    weights = torch.linspace(1, 2, 5, dtype=dtype)
    (losses * weights).sum().backward()
    (wanted * weights).sum().backward()
    return (losses - wanted).abs().sum().item(), (local.grad - whole.grad[:, columns]).abs().sum().item()


@pytest.mark.parametrize(("vocabulary", "world"), [(101, 1), (101, 3), (50257, 3), (2, 3)])
@pytest.mark.parametrize("ignored_share", [0.0, 0.4, 1.0])
def test_cross_entropy_over_roles_equals_torch(pool, vocabulary, world, ignored_share):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        reports = pool.run(cross_entropy_against_torch, world, vocabulary, dtype, ignored_share)
        assert all(error < tolerance for errors in reports for error in errors), reports


def finite_differences(rank, world):
    """gradcheck of each role's columns in turn. All roles call it, as the loss is collective; the mover's input counts."""
    layout = nested_layouts(3 * world, world)[world]
    generator = torch.Generator().manual_seed(rank)
    logits = torch.randn((4, 3), generator=generator, dtype=torch.float64)
    targets = torch.tensor([0, 3 * world - 1, IGNORED, 1])
    lookup, passed = lookup_table(layout, rank, "cpu"), []
    for mover in range(world):

        def losses(moved, mover=mover):
            used = moved if rank == mover else logits
            found = vocab_parallel_cross_entropy(used, targets, lookup, dist.group.WORLD)
            return found * (rank == mover) + 0 * moved.sum()

        passed.append(torch.autograd.gradcheck(losses, (logits.clone().requires_grad_(),), check_undefined_grad=False))
    return passed


@pytest.mark.parametrize("world", [1, 3])
def test_cross_entropy_gradcheck(pool, world):
    assert pool.run(finite_differences, world) == [[True] * world] * world
