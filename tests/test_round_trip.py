"""Saved on one topology after three AdamW steps, loaded on another, three more steps: the run that never stopped, to 1e-10."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ntp.dtensor.checkpoint import SavedTensors, load_values
from lightning_ntp.dtensor.checkpoint_files import Manifest
from lightning_ntp.strategy.sources import MODEL, OPTIMIZER, OPTIMIZERS
from lightning_ntp.strategy.whole import whole_optimizer_state, whole_tensors
from lightning_ntp.topology import Topology
from tests.engine import ShardedJob, Twin
from tests.models import batch, float64_norms, tiny
from tests.saves import load_job, save_job

HURT = Topology.from_shapes([(1, 3), (1, 3)]).without(1).without(4)

TOPOLOGIES = {
    "degrees 3 and 2": Topology.from_shapes([(1, 3), (1, 2)]),
    "2 x 2": Topology.from_shapes([(2, 2)]),
    "a lost role, taken over": HURT,
    "fsdp 3 and 2": Topology.from_shapes([(3, 1), (2, 1)]),
    "three replicas": Topology.from_shapes([(1, 2), (1, 1), (2, 2)]),
}
PLAIN = "one process, no mesh"
NAMES = (*TOPOLOGIES, PLAIN)

SAMPLED_SAVES = ("a lost role, taken over", "three replicas", PLAIN)
SAMPLED_LOADS = ("degrees 3 and 2", "fsdp 3 and 2", PLAIN)


def _data(step: int) -> Any:
    return batch(101, 11, 9, seed=step)


def _job(topology: Topology, rank: int) -> ShardedJob:
    members = topology.workers
    return ShardedJob(tiny("llama"), topology, members[rank], members=members)


def _save(rank: int, world: int, topology: Topology, folder: str) -> None:
    with float64_norms():
        job = _job(topology, rank)
        for step in range(3):
            job.step(_data(step))
        save_job(job, folder)


def _plain_save(file: Path) -> None:
    """As plain Lightning writes it."""
    with float64_norms():
        twin = Twin(tiny("llama"))
        for step in range(3):
            twin.step(_data(step))
    torch.save({"state_dict": twin.model.state_dict(), "optimizer_states": [twin.optimizer.state_dict()]}, file)


def _load_all(rank: int, world: int, topology: Topology, paths: dict[str, str]) -> dict[str, float]:
    """Per checkpoint the worst relative error of parameters and moments after three more steps."""
    worst = {}
    with float64_norms():
        job, twin = _job(topology, rank), Twin(tiny("llama"))
        for step in range(6):
            twin.step(_data(step))
        for name, path in paths.items():
            for parameter in job.model.parameters():
                parameter.data.zero_()
            load_job(job, path)
            for step in range(3, 6):
                job.step(_data(step))
            errors = job.errors(twin, lambda p: p)
            state = {id(p): s for o in (job.optimizer, twin.optimizer) for p, s in o.state.items()}
            moments = job.errors(twin, lambda p: state[id(p)]["exp_avg_sq"])  # noqa: B023  called before the next round
            worst[name] = max(*errors.values(), *moments.values(), float(job.drifted()))
    return worst


def _plain_load(path: Path) -> float:
    """Into an ordinary model and an ordinary AdamW."""
    with float64_norms():
        resumed, twin = Twin(tiny("llama")), Twin(tiny("llama"))
        if path.is_dir():
            _fill_from_folder(resumed, path)
        else:
            checkpoint = torch.load(path, weights_only=True)
            resumed.model.load_state_dict(checkpoint["state_dict"])
            resumed.optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        for step in range(3, 6):
            resumed.step(_data(step))
        for step in range(6):
            twin.step(_data(step))
    return max(
        float((p - twin.parameters[name]).detach().abs().max() / twin.parameters[name].detach().abs().max())
        for name, p in resumed.parameters.items()
    )


def _fill_from_folder(resumed: Twin, folder: Path) -> None:
    saved, settings = SavedTensors(folder), load_values(folder)[OPTIMIZERS][0]
    resumed.model.load_state_dict({name: saved.whole(f"{MODEL}{name}") for name in resumed.parameters})
    prefix = OPTIMIZER.format(0)
    for name, parameter in resumed.parameters.items():
        keys = ("step", "exp_avg", "exp_avg_sq")
        resumed.optimizer.state[parameter] = {key: saved.whole(f"{prefix}{name}/{key}") for key in keys}
    assert [len(group["params"]) for group in settings["groups"]] == [len(resumed.parameters)]


def _round_trips(pool, tmp_path, saves, loads):
    """(save, load) -> the largest relative difference from the run that was not interrupted."""
    paths, found = {}, {}
    for number, name in enumerate(saves):
        paths[name] = str(tmp_path / f"{number}.ckpt")
        if name == PLAIN:
            _plain_save(Path(paths[name]))
        else:
            pool.run(_save, len(TOPOLOGIES[name].workers), TOPOLOGIES[name], paths[name])
    for name in loads:
        if name == PLAIN:
            errors = {save: _plain_load(Path(path)) for save, path in paths.items()}
        else:
            errors = pool.run(_load_all, len(TOPOLOGIES[name].workers), TOPOLOGIES[name], paths)[0]
        found |= {(save, name): error for save, error in errors.items()}
    return found


def test_round_trips(pool, tmp_path):
    errors = _round_trips(pool, tmp_path, SAMPLED_SAVES, SAMPLED_LOADS)
    assert len(errors) == len(SAMPLED_SAVES) * len(SAMPLED_LOADS) and max(errors.values()) < 1e-10, errors


@pytest.mark.full
def test_round_trips_from_all_to_all(pool, tmp_path):
    errors = _round_trips(pool, tmp_path, NAMES, NAMES)
    assert len(errors) == 36 and max(errors.values()) < 1e-10, errors


def _save_larger(rank: int, world: int, topology: Topology, folder: str) -> dict[str, int]:
    model = tiny("llama", num_attention_heads=24, intermediate_size=640, vocab_size=4000)
    job = ShardedJob(model, topology, rank)
    for _ in range(1):
        job.step(batch(4000, 8, 5))
    save_job(job, folder)
    return {spec.fqn: spec.numel for spec in job.sharded.plan.params}


@pytest.mark.parametrize("name", ["degrees 3 and 2", "three replicas"])
def test_one_replicas_worth_is_written_in_about_equal_parts(pool, tmp_path, name):
    folder, topology = tmp_path / "c", TOPOLOGIES[name]
    numels = pool.run(_save_larger, len(topology.workers), topology, str(folder))[0]
    wanted = 3 * 8 * sum(numels.values())  # float64: parameters and two moments
    files = Manifest.read(folder).files
    sizes = [size for file, (size, _) in files.items() if file.endswith(".distcp")]
    assert len(sizes) == len(topology.workers)
    assert wanted <= sum(sizes) < 1.05 * wanted
    assert max(sizes) < 1.35 * sum(sizes) / len(sizes), sizes


def _whole(rank: int, world: int, topology: Topology) -> Any:
    with float64_norms():
        job = _job(topology, rank)
        for step in range(3):
            job.step(_data(step))
        return dict(whole_tensors(job.sharded)), whole_optimizer_state(job.sharded, job.optimizer)


def test_whole_state_is_what_one_process_has(pool):
    topology = TOPOLOGIES["degrees 3 and 2"]
    results = pool.run(_whole, len(topology.workers), topology)
    with float64_norms():
        twin = Twin(tiny("llama"))
        for step in range(3):
            twin.step(_data(step))
    state, optimizer = results[0]
    assert [bool(whole) for whole, _ in results] == [True, True, True, False, False]
    assert [bool(entry.get("state")) for _, entry in results] == [True, False, False, False, False]
    wanted = twin.optimizer.state_dict()
    assert optimizer["param_groups"][0]["params"] == wanted["param_groups"][0]["params"]
    for number, entries in wanted["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(optimizer["state"][number][key], value, rtol=1e-9, atol=1e-12)
    for name, parameter in twin.parameters.items():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-9, atol=1e-12)
