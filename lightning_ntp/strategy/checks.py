"""What cannot work is refused at the start, on every worker, before one of them waits for another."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import torch

from lightning_ntp.errors import ConfigError, UnsupportedModelError
from lightning_ntp.planner_start import STATE_BYTES_PER_PARAMETER
from lightning_ntp.strategy._lightning_private import syncs_batch_norm
from lightning_ntp.strategy.elementwise import why_not_elementwise

PER_TENSOR_OPTIMIZERS = frozenset(
    {
        "Adafactor",
        "Adagrad8bit",
        "DistributedShampoo",
        "LAMB",
        "Lamb",
        "LARS",
        "Lars",
        "Muon",
        "NovoGrad",
        "SOAP",
        "Shampoo",
    }
)
"""Optimizers whose update of one element depends on the whole tensor (norms, factored moments, matrix roots)."""

REFUSED_CALLBACKS = {
    "StochasticWeightAveraging": "it copies and replaces the whole model, of which each worker holds cells; use WeightAveraging",
    "ModelPruning": "it puts masks on whole tensors, and each worker holds cells of them; prune before or after the training",
    "BaseFinetuning": "it frees parameters later, which are not in the planned gradient buckets; freeze them with "
    "requires_grad_(False) before fit, and start another fit to train more of them",
    "BatchSizeFinder": "it makes one worker run out of memory to see how far it goes; give the batch_size",
    "LearningRateFinder": "it goes back to a checkpoint inside a running fit; give the learning rate",
}
"""Callbacks that cannot work on a cut model, and what to do instead."""

CLOSURE_OPTIMIZERS = frozenset({"LBFGS", "SAM", "ASAM", "ESAM"})
"""Optimizers that call their closure again."""


def check_options(unknown: Iterable[str], known: Iterable[str]) -> None:
    """ConfigError that names an unknown option of the strategy and the nearest known one."""
    known = list(known)
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"NTPStrategy has no option {name!r}{hint} Its options are {', '.join(known)}")


def check_precision(precision: object) -> None:
    """ConfigError unless the Trainer's precision is one that the strategy runs."""
    if precision not in STATE_BYTES_PER_PARAMETER:
        known = ", ".join(f'"{name}"' for name in STATE_BYTES_PER_PARAMETER)
        raise ConfigError(
            f'strategy "ntp" does not support precision={precision!r}; use one of {known} '
            '("bf16-mixed" keeps float32 weights and sums gradients in float32)'
        )


def check_trainer(trainer: Any, module: Any) -> None:
    """What the strategy's loops cannot run.

    Raises:
        ConfigError: a callback that cannot work on a cut model.
        UnsupportedModelError: SyncBatchNorm.
    """
    for callback in trainer.callbacks:
        for name in (cls.__name__ for cls in type(callback).__mro__):
            if name in REFUSED_CALLBACKS:
                shown = type(callback).__name__
                raise ConfigError(f'strategy "ntp" cannot run the callback {shown}: {REFUSED_CALLBACKS[name]}')
    if syncs_batch_norm(trainer) or any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules()):
        raise UnsupportedModelError(
            "SyncBatchNorm needs equally many micro-batches everywhere, and ragged replicas run different numbers of them; "
            "use layer or group norms"
        )


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer], module: torch.nn.Module) -> None:
    """Refuses optimizers that are wrong on cells of a parameter.

    An optimizer that is elementwise in spite of its name may say so: ``optimizer.ntp_elementwise = True``.

    Raises:
        ConfigError: a closure optimizer, one with per-tensor norms (by name, or found by trying), one with state of another shape
            than its parameter, or a fused one over several kinds of device.
    """
    for optimizer in optimizers:
        names = {cls.__name__ for cls in type(optimizer).__mro__}
        if names & CLOSURE_OPTIMIZERS:
            raise ConfigError(
                f"{type(optimizer).__name__} calls its closure again, which would sync gradients twice in one step; "
                "use an optimizer that steps once, such as AdamW"
            )
        if names & PER_TENSOR_OPTIMIZERS and not getattr(optimizer, "ntp_elementwise", False):
            raise ConfigError(
                f"{type(optimizer).__name__} looks at whole tensors, and each worker holds cells of them; use an elementwise "
                "optimizer such as AdamW or SGD, or set optimizer.ntp_elementwise = True if yours is one"
            )
        why = None if getattr(optimizer, "ntp_elementwise", False) else why_not_elementwise(optimizer)
        if why is not None:
            raise ConfigError(
                f"{type(optimizer).__name__}: {why}, and each worker holds a part of each parameter, another one after a loss; use "
                "an elementwise optimizer such as AdamW or SGD, or set optimizer.ntp_elementwise = True if you know better"
            )
        for group in optimizer.param_groups:
            devices = sorted({parameter.device.type for parameter in group["params"]})
            if group.get("fused") and len(devices) > 1:
                raise ConfigError(
                    f"{type(optimizer).__name__}(fused=True) has parameters on {' and '.join(devices)}; move them to one kind of "
                    "device or leave fused out"
                )


def forward_roots(module: torch.nn.Module, prefix: str = "") -> list[str]:
    """Names of the submodules whose forward the user's steps call: children with parameters, looking through containers.

    Raises:
        ConfigError: the module has parameters of its own, which no forward of a submodule would gather.
    """
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise ConfigError(
            f"parameter {prefix}{own[0]} belongs to the LightningModule itself; put it into a submodule whose forward you call, so "
            "that it can be gathered before use"
        )
    roots: list[str] = []
    for name, child in module.named_children():
        if next(child.parameters(), None) is None:
            continue
        is_container = isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict))
        roots += forward_roots(child, f"{prefix}{name}.") if is_container else [f"{prefix}{name}"]
    return roots


def fewest_query_heads(module: torch.nn.Module) -> int | None:
    """Of the Hugging Face models inside: no degree may be higher. None where there is no such model. Local."""
    configs = (getattr(part, "config", None) for part in module.modules())
    counts = {getattr(config, "num_attention_heads", None) for config in configs}
    return min((count for count in counts if isinstance(count, int)), default=None)
