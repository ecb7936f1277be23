"""What the next losses would mean for each worker's memory, asked of the planner before step 1."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from lightning_ntp.cost_model import GpuSpec
from lightning_ntp.errors import NTPError
from lightning_ntp.model_spec import ModelPlan
from lightning_ntp.plan_cost import PlanCost
from lightning_ntp.planner import further_losses, plan_placement
from lightning_ntp.presets import GPUS
from lightning_ntp.topology import Topology

_NUM_LOSSES = 2
_CPU_FLOPS, _CPU_BYTES_PER_SECOND = 1e11, 1e10
"""Orders of magnitude: on CPU only the ratios of shapes matter, and no link is slow beside the compute."""


@dataclass(frozen=True, slots=True)
class State:
    """Replicas as ``fsdp x tp`` words, and bytes of parameters, gradients and optimizer state on the fullest worker."""

    shapes: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """State now and after one, two, ... further losses, each in the fullest replica.

    Args:
        after: shorter than asked for where the job could not go on.
        warnings: a loss that costs a whole replica or the job, and why.
    """

    now: State
    after: tuple[State, ...]
    warnings: tuple[str, ...]


def device_spec(device: torch.device, workers_per_node: int, num_nodes: int) -> GpuSpec:
    """Speeds and memory of a worker's device. An unknown GPU counts as an H100 with its own memory. Local."""
    if device.type != "cuda":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / workers_per_node
        return GpuSpec("cpu", _CPU_FLOPS, memory, _CPU_BYTES_PER_SECOND, _CPU_BYTES_PER_SECOND)
    properties = torch.cuda.get_device_properties(device)
    known = next((spec for name, spec in GPUS.items() if name in properties.name.lower()), GPUS["h100"])
    network = known.network_bytes_per_second if num_nodes > 1 else known.nvlink_bytes_per_second
    return GpuSpec(
        properties.name, known.peak_flops, properties.total_memory, known.nvlink_bytes_per_second, network
    )


def look_ahead(plan: ModelPlan, topology: Topology, spec: GpuSpec, state_bytes: int, domain_size: int) -> Outlook:
    """Asks the planner for the next losses.

    Args:
        plan: made for the topology's roles and loss order.
        state_bytes: per element: parameter, gradient and optimizer state.
        domain_size: workers of one node.
    """
    cost = PlanCost(lambda order: plan.params, topology, spec, state_bytes, domain_size=domain_size)
    batch = 64 * len(topology.data_rows)  # many micro-batches: shapes are compared by speed, not by what a small batch rounds to
    now = _state(topology, cost)
    try:
        placement = plan_placement(topology, cost, batch, refactor=False)
    except NTPError as error:  # a model that takes all memory by itself has no room to look ahead from
        return Outlook(now, (), (str(error),))
    chain = further_losses(placement, cost, batch, _NUM_LOSSES, refactor=False)
    warnings, before = [], topology
    for number, step in enumerate(chain, start=1):
        shrinkable = max(before.replicas, key=lambda replica: len(replica.workers))
        if step.dropped_replicas and len(shrinkable.workers) > 1:
            warnings.append(f"loss {number} costs a whole replica: its other workers cannot hold the model")
        before = step.topology
    if len(chain) < _NUM_LOSSES:
        warnings.append(f"loss {len(chain) + 1} in one replica would end the job: no other worker holds what is lost, or none has room")
    return Outlook(now, tuple(_state(step.topology, cost) for step in chain), tuple(warnings))


def _state(topology: Topology, cost: PlanCost) -> State:
    shapes = [(replica.fsdp_size, replica.degree) for replica in topology.replicas]
    fullest = max(cost.memory_bytes(degree, fsdp_size) for fsdp_size, degree in shapes)
    return State(", ".join(f"{fsdp_size}x{degree}" for fsdp_size, degree in shapes), int(fullest))
