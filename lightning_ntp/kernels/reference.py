"""The definitions: what each kernel computes, in plain torch. Compiled versions are held against these."""

from __future__ import annotations

import torch

from lightning_ntp.kernels.blocks import Block, Moves


def _matrix(buffer: torch.Tensor, block: Block) -> torch.Tensor:
    return buffer.as_strided(
        (block.rows, block.columns), (block.stride, 1), buffer.storage_offset() + block.offset
    )


def move_blocks(
    source: torch.Tensor, destination: torch.Tensor, moves: Moves, add: bool = False, scale: float = 1.0
) -> None:
    """Copy or add rectangles of one flat buffer into those of another, in place.

    Args:
        source: 1-D, at least ``moves.source_end`` elements.
        destination: 1-D, at least ``moves.destination_end`` elements, no overlap with `source`.
        moves: which rectangles.
        add: add to what is there rather than overwrite it.
        scale: factor of what moves. Arithmetic is in the wider of the two dtypes.
    """
    wide = torch.promote_types(source.dtype, destination.dtype)
    for block, to in moves.pairs:
        moved, target = _matrix(source, block), _matrix(destination, to)
        if scale != 1.0:
            moved = moved.to(wide) * scale
        if add:
            target.add_(moved)
        else:
            target.copy_(moved)


def local_max(logits: torch.Tensor) -> torch.Tensor:
    """Largest local logit per token.

    Args:
        logits: (tokens, local vocabulary); the vocabulary may be empty.

    Returns:
        (tokens,); minus infinity where nothing is stored.
    """
    if logits.shape[-1] == 0:
        return logits.new_full(logits.shape[:-1], float("-inf"))
    return logits.amax(-1)


def local_sums(logits: torch.Tensor, top: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """What a role adds to the softmax denominator and to the target's logit.

    Args:
        logits: (tokens, local vocabulary).
        top: (tokens,) the largest logit over all roles.
        position: (tokens,) local column of the target, -1 where another role stores it.

    Returns:
        (2, tokens): sum of ``exp(logit - top)``, and the target's ``logit - top`` or 0.
    """
    total = (logits - top.unsqueeze(-1)).exp().sum(-1)
    if logits.shape[-1] == 0:
        return torch.stack([total, torch.zeros_like(total)])
    hit = logits.gather(-1, position.clamp(min=0).unsqueeze(-1)).squeeze(-1) - top
    return torch.stack([total, hit.where(position >= 0, 0)])


def local_gradient(
    logits: torch.Tensor, log_total: torch.Tensor, position: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Gradient of the per-token losses with respect to the local logits.

    Args:
        logits: (tokens, local vocabulary).
        log_total: (tokens,) log of the whole softmax denominator, the largest logit included.
        position: (tokens,) local column of the target, -1 where another role stores it.
        gradient: (tokens,) of the losses; 0 for ignored tokens.

    Returns:
        (tokens, local vocabulary): ``(softmax - one_hot) * gradient``.
    """
    out = (logits - log_total.unsqueeze(-1)).exp() * gradient.unsqueeze(-1)
    if logits.shape[-1] == 0:
        return out
    return out.scatter_add(-1, position.clamp(min=0).unsqueeze(-1), -gradient.where(position >= 0, 0).unsqueeze(-1))
