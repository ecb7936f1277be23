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

    def _call(self, message: Callable[[], Sent]) -> Sent:
        return self.recovery.all_or_nobody("control", message)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all workers."""
        if self._runner is not None:
            self._call(lambda: self.control.barrier())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of worker `src`."""
        if self._runner is None:
            return self._call(lambda: agree_with_leader(obj, self.root_device)) if dist.is_initialized() else obj
        return self._call(lambda: self.control.broadcast(obj, src))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over data rows, each counted once. In an evaluation step a mean is weighted by what each row's batch counts.

        In `training_step` the value stays as it is: `self.log(sync_dist=True)` is reduced once per loop batch, when all
        micro-batches have run, as rows may run different numbers of them.
        """
        if not isinstance(tensor, torch.Tensor) or self._runner is None or self.runner.in_training_step:
            return tensor
        return self._call(lambda: self.control.reduce_rows(tensor, str(reduce_op or "sum"), self._eval_weight))

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all data rows, stacked: (data rows, *shape).

        Raises:
            ConfigError: with gradients, or inside training_step, where rows may run different numbers of micro-batches.
        """
        if sync_grads or self.runner.in_training_step:
            raise ConfigError(
                "all_gather in training_step (or with sync_grads=True) is not supported: data rows may run different numbers of "
                "micro-batches, so some would wait forever; gather in on_train_batch_end, or log with sync_dist=True"
            )
        return torch.stack(self.gather_rows(tensor))

    def gather_rows(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all data rows; sizes may differ."""
        return self._call(lambda: self.control.gather_rows(tensor))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all workers, or any of them, say yes."""
        return self._call(lambda: self.control.all_agree(decision) if all else self.control.any_agrees(decision))
