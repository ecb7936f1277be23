"""Validation, test and prediction: one micro-batch per data row and loop batch, ghosts without trace.

A pass is one region of the recovery (see recovery.py): after a loss all survivors start it again, with metrics, logged results and
module modes as they were. The hooks at its end come after the vote that ends it, so they run once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from lightning_ntp.strategy._lightning_private import DEFERRED, evaluation_loops, halves_of_run, results_of
from lightning_ntp.strategy.base import StrategyBase
from lightning_ntp.strategy.replay import nothing, remember_evaluation
from lightning_ntp.strategy.step_log import StepLog


class Evaluation(StrategyBase):
    """The strategy's evaluation steps. Every data row runs equally many, so values may be reduced in the middle of one."""

    def guard_evaluation(self, trainer: Any) -> None:
        """Let every pass of evaluation survive losses. Local."""
        for loop in evaluation_loops(trainer):
            if "run" not in vars(loop):
                loop.run = partial(self._evaluate_pass, loop)

    def _evaluate_pass(self, loop: Any) -> Any:
        first, second = halves_of_run(loop)
        trainer = self.lightning_module.trainer
        survives = self.recovery.member is not None and not self.recovery.running
        go_back = remember_evaluation(trainer, self.lightning_module, loop) if survives else nothing
        result = self.recovery.all_or_nobody("evaluate", first, go_back)
        return second() if result is DEFERRED else result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch on every data row; ghosts leave no trace."""
        return self._evaluate(super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`."""
        return self._evaluate(super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`; None for a ghost, so that no prediction appears twice."""
        is_ghost = self._taken_batch().ghosts[0]
        output = self._evaluate(super().predict_step, args, kwargs)
        return None if is_ghost else output

    def _evaluate(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        batch, trainer = self._taken_batch(), self.lightning_module.trainer
        self.recovery.fire("validation")
        weight, results = batch.weights[0], results_of(trainer)
        self._eval_weight = weight
        try:
            # FSDP keeps what it gathers; made in inference mode it could not be trained with later.
            with torch.inference_mode(False), torch.no_grad(), batch.alone(0, self.lightning_module):
                if results is None:
                    return step(*args, **kwargs)
                log = StepLog(results)
                with log.micro_batch(batch.batches[0], weight):
                    output = step(*args, **kwargs)
                log.finish(None)
                return output
        finally:
            self._eval_weight = None
