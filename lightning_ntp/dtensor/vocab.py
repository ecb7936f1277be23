"""Embedding and head cut by vocabulary rows, and the cross-entropy that never holds all logits."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_ntp.dtensor.collectives import (
    copy_to_roles,
    exchange_uneven,
    max_in_place,
    reduce_from_roles,
    sum_in_place,
)
from lightning_ntp.dtensor.cut import CutModule, CutState, local_tensor, set_local
from lightning_ntp.dtensor.placement import UnevenShard, wrap_local
from lightning_ntp.errors import ConfigError, UnsupportedModelError
from lightning_ntp.kernels.cross_entropy import local_gradient, local_max, local_sums
from lightning_ntp.layout import ShardLayout
from lightning_ntp.model_spec import Coordinates, ModuleRule


def lookup_table(layout: ShardLayout, role: int, device: torch.device | str) -> torch.Tensor:
    """(vocabulary,) int64: where `role` stores a row, -1 if another role does. Local."""
    table = torch.full((layout.size,), -1, dtype=torch.long, device=device)
    at = 0
    for span in layout.of(role):
        table[span.start : span.stop] = torch.arange(at, at + len(span), device=device)
        at += len(span)
    return table


def prepare_vocab(module: nn.Module, rule: ModuleRule, at: Coordinates, state: CutState) -> None:
    """Give a swapped embedding or head its lookup table and layout. Local."""
    if rule.layouts is None:
        raise UnsupportedModelError(f"{rule.fqn}: a vocabulary rule without layouts; give the vocabulary's layouts")
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option, None):
            raise UnsupportedModelError(f"{rule.fqn} ({type(module).__name__}): {option} does not work on a part of the rows")
    layout = rule.layouts.at(at.degree, at.relief)
    table = lookup_table(layout, state.role, state.mesh.device_type)
    # Not a buffer: FSDP, checkpoints and the leader's broadcast have no business with it.
    state.lookup, state.layout = table, layout
    name = "num_embeddings" if isinstance(module, nn.Embedding) else "out_features"
    set_local(module, state, name, layout.local_size(state.role))


class VocabEmbedding(CutModule):
    """Each role looks up the rows it stores; the sum over roles is the embedding."""

    weight: nn.Parameter
    padding_idx: int | None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(...,) int64 -> (..., hidden). Collective over the tp axis."""
        weight, state = local_tensor(self.weight), self.cut
        if weight.shape[0] == 0:
            found = weight.sum() + weight.new_zeros((*ids.shape, weight.shape[1]))
        else:
            at = state.lookup[ids]
            found = F.embedding(at.clamp(min=0), weight).masked_fill((at < 0).unsqueeze(-1), 0)
            if self.padding_idx is not None:  # its row gets no gradient, wherever it is stored
                found = torch.where((ids == self.padding_idx).unsqueeze(-1), found.detach(), found)
        return reduce_from_roles(found, state.group)


class VocabHead(CutModule):
    """Logits cut by vocabulary.

    While training, and wherever the surrounding model was given labels, the output is a DTensor cut over its last dim: no rank
    holds all logits. Otherwise (generating, predicting) it is the whole plain tensor.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden) -> (..., vocabulary). Collective over the tp axis."""
        state = self.cut
        bias = None if self.bias is None else local_tensor(self.bias)
        local = F.linear(copy_to_roles(x, state.group), local_tensor(self.weight), bias)
        if self.training or state.has_labels:
            return _cut_logits(local, state)
        return gather_vocab(local, state.layout, state.role, state.group)


@torch.compiler.disable
def _cut_logits(local: torch.Tensor, state: CutState) -> DTensor:
    """[Note: compiled models] A compiled graph that returns a DTensor must be told in advance whether its gradient will be one.

    Loss and logits leave the model together and only the loss is differentiated, so torch guesses wrong and backward fails.
    The decoder layers are the graphs; head and loss stay outside, and the loss has compiled kernels of its own.
    """
    return wrap_local(local, state.mesh, UnevenShard(local.dim() - 1, state.layout), (*local.shape[:-1], state.layout.size))


def _as_matrix(logits: torch.Tensor) -> torch.Tensor:
    """(tokens, local vocabulary); a role may store no row at all, so that no dim can be left to torch to find."""
    return logits.reshape(logits.shape[:-1].numel(), logits.shape[-1])


