"""What a failed attempt leaves behind outside of parameters, and how it is undone: buffers, metrics, logged results, progress.

Copies are small: tensors of buffers and of metric states. Parameters and optimizer state are not among them, because nothing
changes them before the vote.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_ntp.strategy._lightning_private import (
    evaluation_results,
    hook_name,
    optimizer_progress,
    set_hook_name,
    training_results,
)
from lightning_ntp.strategy.step_log import metric_state, metrics_of


def remember_step(trainer: Any, module: torch.nn.Module) -> Callable[[], None]:
    """The present state of everything that the attempt of a window may change; call what is returned to go back to it."""
    go_back = (
        _remember_tensors(module),
        _remember_results(training_results(trainer)),
        _remember_progress(optimizer_progress(trainer)),
    )
    hook = hook_name(module)

    def restore() -> None:
        for one in go_back:
            one()
        set_hook_name(module, hook)

    return restore


def remember_evaluation(trainer: Any, module: torch.nn.Module, loop: Any) -> Callable[[], None]:
    """The same for a pass of evaluation: also which modules were training."""
    modes = [(part, part.training) for part in module.modules()]
    go_back = (
        _remember_tensors(module),
        _remember_results(evaluation_results(loop)),
        _remember_progress(loop.batch_progress),
    )
    hook = hook_name(module)

    def restore() -> None:
        for part, training in modes:
            part.training = training
        for one in go_back:
            one()
        set_hook_name(module, hook)

    return restore


def _remember_tensors(module: torch.nn.Module) -> Callable[[], None]:
    with torch.no_grad():
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    metrics = [(metric, metric_state(metric)) for metric in metrics_of(module)]

    def restore() -> None:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for metric, state in metrics:
            metric.__dict__.update(state)

    return restore


def _remember_results(results: Any) -> Callable[[], None]:
    """Of a collection of logged values: those that were there, with their sums; later ones go."""
    states = {key: metric_state(metric) for key, metric in results.items()}
    shown = tuple(getattr(results, name, None) for name in ("batch", "batch_size", "dataloader_idx"))

    def restore() -> None:
        for key in list(results):
            if key in states:
                results[key].__dict__.update(states[key])
            else:
                del results[key]
        if hasattr(results, "batch"):
            results.batch, results.batch_size, results.dataloader_idx = shown

    return restore


def _remember_progress(progress: Any) -> Callable[[], None]:
    state = progress.state_dict()
    return lambda: progress.load_state_dict(state)


def nothing() -> None:
    """Where no attempt is ever repeated there is nothing to go back to."""
