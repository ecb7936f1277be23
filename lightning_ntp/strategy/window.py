"""One optimizer step as a transaction: every micro-batch of its window, one exchange, one division, then the update.

    optimizer_step (once per loop batch)
      micro-batch 0   Lightning's closure: training_step, zero_grad, backward
      micro-batch i   the same without zero_grad
      ... loop batches up to the end of the window; only its last micro-batch exchanges gradients
      global count -> divide once -> hooks, clipping -> optimizer.step, local

Losses are scaled by their own count over a constant; the sum over all workers divided by (global count / constant) is the mean
over the window, whatever the shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch

from lightning_ntp.errors import ConfigError, PlanMismatchError
from lightning_ntp.strategy._lightning_private import inside_hook, training_results
from lightning_ntp.strategy.control import ControlPlane
from lightning_ntp.strategy.fsdp import ShardedModel
from lightning_ntp.strategy.pace import PaceMeter
from lightning_ntp.strategy.row_trail import check_rows, row_ballot, rows_agree
from lightning_ntp.strategy.sampler import reseed
from lightning_ntp.strategy.step_log import StepLog, leaves_no_trace
from lightning_ntp.strategy.weights import num_samples


@dataclass(frozen=True, slots=True)
class LoopBatch:
    """One data row's part of a loop batch, on the device.

    Args:
        batches: micro-batches in the user's shape.
        weights: of each in the mean; 0 for a ghost.
        ghosts: whether each is a ghost: a real micro-batch may count nothing as well.
    """

    batches: tuple[Any, ...]
    weights: tuple[float, ...]
    ghosts: tuple[bool, ...]

    def alone(self, index: int, module: torch.nn.Module) -> AbstractContextManager[None]:
        """A context that hides the traces of a ghost."""
        return leaves_no_trace(module) if self.ghosts[index] else nullcontext()


@dataclass
class WindowState:
    """What has run of the current optimizer step.

    Args:
        constant: loss scale common to all workers: samples of a nominal window.
    """

    constant: float
    count: float = 0.0
    num_micro_batches: int = 0


class StepRunner:
    """Runs windows for one strategy.

    Args:
        sharded: the model.
        control: messages between workers.
        seed: the leader's.
        pace: measures what runs here.
    """

    def __init__(
        self, sharded: ShardedModel, control: ControlPlane, seed: int, pace: PaceMeter | None = None
    ) -> None:
        self.sharded, self.control, self.seed = sharded, control, seed
        self.pace = pace or PaceMeter()
        self.window: WindowState | None = None
        self.loss_scale = 1.0
        self.micro_batch: Any = None  # the one that runs
        self.in_training_step = False

    def begin(self, constant: float) -> None:
        """Open a window unless one is open."""
        if self.window is None:
            self.window = WindowState(constant)
            self.sharded.begin_window()
            self.pace.begin_window()

    def run(
        self,
        trainer: Any,
        module: Any,
        batch: LoopBatch,
        ends_window: bool,
        closure: Callable[[], Any] | None,
        again: Callable[[Any], Any],
    ) -> Any:
        """All micro-batches of one loop batch; returns the loss that Lightning reports.

        Args:
            closure: Lightning's, for the first micro-batch; None when the window is replayed.
            again: training_step of another micro-batch; its output, scaled and run backward here.
        """
        window = self.window
        if window is None:
            raise RuntimeError("a loop batch outside of a window")
        log = StepLog(training_results(trainer), trainer.strategy.reduce_logged)
        losses: list[torch.Tensor] = []
        reported: Any = None
        self.pace.begin()
        for index, (micro, weight) in enumerate(zip(batch.batches, batch.weights, strict=True)):
            last = ends_window and index == len(batch.batches) - 1
            self._prepare(trainer, window, weight, last, not batch.ghosts[index])
            self.micro_batch, self.in_training_step = micro, True
            try:
                with log.micro_batch(micro, weight), batch.alone(index, module):
                    if index == 0 and closure is not None:
                        reported = closure()
                        losses.append(reported)
                    else:
                        losses.append(self._once_more(trainer, module, micro, again))
            finally:
                self.in_training_step = False
            window.count += weight
        self.pace.end(sum(map(num_samples, batch.batches)) if self.pace.on else 0)
        log.finish(self.control)
        _report_mean(reported, losses, batch.weights)
        return reported

    def total_count(self) -> float:
        """The count of the whole window over all data rows; gradients that no worker has are gone afterwards.

        Raises:
            PlanMismatchError: see `settle`.

        Collective over all workers with a role.
        """
        if self.window is None:
            raise RuntimeError("no window is open")
        used = self.settle()
        for spec, parameter in self.sharded.parameters():
            if not used[spec.fqn]:
                parameter.grad = None  # as in one process: an optimizer must not decay what nobody used
        return float(self.control.sum_rows(torch.tensor(self.window.count, dtype=torch.float64)))

    def settle(self) -> dict[str, bool]:
        """After an exchange: whether any worker used each parameter; the order of buckets of the next one is agreed on.

        Raises:
            PlanMismatchError: replicas reduced their buckets in different orders, or the rows of one replica ran different parts of
                the model. Nothing has been updated yet.

        Collective over all workers with a role.
        """
        buckets, trail, groups = self.sharded.window, self.sharded.watch.trail, self.control.groups
        paces, ballot = self.pace.outgoing(groups), row_ballot(trail.digest, groups)
        mine = [buckets.order_digest, -buckets.order_digest, *ballot, *paces, *self.sharded.window_marks()]
        highest, lowest, *told = self.control.extreme(torch.tensor(mine), largest=True).tolist()
        ballot, told = told[: len(ballot)], told[len(ballot) :]
        if not rows_agree(ballot):
            check_rows(groups.topology, self.control.gather_objects(tuple(trail.entries)), trail.names)
        if highest != -lowest:
            raise PlanMismatchError(
                f"this worker reduced the gradient buckets in the order {buckets.order}, another one in another order, so their "
                "sums are wrong and nothing was updated. Make the model's branches run in one order on all data rows."
            )
        self.pace.incoming(told[: len(paces)], groups)
        return self.sharded.settle_window(told[len(paces) :])

    def end(self) -> WindowState:
        """Close the window; the gradients are summed over all workers."""
        self.sharded.finish_backward()
        window, self.window = self.window, None
        if window is None:
            raise RuntimeError("no window is open")
        return window

    def _prepare(self, trainer: Any, window: WindowState, weight: float, last: bool, counts: bool) -> None:
        self.sharded.set_last_micro_batch(last, counts)
        self.loss_scale = weight / window.constant
        # The same on all roles of a row; derived, so that a replay draws the same.
        reseed(self.seed, trainer.current_epoch, trainer.global_step, window.num_micro_batches, self.control.row)
        if torch.cuda.is_available():
            torch.cuda.manual_seed(torch.initial_seed())
        window.num_micro_batches += 1

    def _once_more(self, trainer: Any, module: Any, micro: Any, again: Callable[[Any], Any]) -> torch.Tensor:
        with inside_hook(module, "training_step"):
            output = again(micro)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(
                f"{type(module).__name__}.training_step returned {type(output).__name__} without a loss; in a job of several "
                "workers every micro-batch needs one"
            )
        normalized = loss / trainer.accumulate_grad_batches
        with inside_hook(module, "backward"):
            trainer.strategy.backward(normalized, None)
        return normalized.detach()


def _report_mean(reported: Any, losses: list[torch.Tensor], weights: tuple[float, ...]) -> None:
    """Lightning keeps the first micro-batch's loss tensor for its hooks: make it this row's mean."""
    counted = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight > 0]
    if isinstance(reported, torch.Tensor) and len(losses) > 1 and counted:
        total = cast(torch.Tensor, sum(loss * weight for loss, weight in counted))
        reported.copy_(total / sum(weight for _, weight in counted))
