"""What moves, what it takes, and what is left of it: bytes, memory, refusals, a failure in the middle, many changes."""

import gc
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from lightning_ntp.dtensor.cut import CutModule, restore_module
from lightning_ntp.errors import PlanMismatchError, UnrecoverableError
from lightning_ntp.strategy.fsdp import local_of, shard_model
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.huggingface import plan_model
from lightning_ntp.strategy.mover import Mover
from lightning_ntp.topology import Replica, Topology
from tests.engine import ShardedJob, Twin
from tests.lives import regroup, resources
from tests.models import batch, float64_norms, tiny

EVEN = {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 48, "intermediate_size": 96, "vocab_size": 96}
SMALL = {"num_hidden_layers": 1, "vocab_size": 31}
THREES = Topology.from_shapes([(1, 3), (1, 3)])
RELIEVED = replace(THREES, replicas=(THREES.replicas[0], replace(THREES.replicas[1], relief=((2, 500),))))


def one_move(rank, world, old, new, overrides, batch_bytes):
    """Received by the exchanges, by the report and by the plan; what the bounds are made of; the memory it took."""
    store = c10d._get_default_store()
    dist.barrier()
    if rank not in old.workers:
        return None
    regroup(store, 0, old.workers, rank)
    job = ShardedJob(tiny("llama", **overrides), old, rank)
    job.step(batch(job.model.config.vocab_size, 11, 9))
    dist.barrier()
    if rank not in new.workers:
        return None
    members = tuple(sorted(new.workers))
    regroup(store, 1, members, rank)
    carried, exchange = [], dist.all_to_all_single

    def spy(received, *args, **kwargs):
        carried.append(received.numel() * received.element_size())
        return exchange(received, *args, **kwargs)

    before = {spec.fqn: spec.cell(old.coordinates(rank)) for spec in job.sharded.plan.reordered(new.loss_order).params}
    with mock.patch.object(dist, "all_to_all_single", spy):
        report = job.move(new, members, dict.fromkeys(members, 1), batch_bytes)
    lacking = sum(
        part.numel for spec in job.sharded.plan.params for part in spec.cell(new.coordinates(rank)).minus(before[spec.fqn])
    )
    handed_out = [part.numel for spec in job.sharded.plan.params for part in before[spec.fqn].minus(spec.cell(new.coordinates(rank)))]
    lost = [worker for worker in old.workers if worker not in new.workers]
    cells = sum(spec.cell(old.coordinates(w)).numel for spec in job.sharded.plan.params if spec.dim is not None for w in lost)
    return {
        "carried": sum(carried),
        "received": report.received_bytes,
        "planned": report.planned_bytes.get(rank, 0),
        "moved": report.moved_bytes,
        "lacking": lacking * 3 * 8,
        "handed_out": sum(handed_out) * 3 * 8,
        "one_cell": max(cell.numel for cell in before.values()) * 3 * 8,
        "lost_cells": cells * 3 * 8,
        "peak": report.peak_extra_bytes,
        "largest": max(carried, default=0),
    }


MOVES = {
    "next in the order": (THREES, THREES.without(4), EVEN, True),
    "relabelled": (THREES.without(5), THREES.without(5).without(0), EVEN, False),
    "KV copies": (THREES, THREES.without(4), {}, False),
    "fsdp": (Topology.from_shapes([(3, 1), (3, 1)]), Topology(1, (Replica(((0,), (1,), (2,))), Replica(((3,), (5,))))), EVEN, False),
    "a slow role is relieved": (THREES, RELIEVED, EVEN, False),
    "and is well again": (RELIEVED, THREES, {}, False),
}


