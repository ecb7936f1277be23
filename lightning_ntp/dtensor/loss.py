"""``F.cross_entropy`` and ``F.log_softmax`` on logits whose classes are cut: no worker ever holds a whole row.

The layers have their own fused loss (`vocab.py`); this one serves users who call torch's function on ``outputs.logits``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from lightning_ntp.dtensor._torch_private import OpOverload, local_of, make_dtensor, spec_of
from lightning_ntp.dtensor.collectives import reduce_over
from lightning_ntp.dtensor.placement import UnevenShard, coordinate_of
from lightning_ntp.dtensor.reductions import cut_groups, reduce_dims
from lightning_ntp.dtensor.rules import refuse
from lightning_ntp.layout import Span, intersect

aten = torch.ops.aten

_NO_REDUCTION, _MEAN = 0, 1
"""torch's numbers for the `reduction` argument; 2 is the sum."""


def log_softmax_handler(operator: OpOverload, logits: DTensor, dim: int, half_to_float: bool) -> DTensor:
    """``_log_softmax`` over a cut dim or beside it. Collective over the axis that cuts `dim`."""
    dim %= logits.ndim
    spec = spec_of(logits)
    values = local_of(logits)
    wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    highest = _whole_row(operator, logits, dim, "max").to(wide.dtype)
    shifted = wide - highest
    total = _whole_row(operator, make_dtensor(shifted.exp(), spec, spec.shape, spec.placements), dim, "sum")
    result = shifted - total.log()
    return make_dtensor(result if half_to_float else result.to(values.dtype), spec, spec.shape, spec.placements)


def log_softmax_backward_handler(
    operator: OpOverload, gradient: DTensor, output: DTensor, dim: int, input_dtype: torch.dtype
) -> DTensor:
    """``_log_softmax_backward_data``. Collective over the axis that cuts `dim`."""
    spec = spec_of(output)
    cut = gradient if gradient.placements == output.placements else gradient.redistribute(placements=output.placements)
    total = _whole_row(operator, cut, dim % output.ndim, "sum")
    result = local_of(cut) - local_of(output).exp() * total
    return make_dtensor(result.to(input_dtype), spec, spec.shape, spec.placements)


def _whole_row(operator: OpOverload, tensor: DTensor, dim: int, combine: str) -> torch.Tensor:
    """The reduction over `dim`, kept as a dim of one, on the local rows."""
    return reduce_dims(operator, tensor, [dim], True, combine)[0]


def nll_loss_forward_handler(
    operator: OpOverload,
    log_probs: DTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``nll_loss_forward``: the loss as a plain tensor, equal on all workers. Collective over the axis that cuts the classes."""
    classes, group = _cut_classes(operator, log_probs)
    labels, weights = _labels(operator, log_probs, target, weight, ignored)
    at = _stored_at(labels, classes, coordinate_of(log_probs.device_mesh)[0], owned=True)
    picked = reduce_over(_pick(local_of(log_probs), at), "sum", group)
    losses = -picked * weights.to(picked.dtype)
    total = weights.to(picked.dtype).sum()
    if reduction == _NO_REDUCTION:
        return losses, torch.zeros_like(total)
    return (losses.sum() / total if reduction == _MEAN else losses.sum()), total


def nll_loss_backward_handler(
    operator: OpOverload,
    gradient: torch.Tensor,
    log_probs: DTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    total: torch.Tensor,
) -> DTensor:
    """``nll_loss_backward``: cut like the log-probabilities. Local."""
    classes, _ = _cut_classes(operator, log_probs)
    labels, weights = _labels(operator, log_probs, target, weight, ignored)
    at = _stored_at(labels, classes, coordinate_of(log_probs.device_mesh)[0], owned=False)
    spec, local = spec_of(log_probs), local_of(log_probs)
    values = -_plain(gradient) * weights.to(local.dtype) * (at >= 0)
    if reduction == _MEAN:
        values = values / _plain(total)
    result = torch.zeros_like(local)
    if local.shape[-1]:
        result.scatter_(-1, at.clamp(min=0).unsqueeze(-1), values.to(local.dtype).unsqueeze(-1))
    return make_dtensor(result, spec, spec.shape, spec.placements)


def _cut_classes(operator: OpOverload, log_probs: DTensor) -> tuple[UnevenShard, ProcessGroup]:
    """The placement that cuts the last dim of [rows, classes] (or [classes]), on a mesh of one axis."""
    spec = spec_of(log_probs)
    placement = spec.placements[0]
    if spec.mesh.ndim != 1 or not isinstance(placement, UnevenShard) or placement.dim != spec.ndim - 1 or spec.ndim > 2:
        refuse(operator, [spec], "the loss needs [rows, classes] with the classes cut, on a mesh of one axis")
    return placement, cut_groups(operator, spec, [placement.dim])[0]


def _labels(
    operator: OpOverload, log_probs: DTensor, target: torch.Tensor, weight: torch.Tensor | None, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels with ignored ones as -1, and the weight of each row (0 where ignored)."""
    if isinstance(target, DTensor) and not all(isinstance(p, Replicate) for p in target.placements):
        refuse(operator, [spec_of(log_probs), spec_of(target)], "the labels must be whole on every worker")
    labels = _plain(target)
    counts = labels != ignored
    size = log_probs.shape[-1]
    known = ((labels >= 0) & (labels < size) | ~counts).all()
    aten._assert_async.msg(
        known, f"cross-entropy: a label outside 0..{size - 1} that is not the ignored one, {ignored}"
    )
    if weight is None:
        return labels.where(counts, -1), counts
    return labels.where(counts, -1), _plain(weight)[labels.where(counts, 0)] * counts


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


def _stored_at(labels: torch.Tensor, classes: UnevenShard, position: int, owned: bool) -> torch.Tensor:
    """Position of each label in this worker's storage, -1 where it does not store (or own) it."""
    at = torch.full_like(labels, -1)
    spans: tuple[Span, ...] = classes.owned(position) if owned else classes.spans(position)
    for run in intersect(spans, classes.spans(position)):
        inside = (labels >= run.span.start) & (labels < run.span.stop)
        at = torch.where(inside, labels - run.span.start + run.second_offset, at)
    return at


def _pick(local: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """``local[..., at]``, 0 where `at` is -1."""
    if not local.shape[-1]:
        return local.new_zeros(at.shape)
    return local.gather(-1, at.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (at >= 0)


HANDLERS: dict[OpOverload, Any] = {
    aten._log_softmax.default: log_softmax_handler,
    aten._log_softmax_backward_data.default: log_softmax_backward_handler,
    aten.nll_loss_forward.default: nll_loss_forward_handler,
    aten.nll_loss_backward.default: nll_loss_backward_handler,
}
