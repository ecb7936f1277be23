"""Lightning's checkpoint hooks; `checkpointing` does the work."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from lightning_ntp.strategy import checkpointing
from lightning_ntp.strategy._lightning_private import begin_epoch_anew, epoch_counts
from lightning_ntp.strategy.base import StrategyBase
from lightning_ntp.strategy.resume import rewrite_counters

JOB = "ntp"
"""Key of what the strategy itself keeps in a checkpoint."""


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

    def on_train_start(self) -> None:
        """Called by Lightning before the first batch."""
        begin_epoch_anew(self.lightning_module.trainer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """A folder that any topology can load. Collective over all workers with a role."""
        self._say_position(checkpoint)

        def dump_again() -> None:  # after a loss this worker's cells are others
            if "state_dict" in checkpoint:
                checkpoint["state_dict"] = self.lightning_module_state_dict()
            if "optimizer_states" in checkpoint:
                checkpoint["optimizer_states"] = [self.optimizer_state(optimizer) for optimizer in self.optimizers]

        def save() -> None:
            path = self.broadcast(str(filepath))
            self.recovery.fire("checkpoint")
            checkpointing.save(self.sharded, checkpoint, path)

        self.recovery.all_or_nobody("save", save, dump_again)

    def _say_position(self, checkpoint: dict[str, Any]) -> None:
        """What decides the order of samples and masks, and Lightning's counters at the last whole optimizer step."""
        checkpoint[JOB] = {"seed": self._seed, "topology": repr(self.topology)}
        trainer = self.lightning_module.trainer
        if trainer.state.fn == "fit":
            counts = epoch_counts(trainer)
            if not counts.is_exact:
                rewrite_counters(checkpoint["loops"]["fit_loop"], counts.position)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill cells in place; returns the rest. Collective over all workers with a role."""
        checkpoint = self.recovery.all_or_nobody(
            "start", lambda: checkpointing.load(self.sharded, self.optimizers, self.broadcast(str(checkpoint_path)))
        )
        self._take_seed(checkpoint.get(JOB, {}))
        return checkpoint

    def _take_seed(self, job: Mapping[str, Any]) -> None:
        """A job that goes on keeps its order of samples and its masks, whatever seed this process was given."""
        if self.lightning_module.trainer.state.fn == "fit" and "seed" in job:
            self._seed = self.runner.seed = job["seed"]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """`load_checkpoint` has done it."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """`load_checkpoint` has done it."""

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the Hugging Face model inside the module so that ``from_pretrained`` loads it without this package.

        Collective over all workers with a role.
        """
        self.recovery.all_or_nobody(
            "save", lambda: checkpointing.save_pretrained(self.sharded, self.lightning_module, folder)
        )
