"""What a report should say about a job beside its numbers: topology, layouts, versions, machine."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_ntp.topology import Topology

PACKAGES = ("lightning-ntp", "torch", "lightning", "transformers", "wandb")


def describe_job(trainer: Any, topology: Topology | None, ledger_folder: Path | None) -> dict[str, Any]:
    """Plain data for the ledger's first event and W&B's config."""
    strategy = trainer.strategy
    return {
        "topology": "" if topology is None else topology_words(topology),
        "shapes": [] if topology is None else [[r.fsdp_size, r.degree] for r in topology.replicas],
        "healthy_degree": 0 if topology is None else topology.num_roles,
        "loss_order": [] if topology is None else list(topology.loss_order),
        "num_gpus": int(strategy.world_size),
        "device": strategy.root_device.type,
        "precision": str(trainer.precision),
        "host": platform.node(),
        "versions": versions(),
        "ledger": "" if ledger_folder is None else str(ledger_folder),
    }


def topology_words(topology: Topology) -> str:
    """``2 x (1x3), 1 x (1x2)``: replicas by (fsdp, tp)."""
    counts: dict[str, int] = {}
    for replica in topology.replicas:
        shape = f"{replica.fsdp_size}x{replica.degree}"
        counts[shape] = counts.get(shape, 0) + 1
    return ", ".join(f"{count} x ({shape})" for shape, count in counts.items())


def versions() -> dict[str, str]:
    """Installed versions of what matters."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
