"""The strategy end to end: a Trainer on ragged replicas equals a Trainer in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler

from lightning_ntp.strategy.sampler import global_order
from tests import lightning_jobs as jobs

SIZE, BATCH = 29, 4


def _order(epochs: int = 1) -> list[list[int]]:
    """The global batches of 8 that two data rows at batch_size 4 must see."""
    order = [global_order(RandomSampler(range(SIZE)), 5, epoch) for epoch in range(epochs)]
    return [ids[i : i + 8] for ids in order for i in range(0, len(ids), 8)]


def _fit(rank: int, world: int, sizes: Any, kind: str, options: dict[str, Any], settings: dict[str, Any]) -> Any:
    with jobs.as_worker(rank, world):
        module = getattr(jobs, kind)()
        strategy = jobs.ntp(replica_sizes=sizes, **settings)
        trainer = jobs.trainer(strategy, world, **options)
        trainer.fit(module, jobs.loader(SIZE, BATCH, shuffle=True))
        return {
            "state": jobs.whole_state(strategy),
            "seen": module.seen,
            "history": module.history,
            "step": trainer.global_step,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
        }


def _worst(state: dict[str, torch.Tensor], twin: torch.nn.Module) -> float:
    named = dict(twin.named_parameters())
    assert state.keys() == named.keys()
    return max(float((tensor - named[name].detach()).abs().max()) for name, tensor in state.items())


def test_five_steps_equal_one_process_and_log_what_it_logs(pool):
    options = {"gradient_clip_val": 0.5}
    results = pool.run(_fit, 5, [3, 2], "TinyLlama", options | {"max_epochs": 2, "max_steps": 5}, {})
    twin = jobs.in_one_process(jobs.TinyLlama, _order(2)[:5], **options)
    assert _worst(results[0]["state"], twin) < 1e-9
    assert {r["step"] for r in results} == {5}
    assert len({r["lr"] for r in results}) == 1
    for ours, theirs in zip(results[4]["history"][:4], twin.history[:4], strict=True):
        for name in ("train_step", "samples", "highest"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-9), name
    losses = [entry["train_step"] for entry in twin.history[:4]]
    sizes = [len(batch) for batch in _order()]
    wanted = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / SIZE
    assert results[3]["history"][4]["train_epoch"] == pytest.approx(wanted, abs=1e-9)


def test_accumulation_syncs_once_and_the_short_last_window_steps(pool):
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
    results = pool.run(_fit, 5, [(1, 3), (2, 1)], "TokenLlama", options, {"batch_weight": "tokens"})
    order = global_order(RandomSampler(range(SIZE)), 5, 0)  # three data rows: loop batches of 12, windows of 36
    windows = [order]
    twin = jobs.in_one_process(jobs.TokenLlama, windows, gradient_clip_val=0.05, gradient_clip_algorithm="value")
    assert _worst(results[0]["state"], twin) < 1e-9
    assert {r["step"] for r in results} == {1}


def test_roles_see_the_same_samples_and_each_sample_once(pool):
    results = pool.run(_fit, 5, [3, 2], "TinyLlama", {}, {})
    assert results[0]["seen"] == results[1]["seen"] == results[2]["seen"]
    assert results[3]["seen"] == results[4]["seen"]
    assert all(len(micro) <= BATCH for r in results for micro in r["seen"])
