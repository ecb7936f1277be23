"""What every part of the strategy knows: its options, who this worker is, and the cut model."""

from __future__ import annotations

import importlib
import os
import weakref
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_ntp.errors import ConfigError
from lightning_ntp.planner_start import Size
from lightning_ntp.strategy import checks, rendezvous
from lightning_ntp.strategy._lightning_private import is_last_of_epoch, training_results
from lightning_ntp.strategy.clipping import clip_by_norm_, clip_by_value_, global_norm
from lightning_ntp.strategy.config import RecoveryConfig, StrategyConfig
from lightning_ntp.strategy.control import ControlPlane
from lightning_ntp.strategy.environment import WorkerEnvironment
from lightning_ntp.strategy.events import Observers
from lightning_ntp.strategy.fsdp import ShardedModel
from lightning_ntp.strategy.metric_state import LoggedSums
from lightning_ntp.strategy.recovery import Recovery
from lightning_ntp.strategy.resume import DataPosition
from lightning_ntp.strategy.weights import BatchWeight
from lightning_ntp.strategy.window import LoopBatch, StepRunner
from lightning_ntp.topology import Topology

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Base

    from lightning_ntp.strategy.stepping import OpenWindow
else:
    _Base = ABC  # `strategy_class` puts a ParallelStrategy of one of the two Lightnings behind it

_CUT = "_ntp_cut"


@dataclass
class CutState:
    """How a module is cut, and the topology of the healthy job: a second `fit`, `validate` or another Trainer goes on with it.

    It stays on the module: a table outside, weak as its keys may be, would keep the module alive, as the value refers to it, and
    with it all process groups of a finished fit. A copy of the module is not cut.
    """

    sharded: ShardedModel | None = None
    healthy: Topology | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CutState:
        return CutState()

    def __reduce__(self) -> tuple[type[CutState], tuple[()]]:
        return CutState, ()


def keep_cut(module: torch.nn.Module, sharded: ShardedModel, healthy: Topology) -> None:
    """Note that the module is cut."""
    setattr(module, _CUT, CutState(sharded, healthy))


def cut_of(module: torch.nn.Module) -> tuple[ShardedModel, Topology] | None:
    """What `keep_cut` noted."""
    state: CutState = module.__dict__.get(_CUT, CutState())
    return None if state.sharded is None or state.healthy is None else (state.sharded, state.healthy)


