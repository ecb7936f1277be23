"""Gradient clipping over ragged replicas: one norm for the whole job, the same bits on every worker."""

from __future__ import annotations

from collections.abc import Collection

import torch

from lightning_ntp.dtensor.collectives import sum_in_place
from lightning_ntp.model_spec import Cell
from lightning_ntp.strategy.fsdp import ShardedModel

Some = Collection[torch.Tensor] | None
"""The parameters that are meant (an optimizer's); None: all."""


@torch.no_grad()
def local_square_sum(sharded: ShardedModel, device: torch.device | str = "cpu", of: Some = None) -> torch.Tensor:
    """Sum of squares of the gradient elements that this worker counts, float64, 0-D. Local.

    Only the first replica counts, and there each element at its owner: after the sync all replicas hold equal gradients, and
    replicas that each used a norm of their own would drift apart bit by bit.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    groups = sharded.groups
    if groups.topology.position(groups.worker).replica != 0:
        return total
    at = sharded.coordinates
    lowest = groups.topology.roles(at.degree)[0]
    for spec, gradient in sharded.gradients(of):
        for part in _owned_parts(gradient, spec.cell(at), spec.owned_cell(at, lowest)):
            total += part.double().square().sum()
    return total


def global_norm(sharded: ShardedModel, of: Some = None) -> torch.Tensor:
    """The 2-norm of the whole job's gradient, float64, 0-D. Collective over all workers with a role."""
    device = sharded.groups.device_type
    return sum_in_place(local_square_sum(sharded, device, of), sharded.groups.live).sqrt()


def clip_by_norm_(sharded: ShardedModel, max_norm: float, norm: torch.Tensor, of: Some = None) -> None:
    """Scale gradients so that `norm` becomes at most `max_norm`, as ``torch.nn.utils.clip_grad_norm_`` does. Local."""
    sharded.scale_gradients((max_norm / (norm + 1e-6)).clamp(max=1.0), of)


@torch.no_grad()
def clip_by_value_(sharded: ShardedModel, limit: float, of: Some = None) -> None:
    """Clamp each gradient element to [-limit, limit]. Local."""
    for _, gradient in sharded.gradients(of):
        gradient.clamp_(-limit, limit)


def _owned_parts(gradient: torch.Tensor, cell: Cell, owned: Cell) -> list[torch.Tensor]:
    matrix = gradient.reshape(cell.shape)
    return [
        matrix[p.source_row : p.source_row + len(p.rows), p.source_column : p.source_column + len(p.columns)]
        for p in cell.pieces(owned)
    ]
