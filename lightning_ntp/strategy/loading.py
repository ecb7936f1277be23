"""The user's loaders as this data row's, and where in the stream a job goes on after its members have changed."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy._lightning_private import (
    epoch_counts,
    fit_length,
    forget_evaluation_loaders,
    next_training_batch,
    replace_training_loaders,
    shift_batches,
    training_loaders,
)
from lightning_ntp.strategy.base import StrategyBase
from lightning_ntp.strategy.data import LoaderPlan, rebuild_loader
from lightning_ntp.strategy.screen import say_batches


class Loading(StrategyBase):
    """The strategy's loaders."""

    def process_dataloader(self, dataloader: object) -> object:
        """The user's loader as one of this data row's micro-batches."""
        trainer = self.lightning_module.trainer
        training = bool(trainer.training)
        if training:
            self._num_training_loaders += 1
            if self._num_training_loaders > 1 and not trainer.reload_dataloaders_every_n_epochs:
                raise ConfigError(
                    "several training loaders at once cannot be shared over data rows; join their datasets into one loader"
                )
        source = self._sources.get(dataloader, dataloader) if _can_be_known(dataloader) else dataloader
        loader = self._own_loader(source, training)
        if training and self._num_training_loaders == 1:
            batch_size = getattr(source, "batch_size", None)
            say_batches(self, batch_size, self.control.num_rows, trainer.accumulate_grad_batches)
        loader.set_epoch(trainer.current_epoch)  # Lightning creates the first iterator before it tells the epoch
        return loader

    @property
    @abstractmethod
    def row_weights(self) -> tuple[int, ...]:
        """By which a window's samples are dealt to the data rows. Equal on all workers."""

    def _own_loader(self, source: Any, training: bool) -> Any:
        trainer = self.lightning_module.trainer
        plan = LoaderPlan(
            self.topology,
            self.control.row,
            self._seed,
            self._num_healthy_rows,
            training,
            lambda: trainer.accumulate_grad_batches,
            manual=not self.lightning_module.automatic_optimization,
            progress=lambda: epoch_counts(trainer).position,
            weights=self.row_weights,
            devices=self._batch_devices,
        )
        loader = rebuild_loader(source, plan)
        if training:
            loader.keeps_number = self._is_newcomer
            loader.on_resume = partial(_taken_up, trainer)
            if plan.devices is not None:
                _on_epoch(loader, partial(fit_length, trainer))
        self._sources[loader] = source
        return loader

    @property
    def _batch_devices(self) -> tuple[int, int] | None:
        """(at work, of the healthy job) where the global batch shrinks with the job. Equal on all workers."""
        if self.config.recovery.batch_policy == "keep":
            return None
        return len(self.topology.workers), len(self._healthy.workers)

    def restart_data(self) -> None:
        """Share all loaders anew over the live data rows; training goes on where the open window or the next batch begins. Local.

        Batches that were loaded ahead are dropped: they were shared over rows that are gone.
        """
        trainer = self.lightning_module.trainer
        forget_evaluation_loaders(trainer)
        old = training_loaders(trainer)
        if not old:
            return
        position = next_training_batch(trainer)
        if self._open_window is not None:
            position = self._open_window.first_batch
        elif self._is_batch_pending:
            position = trainer.fit_loop.batch_idx
        new = [self._own_loader(self._sources[loader], True) for loader in old]
        for loader, before in zip(new, old, strict=True):
            loader.continue_from(before, position)
        replace_training_loaders(trainer, new, position)


def _taken_up(trainer: Any, saved: int, here: int) -> None:
    """A loader goes on where a checkpoint stands, behind loop batch `saved` there and `here` in this run."""
    shift_batches(trainer, here - saved)
    fit_length(trainer)


def _on_epoch(loader: Any, act: Callable[[], None]) -> None:
    """Call `act` when Lightning tells an epoch, right before it begins: the pass may have another length than the one before."""
    tell = loader.sampler.set_epoch

    def set_epoch(epoch: int) -> None:
        tell(epoch)
        act()

    loader.sampler.set_epoch = set_epoch


def _can_be_known(loader: object) -> bool:
    try:
        weakref.ref(loader)
        hash(loader)
    except TypeError:  # a plain list of batches, for example
        return False
    return True
