"""What a worker keeps of a model and its optimizers while it is cut anew: plain local tensors, and everything that is not cut.

    sharded parameters, optimizer.state --take--> HeldState --give--> the same module and optimizer objects, cut otherwise
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_ntp.errors import ConfigError, PlanMismatchError
from lightning_ntp.model_spec import Cell, ModelPlan
from lightning_ntp.reshard import Kept
from lightning_ntp.strategy._torch_private import undo_fully_shard
from lightning_ntp.strategy.fsdp import ShardedModel, fill, local_of, local_shape, uncut, wrap_like
from lightning_ntp.topology import Topology

Cells = dict[tuple[str, str], torch.Tensor]
"""Local tensors by (parameter, label); label ``""`` is the parameter itself, ``"0/exp_avg"`` a state of optimizer 0."""


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """One optimizer without its cells.

    Args:
        groups: per param group, names of its parameters.
        options: per param group, everything else (lr, betas, ...).
        cells: per parameter, dtype of each state tensor that is cut like it, by key.
        values: per parameter, its other state: scalars, counts, None.
        order: per parameter, keys of its state in their order.
    """

    groups: tuple[tuple[str, ...], ...]
    options: tuple[Mapping[str, Any], ...]
    cells: Mapping[str, Mapping[str, torch.dtype]]
    values: Mapping[str, Mapping[str, Any]]
    order: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Record:
    """Everything about the held state that newcomers have to be told.

    Args:
        topology: under which the cells are held.
        dtypes: of the parameters.
        trained: names of the parameters that require gradients.
        optimizers: in the caller's order.
    """

    topology: Topology
    dtypes: Mapping[str, torch.dtype]
    trained: frozenset[str]
    optimizers: tuple[OptimizerRecord, ...]

    @property
    def kept(self) -> tuple[Kept, ...]:
        """All tensors that are cut like a parameter, each parameter's together."""
        return tuple(
            Kept(fqn, label, str(dtype), dtype.itemsize) for fqn in self.dtypes for label, dtype in self._labels(fqn)
        )

    def _labels(self, fqn: str) -> Iterator[tuple[str, torch.dtype]]:
        yield "", self.dtypes[fqn]
        for index, optimizer in enumerate(self.optimizers):
            for key, dtype in optimizer.cells.get(fqn, {}).items():
                yield f"{index}/{key}", dtype


@dataclass(frozen=True, slots=True)
class Moved:
    """A tensor that has got its new cell: the old one is in there, but for the rests."""

    new: torch.Tensor
    cell: Cell
    rests: tuple[tuple[Cell, torch.Tensor], ...]


@dataclass
class HeldState:
    """A worker's cells under ``plan`` and ``record.topology``, taken out of the module until the new ones are complete.

    Args:
        plan: how the parameters were cut.
        record: what is not cut.
        cells: tensors that have not moved yet.
        moved: those that have.
    """

    plan: ModelPlan
    worker: int
    record: Record
    cells: Cells
    moved: dict[tuple[str, str], Moved] = field(default_factory=dict)

    def old_cells(self, worker: int) -> dict[str, Cell]:
        """What a worker held of each parameter; nothing without a role."""
        topology = self.record.topology
        if worker not in topology.workers:
            return {}
        at = topology.coordinates(worker)
        return {spec.fqn: spec.cell(at) for spec in self.plan.params}

    @torch.no_grad()
    def go_back(self) -> None:
        """Put the old cells together again from what has moved and the rests. Local."""
        had = self.old_cells(self.worker) if self.moved else {}
        for (fqn, label), moved in list(self.moved.items()):
            old = moved.new.new_empty(local_shape(self.plan.by_fqn[fqn], had[fqn]))
            copy_common(moved.new, moved.cell, old, had[fqn])
            for part, rest in moved.rests:
                copy_common(rest, part, old, had[fqn])
            self.cells[fqn, label] = old
            del self.moved[fqn, label]


def copy_common(source: torch.Tensor, source_cell: Cell, destination: torch.Tensor, destination_cell: Cell) -> None:
    """Copy what two cells of one parameter share from one storage to the other. Local."""
    origin, target = source.view(source_cell.shape), destination.view(destination_cell.shape)
    for piece in source_cell.pieces(destination_cell):
        rows, columns = len(piece.rows), len(piece.columns)
        block = origin[piece.source_row : piece.source_row + rows, piece.source_column : piece.source_column + columns]
        at_row, at_column = piece.destination_row, piece.destination_column
        target[at_row : at_row + rows, at_column : at_column + columns].copy_(block)


def take(sharded: ShardedModel, optimizers: Sequence[torch.optim.Optimizer]) -> HeldState:
    """Take all state out of a sharded model and its optimizers; the module is left uncut and without storage. Local.

    Raises:
        ConfigError: an optimizer holds a parameter that is not the model's, or state of another shape.
    """
    undo_fully_shard(sharded.module)
    named = dict(sharded.module.named_parameters())
    parameters = {spec.fqn: named[spec.fqn] for spec in sharded.plan.params}
    names = {parameter: fqn for fqn, parameter in parameters.items()}
    cells: Cells = {(fqn, ""): local_of(parameter) for fqn, parameter in parameters.items()}
    records = tuple(_take_optimizer(index, optimizer, names, cells) for index, optimizer in enumerate(optimizers))
    record = Record(
        sharded.groups.topology,
        {fqn: parameter.dtype for fqn, parameter in parameters.items()},
        frozenset(fqn for fqn, parameter in parameters.items() if parameter.requires_grad),
        records,
    )
    uncut(sharded)
    _attach(sharded, optimizers, records)
    return HeldState(sharded.plan, sharded.groups.worker, record, cells)


