"""Each gradient bucket is exchanged once per window and in one order, however often a step has run which part of the model.

[Note: one exchange per bucket] FSDP2 reduces a unit whenever backward leaves it: twice where a training step runs the model twice,
at the very end or never where a step has not run it at all. Replicas see different samples, so they may differ in that, and
an exchange too many, too few or out of turn would meet another bucket's on the other side. So earlier passes are set aside
as earlier micro-batches are; units that have not run are reduced in their turn (zeros, and what earlier micro-batches left); and a
unit that is left out of turn waits, with its whole gradients, for those before it. Rows of one replica must agree, see row_trail.py.

The order: the units' own, last one first, except that those whose inputs carry no gradient come at the end, as autograd does not
say when it leaves them. Workers agree about the latter at the vote; the first window goes without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from lightning_ntp.dtensor.grad_sync import WindowState
from lightning_ntp.strategy._torch_private import WatchedUnit
from lightning_ntp.strategy.row_trail import RowTrail


@dataclass
class UnitPass:
    """What a unit has done in the micro-batch that runs now.

    Args:
        ran: its forward was called, with or without autograd.
        pending: backward passes that are still to come, as far as autograd will report them.
        ready: none is to come any more.
        reduced: its bucket was handed over for good.
    """

    ran: bool = False
    pending: int = 0
    ready: bool = False
    reduced: bool = False


class BackwardWatch:
    """Stands between autograd and FSDP2's reduction for all units of a model.

    Args:
        units: by bucket number, each with the names of its trainable parameters in bucket order.
        others: units without trainable parameters; backward through their root may begin at them.
        window: shared with the buckets.
        trail: gets the numbers of units that run, those of `others` after all with a bucket.
    """

    def __init__(
        self,
        units: Sequence[tuple[WatchedUnit, Sequence[str]]],
        others: Sequence[WatchedUnit],
        window: WindowState,
        trail: RowTrail,
    ) -> None:
        self.window, self.trail = window, trail
        self._counts = True
        self._units = [unit for unit, _ in units]
        self._names = [tuple(names) for _, names in units]
        self._order = _backward_order(self._units)
        self._reported = [False] * len(units)
        self.begin_micro_batch()
        for index, unit in enumerate(self._units):
            unit.watch(partial(self._ran, index), partial(self._will_pass, index), partial(self._pass, index), self._end)
        for index, unit in enumerate(others, start=len(units)):
            unit.watch_forward(partial(self._enter, index))
            unit.watch_end(self._end)

    def begin_micro_batch(self, counts: bool = True) -> None:
        """Call before each forward that a backward follows.

        Args:
            counts: whether parameters that it uses count as used; not for a ghost.
        """
        self._counts = counts
        self._passes = [UnitPass() for _ in self._units]
        self._ended: list[WatchedUnit] = []

    def begin_backward(self) -> None:
        """Call before one of several backward passes through forwards that have run already: each is a window of its own."""
        pending = [this.pending > 0 for this in self._passes]
        used = [this.ran and not this.reduced for this in self._passes]
        self._passes = [
            UnitPass(ran=fresh or self._shares_root(index, pending), pending=this.pending)
            for index, (this, fresh) in enumerate(zip(self._passes, used, strict=True))
        ]
        self._ended = []

    def _shares_root(self, index: int, chosen: Sequence[bool]) -> bool:
        units = [unit for unit, is_chosen in zip(self._units, chosen, strict=True) if is_chosen]
        return any(self._units[index].shares_root_with(unit) for unit in units)

    @property
    def reported(self) -> list[bool]:
        """Per bucket, whether autograd has ever announced that it will report leaving the unit."""
        return list(self._reported)

    def settle_order(self, reported: Sequence[bool]) -> None:
        """From the next window on, buckets that autograd reports nowhere come last.

        Args:
            reported: that of all workers, combined by or.
        """
        order = _backward_order(self._units)
        self._order = [i for i in order if reported[i]] + [i for i in order if not reported[i]]

    def _ran(self, index: int) -> None:
        self._enter(index)
        self._passes[index].ran = True

    def _enter(self, index: int) -> None:
        self.trail.enter(index, keep=torch.is_grad_enabled())

    def _will_pass(self, index: int) -> None:
        self._passes[index].pending += 1
        self._reported[index] = True

    def _pass(self, index: int) -> None:
        """Autograd, or FSDP2 at the end of backward, has left a unit."""
        this = self._passes[index]
        this.pending = max(this.pending - 1, 0)
        if not this.ran and not self.window.is_last_micro_batch:
            return
        if this.pending or this.reduced or not self.window.is_last_micro_batch:
            # Another one follows; or it was not announced (reentrant checkpoints) and must not be lost; or nothing is exchanged.
            self._reduce(index, more_to_come=this.pending > 0)
            return
        this.ready = True
        self._reduce_in_turn()

    def _reduce_in_turn(self) -> None:
        for index in self._order:
            this = self._passes[index]
            if this.ran and not this.ready:
                return
            if not this.reduced:
                this.reduced = True
                self._reduce(index, more_to_come=False)

    def _reduce(self, index: int, more_to_come: bool) -> None:
        self.window.more_to_come = more_to_come
        have_gradient = self._units[index].reduce()
        self.window.more_to_come = False
        if self._counts:
            used = zip(self._names[index], have_gradient, strict=True)
            self.window.used.update(name for name, has_one in used if has_one)

    def _end(self, unit: WatchedUnit, finish: Callable[[], None]) -> None:
        """Backward through one FSDP root is over: close what is open there, then let FSDP2 finish."""
        if self.window.is_last_micro_batch:
            for index, this in enumerate(self._passes):
                this.ready = this.ready or self._units[index].shares_root_with(unit)
            self._reduce_in_turn()
        finish()
        self._ended.append(unit)
        for index, this in enumerate(self._passes):
            roots_done = [self._units[index].shares_root_with(ended) for ended in self._ended]
            if this.reduced and not roots_done[-1] and (any(roots_done) or not this.ran):
                self._units[index].finish_alone()


def _backward_order(units: Sequence[WatchedUnit]) -> list[int]:
    """Last unit first, and each after those inside it."""
    order: list[int] = []
    for index in reversed(range(len(units))):
        inside = [i for i in reversed(range(len(units))) if i != index and units[index].contains(units[i])]
        order += [i for i in (*inside, index) if i not in order]
    return order
