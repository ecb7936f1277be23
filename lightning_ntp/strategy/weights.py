"""How much a micro-batch counts in the mean over the global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_ntp.errors import ConfigError

BatchWeight = str | Callable[[Any], float]

IGNORED_LABEL = -100
"""The label that Hugging Face models leave out of the mean."""


def num_samples(batch: Any) -> int:
    """Samples in a ready-made batch: size of dim 0 of the first tensor in it, 1 where there is none."""
    return next((t.shape[0] for t in _tensors(batch) if t.dim() > 0), 1)


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        for value in batch:
            yield from _tensors(value)


def weigh(batch: Any, num_counted: int, weight: BatchWeight) -> float:
    """The count of a micro-batch in the mean over the global batch.

    Args:
        batch: as the user's ``collate_fn`` made it.
        num_counted: its samples; 0 for a ghost, which counts 0 whatever it holds.
        weight: ``"samples"``, ``"tokens"`` (labels other than -100, less the first of each sequence, which nothing
            predicts) or a function of the batch.

    Raises:
        ConfigError: ``"tokens"`` without ``labels`` in the batch, or a weight below 0.
    """
    if num_counted == 0:
        return 0.0
    if weight == "samples":
        return float(num_counted)
    if weight == "tokens":
        labels = batch.get("labels") if isinstance(batch, Mapping) else getattr(batch, "labels", None)
        if not isinstance(labels, torch.Tensor):
            raise ConfigError(
                f'batch_weight="tokens" counts batch["labels"], and a {type(batch).__name__} has none; give '
                "batch_weight a function of the batch that returns how much it counts"
            )
        return float((labels[..., 1:] != IGNORED_LABEL).sum())
    if isinstance(weight, str):
        raise ConfigError(f'batch_weight is "samples", "tokens" or a function of the batch, got {weight!r}')
    count = float(weight(batch))
    if not count >= 0:
        raise ConfigError(f"batch_weight returned {count} for a batch; a weight is a number of at least 0")
    return count
