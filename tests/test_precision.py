"""Each precision that the strategy takes keeps its bits through saving, loading and the move of state after a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.distributed import distributed_c10d as c10d

from lightning_ntp.strategy.fsdp import local_of
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.state import rebuild
from lightning_ntp.strategy.whole import takes_part, whole_tensor
from tests import lightning_jobs as jobs
from tests.lives import regroup

PRECISIONS = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "bf16-mixed": torch.float32}
"""What parameters and moments are kept in."""

Bits = dict[str, torch.Tensor]


class Single(jobs.TinyLlama):
    """Weights as a user's model has them, before the precision is applied."""

    def __init__(self) -> None:
        super().__init__()
        self.float()


def whole(strategy: Any) -> Bits:
    """Parameters, and whatever is kept beside them, in one piece; empty outside of the first replica."""
    found: Bits = {}
    for spec, parameter in strategy.sharded.parameters() if takes_part(strategy.sharded) else ():
        found[spec.fqn] = whole_tensor(strategy.sharded, spec, parameter)
        for index, holder in enumerate(strategy.state_holders):
            for key, value in sorted(holder.state[parameter].items()):
                if value.dim():
                    found[f"{spec.fqn} {index} {key}"] = whole_tensor(strategy.sharded, spec, value)
    return {name: tensor.clone() for name, tensor in found.items()}


def train(strategy: Any, world: int, precision: str, steps: int, folder: Path, **options: Any) -> Any:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = jobs.trainer(
        strategy, world, precision=precision, max_steps=steps, enable_checkpointing=True,
        callbacks=[saver, EMAWeightAveraging(decay=0.5)],
    )  # fmt: skip
    trainer.fit(Single(), jobs.loader(32, 4), **options)
    return trainer


def saved_case(rank: int, world: int, precision: str, folder: str) -> tuple[Bits, Bits, set[torch.dtype]]:
    """(after two steps, after four, dtypes of everything that is kept)."""
    with jobs.as_worker(rank, world):
        states = []
        for steps in (2, 4):
            strategy = jobs.ntp(replica_sizes=[3, 2])
            train(strategy, world, precision, steps, Path(folder) / f"{steps}")
            states.append(whole(strategy))
        kept = [local_of(v) for h in strategy.state_holders for s in h.state.values() for v in s.values() if v.dim()]
        return states[0], states[1], {local_of(p).dtype for _, p in strategy.sharded.parameters()} | {v.dtype for v in kept}


def resumed_case(rank: int, world: int, precision: str, folder: str) -> Bits:
    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=[3, 2])
        train(strategy, world, precision, 4, Path(folder) / "resumed", ckpt_path=f"{folder}/4/step=2.ckpt")
        return whole(strategy)


def loaded_case(rank: int, world: int, precision: str, folder: str) -> Bits:
    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=[3, 2] if world == 5 else [(2, 1), (1, 1)])
        trainer = jobs.trainer(strategy, world, precision=precision)
        trainer.validate(Single(), jobs.loader(2, 1), ckpt_path=f"{folder}/4/step=2.ckpt", verbose=False)
        return whole(strategy)


def same(one: Bits, other: Bits) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


SAMPLE = [p if p == "bf16-mixed" else pytest.param(p, marks=pytest.mark.full) for p in PRECISIONS]


@pytest.mark.parametrize("precision", SAMPLE)
def test_a_checkpoint_keeps_every_bit(pool, tmp_path, precision):
    results = pool.run(saved_case, 5, precision, str(tmp_path))
    after_two, after_four, dtypes = results[0]
    assert dtypes == {PRECISIONS[precision]}
    assert same(pool.run(resumed_case, 5, precision, str(tmp_path))[0], after_four)
    loaded = pool.run(loaded_case, 3, precision, str(tmp_path))[0]
    assert loaded.keys() == {name for name in after_two if " " not in name}
    assert {tensor.dtype for tensor in loaded.values()} == {PRECISIONS[precision]}
    assert same(loaded, pool.run(loaded_case, 5, precision, str(tmp_path))[0])


def moved_case(rank: int, world: int, precision: str, folder: str) -> tuple[Bits, Bits]:
    """Everything that is kept, before and after worker 4 is lost."""
    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=[3, 2])
        train(strategy, world, precision, 2, Path(folder) / "moved")
        before, store = whole(strategy), c10d._get_default_store()
        dist.barrier()
        if rank == 4:
            return {}, {}
        members = (0, 1, 2, 3)
        regroup(store, 1, members, rank)
        topology = strategy.topology.without(4)
        groups = Groups(topology, rank, "cpu", members)
        rebuild(strategy.sharded, strategy.state_holders, groups, dict.fromkeys(members, 2))
        after = whole(strategy)
        dist.barrier()
        return before, after


@pytest.mark.parametrize("precision", SAMPLE)
def test_a_loss_moves_every_bit_averages_included(pool, tmp_path, precision):
    before, after = pool.run(moved_case, 5, precision, str(tmp_path))[0]
    assert any(name.endswith("average") for name in before) and any(name.endswith("exp_avg_sq") for name in before)
    assert same(before, after)