class StrategyBase(_Base):
    """Options, identity and state of the strategy; its parts derive from it."""

    strategy_name = "ntp"
    framework = "lightning.pytorch"
    is_distributed = True  # else `self.log` ignores sync_dist

    def __init__(
        self,
        num_replicas: Size = "auto",
        fsdp_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
        replica_sizes: Sequence[Any] | None = None,
        plan: Any = "auto",
        batch_weight: BatchWeight = "samples",
        recovery: RecoveryConfig = RecoveryConfig(),  # noqa: B008  frozen
        seed: int | None = None,
        **unknown: Any,
    ) -> None:
        checks.check_options(unknown, StrategyConfig.__dataclass_fields__)
        sizes: Any = None if replica_sizes is None else tuple(replica_sizes)
        self.config = StrategyConfig(
            num_replicas, fsdp_size, tensor_parallel_size, sizes, plan, batch_weight, recovery, seed
        )
        self.num_nodes = 1
        self.observers = Observers()
        self.recovery = Recovery(None, self.observers)
        self._topology: Topology | None = None
        self._runner: StepRunner | None = None
        self._loop_batch: LoopBatch | None = None
        self._step_arguments: tuple[Any, ...] = ()
        self._eval_weight: float | None = None
        self._seed = 0
        self._num_training_loaders = 0
        self._healthy: Topology = Topology.from_shapes([(1, 1)])  # the job as it was started
        self._num_healthy_rows = 1  # data rows of the job as it was started: the global batch stays what it was then
        self._held_step = 0  # optimizer steps whose updates this worker's state has
        self._open_window: OpenWindow | None = None
        self.logged_sums = LoggedSums()
        self._num_setups = 0
        self._place = 0  # the worker of the job as it was started at whose place, so on whose GPU, this one is
        self._is_newcomer = False  # a worker that has come later, until its first step
        self._awaits_state = False  # its module has no storage yet
        self._is_out_of_memory = False  # the move of state that was tried last did not fit here
        self._live: dict[str, Any] | None = None  # what the others have told it
        self._is_regroup_wanted = False
        self._has_led = False  # logs, progress bar and screen are this worker's
        self._must_end = ""  # why the fit is saved and the job ends at the next step boundary
        self._is_batch_pending = False  # Lightning has fetched a training batch that no step has finished
        self._sources: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # our loader -> the user's
        super().__init__()

    @property
    def cluster_environment(self) -> Any:
        """Lightning's under SLURM and the like; ours for a plain script, our launcher, and torchrun, whose nodes may be unequal."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: Any) -> None:
        ours = rendezvous.ENV_STORE_ENDPOINT in os.environ  # `ntp launch` inside of SLURM, for example
        if ours or type(environment).__name__ in ("LightningEnvironment", "TorchElasticEnvironment"):
            environment = WorkerEnvironment.read(os.environ)
        self._cluster_environment = environment

    @property
    def precision_plugin(self) -> Any:
        """Lightning's for the dtype contexts; clipping is ours, and bf16-mixed is FSDP2's instead of autocast."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            checks.check_precision(plugin.precision)
            if plugin.precision == "bf16-mixed":
                plugin = self._precision_class()()
                plugin.precision = "bf16-mixed"
            plugin.clip_grad_by_norm = self._clip_by_norm
            plugin.clip_grad_by_value = self._clip_by_value
        self._precision_plugin = plugin

    @property
    def root_device(self) -> torch.device:
        """This worker's device."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank % len(devices)]

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker leads: logger, progress bar, checkpoints."""
        return self.global_rank == 0

    @property
    def topology(self) -> Topology:
        """Live replicas. ConfigError before `fit` has set the strategy up."""
        if self._topology is None:
            raise ConfigError(
                "the topology is known once trainer.fit (or validate, test, predict) has set the strategy up"
            )
        return self._topology

    @property
    def state_holders(self) -> list[torch.optim.Optimizer]:
        """Everything that keeps state beside each parameter, which is moved, saved and loaded with it."""
        return list(self.optimizers)

    def note_neighbours(self) -> None:
        """Tells the membership whose loss this process shall not outlive, where it shall not. Local."""
        member = self.recovery.member
        if member is not None and self.config.recovery.neighbours == "renew":
            member.replicas = tuple(frozenset(replica.workers) for replica in self.topology.replicas)

    def is_cut(self, module: Any) -> bool:
        """Whether an earlier run of a Trainer in this process has cut the module."""
        return module is not None and cut_of(module) is not None

    @property
    def runner(self) -> StepRunner:
        """What runs steps; there is one from `setup` on."""
        if self._runner is None:
            raise ConfigError("the model is cut once trainer.fit (or validate, test, predict) has set the strategy up")
        return self._runner

    @property
    def sharded(self) -> ShardedModel:
        """The cut model."""
        return self.runner.sharded

    @property
    def control(self) -> ControlPlane:
        """Messages between workers."""
        return self.runner.control

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Data rows, for whoever counts samples; the strategy's own loaders do not use it."""
        if self._topology is None:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": self.control.num_rows, "rank": self.control.row}

    @property
    def handles_gradient_accumulation(self) -> bool:
        """True, so that every loop batch comes to `optimizer_step`; False on an epoch's last one, so that Lightning sees a step."""
        module = self.lightning_module
        return module is None or not is_last_of_epoch(module.trainer)

    def note_logged(self, position: DataPosition) -> None:
        """Keep what the epoch has logged up to a position, as it is about to be added to or cleared. Local."""
        if position.batches:  # else nothing
            self.logged_sums.note(position, self.lightning_module, training_results(self.lightning_module.trainer))

    def _taken_batch(self) -> LoopBatch:
        if self._loop_batch is None:
            raise ConfigError(
                "a step got a batch that the strategy did not load; steps that take dataloader_iter are not supported, let them "
                "take a batch"
            )
        return self._loop_batch

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        own = parameters_of(optimizer)  # as Lightning does: what another optimizer trains has no part in the norm
        clip_by_norm_(self.sharded, float(clip_val), global_norm(self.sharded, own), own)

    def _clip_by_value(self, optimizer: Any, clip_val: float) -> None:
        clip_by_value_(self.sharded, float(clip_val), parameters_of(optimizer))

    def _precision_class(self) -> type[Any]:
        return importlib.import_module(f"{self.framework}.plugins.precision").Precision


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Everything that an optimizer trains."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def fabric_of(framework: str) -> str:
    return "lightning.fabric" if framework == "lightning.pytorch" else "lightning_fabric"