class _GatherVocab(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, layout: ShardLayout, role: int, group: ProcessGroup
    ) -> torch.Tensor:
        ctx.layout, ctx.role = layout, role
        if group.size() == 1 and len(layout.of(role)) == 1:
            return local.view_as(local)  # all rows are here, in order
        flat = _as_matrix(local)
        sizes = [layout.local_size(other) * flat.shape[0] for other in layout.roles]
        sent = flat.t().reshape(-1)
        parts = exchange_uneven(sent.repeat(len(sizes)), [sent.numel()] * len(sizes), sizes, group).split(sizes)
        whole = local.new_empty((layout.size, flat.shape[0]))
        for other, part in zip(layout.roles, parts, strict=True):
            rows, at = part.view(-1, flat.shape[0]), 0
            for span in layout.of(other):
                whole[span.start : span.stop] = rows[at : at + len(span)]
                at += len(span)
        return whole.t().reshape(*local.shape[:-1], layout.size)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        spans = ctx.layout.of(ctx.role)
        parts = [gradients[0][..., span.start : span.stop] for span in spans] or [gradients[0][..., :0]]
        return torch.cat(parts, dim=-1), None, None, None


def gather_vocab(local: torch.Tensor, layout: ShardLayout, role: int, group: ProcessGroup) -> torch.Tensor:
    """All logits in logical order on every role, (..., local vocabulary) -> (..., vocabulary). Collective over the tp axis."""
    return _GatherVocab.apply(local, layout, role, group)


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, lookup: torch.Tensor, group: ProcessGroup, ignored: int
    ) -> torch.Tensor:
        counts = targets != ignored
        position = lookup[targets.where(counts, 0)]
        top = max_in_place(local_max(logits), group)
        total, hit = sum_in_place(local_sums(logits, top, position), group)  # one collective for both
        log_total = total.log() + top
        ctx.save_for_backward(logits, log_total, position, counts)
        return (total.log() - hit).where(counts, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, log_total, position, counts = ctx.saved_tensors
        return local_gradient(logits, log_total, position, gradients[0].where(counts, 0)), None, None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, lookup: torch.Tensor, group: ProcessGroup, ignore_index: int = -100
) -> torch.Tensor:
    """Per-token losses from logits cut by vocabulary.

    Args:
        logits: (tokens, local vocabulary).
        targets: (tokens,) int64 in the whole vocabulary, or `ignore_index`.
        lookup: see `lookup_table`.
        group: the tp axis.

    Returns:
        (tokens,), equal on all roles; 0 for ignored tokens.

    Collective over the tp axis.
    """
    return _VocabCrossEntropy.apply(logits, targets, lookup, group, ignore_index)


@torch.compiler.disable
def causal_lm_loss(
    head: VocabHead,
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
) -> torch.Tensor:
    """Hugging Face's causal-LM loss on cut logits: mean over counted tokens, or their sum over `num_items_in_batch`.

    16-bit logits are lifted to float32 locally. As in torch, a batch without counted tokens has loss NaN and gradient 0.
    """
    if shift_labels is None:
        if labels is None:
            raise ConfigError("the causal-LM loss needs labels or shift_labels, got neither")
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    state = head.cut
    local = local_tensor(logits) if isinstance(logits, DTensor) else _own_part(logits, state)
    local = local.float() if local.dtype in (torch.bfloat16, torch.float16) else local
    targets = shift_labels.reshape(-1).to(local.device)
    losses = vocab_parallel_cross_entropy(
        _as_matrix(local), targets, state.lookup, state.group, ignore_index
    )
    if num_items_in_batch is not None:
        return losses.sum() / num_items_in_batch
    count = (targets != ignore_index).sum()
    return torch.where(count > 0, losses.sum() / count.clamp(min=1), float("nan"))


def _own_part(logits: torch.Tensor, state: CutState) -> torch.Tensor:
    parts = [logits[..., span.start : span.stop] for span in state.layout.of(state.role)] or [logits[..., :0]]
    return torch.cat(parts, dim=-1)


def connect_head(model: nn.Module, head: VocabHead) -> None:
    """Make a causal LM use the vocab-parallel loss, and its head keep logits cut whenever labels were given. Local."""
    # Weak: the loss hangs on the model, and the model holds the head.
    reference = weakref.ref(head)

    def loss(logits: torch.Tensor, labels: torch.Tensor | None = None, *_: Any, **options: Any) -> torch.Tensor:
        known = {k: v for k, v in options.items() if k in ("num_items_in_batch", "ignore_index", "shift_labels")}
        owner = reference()
        assert owner is not None
        return causal_lm_loss(owner, logits, labels, **known)

    def note_labels(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        owner = reference()
        if owner is not None:
            owner.cut.has_labels = options.get("labels") is not None

    causal: Any = model  # nn.Module declares tensors and modules; this is a property of transformers' models, with a setter
    causal.loss_function = loss
    handles = head.cut.handles
    handles.append(model.register_forward_pre_hook(note_labels, with_kwargs=True))
