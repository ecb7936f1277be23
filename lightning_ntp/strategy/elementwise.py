"""Whether an optimizer can work on cells and be moved with them: tried on a small matrix and on its halves, not believed by name."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_log = logging.getLogger(__name__)

_SHAPE = (4, 6)
_NUM_STEPS = 2


def why_not_elementwise(optimizer: torch.optim.Optimizer) -> str | None:
    """What is wrong with running this optimizer on parts of a parameter; None if nothing is. Local.

    A twin of the same class and options takes two steps on a matrix, two others on its halves; what each element becomes must not
    depend on what lies beside it, and state must have the shape of the matrix or be one number. An optimizer that cannot be tried
    is believed, with a warning that says why it could not.
    """
    device = next((p.device for group in optimizer.param_groups for p in group["params"] if not p.is_meta), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(_SHAPE, generator=generator, dtype=torch.float64) for _ in range(1 + _NUM_STEPS))
    start, *gradients = (tensor.to(device) for tensor in drawn)
    try:
        whole, first, second = (
            _run(_twin(optimizer, start[rows]), [gradient[rows] for gradient in gradients])
            for rows in (slice(0, 4), slice(0, 2), slice(2, 4))
        )
    except Exception as error:  # noqa: BLE001  a constructor of its own kind, or steps that want more than gradients (a closure, hooks)
        _log.warning(
            "%s could not be tried on a small matrix (%s: %s), so it is believed to treat each element by itself; one that looks at whole "
            "tensors would train wrongly here. optimizer.ntp_elementwise = True says that it is so",
            type(optimizer).__name__,
            type(error).__name__,
            error,
        )
        return None
    for key, value in whole.state[next(iter(whole.state))].items() if whole.state else ():
        if isinstance(value, torch.Tensor) and value.numel() != 1 and value.shape != _SHAPE:
            return f"it keeps {key} of shape {tuple(value.shape)} for a parameter of shape {_SHAPE}"
    together = _parameter(whole).detach() - start
    apart = torch.cat([_parameter(first), _parameter(second)]).detach() - start
    if (together - apart).norm() > 1e-6 * together.norm():
        return "what it makes of an element depends on the rest of its parameter (norms, factored moments, estimates over all)"
    return None


def _twin(optimizer: torch.optim.Optimizer, start: torch.Tensor) -> torch.optim.Optimizer:
    """The same class with the options of the first param group, over one parameter."""
    known = inspect.signature(type(optimizer).__init__).parameters
    options: dict[str, Any] = {**optimizer.defaults, **optimizer.param_groups[0]}
    options = {name: value for name, value in options.items() if name in known and name != "params"}
    if isinstance(options.get("lr"), float):
        options["lr"] = 0.01  # a warm-up may begin at 0, which would show nothing
    return type(optimizer)([nn.Parameter(start.clone())], **options)


def _run(optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    for gradient in gradients:
        _parameter(optimizer).grad = gradient.clone()
        optimizer.step()
    return optimizer


def _parameter(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    parameter: torch.Tensor = optimizer.param_groups[0]["params"][0]
    return parameter
