"""Lightning's checkpoint hooks; `checkpointing` does the work."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from lightning_ntp.strategy import checkpointing
from lightning_ntp.strategy.base import StrategyBase


class Saving(StrategyBase):
    """Checkpoints are folders of cells that load under any topology."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Cells are filled in place, so they must be there first."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """`load_checkpoint` has done it."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This worker's cells by name, in the form that `save_checkpoint` writes."""
        return checkpointing.model_state(self.sharded)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """This worker's cells of the optimizer's state."""
        return checkpointing.optimizer_state(self.sharded, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """A folder that any topology can load. Collective over all workers with a role."""
        checkpointing.save(self.sharded, checkpoint, self.broadcast(str(filepath)))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill cells in place; returns the rest. Collective over all workers with a role."""
        return checkpointing.load(self.sharded, self.optimizers, self.broadcast(str(checkpoint_path)))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """`load_checkpoint` has done it."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """`load_checkpoint` has done it."""

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the Hugging Face model inside the module so that ``from_pretrained`` loads it without this package.

        Collective over all workers with a role.
        """
        checkpointing.save_pretrained(self.sharded, self.lightning_module, folder)
