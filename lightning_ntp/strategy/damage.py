"""Silent damage on purpose: one bit of a parameter that this worker holds, for tests of the integrity check."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from lightning_ntp.errors import ConfigError
from lightning_ntp.testing import Fault

_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip_bit(named_parameters: Iterable[tuple[str, torch.Tensor]], fault: Fault) -> str:
    """Flips `fault.bit` of the first local element of the first parameter that matches; returns its name. Local.

    A parameter matches if its name ends in `fault.parameter` and this worker holds a part of it. `ConfigError` if none does
    or its elements have fewer bits.
    """
    for name, parameter in named_parameters:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not name.endswith(fault.parameter) or local.numel() == 0:
            continue
        bits = 8 * local.element_size()
        if not 0 <= fault.bit < bits:
            raise ConfigError(f"flip-bit {fault.bit} of {name}: its elements have the bits 0 to {bits - 1}")
        with torch.no_grad():
            first = local.detach().flatten()[:1]
            flipped = first.view(_SAME_SIZE[local.element_size()]) ^ _mask(fault.bit, bits)
            local.detach()[(0,) * local.dim()] = flipped.view(local.dtype)[0]
        return name
    raise ConfigError(f"flip-bit: worker {fault.worker} holds no parameter whose name ends in {fault.parameter!r}")


def _mask(bit: int, num_bits: int) -> int:
    """The bit's value as a signed number of that width."""
    return -(1 << bit) if bit == num_bits - 1 else 1 << bit