def half_of_a_role(overrides):
    """Elements that role 2 of 3 hands out when it keeps half of its granules, where all sizes divide."""
    plan = plan_model(tiny("llama", **overrides), 3)
    return sum(spec.numel // 6 for spec in plan.params if spec.dim is not None)


@pytest.mark.parametrize("name", MOVES)
def test_what_is_received_is_the_plan_and_what_was_lacking(pool, name):
    old, new, overrides, minimal = MOVES[name]
    reports = pool.run(one_move, 6, old, new, overrides, 2048, timeout=120.0)
    for worker, report in enumerate(reports):
        if report is None:
            continue
        assert report["carried"] == report["received"] == report["planned"] == report["lacking"]
        assert report["largest"] <= 2048
        if minimal:
            assert report["moved"] == report["lost_cells"]
            assert report["received"] == 0 or worker in new.replicas[1].workers
        assert report["moved"] <= 2 * max(report["lost_cells"], sum(r["lacking"] for r in reports if r))
        if not report["lost_cells"] and old is THREES:
            assert report["received"] == 0 or worker in (3, 4), "only the slow one's neighbours receive"
            assert report["moved"] == 3 * 8 * half_of_a_role(overrides)
        if report["handed_out"]:
            assert report["peak"] <= max(2 * report["received"], report["handed_out"] + report["one_cell"])
        elif report["received"] == 0:
            assert report["peak"] <= 2048, "a healthy worker needs no more than its send buffer"
        else:
            assert report["peak"] <= 2 * report["received"]


def refused(rank, world, case):
    store = c10d._get_default_store()
    old, new = (Topology.from_shapes([(1, 2)]), Topology(2, (Replica(((0,),)),), (1,)))
    if case == "differs":
        old, new = THREES, THREES.without(5)
    job = ShardedJob(tiny("llama", **SMALL), old, rank)
    dist.barrier()
    if rank not in new.workers:
        return None
    regroup(store, 1, new.workers, rank)
    steps = dict.fromkeys(new.workers, 3)
    if case == "nobody":
        steps = dict.fromkeys(new.workers)
    if case == "differs" and rank == 1:
        steps[1] = 4
    try:
        job.move(new, new.workers, steps)
    except (UnrecoverableError, PlanMismatchError) as error:
        return type(error).__name__, str(error)
    return "moved"


def test_what_nobody_holds_is_named_with_what_would_have_saved_it(pool):
    name, words = pool.run(refused, 2, "last")[0]
    assert name == "UnrecoverableError"
    assert "model.embed_tokens.weight: no live worker holds rows[" in words
    assert "one more replica, a buddy copy or a checkpoint would have saved it" in words
    name, words = pool.run(refused, 2, "nobody")[0]
    assert name == "UnrecoverableError"
    assert "none of the workers (0,) holds any state" in words


def two_steps(rank):
    """A job of two replicas of degree 3, and one process, after the same two steps."""
    job, twin = ShardedJob(tiny("llama", **SMALL), THREES, rank), Twin(tiny("llama", **SMALL))
    for step in range(2):
        job.step(batch(31, 11, 9, seed=step))
        twin.step(batch(31, 11, 9, seed=step))
    return job, twin


def old_holder(rank, world):
    """Worker 3 missed the last step: its parts come from the other replica although it has them."""
    store = c10d._get_default_store()
    with float64_norms():
        job, twin = two_steps(rank)
        if rank == 3:
            for _, parameter in job.sharded.parameters():
                local_of(parameter).mul_(0.5)
            for state in job.optimizer.state.values():
                state["step"] -= 1
        new = THREES.without(5)
        dist.barrier()
        if rank == 5:
            return 0.0
        regroup(store, 1, new.workers, rank)
        report = job.move(new, new.workers, {0: 2, 1: 2, 2: 2, 3: 1, 4: 2})
        assert report.step == 2
        job.step(batch(31, 11, 9, seed=2))
        twin.step(batch(31, 11, 9, seed=2))
        return max(job.errors(twin, lambda p: p).values())


def test_a_holder_of_an_older_step_is_no_source_and_is_brought_up_to_date(pool):
    assert max(pool.run(old_holder, 6)) < 1e-10


def broken_in_the_middle(rank, world, at):
    """Worker 1 is lost while the cells of worker 5 move: the others start over, from the same state."""
    store = c10d._get_default_store()
    with float64_norms():
        job, twin = two_steps(rank)
        first = THREES.without(5)
        second = first.without(1)
        dist.barrier()
        if rank == 5:
            return None
        regroup(store, 1, first.workers, rank, seconds=30.0)
        count, exchange = [0], Mover._exchange

        def failing(self, moves):
            count[0] += 1
            if count[0] == at and rank == 1:
                os._exit(9)
            exchange(self, moves)

        failed = False
        with mock.patch.object(Mover, "_exchange", failing):
            try:
                job.move(first, first.workers, dict.fromkeys(first.workers, 2), 1024)
            except RuntimeError:
                failed = True
        moved = len(job.sharded.held.moved) if job.sharded.held else -1
        regroup(store, 2, second.workers, rank)
        report = job.move(second, second.workers, dict.fromkeys(second.workers, 2), 1024)
        for step in range(2, 4):
            job.step(batch(31, 11, 9, seed=step))
            twin.step(batch(31, 11, 9, seed=step))
        worst = max(job.errors(twin, lambda p: p).values())
        moments = max(job.errors(twin, lambda p: {**job.optimizer.state, **twin.optimizer.state}[p]["exp_avg"]).values())
        return failed, moved, max(worst, moments), report.step


@pytest.mark.parametrize("at", [1, 12])
def test_a_loss_in_the_middle_of_a_move_starts_over(pool, at):
    reports = [report for report in pool.run(broken_in_the_middle, 6, at, timeout=120.0, deaths={1}) if report]
    assert len(reports) == 4
    for failed, moved, worst, step in reports:
        assert failed
        assert worst < 1e-10
        assert step == 2
    assert at == 1 or max(moved for _, moved, _, _ in reports) > 0, "some cells had moved"


def identities(rank, world):
    """What a user holds on to: module, hooks, optimizer, param groups, scheduler; buffers of a newcomer."""
    store = c10d._get_default_store()
    dist.barrier()
    both = Topology.from_shapes([(1, 2), (1, 1)])
    alone = Topology(2, (Replica(((0,),)), Replica(((2,),))), (1,), spares=(1,))
    model = tiny("llama", **SMALL)
    model.register_buffer("seen", torch.full((), float(rank)))
    job = ShardedJob(model, both, rank)
    calls = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append("after"))
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.5)
    group, listed = job.optimizer.param_groups[0], job.optimizer.param_groups[0]["params"]
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    job.step(batch(31, 6, 9))
    scheduler.step()
    hooks = {name: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._state_dict_pre_hooks)) for name, m in model.named_modules()}
    changes = []
    for number, topology in enumerate((alone, both), start=1):
        regroup_all(store, number, rank)
        job.move(topology, (0, 1, 2), {w: 1 if w in (0, 2) else None if number == 2 else 1 for w in (0, 1, 2)})
        if rank == 1 and number == 1:
            model.seen.fill_(-1.0)
        changes.append((job.optimizer.param_groups[0] is group, group["params"] is listed, group["lr"]))
    job.step(batch(31, 6, 9))
    scheduler.step()
    now = {name: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._state_dict_pre_hooks)) for name, m in model.named_modules()}
    names = {id(p) for p in model.parameters()}
    return {
        "changes": changes,
        "calls": calls[-2:],
        "lr": group["lr"],
        "classes": classes == {name: type(module).__name__ for name, module in model.named_modules()},
        "hooks": hooks == now or {k: (hooks[k], now[k]) for k in hooks if hooks[k] != now[k]},
        "listed": [id(p) for p in listed] == [id(p) for p in model.parameters()] and len(names) == len(listed),
        "state": set(map(id, job.optimizer.state)) == names,
        "seen": float(model.seen),
        "grads": any(p.grad is not None for p in model.parameters()),
    }


