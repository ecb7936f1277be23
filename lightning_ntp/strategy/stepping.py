"""An optimizer step inside Lightning as a transaction, and the replay of its window after a loss.

    optimizer_step  (one per loop batch)
      micro-batches: forward, backward, at the window's end the exchange      |
      counts, bucket order, division, hooks, clipping                         |  run again after a loss, on fewer workers
      vote                                                                    |
      update, local

A window that was lost is run again from its first loop batch: the same global batches, re-split, without batch hooks.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lightning_ntp.strategy._lightning_private import (
    as_training,
    ends_window,
    epoch_counts,
    forget_evaluation_loaders,
    next_batch,
    run_after_closure,
)
from lightning_ntp.strategy.data import as_micro_batches
from lightning_ntp.strategy.events import CommitEvent
from lightning_ntp.strategy.generation import Decision, Outcome
from lightning_ntp.strategy.inspection import Inspection
from lightning_ntp.strategy.replay import nothing, remember_step
from lightning_ntp.strategy.resume import DataPosition
from lightning_ntp.strategy.row_trail import BACKWARD
from lightning_ntp.strategy.weights import weigh
from lightning_ntp.strategy.window import LoopBatch


@dataclass
class OpenWindow:
    """The window that is running, as far as a replay must know it.

    Args:
        first_batch: number in the epoch of its first loop batch.
        go_back: undoes what its loop batches have done to buffers, metrics, logged results and progress.
        passed: of each loop batch that has run, what `training_step` got beside the batch.
    """

    first_batch: int
    go_back: Callable[[], None]
    passed: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A loop batch that has run: the loss that Lightning reports, and at the end of a window its count and decision."""

    loss: Any
    count: float = 0.0
    decision: Decision | None = None


