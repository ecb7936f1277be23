"""Lightning's checkpoints as folders of cells, loadable under any topology; and whole Hugging Face models."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_ntp.dtensor.checkpoint import CellTensor, load_cells, load_values, save_cells, saved_names
from lightning_ntp.dtensor.collectives import sum_in_place
from lightning_ntp.errors import ConfigError
from lightning_ntp.model_spec import Cell, ParamSpec
from lightning_ntp.strategy.fsdp import ShardedModel, local_of

MODEL = "model/"
OPTIMIZER = "optimizer{}/"
GROUPS = "ntp_param_groups"
"""Prefixes of tensor names in a checkpoint, and the key of the optimizers' param groups among its values."""


def reshard(sharded: ShardedModel) -> None:
    """After a forward without backward FSDP roots still show their gathered parameters, whose storage may go any time. Local."""
    for unit in sharded.units:
        unit.reshard()


def model_state(sharded: ShardedModel) -> dict[str, Any]:
    """Cells of all parameters and whole persistent buffers, by name. Local."""
    reshard(sharded)
    state: dict[str, Any] = {spec.fqn: cell_of(sharded, spec, parameter) for spec, parameter in sharded.parameters()}
    persistent = sharded.module.state_dict().keys()
    return state | {name: buffer for name, buffer in sharded.module.named_buffers() if name in persistent}


def optimizer_state(sharded: ShardedModel, optimizer: Any) -> dict[str, Any]:
    """``{"tensors": {"parameter/state": cell or scalar}, "param_groups": [...]}``. Local."""
    optimizer = getattr(optimizer, "_optimizer", optimizer)
    reshard(sharded)
    names = {parameter: spec for spec, parameter in sharded.parameters()}
    tensors: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            spec = names[parameter]
            whole = value.dim() == 0 or not isinstance(value, DTensor)
            tensors[f"{spec.fqn}/{key}"] = value if whole else cell_of(sharded, spec, value)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[parameter].fqn for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"tensors": tensors, "param_groups": groups}


def cell_of(sharded: ShardedModel, spec: ParamSpec, tensor: torch.Tensor) -> CellTensor:
    """A parameter, or a tensor laid out like it, for a checkpoint: the first replica writes each element once. Local."""
    at, topology = sharded.coordinates, sharded.groups.topology
    writes = topology.position(sharded.groups.worker).replica == 0
    written = spec.owned_cell(at, topology.roles(at.degree)[0]) if writes else Cell((), ())
    return CellTensor(spec, spec.cell(at), local_of(tensor), written)


def save(sharded: ShardedModel, checkpoint: Mapping[str, Any], path: str) -> None:
    """Write what Lightning collected. Collective over all workers with a role."""
    values = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    tensors = {f"{MODEL}{name}": value for name, value in checkpoint["state_dict"].items()}
    optimizers = checkpoint.get("optimizer_states", [])
    for index, state in enumerate(optimizers):
        tensors |= {f"{OPTIMIZER.format(index)}{name}": value for name, value in state["tensors"].items()}
    if optimizers:
        values[GROUPS] = [state["param_groups"] for state in optimizers]
    save_cells(tensors, values, Path(path), sharded.groups.live)


def load(sharded: ShardedModel, optimizers: Sequence[torch.optim.Optimizer], path: str) -> dict[str, Any]:
    """Fill parameters, buffers and optimizer state in place; returns the checkpoint's other values.

    Raises:
        ConfigError: no checkpoint of ours, or of another model or optimizer.

    Collective over all workers with a role.
    """
    folder = Path(path)
    values, names = load_values(folder), saved_names(folder)
    tensors = {f"{MODEL}{name}": value for name, value in model_state(sharded).items()}
    groups = values.pop(GROUPS, [])
    if groups and len(groups) != len(optimizers) and optimizers:
        raise ConfigError(f"{folder} holds {len(groups)} optimizers, this run has {len(optimizers)}")
    for index, (optimizer, saved_groups) in enumerate(zip(optimizers, groups, strict=False)):
        prefix = OPTIMIZER.format(index)
        _make_state(sharded, optimizer, [name.removeprefix(prefix) for name in names if name.startswith(prefix)])
        tensors |= {f"{prefix}{name}": v for name, v in optimizer_state(sharded, optimizer)["tensors"].items()}
        _restore_groups(sharded, optimizer, saved_groups)
    load_cells(tensors, folder, sharded.groups.live)
    return {**values, "state_dict": {}, "optimizer_states": []}


