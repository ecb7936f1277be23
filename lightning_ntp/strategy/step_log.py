"""What ``self.log`` says about a loop batch that runs as several micro-batches, some of which do not count.

Per step: the weighted mean over micro-batches, and over data rows under ``sync_dist``. Per epoch: Lightning's own sums, with
each micro-batch's count as its weight. Ghosts leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from lightning_ntp.strategy._lightning_private import metric_cache, metric_defaults, set_metric_cache, synced_by
from lightning_ntp.strategy.control import ControlPlane


def as_batch_size(weight: float) -> float:
    """A count as Lightning's batch size: an integer where it is one, so that sums stay exact."""
    return int(weight) if float(weight).is_integer() else weight


@contextmanager
def leaves_no_trace(module: torch.nn.Module) -> Iterator[None]:
    """Puts buffers and the states of torchmetrics inside the module back afterwards: for ghosts."""
    with torch.no_grad():
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        metrics = [(metric, metric_state(metric)) for metric in metrics_of(module)]
        try:
            yield
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)
            for metric, state in metrics:
                metric.__dict__.update(state)


def metrics_of(module: torch.nn.Module) -> list[Any]:
    """The torchmetrics inside a module."""
    return [m for m in module.modules() if all(hasattr(m, name) for name in ("_defaults", "update", "compute"))]


def metric_state(metric: Any) -> dict[str, Any]:
    """A copy of what `update`, `compute` and `reset` change in a metric; put it back with ``metric.__dict__.update``."""
    names = (*metric_defaults(metric), "_update_count", "_computed", "_forward_cache", "has_reset")
    return {name: _copied(metric.__dict__[name]) for name in names if name in metric.__dict__}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


class StepLog:
    """On-step values of one loop batch.

    Args:
        results: Lightning's result collection of the loop that is running.
        reduce: how logged values are synced; Lightning's own way unless given.
    """

    def __init__(self, results: Any, reduce: Callable[..., Any] | None = None) -> None:
        self._results, self._reduce = results, reduce
        self._before = {key: metric_cache(metric) for key, metric in results.items()}
        self._values: dict[str, list[tuple[torch.Tensor, float]]] = {}
        self._total_weight = 0.0

    @contextmanager
    def micro_batch(self, batch: Any, weight: float) -> Iterator[None]:
        """Everything logged inside belongs to this micro-batch; with weight 0 the epoch's sums stay as they were."""
        results = self._results
        self._total_weight += weight
        results.batch, results.batch_size = batch, as_batch_size(weight)
        sums = {key: (metric.value, getattr(metric, "cumulated_batch_size", None)) for key, metric in self._tensors()}
        for _, metric in self._tensors():
            set_metric_cache(metric, None)
        with synced_by(results, self._reduce):
            yield
        for key, metric in self._tensors():
            value = metric_cache(metric)
            if value is not None:
                self._values.setdefault(key, []).append((value, weight))
            if weight == 0:
                self._restore_sums(metric, sums.get(key))

    def finish(self, control: ControlPlane | None) -> None:
        """Set the on-step values: over this row's micro-batches, and over all rows for ``sync_dist``.

        With `control`, collective over all workers if anything was logged with ``sync_dist`` and ``on_step``.
        """
        synced: list[tuple[Any, list[tuple[torch.Tensor, float]]]] = []
        for key, metric in self._tensors():
            values = self._values.get(key)
            if values is None:
                set_metric_cache(metric, self._before.get(key))
            elif control is not None and metric.meta.sync.should and not metric.meta.sync.rank_zero_only:
                synced.append((metric, values))
            else:
                set_metric_cache(metric, _combined(metric, values))
        if control is not None and synced:
            _finish_synced(synced, control)
        for _, metric in self._tensors():
            if not metric.meta.on_epoch and metric_cache(metric) is not None:
                metric.value = metric_cache(metric)
        self._results.batch_size = as_batch_size(self._total_weight)

    def _tensors(self) -> list[tuple[str, Any]]:
        return [(key, metric) for key, metric in self._results.items() if metric.is_tensor]

    @staticmethod
    def _restore_sums(metric: Any, sums: tuple[Any, Any] | None) -> None:
        defaults = metric_defaults(metric)
        value, count = sums or (defaults["value"].clone(), defaults.get("cumulated_batch_size"))
        metric.value = value.to(metric.value.device)
        if count is not None:
            metric.cumulated_batch_size = count.clone().to(metric.value.device)


def _combined(metric: Any, values: list[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """One row's value over its micro-batches; that of the first one where none counts."""
    counted = [(value, weight) for value, weight in values if weight > 0]
    if not counted:
        return values[0][0]
    if metric.meta.is_mean_reduction:
        return cast(torch.Tensor, sum(v * w for v, w in counted)) / sum(w for _, w in counted)
    return _fold(metric, [value for value, _ in counted])


def _fold(metric: Any, values: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(values)
    if metric.meta.is_sum_reduction:
        return stacked.sum(0)
    return stacked.amax(0) if metric.meta.is_max_reduction else stacked.amin(0)


def _finish_synced(synced: list[tuple[Any, list[tuple[torch.Tensor, float]]]], control: ControlPlane) -> None:
    """One exchange for all means and sums, one for all extremes (smallest as largest of the negative)."""
    sums, extremes = [], []
    for metric, values in synced:
        counted = [(value.double(), weight) for value, weight in values if weight > 0]
        zero = torch.zeros_like(values[0][0], dtype=torch.float64)
        if metric.meta.is_mean_reduction:
            sums += [sum((v * w for v, w in counted), zero), zero + sum(w for _, w in counted)]
        elif metric.meta.is_sum_reduction:
            sums += [sum((v for v, _ in counted), zero), zero]
        else:
            sign = 1.0 if metric.meta.is_max_reduction else -1.0
            extremes.append(max((float(v) * sign for v, _ in counted), default=-torch.inf))
    device = synced[0][1][0][0].device
    totals = iter(control.sum_rows(torch.stack(sums).to(device)).unbind() if sums else ())
    largest = iter(control.extreme(torch.tensor(extremes, dtype=torch.float64), largest=True) if extremes else ())
    for metric, values in synced:
        like = values[0][0]
        if metric.meta.is_mean_reduction:
            value = next(totals) / next(totals)
        elif metric.meta.is_sum_reduction:
            value, _ = next(totals), next(totals)
        else:
            value = next(largest) * (1.0 if metric.meta.is_max_reduction else -1.0)
        set_metric_cache(metric, value.to(like))
