"""Lightning's checkpoint hooks: what is saved when, and how a run goes on from it."""

from __future__ import annotations

import importlib
import io
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_ntp.dtensor.bucket import Bucket, place_of
from lightning_ntp.dtensor.checkpoint import commit, load_safely, stage, write_part, write_values
from lightning_ntp.dtensor.checkpoint_files import put_in_place
from lightning_ntp.errors import ConfigError, SilentCorruptionError, UnrecoverableError
from lightning_ntp.strategy import checkpointing, pretrained
from lightning_ntp.strategy._lightning_private import (
    before_clearing,
    begin_epoch_anew,
    epoch_counts,
    on_first_log,
    stop_watching,
    training_results,
)
from lightning_ntp.strategy.base import StrategyBase
from lightning_ntp.strategy.config import CheckpointConfig
from lightning_ntp.strategy.metric_state import LoggedSums, present_sums, restore_metrics, starter, totals
from lightning_ntp.strategy.pretrained import DESCRIPTION, JOB, PREFIX
from lightning_ntp.strategy.restart import Restart
from lightning_ntp.strategy.resume import rewrite_counters
from lightning_ntp.strategy.saver import Save, Saver
from lightning_ntp.strategy.whole import whole_optimizer_state, whole_tensors
from lightning_ntp.topology import Topology

_log = logging.getLogger(__name__)

LOADERS, LOGGED = "loaders", "logged"
"""In the strategy's own values: where the run stands in its data, and what its epoch has logged so far."""