def give(sharded: ShardedModel, optimizers: Sequence[torch.optim.Optimizer], record: Record, cells: Cells) -> None:
    """Put cells into a module that has just been cut, and into the optimizers' state. Local."""
    fill(sharded, {fqn: cells[fqn, ""] for fqn in record.dtypes})
    parameters = _attach(sharded, optimizers, record.optimizers)
    for index, (optimizer, kept) in enumerate(zip(optimizers, record.optimizers, strict=True)):
        for fqn, order in kept.order.items():
            parameter = parameters[fqn]
            optimizer.state[parameter] = {
                key: wrap_like(parameter, cells[fqn, f"{index}/{key}"])
                if key in kept.cells[fqn]
                else _value(kept.values[fqn][key], parameter)
                for key in order
            }


def follow(optimizers: Sequence[torch.optim.Optimizer], record: Record) -> None:
    """Give a newcomer's param groups the options (learning rates, ...) of the others'. Local."""
    for optimizer, told in zip(optimizers, record.optimizers, strict=True):
        for group, options in zip(optimizer.param_groups, told.options, strict=True):
            group.update(options)


def _take_optimizer(
    index: int, optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str], cells: Cells
) -> OptimizerRecord:
    shapes: dict[str, dict[str, torch.dtype]] = {}
    values: dict[str, dict[str, Any]] = {}
    order: dict[str, tuple[str, ...]] = {}
    for parameter in [parameter for parameter in optimizer.state if isinstance(parameter, torch.nn.Parameter)]:
        fqn, state = _name(optimizer, parameter, names), optimizer.state.pop(parameter)
        if not isinstance(parameter, DTensor):
            continue  # without storage: what some optimizers make at once for it means nothing
        order[fqn] = tuple(state)
        shapes[fqn], values[fqn] = {}, {}
        for key, value in state.items():
            if is_cell(parameter, value):
                shapes[fqn][key] = value.dtype
                cells[fqn, f"{index}/{key}"] = local_of(value)
            elif isinstance(value, torch.Tensor) and value.numel() != 1:
                raise ConfigError(f"{type(optimizer).__name__} keeps {key} of {fqn} as {tuple(value.shape)}; {WRONG_SHAPE}")
            else:
                values[fqn][key] = Number.of(value) if isinstance(value, torch.Tensor) else value
    return OptimizerRecord(
        tuple(tuple(_name(optimizer, parameter, names) for parameter in group["params"]) for group in optimizer.param_groups),
        tuple({key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups),
        shapes,
        values,
        order,
    )


@dataclass(frozen=True, slots=True)
class Number:
    """A tensor of one element (a step count), on the host while it travels."""

    value: torch.Tensor
    on_host: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Number:
        """From optimizer state."""
        return cls(local_of(tensor).detach().cpu().clone(), tensor.device.type == "cpu")

    def beside(self, parameter: torch.Tensor) -> torch.Tensor:
        """As optimizer state again: on the host as before, or where the parameter is."""
        return self.value.clone() if self.on_host else self.value.to(parameter.device)


WRONG_SHAPE = "state must have its parameter's shape, or be one number, to be moved with it: use an elementwise optimizer"


def is_cell(parameter: torch.Tensor, value: object) -> bool:
    """Whether a state tensor is cut like its parameter."""
    return isinstance(value, DTensor) and value.shape == parameter.shape and value.dim() > 0


def _name(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, names: Mapping[torch.nn.Parameter, str]
) -> str:
    if parameter not in names:
        raise ConfigError(
            f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is none of the model's; pass it "
            "parameters of the module"
        )
    return names[parameter]


def _attach(
    sharded: ShardedModel, optimizers: Sequence[torch.optim.Optimizer], records: Sequence[OptimizerRecord]
) -> dict[str, torch.nn.Parameter]:
    """Let the param groups hold the module's present parameters; their lists and dicts stay the same objects."""
    parameters = dict(sharded.module.named_parameters())
    for optimizer, kept in zip(optimizers, records, strict=True):
        ours = tuple(len(group["params"]) for group in optimizer.param_groups)
        if ours != tuple(len(names) for names in kept.groups):
            raise PlanMismatchError(
                f"{type(optimizer).__name__} has param groups of {ours} parameters here, "
                f"{tuple(len(names) for names in kept.groups)} on the others"
            )
        for group, names in zip(optimizer.param_groups, kept.groups, strict=True):
            group["params"][:] = [parameters[name] for name in names]
    return parameters


def _value(value: Any, parameter: torch.Tensor) -> Any:
    return value.beside(parameter) if isinstance(value, Number) else value
