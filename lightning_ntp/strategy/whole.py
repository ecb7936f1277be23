"""Whole tensors out of cells, one after the other: for tools that know nothing of cells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lightning_ntp.dtensor.collectives import sum_in_place
from lightning_ntp.model_spec import ParamSpec
from lightning_ntp.strategy.fsdp import ShardedModel, local_of


def takes_part(sharded: ShardedModel) -> bool:
    """Whether this worker gathers whole tensors: those of the first replica do."""
    return sharded.groups.topology.position(sharded.groups.worker).replica == 0


def whole_tensor(sharded: ShardedModel, spec: ParamSpec, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter, or a tensor laid out like it, in one piece on every worker of the first replica.

    Collective over the first replica; a worker of another one must not call it.
    """
    groups, at = sharded.groups, sharded.coordinates
    lowest = groups.topology.roles(at.degree)[0]
    local = local_of(tensor)
    cell, whole = spec.cell(at), local.new_zeros(spec.matrix_shape)
    matrix = local.reshape(cell.shape)
    for piece in cell.pieces(spec.owned_cell(at, lowest)):
        rows = slice(piece.source_row, piece.source_row + len(piece.rows))
        columns = slice(piece.source_column, piece.source_column + len(piece.columns))
        whole[piece.rows.start : piece.rows.stop, piece.columns.start : piece.columns.stop] = matrix[rows, columns]
    return sum_in_place(whole, groups.replica).reshape(spec.shape)


def whole_tensors(sharded: ShardedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter in one piece on every worker of the first replica, one after the other; nothing elsewhere.

    Collective over the first replica.
    """
    if takes_part(sharded):
        for spec, parameter in sharded.parameters():
            yield spec.fqn, whole_tensor(sharded, spec, parameter)


def whole_optimizer_state(sharded: ShardedModel, optimizer: Any) -> dict[str, Any]:
    """torch's own ``state_dict`` of an optimizer over whole parameters, in host memory; on the leader, else empty parts.

    Collective over the first replica; other workers return at once.
    """
    if not takes_part(sharded):
        return {}
    leads = sharded.groups.worker == sharded.groups.leader
    names = {parameter: spec for spec, parameter in sharded.parameters()}
    ids = {p: number for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    states: dict[int, dict[str, Any]] = {}
    for parameter, number in ids.items():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor) and value.dim():
                value = whole_tensor(sharded, names[parameter], value).cpu()
            if leads:
                states.setdefault(number, {})[key] = value.cpu() if isinstance(value, torch.Tensor) else value
    groups = [group | {"params": [ids[p] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": states, "param_groups": groups}
