"""A flipped bit is found wherever it is planted; three holders tell who is wrong, and the right bits come back."""

import pytest
import torch

from lightning_ntp.strategy.fsdp import local_of
from lightning_ntp.strategy.integrity import check_integrity
from lightning_ntp.topology import Topology
from tests.engine import ShardedJob
from tests.models import batch, tiny

# shapes, worker, parameter, label, and the culprits that must be named
FLIPS = {
    "three replicas": ([(1, 2), (1, 2), (1, 1)], 3, "model.layers.0.mlp.up_proj.weight", "", (3,)),
    "a moment": ([(1, 2), (1, 2), (1, 1)], 0, "model.layers.1.self_attn.o_proj.weight", "0/exp_avg_sq", (0,)),
    "a replicated norm, copies on roles": ([(1, 2), (1, 2)], 2, "model.norm.weight", "", (2,)),
    "two replicas cannot tell": ([(1, 3), (1, 2)], 4, "lm_head.weight", "", ()),
    "fsdp cuts differ": ([(2, 1), (3, 1), (1, 1)], 2, "model.embed_tokens.weight", "", (2,)),
}


def planted(rank, world, flip):
    shapes, worker, fqn, label, _ = flip
    job = ShardedJob(tiny("llama", num_hidden_layers=2), Topology.from_shapes(shapes), rank)
    job.step(batch(101, 11, 9))
    before = check_integrity(job.sharded, [job.optimizer])
    named = {spec.fqn: p for spec, p in job.sharded.parameters()}
    tensor = job.optimizer.state[named[fqn]]["exp_avg_sq"] if label else named[fqn]
    kept = local_of(tensor).clone()
    if rank == worker:
        bits = local_of(tensor).reshape(-1).view(torch.int64)
        bits[len(bits) // 2] ^= 1 << 3
    found = check_integrity(job.sharded, [job.optimizer])
    mended = check_integrity(job.sharded, [job.optimizer], repair=True)
    after = check_integrity(job.sharded, [job.optimizer])
    return {
        "before": before.damages,
        "places": [(d.fqn, d.label, d.culprits) for d in found.damages],
        "words": [str(d) for d in found.damages],
        "culprits": found.culprits,
        "repaired": mended.num_repaired,
        "after": len(after.damages),
        "same": torch.equal(local_of(tensor), kept),
    }


@pytest.mark.parametrize("name", FLIPS)
def test_a_flipped_bit_is_found_named_and_mended(pool, name):
    shapes, worker, fqn, label, culprits = FLIPS[name]
    for rank, report in enumerate(pool.run(planted, sum(f * t for f, t in shapes), FLIPS[name], timeout=90.0)):
        assert report["before"] == ()
        assert report["places"] == [(fqn, label, culprits)]
        assert report["culprits"] == culprits
        assert report["repaired"] == report["same"] * bool(culprits) == bool(culprits) or rank != worker
        assert report["after"] == (0 if culprits else 1)
        (words,) = report["words"]
        assert fqn in words
        if culprits:
            assert f"worker {worker} (r" in words
            assert "differs from the other holders" in words
        else:
            assert "no majority" in words
