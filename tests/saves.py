"""Saves and loads of a `ShardedJob` without Lightning."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from lightning_ntp.dtensor.checkpoint import commit, stage, write_part, write_values
from lightning_ntp.strategy.checkpointing import collect, load, model_state, parts_to_write
from lightning_ntp.strategy.control import ControlPlane
from lightning_ntp.strategy.saver import Save, Saver
from tests.engine import ShardedJob


def control_of(job: ShardedJob) -> ControlPlane:
    return ControlPlane(job.groups, torch.device("cpu"))


def save_job(job: ShardedJob, folder: Path | str, values: dict[str, Any] | None = None) -> None:
    """Model and optimizer. Collective."""
    target, groups = Path(folder), job.groups
    checkpoint = {"state_dict": model_state(job.sharded), "optimizer_states": [], **(values or {})}
    tensors, others = collect(job.sharded, [job.optimizer], checkpoint, parts_to_write(job.sharded))
    leads, parts = groups.worker == groups.leader, groups.topology.workers
    chunks, content = stage(tensors, leads), io.BytesIO()
    torch.save(others, content)

    def write(aside: Path) -> None:
        if leads:
            write_values(content.getvalue(), aside)
        write_part(chunks, aside, groups.worker)

    control = control_of(job)
    saver = Saver(control.any_message, lambda: parts)
    finish = (lambda aside: commit(aside, target, parts)) if leads else None
    saver.start(Save(target, "token", groups.worker, parts, write, finish))
    error = saver.settle()
    control.barrier()
    assert error is None, error


def load_job(job: ShardedJob, folder: Path | str, strict: bool = True) -> dict[str, Any]:
    """Collective."""
    return load(job.sharded, [job.optimizer], str(folder), control_of(job).any_message, strict)
