"""Randomness on local heads: each role its own, without disturbing what all roles share.

All roles of a data row draw the same masks on replicated activations, because their generators are in the same state. On local heads
they must draw different ones, and not as many: after 3 and 2 local heads one shared generator would stand at different
places. So a region cut over roles runs on a generator seeded from one shared draw and the role, and the shared state is put
back after it. The draw makes the region replay exactly when activation checkpointing recomputes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import ClassVar, Self

import torch

_ROLE_STRIDE = 0x9E3779B97F4A7C15  # odd, so that different roles never meet modulo 2**63
_SEED_LIMIT = 2**63 - 1


class RoleRandomness:
    """A region that begins with ``with`` and ends there or at `leave`, whichever comes first.

    Args:
        role: of this worker.

    Covers the CPU generator and, once CUDA is in use, the current device's.
    """

    _open: ClassVar[RoleRandomness | None] = None

    def __init__(self, role: int) -> None:
        self._role = role
        self._shared: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._outer: RoleRandomness | None = None

    @classmethod
    @contextmanager
    def paused(cls) -> Iterator[None]:
        """Inside, whatever region is open: random numbers come from the state that all roles share, and move it on."""
        region = cls._open
        if region is None or region._shared is None:
            yield
            return
        own = _states(region._shared[1] is not None)
        _set_states(region._shared)
        yield
        region._shared = _states(own[1] is not None)
        _set_states(own)

    @torch.compiler.disable
    def __enter__(self) -> Self:
        base = int(torch.randint(_SEED_LIMIT, (), device="cpu"))
        on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._shared = _states(on_cuda)
        self._outer, RoleRandomness._open = RoleRandomness._open, self
        seed = (base + (self._role + 1) * _ROLE_STRIDE) % _SEED_LIMIT
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            torch.cuda.manual_seed(seed)
        return self

    @torch.compiler.disable
    def leave(self) -> None:
        """Put the shared state back; nothing happens outside a region."""
        if self._shared is None:
            return
        states, self._shared = self._shared, None
        RoleRandomness._open, self._outer = self._outer, None
        _set_states(states)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()


def _states(on_cuda: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if on_cuda else None


def _set_states(states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    cpu_state, cuda_state = states
    torch.set_rng_state(cpu_state)
    if cuda_state is not None:
        torch.cuda.set_rng_state(cuda_state)
