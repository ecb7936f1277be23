"""Ragged jobs against one process, float64: logits, loss, the gradient of every parameter, AdamW's state after 5 steps."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_ntp.topology import Topology
from tests.engine import ShardedJob, Twin
from tests.models import batch, float64_norms, tiny

TOLERANCE = 1e-10

# (kind, overrides, shapes, loss order, micro-batches per replica, and what slow roles of each keep)
CASES = {
    "llama [3,2]": ("llama", {}, [(1, 3), (1, 2)], (1, 2), (1, 1)),
    "llama [3,2] tied": ("llama", {"tie_word_embeddings": True}, [(1, 3), (1, 2)], (1, 2), (1, 1)),
    "qwen3 [3,2]": ("qwen3", {}, [(1, 3), (1, 2)], (0, 2), (2, 1)),
    "qwen3 [4,3,1] tied": ("qwen3", {"tie_word_embeddings": True}, [(1, 4), (1, 3), (1, 1)], (2, 0, 1), (1, 2, 3)),
    "llama [4,3,1]": ("llama", {}, [(1, 4), (1, 3), (1, 1)], (2, 0, 1), (1, 1, 1)),
    "llama 2x2 + 2x1": ("llama", {}, [(2, 2), (2, 1)], (0,), (1, 1)),
    "qwen3 2x2 + 1x3": ("qwen3", {}, [(2, 2), (1, 3)], (1, 0), (2, 3)),
    "qwen3 3x1 + 2x1": ("qwen3", {}, [(3, 1), (2, 1)], (), (1, 1)),
    "gpt2 [3,2]": ("gpt2", {}, [(1, 3), (1, 2)], (1, 2), (1, 2)),
    "gpt2 2x2 + 2x1": ("gpt2", {}, [(2, 2), (2, 1)], (1,), (1, 1)),
    "gpt2 [4,3,1]": ("gpt2", {}, [(1, 4), (1, 3), (1, 1)], (1, 2, 0), (1, 1, 1)),
    "phi3 [3,2]": ("phi3", {}, [(1, 3), (1, 2)], (2, 0), (1, 1)),
    "phi3 [4,3,1]": ("phi3", {}, [(1, 4), (1, 3), (1, 1)], (0, 1, 2), (2, 1, 1)),
    "phi3 2x2 + 2x1": ("phi3", {}, [(2, 2), (2, 1)], (1,), (1, 1)),
    "qwen2 [3,2]": ("qwen2", {}, [(1, 3), (1, 2)], (1, 0), (1, 1)),
    "mistral [4,3]": ("mistral", {}, [(1, 4), (1, 3)], (3, 1, 0), (1, 1)),
    "llama one replica 2x3": ("llama", {}, [(2, 3)], (1, 0), (1,)),
    "llama even 2x2 + 2x2": ("llama", {}, [(2, 2), (2, 2)], (1,), (1, 1)),
    "llama 14 heads / 2 kv over 3": (
        "llama",
        {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 28, "head_dim": 2},
        [(1, 3), (1, 2)],
        (0, 1),
        (1, 1),
    ),
    **{
        f"{kind} {name}": (kind, {}, shapes, order, (1, 2))
        for name, shapes, order in (("2x2 + 2x1 again", [(2, 2), (2, 1)], (0,)), ("3x1 + 2x1 again", [(3, 1), (2, 1)], ()))
        for kind in ("llama", "qwen3", "gpt2", "phi3")
    },
    **{
        f"{kind} 14 heads over 3": (
            kind, {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 28, "head_dim": 2}, [(1, 3), (1, 2)],
            (1, 0), (1, 1),
        )
        for kind in ("qwen3", "gpt2", "phi3")
    },
    "gpt2 vocab 50257 over 3": ("gpt2", {"vocab_size": 50257}, [(1, 3), (1, 2)], (0, 1), (1, 1)),
    "llama [3,2] relieved": ("llama", {}, [(1, 3), (1, 2)], (1, 2), (1, 1), ((), ((0, 400),))),
    "qwen3 2x2 + 1x3 relieved": ("qwen3", {}, [(2, 2), (1, 3)], (1, 0), (2, 3), (((2, 500),), ((0, 300), (2, 600)))),
    "gpt2 [3,2] relieved": ("gpt2", {}, [(1, 3), (1, 2)], (1, 2), (1, 2), (((0, 500),), ())),
    "phi3 one replica 1x3 relieved": ("phi3", {}, [(1, 3)], (1, 2), (1,), (((2, 500),),)),
}  # fmt: skip

FULL = {name for name in CASES if name.endswith((" again", "14 heads over 3"))} | {"gpt2 [3,2] relieved", "phi3 one replica 1x3 relieved"}


def gradients_and_steps(rank, world, case, num_steps):
    kind, overrides, shapes, order, micro_batches, *reliefs = case
    torch.manual_seed(rank)
    with float64_norms():
        topology = Topology.from_shapes(shapes, order)
        for relief in reliefs:
            relieved = (replace(replica, relief=one) for replica, one in zip(topology.replicas, relief, strict=True))
            topology = replace(topology, replicas=tuple(relieved))
        model = tiny(kind, **overrides)
        if rank:  # another start: the leader's has to win
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        job = ShardedJob(model, topology, rank, micro_batches)
        twin = Twin(tiny(kind, **overrides))
        data = batch(model.config.vocab_size, 11, 9, seed=1)
        logits = job.logits_error(twin, data)
        loss, wanted = job.backward(data), twin.backward(data)
        report = {"logits": logits.item(), "loss": abs(loss - wanted).item(), "gradient": job.errors(twin, lambda p: p.grad)}
        norms = []
        for step in range(num_steps):
            data = batch(model.config.vocab_size, 11, 9, seed=2 + step)
            norms.append(abs(job.step(data) / twin.step(data) - 1).item())
        report["norm"] = max(norms, default=0.0)
        report["parameter"] = job.errors(twin, lambda p: p)
        for name in ("exp_avg", "exp_avg_sq"):
            report[name] = job.errors(
                twin, lambda p, name=name: {**job.optimizer.state, **twin.optimizer.state}[p][name]
            )
        report["drifted"] = job.drifted()
        digests = [None] * world
        dist.all_gather_object(digests, job.sharded.window.order_digest)
        report["orders"] = len(set(digests))
    return report


def is_full(name):
    """The same shape with another model is left to `make test-full`."""
    return pytest.param(name, marks=pytest.mark.full) if name in FULL else name


@pytest.mark.parametrize("name", [is_full(name) for name in CASES])
def test_gradients_losses_and_five_adamw_steps_equal_one_process(pool, name):
    case = CASES[name]
    world = sum(f * t for f, t in case[2])
    report = pool.run(gradients_and_steps, world, case, 5)[0]
    assert report["logits"] < TOLERANCE
    assert report["loss"] < TOLERANCE
    assert report["norm"] < TOLERANCE
    for what in ("gradient", "parameter", "exp_avg", "exp_avg_sq"):
        wrong = {fqn: error for fqn, error in report[what].items() if not error < TOLERANCE}
        assert not wrong, what
    assert report["drifted"] == 0, "copies of one element are not the same bits"
    assert report["orders"] == 1


def dropout_steps(rank, world):
    """gpt2 with its default dropout: what each role draws on replicated activations, and whether copies stay equal."""
    torch.manual_seed(rank)
    with float64_norms():
        topology = Topology.from_shapes([(1, 3), (1, 2)])
        model = tiny("gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
        job = ShardedJob(model, topology, rank)
        residual, local, masks = model.transformer.h[0].attn.resid_dropout, [], []
        residual.register_forward_hook(lambda _, args, out: masks.append(out == 0))
        model.transformer.h[0].attn.c_proj.register_forward_pre_hook(lambda _, args: local.append(args[0].detach()))
        inputs = []
        model.transformer.h[1].register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
        for step in range(5):
            torch.manual_seed(1000 * step + topology.data_row(rank))  # what the strategy does per micro-batch
            job.step(batch(101, 10, 9, seed=step))
        return {
            "masks": torch.stack([m[:3] for m in masks]),
            "inputs": torch.stack([i[:3] for i in inputs]),
            "after": torch.rand(4),
            "drifted": job.drifted(),
            "dropped": float((masks[0]).double().mean()),
        }


def test_dropout_is_one_mask_per_data_row_on_replicated_activations(pool):
    reports = pool.run(dropout_steps, 5)
    for first, others in ((0, (1, 2)), (3, (4,))):
        for other in others:
            for what in ("masks", "inputs", "after"):
                assert torch.equal(reports[first][what], reports[other][what]), (what, first, other)
    assert not torch.equal(reports[0]["masks"], reports[3]["masks"])
    assert all(report["drifted"] == 0 for report in reports), "copies, norms on extra roles among them, drifted apart"
    assert 0.05 < reports[0]["dropped"] < 0.2


def attention_masks(rank, world, degree):
    """Attention weights that dropout zeroed, per role, with equal inputs on all of them."""
    topology = Topology.from_shapes([(1, degree)])
    model = tiny("gpt2", attn_pdrop=0.5)
    job = ShardedJob(model, topology, rank)
    attention, seen = model.transformer.h[0].attn, []
    attention.register_forward_hook(lambda _, args, out: seen.append(out[1] == 0))
    torch.manual_seed(0)
    job.backward(batch(101, 4, 9))
    return [mask[:, 0].clone() for mask in seen]


def test_dropout_on_local_heads_differs_between_roles(pool):
    first, second = pool.run(attention_masks, 2, 2)
    assert first
    assert first[0].any()
    assert not torch.equal(first[0], second[0])


ONE_KV_HEAD_EACH = {"num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 96, "vocab_size": 96}


def counted_volume(rank, world, shapes, order, sizes):
    """Elements that all_to_all_single really carried in one backward, beside the plans' own count."""
    topology = Topology.from_shapes(shapes, order)
    model = tiny("llama", **sizes)
    job = ShardedJob(model, topology, rank)
    carried, exchange, lists = [], dist.all_to_all_single, []

    def spy(output, send, *args, **kwargs):
        carried.append(send.numel())
        return exchange(output, send, *args, **kwargs)

    patched = {"all_to_all_single": spy, "all_to_all": lists.append, "all_gather": lists.append}
    with mock.patch.multiple(dist, **patched):
        job.backward(batch(model.config.vocab_size, 11, 9))
    planned = sum(bucket.plan.sent_elements for bucket in job.sharded.buckets)
    at = topology.coordinates(rank)
    extra = at.role not in topology.roles(topology.sync_degree)
    mine = sum(spec.cell(at).numel for spec in job.sharded.plan.params if spec.dim is not None)
    replicated = sum(spec.numel for spec in job.sharded.plan.params if spec.dim is None)
    return {"carried": sum(carried), "planned": planned, "counted": job.sharded.window.sent_elements,
            "extra_cells": mine if extra else 0, "copies": replicated if extra else 0, "lists": len(lists)}  # fmt: skip


