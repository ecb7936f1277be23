"""Manual optimization: the user's training_step runs backward and the optimizers; the mean over the global batch stays exact.

    training_step (once per loop batch, whatever the replica: each data row runs its share in one piece)
      the loop batch's count, over all data rows -> scale of every loss of it
      manual_backward   a window of its own: gradients are exchanged at each, and added to what .grad holds
      optimizer.step    local

An update cannot be taken back here, as a later backward of the same step may depend on it: a loss of a worker ends the job.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy._lightning_private import run_after_closure, training_results
from lightning_ntp.strategy.base import parameters_of
from lightning_ntp.strategy.events import CommitEvent
from lightning_ntp.strategy.inspection import Inspection
from lightning_ntp.strategy.sampler import reseed
from lightning_ntp.strategy.step_log import StepLog

WHY = "automatic_optimization=False: a training_step that updates in the middle cannot be run again"
PROTECTED_BY_CHECKPOINTS = f"{WHY}, so only checkpoints protect this job; when a worker is lost in a step it ends"
"""What is said at the start of such a fit."""

TOGGLES = ("toggle_optimizer", "untoggle_optimizer")


class ManualOptimization(Inspection):
    """Stands before the strategy's own training step, backward and optimizer step, and takes over where the user optimizes."""

    _toggled_off: frozenset[int] = frozenset()
    _loop_count = 0.0

    @property
    def is_manual(self) -> bool:
        """Whether the user's training_step runs the optimizers."""
        return self.lightning_module is not None and not self.lightning_module.automatic_optimization

    def setup(self, trainer: Any) -> None:
        """See the strategy. Collective over all processes."""
        super().setup(trainer)
        if not self.is_manual or trainer.state.fn != "fit":
            return
        importlib.import_module(f"{self.framework}.utilities.rank_zero").rank_zero_info(PROTECTED_BY_CHECKPOINTS)
        # A parameter whose requires_grad changed would leave its FSDP bucket, whose size the plan fixes.
        self.lightning_module.toggle_optimizer = self._toggle
        self.lightning_module.untoggle_optimizer = self._untoggle

    def teardown(self) -> None:
        """See the strategy."""
        if self.lightning_module is not None:
            for name in TOGGLES:
                self.lightning_module.__dict__.pop(name, None)
        super().teardown()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's whole step, on this row's share in one piece. Collective over all workers with a role."""
        if not self.is_manual:
            return super().training_step(*args, **kwargs)
        output = self.recovery.once("step", lambda: self._whole_step(super(ManualOptimization, self), args, kwargs), WHY)
        self._held_step += 1
        self.observers.commit(
            CommitEvent(self._held_step - 1, self._loop_count, True, 1, self.recovery.generation, time.monotonic())
        )
        self.inspect_if_due()
        return output

    def _whole_step(self, behind: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        trainer, runner, batch = self.lightning_module.trainer, self.runner, self._taken_batch()
        if len(batch.batches) != 1:
            raise ConfigError(
                f"manual optimization got {len(batch.batches)} micro-batches for one training_step; ready-made batches are one per "
                "data row, so restart the job from its checkpoint with the workers that are left"
            )
        self._loop_count = float(self.control.sum_rows(torch.tensor(batch.weights[0], dtype=torch.float64)))
        runner.loss_scale = batch.weights[0] / self._loop_count if self._loop_count else 0.0
        runner.micro_batch = batch.batches[0]
        self.sharded.set_last_micro_batch(True, counts=not batch.ghosts[0])
        reseed(self._seed, trainer.current_epoch, trainer.fit_loop.batch_idx, self.control.row)
        if torch.cuda.is_available():
            torch.cuda.manual_seed(torch.initial_seed())
        log = StepLog(training_results(trainer), self.reduce_logged)
        runner.in_training_step = True
        try:
            with log.micro_batch(batch.batches[0], batch.weights[0]), batch.alone(0, self.lightning_module):
                output = behind.training_step(*args, **kwargs)
        finally:
            runner.in_training_step = False
            self._loop_batch, self._is_batch_pending = None, False
        log.finish(self.control)
        return output

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One ``manual_backward``: its gradients, summed over all workers, are added to those that are there."""
        if not self.is_manual:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        before = self._set_aside()
        self.sharded.begin_backward()
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        used = self.runner.settle()
        self.sharded.finish_backward()
        for spec, parameter in self.sharded.parameters():
            if id(parameter) in before:
                parameter.grad = before[id(parameter)]
            elif not used[spec.fqn] and id(parameter) not in self._had_gradient:
                parameter.grad = None
        return loss

    def _set_aside(self) -> Mapping[int, torch.Tensor | None]:
        """Gradients that this backward must not touch: of parameters that the user has toggled off."""
        parameters = [parameter for _, parameter in self.sharded.parameters()]
        self._had_gradient = {id(parameter) for parameter in parameters if parameter.grad is not None}
        kept = {id(p): p.grad for p in parameters if id(p) in self._toggled_off}
        for parameter in parameters:
            if id(parameter) in kept:
                parameter.grad = None
        return kept

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """One of the user's updates; none where nothing in the whole loop batch counts."""
        if not self.is_manual:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = closure()
        run_after_closure(self.precision_plugin, self.lightning_module, optimizer)
        if self._loop_count:
            optimizer.step(**kwargs)
        return result

    def _toggle(self, optimizer: Any) -> None:
        """Until `_untoggle`, backward leaves the gradients of all other optimizers' parameters as they are."""
        own = {id(parameter) for parameter in parameters_of(optimizer)}
        self._toggled_off = frozenset(id(p) for other in self.optimizers for p in parameters_of(other)) - own

    def _untoggle(self, optimizer: Any) -> None:
        self._toggled_off = frozenset()
