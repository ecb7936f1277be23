"""Checkpoints of other programs: stock FSDP2 scripts, Lightning's ModelParallelStrategy, plain Lightning, and back to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_ntp.strategy.whole import whole_optimizer_state
from tests import lightning_jobs as jobs
from tests.models import batch, tiny
from tests.test_stock_peer import FloatLlama, HandMadeLlama


def _stock_script(rank: int, world: int, folder: str, form: str) -> dict[str, torch.Tensor]:
    """FSDP2 by hand, without Lightning: three steps, saved as torch's tutorials do."""
    model = tiny("llama")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(3):
        optimizer.zero_grad()
        model(**batch(101, 4, 6, seed=step), use_cache=False).loss.backward()
        optimizer.step()
    if form == "bare":
        dcp.save({f"model.{name}": tensor for name, tensor in get_model_state_dict(model).items()}, checkpoint_id=folder)
    else:
        weights, state = get_state_dict(model, optimizer)
        inside = {f"model.{name}": tensor for name, tensor in weights.items()}
        renamed = {f"model.{name}": entry for name, entry in state["state"].items()}
        groups = [group | {"params": [f"model.{name}" for name in group["params"]]} for group in state["param_groups"]]
        dcp.save({"model": inside, "optim": {"state": renamed, "param_groups": groups}}, checkpoint_id=folder)
    moments = {name: optimizer.state[p]["exp_avg"].full_tensor() for name, p in model.named_parameters()}
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()} | {
        f"{name}/exp_avg": moment for name, moment in moments.items()
    }


def _go_on(rank: int, world: int, sizes: Any, path: str, kind: str, options: dict[str, Any]) -> Any:
    """A fit that only loads: what is held then."""
    with jobs.as_worker(rank, world):
        module = FloatLlama() if kind == "float" else jobs.TinyLlama()
        strategy = jobs.ntp(replica_sizes=sizes)
        trainer = jobs.trainer(strategy, world, **options)
        trainer.fit(module, jobs.loader(8, 2), ckpt_path=path)
        names = [spec.fqn for spec, _ in strategy.sharded.parameters()]
        state = whole_optimizer_state(strategy.sharded, trainer.optimizers[0])
        moments = {f"{names[n]}/{k}": v for n, e in state.get("state", {}).items() for k, v in e.items()}
        return jobs.whole_state(strategy) | moments, trainer.optimizers[0].param_groups[0]["lr"], trainer.global_step


STAND_STILL = {"max_steps": 0}


@pytest.mark.parametrize("form", ["model and optim", "bare"])
def test_a_stock_fsdp2_folder_loads_into_ragged_replicas(pool, tmp_path, form):
    folder = str(tmp_path / "stock")
    wanted = pool.run(_stock_script, 2, folder, form)[0]
    held, lr, _ = pool.run(_go_on, 4, [3, 1], folder, "tiny", STAND_STILL)[0]
    for name, tensor in wanted.items():
        plain = name.removesuffix("/exp_avg")
        if plain == name:
            assert torch.equal(held[f"model.{name}"], tensor), name
        elif form != "bare":
            assert torch.equal(held[f"model.{plain}/exp_avg"], tensor), name
            assert held[f"model.{plain}/step"] == 3
    assert lr == (1e-2 if form == "bare" else 3e-3)


def _model_parallel(rank: int, world: int, folder: str) -> Any:
    with jobs.as_worker(rank, world):
        module, strategy = HandMadeLlama(), ModelParallelStrategy(2, 2)
        trainer = jobs.trainer(strategy, world, precision="32-true", max_steps=3)
        trainer.fit(module, DataLoader(jobs.Samples(24), batch_size=3))
        trainer.save_checkpoint(folder)
        state = trainer.optimizers[0].state
        held = {name: p.full_tensor().detach() for name, p in module.named_parameters()}
        return held | {f"{name}/exp_avg_sq": state[p]["exp_avg_sq"].full_tensor() for name, p in module.named_parameters()}


def test_a_checkpoint_of_model_parallel_strategy_goes_on_ragged(pool, tmp_path):
    folder = str(tmp_path / "theirs")
    wanted = pool.run(_model_parallel, 4, folder)[0]
    options = {"precision": "32-true", "max_steps": 3}
    held, _, step = pool.run(_go_on, 3, [2, 1], folder, "float", options)[0]
    assert step == 3
    for name, tensor in wanted.items():
        assert torch.equal(held[name], tensor), name
    assert pool.run(_go_on, 3, [2, 1], folder, "float", options | {"max_steps": 5, "max_epochs": 9})[0][2] == 5


def _save_file(rank: int, world: int, file: str) -> Any:
    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=[2, 1])
        trainer = jobs.trainer(strategy, world, max_epochs=2)
        trainer.fit(jobs.TinyLlama(), jobs.loader(16, 4))
        trainer.save_checkpoint(file, storage_options={"full": True})
        return jobs.whole_state(strategy)


def test_one_file_goes_to_plain_lightning_and_back(pool, tmp_path):
    """Ours, two epochs -> plain Lightning, one more -> ours, one more: four epochs of plain Lightning."""
    first, second = tmp_path / "ours.ckpt", tmp_path / "plain.ckpt"
    pool.run(_save_file, 3, str(first))
    assert first.is_file() and [p.name for p in tmp_path.iterdir()] == ["ours.ckpt"]
    batches = [list(range(8)), list(range(8, 16))]
    straight = jobs.in_one_process(jobs.TinyLlama, batches, max_epochs=4)
    module = jobs.TinyLlama()
    with jobs.float64_norms():
        plain = jobs.trainer("auto", 1, max_epochs=3)
        loader = DataLoader(jobs.Samples(64), batch_sampler=batches)
        plain.fit(module, loader, ckpt_path=str(first), weights_only=True)
        plain.save_checkpoint(second)
    assert plain.global_step == 6
    held, lr, step = pool.run(_resume_plain, 4, str(second))[0]
    assert step == 8
    named = dict(straight.named_parameters())
    assert max(float((held[name] - p.detach()).abs().max()) for name, p in named.items()) < 1e-9
    assert lr == pytest.approx(1e-2 * 0.9**8)


def _resume_plain(rank: int, world: int, file: str) -> Any:
    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=[(1, 3), (1, 1)])
        trainer = jobs.trainer(strategy, world, max_epochs=4)
        trainer.fit(jobs.TinyLlama(), jobs.loader(16, 4), ckpt_path=file)
        return jobs.whole_state(strategy), trainer.optimizers[0].param_groups[0]["lr"], trainer.global_step