@pytest.mark.parametrize(("shapes", "order"), [([(1, 4), (1, 3)], (1,)), ([(1, 3), (1, 2)], ()), ([(1, 4), (1, 2)], (0, 3))])
def test_bytes_of_the_exchange_are_the_plans_and_the_lower_bound(pool, shapes, order):
    reports = pool.run(counted_volume, sum(t for _, t in shapes), shapes, order, ONE_KV_HEAD_EACH)
    assert all(r["carried"] == r["planned"] == r["counted"] for r in reports)
    assert not any(r["lists"] for r in reports), "a list collective ran"
    # There and back for the extras' cells; copies of replicated gradients only come back.
    bound = sum(2 * r["extra_cells"] + r["copies"] for r in reports)
    assert sum(r["carried"] for r in reports) == bound > 0


@pytest.mark.parametrize(("shapes", "order"), [([(2, 2), (1, 3)], (1, 0)), ([(1, 4), (1, 3)], (2,))])
def test_bytes_of_the_exchange_are_the_plans_with_copies_and_other_fsdp_sizes(pool, shapes, order):
    """How close these plans come to what must be sent is tests/test_sync_plan.py's business."""
    reports = pool.run(counted_volume, sum(f * t for f, t in shapes), shapes, order, {})
    assert all(r["carried"] >= r["planned"] == r["counted"] for r in reports)
    assert sum(r["carried"] for r in reports) < 1.05 * sum(r["planned"] for r in reports), "padding to 16 bytes"
    assert not any(r["lists"] for r in reports), "a list collective ran"


def test_an_even_job_exchanges_nothing_inside_a_replica(pool):
    reports = pool.run(counted_volume, 4, [(1, 2), (1, 2)], (), ONE_KV_HEAD_EACH)
    assert [r["carried"] for r in reports] == [0, 0, 0, 0]
