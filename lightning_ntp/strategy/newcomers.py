"""A worker that joins a running fit: it gets its cells by the state move, and what else the others know as an unwritten checkpoint.

    respawned process -> its own script up to Strategy.setup -> joins at a step boundary -> cells -> briefing -> Lightning resumes
    from the briefing as from a checkpoint -> its first step is the others' next one

A newcomer for which there is no role ends with `EXIT_PARKED`; the supervisor starts it anew, and it waits as a hot spare.
Until its first step it is alone: Lightning's messages at the start of a fit are answered without the others, who wait in the step.
"""

from __future__ import annotations

import io
import signal
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_ntp.model_spec import ModelPlan
from lightning_ntp.strategy import checks, rendezvous
from lightning_ntp.strategy._lightning_private import dump_checkpoint, resume_from
from lightning_ntp.strategy.control import agree_with_leader
from lightning_ntp.strategy.fsdp import ShardedModel, park_model
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.regrouping import Regrouping
from lightning_ntp.strategy.saving import Saving
from lightning_ntp.strategy.signals import default_signal
from lightning_ntp.strategy.takeover import adopt_versions, versions
from lightning_ntp.topology import Topology

VERSIONS = "ntp_logger_versions"
"""Key of a briefing."""

SAVED = "saved-before-leaving.ckpt"
"""Where a job that has to go as a whole saves itself, in the folder of its checkpoints."""

LIVE = "the running job"
"""Where a newcomer's checkpoint comes from, in place of a path."""


class Newcomers(Regrouping, Saving):
    """Both sides of a worker's arrival."""

    def enter_running_job(self, trainer: Any) -> None:
        """Wait for the others' next step boundary, a hot spare for the next loss, and take a place among them. Newcomers only."""
        with default_signal(signal.SIGTERM):  # it holds nothing, so whoever ends it while it waits need not wait
            self.recovery.run("start", lambda: None, planned=True)
        resume_from(trainer, LIVE)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """See `Saving`; a newcomer gets what the others have told it."""
        if checkpoint_path != LIVE or self._live is None:
            return super().load_checkpoint(checkpoint_path, weights_only)
        self._take_position(self._live)
        trainer = self.lightning_module.trainer
        adopt_versions(trainer, self._live.pop(VERSIONS))
        for callback in trainer.checkpoint_callbacks:  # should this worker ever lead, it saves where the leader does now
            callback.dirpath = self._live["callbacks"].get(callback.state_key, {}).get("dirpath", callback.dirpath)
        return self._live

    def save_and_end(self, trainer: Any) -> None:
        """Write a checkpoint and end with `rendezvous.EXIT_SAVED`, on which the job may be started again. All workers with a role."""
        folders = [callback.dirpath for callback in trainer.checkpoint_callbacks if getattr(callback, "dirpath", None)]
        path = Path(folders[0] if folders else trainer.default_root_dir) / SAVED
        trainer.save_checkpoint(path)
        self.on_train_end()
        if self.is_global_zero:
            words = f"{self._must_end}: the fit is saved in {path}; go on with ckpt_path={str(path)!r}"
            self._own_member().tell("saved", [words], path=str(path), step=self._held_step)
        self.leave(rendezvous.EXIT_SAVED)

    def park(self, groups: Groups) -> None:
        """Parameters without storage, and optimizers over them. Local."""
        module, topology = self.lightning_module, groups.topology
        plan = self.make_plan(module, self._healthy).reordered(topology.loss_order)
        sharded = park_model(module, plan, groups, self.mixed_precision(), checks.forward_roots(module))
        self.use(sharded, self._healthy)
        self._awaits_state = True
        self.setup_optimizers(module.trainer)

    @abstractmethod
    def make_plan(self, module: Any, topology: Topology) -> ModelPlan:
        """How the module is cut. Local."""

    @abstractmethod
    def mixed_precision(self) -> MixedPrecisionPolicy | None:
        """FSDP2's. Local."""

    @abstractmethod
    def use(self, sharded: ShardedModel, healthy: Topology) -> None:
        """Go on with a cut model. Local."""

    def brief_newcomers(self) -> None:
        """The leader tells newcomers what a checkpoint would hold beside parameters and optimizer state. All members."""
        told: bytes = agree_with_leader(b"" if self._is_newcomer else self._briefing(), self.root_device)
        if self._is_newcomer and self._live is None:
            # From a member of this job, over this generation's own connections: what torch's object collectives read as well.
            self._live = torch.load(io.BytesIO(told), map_location="cpu", weights_only=False)

    def _briefing(self) -> bytes:
        checkpoint = dump_checkpoint(self.lightning_module.trainer)
        checkpoint |= {"state_dict": {}, "optimizer_states": []}
        self._say_position(checkpoint)
        checkpoint[VERSIONS] = versions(self.lightning_module.trainer)
        file = io.BytesIO()
        torch.save(checkpoint, file)
        return file.getvalue()
