"""The life of a job without Lightning: generations with a topology each, nobody really dies, a worker just is not in the next one."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lightning_ntp.topology import Topology
from tests.engine import MakeOptimizer, ShardedJob, Twin, adamw
from tests.models import batch, float64_norms, tiny


@dataclass(frozen=True)
class Generation:
    """A topology, how many steps it lives, and its members by global rank (default: ascending)."""

    topology: Topology
    num_steps: int
    members: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        everyone = tuple(sorted(self.topology.workers + self.topology.spares))
        object.__setattr__(self, "members", self.members or everyone)


@dataclass(frozen=True)
class Life:
    """A model and its generations."""

    generations: Sequence[Generation]
    kind: str = "llama"
    overrides: dict[str, Any] = field(default_factory=dict)
    make_optimizer: MakeOptimizer = adamw
    batch_bytes: int = 4096
    frozen: tuple[str, ...] = ()

    @property
    def num_workers(self) -> int:
        return 1 + max(worker for generation in self.generations for worker in generation.members)


def lose(topology: Topology, *workers: int) -> Topology:
    """After losing workers one after the other."""
    for worker in workers:
        topology = topology.without(worker)
    return topology


def regroup(store: dist.Store, number: int, members: Sequence[int], worker: int, seconds: float = 60.0) -> None:
    """Give the default group up and form that of the next generation over a store that all workers ever share."""
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"generation{number}", store),
        rank=members.index(worker),
        world_size=len(members),
        timeout=timedelta(seconds=seconds),
    )


def live(rank: int, world: int, life: Life, look: Callable[[ShardedJob], Any] | None = None) -> dict[str, Any] | None:
    """Run a life; worker ids are the ranks of the pool. Returns what the last generation's workers see at its end."""
    with float64_norms():
        return _live(rank, life, look)


def _live(worker: int, life: Life, look: Callable[[ShardedJob], Any] | None) -> dict[str, Any] | None:
    twin = Twin(_model(life), life.make_optimizer)
    job: ShardedJob | None = None
    step, holders, reports, report = 0, set[int](), [], {}
    store = c10d._get_default_store()
    dist.barrier()  # nobody closes connections that a peer is still making
    for number, generation in enumerate(life.generations):
        topology, members = generation.topology, generation.members
        if worker in members:
            regroup(store, number, members, worker)
            if job is None:
                options = {"members": members, "make_optimizer": life.make_optimizer, "joins": number > 0}
                job = ShardedJob(_model(life), topology, worker, **options)
            if number:
                held = {w: step if w in holders else None for w in members}
                reports.append(job.move(topology, members, held, life.batch_bytes))
        else:
            job = None  # lost: what comes back under this number has nothing
        for index in range(step, step + generation.num_steps):
            data = batch(twin.model.config.vocab_size, 11, 9, seed=index)
            twin.step(data)
            if job is not None and worker in topology.workers:
                job.step(data)
        if worker in members:
            dist.barrier()
        step += generation.num_steps
        holders = set(topology.workers)
    if job is None or worker not in topology.workers:
        return {"moves": reports}
    report = {"parameter": job.errors(twin, lambda p: p), "drifted": job.drifted(), "moves": reports}
    states = {**twin.optimizer.state, **job.optimizer.state}
    keys = {k for s in twin.optimizer.state.values() for k, v in s.items() if isinstance(v, torch.Tensor) and v.dim()}
    for key in keys:
        report[key] = job.errors(twin, partial(_state_of, states, key))
    report["steps"] = {float(s["step"]) for s in job.optimizer.state.values() if "step" in s}
    report["look"] = None if look is None else look(job)
    return report


def _model(life: Life) -> torch.nn.Module:
    model = tiny(life.kind, **life.overrides)
    for name in life.frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def _state_of(states: Any, key: str, parameter: torch.Tensor) -> torch.Tensor:
    state = states.get(parameter)  # a frozen parameter has none
    return torch.ones_like(parameter) if state is None else state[key]


def resources() -> dict[str, int]:
    """What this process has open."""
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    kinds = ("FSDPParamGroup", "ProcessGroup", "DeviceMesh", "BackwardWatch")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "tensors": len(tensors),
        **{kind: sum(type(o).__name__ == kind for o in gc.get_objects()) for kind in kinds},
    }
