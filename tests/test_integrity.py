"""A flipped bit is found wherever it is planted; three holders tell who is wrong, and the right bits come back.

First on a bare model, then in ``trainer.fit``, where a fault script plants it.
"""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from lightning_ntp.errors import ConfigError, SilentCorruptionError
from lightning_ntp.goodput_merge import read_run
from lightning_ntp.strategy import integrity
from lightning_ntp.strategy.config import RecoveryConfig
from lightning_ntp.strategy.damage import flip_bit
from lightning_ntp.strategy.fsdp import local_of
from lightning_ntp.strategy.integrity import check_integrity, why_not_comparable
from lightning_ntp.testing import Fault, FaultScript
from lightning_ntp.topology import Topology
from tests import lightning_jobs as jobs
from tests.engine import ShardedJob
from tests.models import batch, tiny
from tests.survival import Run
from tests.test_manual_optimization import Alternating

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
    with patch.multiple(integrity, _MAX_SUMS=50, _MAX_ELEMENTS=40):
        piecemeal = check_integrity(job.sharded, [job.optimizer])
    mended = check_integrity(job.sharded, [job.optimizer], repair=True)
    after = check_integrity(job.sharded, [job.optimizer])
    return {
        "before": before.damages,
        "places": [(d.fqn, d.label, d.culprits) for d in found.damages],
        "words": [str(d) for d in found.damages],
        "piecemeal": piecemeal.damages == found.damages,
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
        assert report["piecemeal"]
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


PARAMETER = "layers.0.mlp.up_proj.weight"


def flip(worker: int, step: int) -> Fault:
    return Fault("flip-bit", worker, "after_commit", step, parameter=PARAMETER, bit=40)


def test_a_bit_that_flips_in_a_fit_is_named_and_put_right_before_the_next_step(tmp_path: Path) -> None:
    """Three replicas: the run equals one in which nothing happened."""
    strategy, faults = {"replica_sizes": [2, 1, 1]}, FaultScript(flip(3, 1))
    run = Run(tmp_path, faults, workers=4, strategy=strategy, recovery={"integrity_every_n_steps": 1})
    run.check({0, 1, 2, 3})
    told = run.lines("damaged")
    assert sorted(line["worker"] for line in told) == [0, 1, 2, 3]
    assert {(*line["damaged"], line["at"], line["since"], line["repaired"]) for line in told} == {(3, 2, 1, 1)}
    said = run.job.printed.decode()
    assert "[ntp] after step 2 copies of the same state differ (looked at before: after step 1):" in said
    assert f"{PARAMETER}  rows[0:1) columns[0:" in said and ": worker 3 (r2/tp0) differs from the other holders" in said
    assert "[ntp]   1 of 1 places got the bits of the majority back" in said


def test_with_two_replicas_a_flipped_bit_ends_the_fit_and_names_both(tmp_path: Path) -> None:
    strategy, faults = {"replica_sizes": [2, 1]}, FaultScript(flip(2, 2))
    run = Run(tmp_path, faults, workers=3, strategy=strategy, recovery={"integrity_every_n_steps": 2}, log=True, code=1)
    assert max(line["step"] for line in run.lines("step")) == 3  # found by the check after step 4
    assert {(*line["damaged"], line["at"], line["since"], line["repaired"]) for line in run.lines("damaged")} == {(4, 2, 0)}
    said = run.job.printed.decode()
    assert "SilentCorruptionError: after step 4 copies of the same state differ (looked at before: after step 2):" in said
    assert "worker 0 (r0/tp0) | worker 2 (r1/tp0) differ, and there is no majority to tell who is right" in said
    assert "a checkpoint of step 2 or before is free of it" in said
    damage = next(event for event in read_run(tmp_path / "ntp").events if event["event"] == "damage")
    assert (damage["step"], damage["num_places"], damage["num_repaired"]) == (4, 1, 0) and PARAMETER in damage["why"]


def test_a_recovery_is_followed_by_a_check_even_if_none_was_asked_for(tmp_path: Path) -> None:
    faults = FaultScript(flip(3, 1), Fault("kill", 0, "sync", 4))
    run = Run(tmp_path, faults, workers=4, strategy={"replica_sizes": [2, 1, 1]})
    assert {line["worker"] for line in run.lines("finished")} == {1, 2, 3}
    assert {(*line["damaged"], line["at"], line["repaired"]) for line in run.lines("damaged")} == {(3, 4, 1)}


def test_a_worker_may_be_lost_in_the_check_itself(tmp_path: Path) -> None:
    """Ragged replicas, before and after: nothing differs in any check."""
    faults = FaultScript(Fault("kill", 2, "integrity", 3), Fault("kill", 4, "backward", 5))
    recovery = {"integrity_every_n_steps": 1}
    run = Run(tmp_path, faults, workers=5, strategy={"replica_sizes": [3, 2]}, recovery=recovery)
    run.check({0, 1, 3})
    assert not run.lines("damaged") and {line["phase"] for line in run.lines("lost")} == {"integrity", "step"}


class Flipping(Alternating):
    """One worker's copy is damaged before the third step."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2 and self.trainer.global_rank == 1:
            flip_bit(self.named_parameters(), flip(1, 2))


def flipped_by_hand(rank, world):
    recovery = RecoveryConfig(integrity_every_n_steps=1)
    with jobs.as_worker(rank, world):
        trainer = jobs.trainer(jobs.ntp(replica_sizes=[1, 1], recovery=recovery), world)
        with pytest.raises(SilentCorruptionError) as caught:
            trainer.fit(Flipping(), jobs.loader(16, 2))
        return str(caught.value)


def test_manual_steps_are_checked_as_well_and_without_a_supervisor(pool):
    for said in pool.run(flipped_by_hand, 2):
        assert said.startswith("after step 3 copies of the same state differ (looked at before: after step 2):")
        assert f"{PARAMETER}  rows[0:1) columns" in said and "worker 0 (r0/tp0) | worker 1 (r1/tp0) differ" in said


def test_what_cannot_be_compared_is_not_taken_for_damage() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    fused = torch.optim.AdamW([parameter], fused=True)
    assert "fused=True on CPU" in why_not_comparable([torch.optim.SGD([parameter]), fused], torch.device("cpu"))
    assert why_not_comparable([fused], torch.device("cuda")) == why_not_comparable([], torch.device("cpu")) == ""
    strategy = jobs.ntp(recovery=RecoveryConfig(integrity_every_n_steps=5))
    strategy.optimizers = [fused]
    with pytest.raises(ConfigError, match="integrity_every_n_steps needs copies that have the same bits: fused=True on CPU"):
        strategy.check_inspectable()
    with pytest.raises(ConfigError, match="integrity_every_n_steps is 1 or more, or None, got 0"):
        RecoveryConfig(integrity_every_n_steps=0)