class Stepping(Inspection):
    """The strategy's training step."""

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves each micro-batch through the user's transfer hooks; callbacks get the first one."""
        micro = as_micro_batches(batch)
        if micro is None:
            return super().batch_to_device(batch, device, dataloader_idx)
        moved = tuple(super(Stepping, self).batch_to_device(b, device, dataloader_idx) for b in micro.batches)
        weights = tuple(
            weigh(part, count, self.config.batch_weight) for part, count in zip(moved, micro.counts, strict=True)
        )
        self._loop_batch = LoopBatch(moved, weights, tuple(count == 0 for count in micro.counts))
        trainer = self.lightning_module.trainer
        self._is_batch_pending = bool(trainer.training)
        if self._is_batch_pending and self._open_window is None:
            counts = epoch_counts(trainer)
            self.note_logged(DataPosition(counts.processed, counts.batches_processed))
        return moved[0]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch: that of the runner, as Lightning knows only the first one of the first attempt."""
        self._step_arguments = args[1:]
        self.recovery.fire("forward")
        return super().training_step(self.runner.micro_batch, *args[1:], **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Backward of one micro-batch, scaled by its count; Lightning's division by accumulate_grad_batches is undone."""
        accumulate = self.lightning_module.trainer.accumulate_grad_batches
        self.recovery.fire("backward")
        self.sharded.watch.trail.enter(BACKWARD)
        return super().backward(closure_loss * (self.runner.loss_scale * accumulate), optimizer, *args, **kwargs)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """One loop batch; at the end of a window the update. Collective over all workers with a role."""
        trainer = self.lightning_module.trainer
        if self._is_newcomer:
            self._is_newcomer = False
            forget_evaluation_loaders(trainer)  # the others have forgotten theirs: all have to make them anew, together
        if self._is_regroup_wanted and self._open_window is None:
            self._is_regroup_wanted = False
            self.recovery.run("commit", nothing, planned=True)  # newcomers are at the door, or somebody must go
        if self._must_end and self._open_window is None:
            self.save_and_end(trainer)
        window = self._opened_window(trainer)
        attempt = self.recovery.run("step", partial(self._attempt, optimizer, closure))
        self._loop_batch, self._is_batch_pending = None, False
        if attempt.decision is None:
            window.passed.append(self._step_arguments)
            return attempt.loss
        self._open_window, self._is_regroup_wanted = None, attempt.decision.regroup
        self.recovery.fire("after_commit")
        if attempt.decision.outcome is Outcome.COMMIT:
            optimizer.step(**kwargs)
        else:
            optimizer.zero_grad()  # nothing in the whole window counts: no update, as a mean over nothing is none
        self._held_step += 1  # from here on this worker's state is that of the next step
        self.runner.pace.commit(self.control.groups)
        self.observers.commit(self._commit_event(attempt, self.judge_pace()))
        self.inspect_if_due()
        return attempt.loss

    @abstractmethod
    def save_and_end(self, trainer: Any) -> None:
        """The whole job has to go at this step boundary. Does not return. All workers with a role."""

    @abstractmethod
    def judge_pace(self) -> float:
        """Seconds for which slow workers kept the others waiting in the step before. Local."""

    def _opened_window(self, trainer: Any) -> OpenWindow:
        if self._open_window is None:
            self._held_step = trainer.global_step
            survives = self.recovery.member is not None
            go_back = remember_step(trainer, self.lightning_module) if survives else nothing
            self._open_window = OpenWindow(trainer.fit_loop.batch_idx, go_back)
        return self._open_window

    def _attempt(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Attempt:
        """One loop batch, with the vote if it ends a window. Changes nothing that a loss could not undo."""
        trainer, runner = self.lightning_module.trainer, self.runner
        ends = ends_window(trainer)  # asked in each attempt: an epoch has more steps left once the batch has shrunk
        loss = self._run_loop_batch(ends, closure, self._again)
        if not ends:
            return Attempt(loss)
        total = runner.total_count()
        window = runner.end()
        if total != 0:
            self.sharded.scale_gradients(window.constant / total)
            run_after_closure(self.precision_plugin, self.lightning_module, trainer.strategy._lightning_optimizers[0])
        if self.root_device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # a kernel that was aborted leaves rubbish, but raises here
        decision = self.recovery.agree(Outcome.COMMIT if total != 0 else Outcome.SKIP, "vote")
        return Attempt(loss, total, decision)

    def _run_loop_batch(self, ends: bool, closure: Callable[[], Any] | None, again: Callable[[Any], Any]) -> Any:
        trainer, runner = self.lightning_module.trainer, self.runner
        self.sharded.window.on_exchange = self._on_exchange
        runner.begin(float(self._num_healthy_rows * trainer.accumulate_grad_batches))
        return runner.run(trainer, self.lightning_module, self._taken_batch(), ends, closure, again)

    def _on_exchange(self, index: int) -> None:
        if index == len(self.sharded.buckets) // 2:  # amid backward: some buckets are summed, some are not
            self.recovery.fire("sync")

    def _again(self, micro_batch: Any) -> Any:
        return self.training_step(micro_batch, *self._step_arguments)

    def replay_window(self) -> None:
        """Brings an open window back to where this worker was in it. All workers with a role."""
        window, self.runner.window = self._open_window, None
        if window is not None:
            window.go_back()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            with as_training(self.lightning_module.trainer), torch.inference_mode(False), torch.enable_grad():
                for self._step_arguments in window.passed:
                    self._fetch()
                    self._run_loop_batch(False, None, self._again)
        if self._is_batch_pending:
            self._fetch()

    def _fetch(self) -> None:
        """The next loop batch, as Lightning's loop would have it, becomes the one that runs."""
        self.batch_to_device(next_batch(self.lightning_module.trainer))

    def _commit_event(self, attempt: Attempt, straggler_seconds: float) -> CommitEvent:
        assert attempt.decision is not None
        return CommitEvent(
            step=self._held_step - 1,
            num_samples=attempt.count,
            updated=attempt.decision.outcome is Outcome.COMMIT,
            attempts=self.recovery.num_attempts,
            generation=self.recovery.generation,
            seconds=time.monotonic(),
            straggler_seconds=straggler_seconds,
        )
