"""What an epoch has logged so far, across a checkpoint inside it: sums of ``self.log`` and states of torchmetrics.

    run:  each data row's sums, as they stood where the open window begins
    save: of the position that the checkpoint names -> one message -> totals over all rows (saved by the leader)
    load: the first data row starts with the totals, the others with nothing; later sums over rows come out right

Rows of the new run need not be those of the old one, so only totals have a meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_ntp.strategy._lightning_private import metric_defaults, metric_reductions
from lightning_ntp.strategy.control import ControlPlane
from lightning_ntp.strategy.resume import DataPosition
from lightning_ntp.strategy.step_log import metrics_of

State = dict[str, dict[str, Any]]
"""Name of a metric -> its states; ``"kind"`` says how rows add up."""


Sums = tuple[State, State]
"""Of one data row: what ``self.log`` has summed up, and states of torchmetrics. Copies, on their device."""


class LoggedSums:
    """One row's sums as they stood at the last position that a checkpoint may name though the run has left it.

    A save inside an accumulation window names the window's start, as the window runs again; one after ``max_steps`` has ended
    an epoch early comes when Lightning has cleared the epoch's sums.
    """

    def __init__(self) -> None:
        self._position: DataPosition | None = None
        self._sums: Sums = ({}, {})

    def note(self, position: DataPosition, module: nn.Module, results: Any) -> None:
        """Keep the present sums as those of this position, unless it has some. Local."""
        if position != self._position:
            self._position, self._sums = position, present_sums(module, results)

    def at(self, position: DataPosition) -> Sums | None:
        """Those of a position; None where they are still the present ones."""
        return self._sums if position == self._position else None


def present_sums(module: nn.Module, results: Any) -> Sums:
    """What this row's epoch has logged so far. Local."""
    return logged_sums(results), metric_states(module)


def logged_sums(results: Any) -> State:
    """What this row's ``self.log(on_epoch=True)`` has summed up, without what is logged once per epoch at its end. Local."""
    state: State = {}
    for key, metric in results.items():
        if metric.is_tensor and metric.meta.on_epoch and metric.meta.fx != "on_train_epoch_end":
            entry = {"kind": _kind(metric.meta), "value": _as_sum(metric.value)}
            if entry["kind"] == "mean":
                entry["count"] = _as_sum(torch.as_tensor(metric.cumulated_batch_size))
            state[key] = entry
    return state


def _as_sum(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(torch.float64, copy=True)


def _kind(meta: Any) -> str:
    if meta.is_mean_reduction:
        return "mean"
    return "sum" if meta.is_sum_reduction else "max" if meta.is_max_reduction else "min"


def metric_states(module: nn.Module) -> State:
    """States of torchmetrics in the module whose reductions say how rows add up. Local."""
    found: State = {}
    names = {metric: name for name, metric in module.named_modules()}
    for metric in metrics_of(module):
        name = names[metric]
        kinds = {key: _reduction(fn) for key, fn in metric_reductions(metric).items()}
        if all(kinds.values()):
            values = {key: _copied(getattr(metric, key)) for key in kinds}
            found[name] = {"kinds": kinds, "values": values, "updates": metric.update_count}
    return found


def _reduction(fn: Any) -> str | None:
    name = getattr(fn, "__name__", "")
    return {"dim_zero_sum": "sum", "dim_zero_cat": "cat", "dim_zero_max": "max", "dim_zero_min": "min"}.get(name)


def _copied(value: Any) -> Any:
    return [part.detach() for part in value] if isinstance(value, list) else value.detach().clone()


def _on_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _on_host(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_host, value))
    return value.cpu() if isinstance(value, torch.Tensor) else value


def totals(own: Sums, control: ControlPlane) -> dict[str, State]:
    """Over all data rows, the same on every worker. Collective over all workers with a role."""
    rows = control.gather_objects(_on_host(own))
    logged: State = {}
    for sums, _ in rows:
        for key, entry in sums.items():
            logged[key] = _added(logged[key], entry) if key in logged else entry
    metrics: State = {}
    for _, states in rows:
        for name, entry in states.items():
            if name not in metrics:
                metrics[name] = entry
                continue
            known = metrics[name]
            values = {key: _combined(kind, [known["values"][key], entry["values"][key]]) for key, kind in entry["kinds"].items()}
            metrics[name] = known | {"values": values, "updates": known["updates"] + entry["updates"]}
    return {"logged": logged, "metrics": metrics}


def _added(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    kind = "sum" if first["kind"] == "mean" else first["kind"]
    entry = {**first, "value": _combined(kind, [first["value"], second["value"]])}
    if "count" in first:
        entry["count"] = first["count"] + second["count"]
    return entry


def _combined(kind: str, values: list[Any]) -> Any:
    first, second = values
    if kind == "cat":
        return [*_parts(first), *_parts(second)]
    if kind == "sum":
        return first + second
    return torch.maximum(first, second) if kind == "max" else torch.minimum(first, second)


def _parts(value: Any) -> Iterable[torch.Tensor]:
    return value if isinstance(value, list) else [value]


def restore_metrics(module: nn.Module, metrics: State, is_first_row: bool) -> None:
    """Metrics of the module begin with the totals on the first data row, empty elsewhere. Local."""
    names = {metric: name for name, metric in module.named_modules()}
    for metric in metrics_of(module):
        entry = metrics.get(names[metric])
        if entry is None or set(entry["kinds"]) != set(metric_defaults(metric)):
            continue  # another metric than the saved one: it starts anew
        metric.reset()
        if is_first_row:
            for key, value in entry["values"].items():
                setattr(metric, key, _like(value, metric.device))
            metric._update_count = entry["updates"]


def _like(value: Any, device: Any) -> Any:
    return [part.to(device) for part in value] if isinstance(value, list) else value.to(device)


def starter(logged: State, is_first_row: bool) -> Callable[[str, Any], None]:
    """What a logged value that appears for the first time begins with: called with its key and metric."""

    def start(key: str, metric: Any) -> None:
        entry = logged.get(key)
        if entry is None or not metric.is_tensor or entry["kind"] != _kind(metric.meta):
            return
        if entry["kind"] in ("max", "min") or is_first_row:
            metric.value = entry["value"].to(metric.value.dtype)
            metric._update_count = max(1, metric._update_count)
            if "count" in entry:
                count = float(entry["count"])
                metric.cumulated_batch_size = torch.tensor(int(count) if count.is_integer() else count)

    return start
