"""What a checkpoint holds of a cut model and its optimizers, and how it comes back under any topology."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_ntp.dtensor.checkpoint import CellTensor
from lightning_ntp.errors import ConfigError, NTPError
from lightning_ntp.model_spec import Cell, ParamSpec
from lightning_ntp.strategy.fsdp import ShardedModel, local_of
from lightning_ntp.strategy.sources import MODEL, OPTIMIZER, OPTIMIZERS, SavedOptimizer, Source, open_source
from lightning_ntp.write_plan import written_cells

Agree = Callable[[str | None], str | None]
"""The message of some worker that has one, or None where nobody has. Collective."""

Parts = Mapping[str, tuple[Cell, ...]]


def reshard(sharded: ShardedModel) -> None:
    """After a forward without backward FSDP roots still show their gathered parameters, whose storage may go any time. Local."""
    for unit in sharded.units:
        unit.reshard()


def parts_to_write(sharded: ShardedModel) -> Parts:
    """Name of a parameter -> the parts of it that this worker writes. Local."""
    topology, worker = sharded.groups.topology, sharded.groups.worker
    return {spec.fqn: written_cells(spec, index, topology, worker) for index, spec in enumerate(sharded.plan.params)}


def model_state(sharded: ShardedModel, parts: Parts | None = None) -> dict[str, Any]:
    """Cells of all parameters and whole persistent buffers, by name. Local."""
    reshard(sharded)
    state: dict[str, Any] = {spec.fqn: _cell(sharded, spec, parameter, parts) for spec, parameter in sharded.parameters()}
    persistent = sharded.module.state_dict().keys()
    return state | {name: buffer for name, buffer in sharded.module.named_buffers() if name in persistent}


def optimizer_state(sharded: ShardedModel, optimizer: Any, parts: Parts | None = None) -> dict[str, Any]:
    """``{"tensors": {"parameter/state": cell or scalar}, "saved": fields of `SavedOptimizer`}``. Local."""
    optimizer = getattr(optimizer, "_optimizer", optimizer)
    reshard(sharded)
    names = {parameter: spec for spec, parameter in sharded.parameters()}
    tensors: dict[str, Any] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        spec = names[parameter]
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                scalars.setdefault(spec.fqn, {})[key] = value
            else:
                whole = value.dim() == 0 or not isinstance(value, DTensor)
                tensors[f"{spec.fqn}/{key}"] = value if whole else _cell(sharded, spec, value, parts)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[parameter].fqn for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"tensors": tensors, "saved": {"groups": groups, "name": type(optimizer).__name__, "scalars": scalars}}


def _cell(sharded: ShardedModel, spec: ParamSpec, tensor: torch.Tensor, parts: Parts | None = None) -> CellTensor:
    """A parameter, or a tensor laid out like it, as a checkpoint sees it. Local."""
    return CellTensor(spec, spec.cell(sharded.coordinates), local_of(tensor), (parts or {}).get(spec.fqn, ()))


def collect(
    sharded: ShardedModel,
    optimizers: Sequence[torch.optim.Optimizer],
    checkpoint: Mapping[str, Any],
    parts: Parts,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is to be written: tensors by name, and everything else.

    The state is taken now, not from `checkpoint`: a recovery may have moved it since Lightning collected. From
    `checkpoint` come the names, as hooks of the user may have dropped some, and tensors that hooks have added.

    Args:
        parts: from `parts_to_write`.

    Local.
    """
    current, chosen = model_state(sharded, parts), checkpoint["state_dict"]
    tensors = {f"{MODEL}{name}": current.get(name, value) for name, value in chosen.items()}
    values = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    if "optimizer_states" in checkpoint:
        values[OPTIMIZERS] = []
        for index, optimizer in enumerate(optimizers):
            state = optimizer_state(sharded, optimizer, parts)
            tensors |= {f"{OPTIMIZER.format(index)}{name}": value for name, value in state["tensors"].items()}
            values[OPTIMIZERS].append(state["saved"])
    return tensors, values


@contextmanager
def agreed(agree: Agree, what: str) -> Iterator[None]:
    """What fails inside on one worker fails on all, before anybody waits for another. Collective at its end."""
    try:
        yield
    except (NTPError, OSError) as error:
        agree(f"{type(error).__name__}: {error}")
        raise
    message = agree(None)
    if message is not None:
        raise ConfigError(f"{what} failed on another worker: {message}")


