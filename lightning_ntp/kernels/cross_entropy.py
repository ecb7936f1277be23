"""Vocab-parallel cross-entropy, the local arithmetic between its collectives; `reference` defines it."""

from __future__ import annotations

from lightning_ntp.kernels.compile import compiled
from lightning_ntp.kernels.reference import local_gradient as reference_local_gradient
from lightning_ntp.kernels.reference import local_max
from lightning_ntp.kernels.reference import local_sums as reference_local_sums

__all__ = ["local_gradient", "local_max", "local_sums"]

local_sums = compiled(reference_local_sums)
local_gradient = compiled(reference_local_gradient)
