"""What Lightning and users ask of a strategy between workers; data rows count once, whatever their degree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.base import StrategyBase
from lightning_ntp.strategy.control import agree_with_leader

Sent = TypeVar("Sent")


class Messages(StrategyBase):
    """Lightning's collective hooks. All are collective over all workers with a role unless said otherwise.

    Each is a region of the recovery: after a loss it is called again on the survivors, and no worker returns before all have the
    result. Within a larger region (an evaluation, a save) it is a part of that.
    """

    def _call(self, message: Callable[[], Sent], alone: Any = None) -> Sent:
        if self._is_newcomer:
            return alone  # the others are past the start of the fit
        return self.recovery.all_or_nobody("control", message)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all workers. ConfigError inside training_step, as for all of these."""
        self._refuse_in_step("strategy.barrier")
        if self._runner is not None:
            self._call(lambda: self.control.barrier())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of worker `src`."""
        self._refuse_in_step("strategy.broadcast")
        if self._runner is None:
            return self._call(lambda: agree_with_leader(obj, self.root_device)) if dist.is_initialized() else obj
        return self._call(lambda: self.control.broadcast(obj, src), obj)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over data rows, each counted once. In an evaluation step a mean is weighted by what each row's batch counts.

        Raises:
            ConfigError: inside training_step, see `_refuse_in_step`; ``self.log(sync_dist=True)`` comes by `reduce_logged`.
        """
        if not isinstance(tensor, torch.Tensor) or self._runner is None:
            return tensor
        self._refuse_in_step("strategy.reduce")
        return self._call(lambda: self.control.reduce_rows(tensor, str(reduce_op or "sum"), self._eval_weight), tensor)

    def reduce_logged(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """`reduce` for values that ``self.log`` was given in `training_step`.

        There they stay as they are: they are reduced once per loop batch, when all micro-batches have run, as rows may run
        different numbers of them.
        """
        return tensor if self.runner.in_training_step else self.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all data rows, stacked: (data rows, *shape).

        Raises:
            ConfigError: with gradients, or inside training_step, see `_refuse_in_step`.
        """
        if sync_grads:
            raise ConfigError(
                "all_gather(sync_grads=True) is not supported: the gradients of other data rows' losses would have to come back "
                "through it; compute the loss from this row's samples"
            )
        return torch.stack(self.gather_rows(tensor, "all_gather"))

    def _refuse_in_step(self, name: str) -> None:
        """ConfigError inside training_step, unless there is one data row: rows may run different numbers of micro-batches."""
        if self._runner is not None and self.runner.in_training_step and self.control.num_rows > 1:
            raise ConfigError(
                f"{name} in training_step is not supported: data rows may run different numbers of micro-batches, so some would "
                "wait forever; log with sync_dist=True, or call it in on_train_batch_end"
            )

    def gather_rows(self, tensor: torch.Tensor, name: str = "computing a metric over all data rows") -> list[torch.Tensor]:
        """The tensors of all data rows; sizes may differ. ConfigError that speaks of `name` inside training_step."""
        self._refuse_in_step(name)
        return self._call(lambda: self.control.gather_rows(tensor), [tensor] * self.control.num_rows)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all workers, or any of them, say yes."""
        self._refuse_in_step("strategy.reduce_boolean_decision")
        return self._call(
            lambda: self.control.all_agree(decision) if all else self.control.any_agrees(decision), decision
        )
