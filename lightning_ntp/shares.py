"""Shares of samples and of granules: integers in proportion to weights. Standard library only."""

from __future__ import annotations

import heapq
from fractions import Fraction
from functools import lru_cache

from lightning_ntp.errors import ConfigError


@lru_cache(maxsize=4096)
def deal(total: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """`total` samples dealt one by one in proportion to `weights` (Sainte-Laguë): each goes to the largest weight / (2n + 1).

    Never takes a sample back when `total` grows, so that shares of a window's positions add up to the shares of the window.
    Ties go to the lowest index; a weight of 0 gets nothing.

    Raises:
        ConfigError: a negative weight, or no positive one.
    """
    if not weights or min(weights) < 0 or max(weights) == 0:
        raise ConfigError(f"shares need weights of at least 0 and one above, got {weights}")
    # Each final count is at least floor(quota) - number of parties, so the dealing can start there.
    counts = [max(0, total * weight // sum(weights) - len(weights)) for weight in weights]
    heap = [(-Fraction(w, 2 * n + 1), i) for i, (w, n) in enumerate(zip(weights, counts, strict=True)) if w]
    heapq.heapify(heap)
    for _ in range(total - sum(counts)):
        _, i = heap[0]
        counts[i] += 1
        heapq.heapreplace(heap, (-Fraction(weights[i], 2 * counts[i] + 1), i))
    return tuple(counts)