class Saving(StrategyBase):
    """Checkpoints are folders of cells that load under any topology, or one file in plain Lightning's form."""

    _saver: Saver | None = None
    _parts: tuple[Topology, checkpointing.Parts] | None = None
    _resumed_epoch: Callable[[str, Any], None] | None = None
    _unsaveable: frozenset[str] = frozenset()

    @property
    def saver(self) -> Saver:
        """Who runs the saves of this worker."""
        if self._saver is None:
            self._saver = Saver(lambda message: self.control.any_message(message), lambda: self.sharded.groups.topology.workers)
        return self._saver

    @property
    def checkpoints(self) -> CheckpointConfig:
        """How checkpoints are written and read."""
        return self.config.recovery.checkpoint

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Cells are filled in place, so they must be there first."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """`load_checkpoint` has done it."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This worker's cells by name. Hooks of the user may drop some or add tensors."""
        return checkpointing.model_state(self.sharded)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """This worker's cells of the optimizer's state."""
        return checkpointing.optimizer_state(self.sharded, optimizer)

    def on_train_start(self) -> None:
        """Called by Lightning before the first batch."""
        trainer = self.lightning_module.trainer
        begin_epoch_anew(trainer)
        results, self.logged_sums = training_results(trainer), LoggedSums()
        before_clearing(results, lambda: self.note_logged(epoch_counts(trainer).position))
        if (start := self._resumed_epoch) is not None:
            epoch, self._resumed_epoch = trainer.current_epoch, None
            on_first_log(results, lambda key, metric: start(key, metric) if trainer.current_epoch == epoch else None)

    def on_train_end(self) -> None:
        """Called by Lightning after the last batch and callback: what is being saved is there when `fit` returns."""
        self.recovery.all_or_nobody("save", self.saver.settle)

    def finish_saves(self) -> None:
        """End a save that is under way, also after an exception, where others may be gone. Local."""
        if self._saver is not None:
            self._saver.abandon()
        if self._runner is not None:  # a process that only launches workers has no loops
            stop_watching(training_results(self.lightning_module.trainer))

    def on_exception(self, exception: BaseException) -> None:
        """Called by Lightning when a run ends with an error: what cannot be recovered can be begun again, and it is said from where."""
        super().on_exception(exception)
        if self._saver is None or not isinstance(exception, UnrecoverableError):
            return
        self._saver.abandon()
        newest = self._saver.newest
        if isinstance(newest, Bucket) or (newest is not None and newest.exists()):
            exception.add_note(f"The last checkpoint is complete: start again with Trainer.fit(..., ckpt_path={str(newest)!r})")
            unclear = isinstance(exception, SilentCorruptionError) or self.recovery.advises  # somebody has to look
            if self.recovery.member is not None and self.config.recovery.max_restarts and not unclear:
                self.recovery.member.offer(Restart(str(newest), self._num_setups))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint that any topology can load.

        Inside `fit` it is written beside training, and what goes wrong with the disk is logged while training goes on;
        elsewhere the checkpoint is there when this returns.

        Args:
            checkpoint: what Lightning collected.
            filepath: folder (or file) to make; what has this name is replaced once the new one is complete.
            storage_options: ``{"full": True}`` for one file in plain Lightning's form.

        Raises:
            ConfigError: unknown options; outside of `fit` also what kept it from being written.

        Collective over all workers with a role.
        """
        place = place_of(filepath)
        make = self._file_save if self._wants_file(storage_options) else self._folder_save
        trainer = self.lightning_module.trainer
        fitting = trainer.state.fn == "fit" and (trainer.training or trainer.validating)
        beside = fitting and self.checkpoints.async_save and not _links(trainer)
        self._say_position(checkpoint)

        def save() -> str | None:
            self.saver.settle()
            self._say_logged(checkpoint)
            target, token = self.broadcast((str(place), secrets.token_hex(4)))
            self.recovery.fire("checkpoint")
            self.saver.start(make(place_of(target), token, checkpoint))
            return None if beside else self.saver.settle()

        error = self.recovery.all_or_nobody("save", save, undo=self.saver.drop)
        if error is not None and not fitting:
            raise ConfigError(f"{filepath} was not saved: {error}")

    def _wants_file(self, options: Any) -> bool:
        if options is None:
            return self.checkpoints.full
        if not isinstance(options, Mapping) or set(options) - {"full"}:
            raise ConfigError(f'storage_options of strategy "ntp" are {{"full": True or False}}, got {options!r}')
        return bool(options.get("full", self.checkpoints.full))

    def _folder_save(self, target: Path | Bucket, token: str, checkpoint: Mapping[str, Any]) -> Save:
        groups = self.sharded.groups
        leads, parts = groups.worker == groups.leader, groups.topology.workers
        if self._parts is None or self._parts[0] is not groups.topology:  # seconds for a large model: once per topology
            self._parts = groups.topology, checkpointing.parts_to_write(self.sharded)
        tensors, values = checkpointing.collect(self.sharded, self.state_holders, checkpoint, self._parts[1])
        chunks = stage(tensors, leads)
        also = self._values_writer(values) if leads else None

        def write(aside: Path) -> None:
            if also is not None:
                also(aside)
            write_part(chunks, aside, groups.worker)

        def finish(aside: Path) -> None:
            if isinstance(target, Bucket):
                target.commit(aside, token, parts)
            else:
                commit(aside, target, parts)

        return Save(target, token, groups.worker, parts, write, finish if leads else None)

    def _values_writer(self, values: dict[str, Any]) -> Callable[[Path], None]:
        """What the leader writes beside its part; `values` are copied now, as training changes them."""
        module = self.lightning_module
        try:
            values[JOB][PREFIX], _ = pretrained.find_model(module)
        except ConfigError:
            pass  # no Hugging Face model: nothing to export later
        content = io.BytesIO()
        torch.save(self._saveable(values), content)

        def write(aside: Path) -> None:
            write_values(content.getvalue(), aside)
            if PREFIX in values[JOB]:
                pretrained.describe(module, aside / DESCRIPTION)

        return write

    def _saveable(self, values: dict[str, Any]) -> dict[str, Any]:
        """Without what would run code when it is loaded; each such key is reported once."""
        kept = {}
        for key, value in values.items():
            content = io.BytesIO()
            try:
                torch.save(value, content)
                content.seek(0)
                load_safely(content)
            except Exception as error:  # noqa: BLE001  pickling asks the user's own classes
                if key not in self._unsaveable:
                    self._unsaveable |= {key}
                    _log.warning(
                        "%r is left out of checkpoints: it holds objects that cannot be loaded without running code (%s)", key, error
                    )
            else:
                kept[key] = value
        return kept

    def _file_save(self, target: Path | Bucket, token: str, checkpoint: Mapping[str, Any]) -> Save:
        """One file in plain Lightning's form; the leader holds all of it in host memory."""
        if isinstance(target, Bucket):
            raise ConfigError(f"{target}: checkpoints in one file are saved to local paths only; leave out full=True, or copy the file")
        groups = self.sharded.groups
        leads = groups.worker == groups.leader
        state = {name: whole.cpu() for name, whole in whole_tensors(self.sharded) if leads}
        optimizers = [whole_optimizer_state(self.sharded, optimizer) for optimizer in self.optimizers]
        if not leads:
            return Save(target, token, groups.worker, (), lambda aside: None, None)
        own = {name: v.cpu() for name, v in checkpoint["state_dict"].items() if isinstance(v, torch.Tensor)}
        chosen = {name: tensor for name, tensor in (state | own).items() if name in checkpoint["state_dict"]}
        content = self._saveable({k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")})
        content["state_dict"] = chosen
        if "optimizer_states" in checkpoint:
            content["optimizer_states"] = optimizers

        def write(aside: Path) -> None:
            aside.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())

        return Save(target, token, groups.worker, (), write, lambda aside: put_in_place(aside, target))

    def _say_position(self, checkpoint: dict[str, Any]) -> None:
        """What decides the order of samples and masks, and Lightning's counters at the last whole optimizer step."""
        checkpoint[JOB] = {"seed": self._seed, "topology": repr(self.topology)}
        trainer = self.lightning_module.trainer
        if trainer.state.fn != "fit":
            return
        fit_loop = checkpoint["loops"]["fit_loop"]
        # Plain Lightning would refuse to load the state of a loader that it does not have.
        checkpoint[JOB][LOADERS] = fit_loop["state_dict"].pop("combined_loader", [])
        counts = epoch_counts(trainer)
        if not counts.is_exact:
            rewrite_counters(fit_loop, counts.position)

    def _say_logged(self, checkpoint: dict[str, Any]) -> None:
        """What the epoch had logged at the position that the checkpoint names. Collective over all workers with a role."""
        trainer = self.lightning_module.trainer
        if trainer.state.fn != "fit" or not (position := epoch_counts(trainer).position).batches:
            return
        sums = self.logged_sums.at(position) or present_sums(self.lightning_module, training_results(trainer))
        checkpoint[JOB][LOGGED] = totals(sums, self.control)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint, once the save that is under way has made a newer one."""
        if self.is_global_zero:
            self.saver.remove(place_of(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill cells in place from a checkpoint of this package, of plain Lightning, or a DCP folder; returns the rest.

        Raises:
            ConfigError: no complete checkpoint, a damaged one, or of another model or optimizer.

        Collective over all workers with a role.
        """
        fitting = self.lightning_module.trainer.state.fn == "fit"

        def load() -> dict[str, Any]:
            self.saver.settle()
            return checkpointing.load(
                self.sharded,
                self.state_holders if fitting else [],
                self.broadcast(str(checkpoint_path)),
                self.control.any_message,
                self.lightning_module.strict_loading,
                self.checkpoints.verify,
            )

        checkpoint = self.recovery.all_or_nobody("start", load)
        if fitting:
            self._take_position(checkpoint)
        return checkpoint

    def _take_position(self, checkpoint: dict[str, Any]) -> None:
        """A job that goes on keeps its order of samples and its masks, whatever seed this process was given."""
        job = checkpoint.get(JOB, {})
        if "seed" in job:
            self._seed = self.runner.seed = job["seed"]
        if job.get(LOADERS):
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = job[LOADERS]
        if LOGGED in job:
            is_first_row = self.control.row == 0
            restore_metrics(self.lightning_module, job[LOGGED]["metrics"], is_first_row)
            self._resumed_epoch = starter(job[LOGGED]["logged"], is_first_row)
        checkpoint.setdefault("pytorch-lightning_version", importlib.import_module(self.framework).__version__)
        if "loops" not in checkpoint:  # a folder of stock DCP: schedulers start anew
            checkpoint["lr_schedulers"] = []

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """`load_checkpoint` has done it."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """`load_checkpoint` has done it."""

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the Hugging Face model inside the module so that ``from_pretrained`` loads it without this package.

        Weights go to the disk tensor by tensor: nobody holds the whole model. Config, generation config and a tokenizer
        that the module keeps as ``self.tokenizer`` are written beside them.

        Collective over all workers with a role.
        """
        self.recovery.all_or_nobody(
            "save", lambda: pretrained.save_pretrained(self.sharded, self.lightning_module, folder)
        )


def _links(trainer: Any) -> bool:
    """Whether a callback links to checkpoints by name: a link must never point to one that is not there yet."""
    return any(getattr(callback, "save_last", None) == "link" for callback in trainer.checkpoint_callbacks)