def regroup_all(store, number, rank):
    dist.barrier()
    regroup(store, number, (0, 1, 2), rank)


def test_modules_hooks_optimizers_and_schedulers_stay_the_same_objects(pool):
    for report in pool.run(identities, 3):
        assert report["changes"] == [(True, True, 0.005)] * 2
        assert report["calls"] == ["before", "after"]
        assert report["lr"] == 0.0025
        assert report["classes"]
        assert report["hooks"] is True
        assert report["listed"]
        assert report["state"]
        assert report["seen"] == 0.0, "the leader's at the start; a newcomer gets it again"


def mixed_precision(rank, world, true):
    """bf16-mixed (float32 weights) and bf16-true: after a change every worker holds the same bits as before."""
    store = c10d._get_default_store()
    dist.barrier()
    both = Topology.from_shapes([(1, 2), (1, 1)])
    alone = Topology(2, (Replica(((0,),)), Replica(((2,),))), (1,), spares=(1,))
    policy = MixedPrecisionPolicy(None if true else torch.bfloat16, torch.float32)
    job = ShardedJob(tiny("llama", **SMALL).to(torch.bfloat16 if true else torch.float32), both, rank, mp_policy=policy)
    job.step(batch(31, 6, 9))
    want = {(spec.fqn, key): local_of(value).clone() for spec, p in job.sharded.parameters() for key, value in _all(job, p)}
    for number, topology in enumerate((alone, both), start=1):
        regroup_all(store, number, rank)
        job.move(topology, (0, 1, 2), {w: None if number == 2 and w == 1 else 1 for w in (0, 1, 2)})
    have = {(spec.fqn, key): local_of(value).clone() for spec, p in job.sharded.parameters() for key, value in _all(job, p)}
    job.step(batch(31, 6, 9))
    return have.keys() == want.keys() and all(torch.equal(have[k], want[k]) and have[k].dtype == want[k].dtype for k in want)