def load(
    sharded: ShardedModel,
    optimizers: Sequence[torch.optim.Optimizer],
    path: str,
    agree: Agree,
    strict: bool = True,
    verify: bool = True,
) -> dict[str, Any]:
    """Fill parameters, buffers and optimizer state in place; returns the checkpoint's other values.

    Everything is compared before anything is changed.

    Args:
        optimizers: none to leave optimizer state alone.
        path: a checkpoint of this package, of plain Lightning, or a DCP folder.
        agree: see `Agree`.
        strict: refuse a checkpoint that lacks a tensor of the model or has others.
        verify: read all files once (each worker its share) and compare their checksums.

    Raises:
        ConfigError: no complete checkpoint, a damaged one, or of another model or optimizer.

    Collective over all workers with a role.
    """
    workers = sharded.groups.topology.workers
    with agreed(agree, f"opening {path}"):
        state = {f"{MODEL}{name}": value for name, value in model_state(sharded).items()}
        source = open_source(path, state)
        if verify:
            source.check(workers.index(sharded.groups.worker), len(workers))
    with agreed(agree, f"comparing {path} with the model"):
        targets = _matching(source, state, path, strict)
        restored = [_Restored(sharded, *pair) for pair in _pair(source, sharded, optimizers, path)]
        for index, one in enumerate(restored):
            targets |= one.make_state(source, OPTIMIZER.format(index))
    with agreed(agree, f"reading {path}"):
        source.fill(targets)
    for one in restored:
        one.put_in_place()
    return {**source.values(), "state_dict": {}, "optimizer_states": []}


def _matching(source: Source, state: Mapping[str, Any], path: str, strict: bool) -> dict[str, Any]:
    """The model's tensors that the checkpoint holds in the right shape."""
    saved = {name for name in source.names if name.startswith(MODEL)}
    missing, unexpected = sorted(state.keys() - saved), sorted(saved - state.keys())
    if strict and (missing or unexpected):
        raise ConfigError(
            f"{path} was made with another model: it lacks {_some(missing)} and has {_some(unexpected)} besides. Load it into the "
            "same model, or set strict_loading = False on the LightningModule"
        )
    for name in sorted(state.keys() & saved):
        if source.shape(name) != tuple(state[name].size()):
            raise ConfigError(
                f"{path}: {name!r} has shape {source.shape(name)} there, {tuple(state[name].size())} here; load it into a model of "
                "the same sizes"
            )
    return {name: value for name, value in state.items() if name in saved}


def _some(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _pair(
    source: Source, sharded: ShardedModel, optimizers: Sequence[torch.optim.Optimizer], path: str
) -> list[tuple[torch.optim.Optimizer, SavedOptimizer]]:
    names = {parameter: spec.fqn for spec, parameter in sharded.parameters()}
    orders = [[names[p] for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
    saved = source.optimizers(orders)
    if not saved or not optimizers:
        return []
    if len(saved) != len(optimizers):
        raise ConfigError(f"{path} holds {len(saved)} optimizers, this run has {len(optimizers)}; make the same ones")
    return list(zip(optimizers, saved, strict=True))


class _Restored:
    """The state of one optimizer on its way back: made and filled aside, put in place at the end.

    Raises:
        ConfigError: the checkpoint's optimizer is another one, or its param groups are.
    """

    def __init__(self, sharded: ShardedModel, optimizer: torch.optim.Optimizer, saved: SavedOptimizer) -> None:
        self.sharded, self.optimizer, self.saved = sharded, optimizer, saved
        self.parameters = {spec.fqn: (spec, parameter) for spec, parameter in sharded.parameters()}
        self.state: dict[Any, dict[str, Any]] = {}
        name = type(optimizer).__name__
        if saved.name not in (None, name):
            raise ConfigError(f"the checkpoint holds the state of {saved.name}, this run uses {name}; use {saved.name} to go on")
        names = {id(parameter): fqn for fqn, (_, parameter) in self.parameters.items()}
        here = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        if here != [list(group["params"]) for group in saved.groups]:
            raise ConfigError(
                f"the param groups of {name} are not those of the checkpoint ({[len(g['params']) for g in saved.groups]} parameters "
                f"there, {[len(group) for group in here]} here, or in another order); make them in the same way"
            )

    def make_state(self, source: Source, prefix: str) -> dict[str, Any]:
        """Empty state of the saved kinds, as optimizers make theirs at the first step only; returns what is to be filled."""
        targets: dict[str, Any] = {}
        for name in sorted(name for name in source.names if name.startswith(prefix)):
            fqn, _, key = name.removeprefix(prefix).rpartition("/")
            if fqn not in self.parameters:
                raise ConfigError(f"the checkpoint has optimizer state of {fqn!r}, which this model does not have")
            spec, parameter = self.parameters[fqn]
            shape, dtype = source.shape(name), source.dtype(name)
            if shape == spec.shape:
                value = torch.zeros_like(parameter.detach(), dtype=dtype)
                targets[name] = _cell(self.sharded, spec, value)
            else:
                value = torch.zeros(shape, dtype=dtype, device=self._device_of_scalars(parameter))
                targets[name] = value
            self.state.setdefault(parameter, {})[key] = value
        return targets

    def _device_of_scalars(self, parameter: torch.Tensor) -> torch.device:
        """Step counts live on the CPU, except where a kernel reads them."""
        group = next(g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"]))
        return parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")

    def put_in_place(self) -> None:
        """The optimizer goes on with the saved state and settings. Local."""
        for fqn, entries in self.saved.scalars.items():
            self.state.setdefault(self.parameters[fqn][1], {}).update(entries)
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)
        for group, old in zip(self.optimizer.param_groups, self.saved.groups, strict=True):
            group.update({key: value for key, value in old.items() if key != "params"})