def _make_state(sharded: ShardedModel, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> None:
    """Empty state of the saved kinds: optimizers make theirs at the first step only. ``step`` is a scalar by convention."""
    parameters = {spec.fqn: parameter for spec, parameter in sharded.parameters()}
    for name in sorted(names):
        fqn, _, key = name.rpartition("/")
        if fqn not in parameters:
            raise ConfigError(f"the checkpoint has optimizer state of {fqn!r}, which this model does not have")
        state = optimizer.state[parameters[fqn]]
        if key not in state:
            scalar = key == "step"
            state[key] = torch.zeros((), dtype=torch.float32) if scalar else torch.zeros_like(parameters[fqn].detach())


def _restore_groups(
    sharded: ShardedModel, optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]
) -> None:
    names = {parameter: spec.fqn for spec, parameter in sharded.parameters()}
    for group, old in zip(optimizer.param_groups, saved, strict=True):
        if [names[parameter] for parameter in group["params"]] != old["params"]:
            raise ConfigError("the optimizer's param groups are not those of the checkpoint; make them in the same way")
        group.update({key: value for key, value in old.items() if key != "params"})


def whole_tensors(sharded: ShardedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter in one piece on every worker of the first replica, one after the other; nothing elsewhere.

    Collective over the first replica.
    """
    reshard(sharded)
    groups, at = sharded.groups, sharded.coordinates
    if groups.topology.position(groups.worker).replica != 0:
        return
    lowest = groups.topology.roles(at.degree)[0]
    for spec, parameter in sharded.parameters():
        local = local_of(parameter)
        cell, whole = spec.cell(at), local.new_zeros(spec.matrix_shape)
        matrix = local.reshape(cell.shape)
        for piece in cell.pieces(spec.owned_cell(at, lowest)):
            rows = slice(piece.source_row, piece.source_row + len(piece.rows))
            columns = slice(piece.source_column, piece.source_column + len(piece.columns))
            whole[piece.rows.start : piece.rows.stop, piece.columns.start : piece.columns.stop] = matrix[rows, columns]
        yield spec.fqn, sum_in_place(whole, groups.replica).reshape(spec.shape)


def save_pretrained(sharded: ShardedModel, module: nn.Module, folder: str | os.PathLike[str]) -> None:
    """See `NTPStrategy.save_pretrained`. The leader keeps one whole copy in host memory.

    Raises:
        ConfigError: not exactly one Hugging Face model in the module.
    """
    found = [(name, part) for name, part in module.named_modules() if hasattr(part, "save_pretrained")]
    outermost = [(name, part) for name, part in found if not any(_below(name, other) for other, _ in found)]
    if len(outermost) != 1:
        raise ConfigError(
            f"save_pretrained needs one Hugging Face model in {type(module).__name__}, found {[name for name, _ in outermost]}"
        )
    prefix, model = outermost[0]
    lead = sharded.groups.worker == sharded.groups.leader
    state = {name: tensor.cpu() for name, tensor in whole_tensors(sharded) if lead and _below(name, prefix)}
    if lead:
        state |= {name: buffer for name, buffer in model_state(sharded).items() if isinstance(buffer, torch.Tensor)}
        inside = {name.removeprefix(f"{prefix}."): tensor for name, tensor in state.items() if _below(name, prefix)}
        model.save_pretrained(folder, state_dict=inside)


def _below(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))