def _all(job, parameter):
    yield "", parameter
    yield from job.optimizer.state[parameter].items()


@pytest.mark.parametrize("true", [False, True])
def test_bf16_comes_back_with_the_same_bits(pool, true):
    assert pool.run(mixed_precision, 3, true) == [True] * 3


def many_changes(rank, world, count):
    """One worker is parked and taken back again and again; what stays is counted when garbage has been collected."""
    store = c10d._get_default_store()
    dist.barrier()
    both = Topology.from_shapes([(1, 2), (1, 1)])
    alone = Topology(2, (Replica(((0,),)), Replica(((2,),))), (1,), spares=(1,))
    regroup(store, 0, (0, 1, 2), rank)
    job = ShardedJob(tiny("llama", **SMALL), both, rank)
    seen = []
    for number in range(1, count + 1):
        if rank in job.topology.workers:
            job.step(batch(31, 6, 9, seed=number))
        held = {w: number - 1 if w in job.topology.workers else None for w in (0, 1, 2)}
        dist.barrier()
        job.groups.destroy()
        regroup(store, number, (0, 1, 2), rank)
        job.move(alone if number % 2 else both, (0, 1, 2), held)
        gc.collect()
        seen.append(resources())
    return seen


def test_twenty_changes_leave_nothing_behind(pool):
    for seen in pool.run(many_changes, 3, 20, timeout=120.0):
        grown = {what: count - seen[3][what] for what, count in seen[-1].items() if count > seen[3][what]}
        assert not grown


def restored_root(rank, world):
    topology = Topology.from_shapes([(1, 2)])
    model = tiny("llama", **SMALL)
    shard_model(model, plan_model(model, 2, topology.loss_order), Groups(topology, rank), roots=("model", "lm_head"))
    head = model.lm_head
    was_cut = isinstance(head, CutModule)
    restore_module(head)
    return was_cut, isinstance(head, CutModule), isinstance(head, FSDPModule), type(head).__mro__[2] is nn.Linear, head.out_features


def test_a_cut_module_that_is_an_fsdp_root_itself_stays_one_when_the_swap_is_undone(pool):
    assert pool.run(restored_root, 2) == [(True, False, True, True, 31)] * 2
