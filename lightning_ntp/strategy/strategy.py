"""The Lightning strategy: when to act. Everything that acts lives in the modules it calls."""

from __future__ import annotations

import importlib
import os
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_ntp.errors import ConfigError
from lightning_ntp.model_spec import ModelPlan
from lightning_ntp.strategy import checkpointing, checks
from lightning_ntp.strategy._lightning_private import (
    ends_window,
    is_last_of_epoch,
    keep_samplers,
    results_of,
    run_after_closure,
    stop_transfer_each,
    transfer_each,
)
from lightning_ntp.strategy.clipping import clip_by_norm_, clip_by_value_, global_norm
from lightning_ntp.strategy.config import (
    Machine,
    ModelSize,
    RecoveryConfig,
    ShapeChoice,
    Size,
    StrategyConfig,
    choose_shapes,
)
from lightning_ntp.strategy.control import ControlPlane, agree_with_leader
from lightning_ntp.strategy.data import BatchWeight, LoaderPlan, MicroBatches, as_micro_batches, rebuild_loader, weigh
from lightning_ntp.strategy.environment import WorkerEnvironment
from lightning_ntp.strategy.fsdp import ShardedModel, shard_model
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.huggingface import plan_model
from lightning_ntp.strategy.launcher import WorkerLauncher
from lightning_ntp.strategy.screen import first_screen
from lightning_ntp.strategy.step_log import StepLog
from lightning_ntp.strategy.window import LoopBatch, StepRunner
from lightning_ntp.topology import Topology

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Base
else:
    _Base = object

_SHARDED: weakref.WeakKeyDictionary[torch.nn.Module, ShardedModel] = weakref.WeakKeyDictionary()
"""Modules that are cut already: a second `fit`, `validate` or another Trainer in the same job goes on with them."""


class NTPStrategyLogic(_Base):
    """FSDP2 + uneven tensor parallelism over ragged replicas. Construct it as `lightning_ntp.NTPStrategy`.

    Args:
        num_replicas: copies of the model.
        fsdp_size: workers that share a role's parameters.
        tensor_parallel_size: roles of a healthy replica.
        replica_sizes: says all three: degrees (``[4, 3]``, fsdp size 1) or (fsdp, tp) pairs; replicas may differ.
        plan: ``"auto"`` reads the Hugging Face model's own plan; or ``{glob: style}``, see `huggingface.plan_model`.
        batch_weight: what the mean over the global batch counts: ``"samples"``, ``"tokens"`` or a function of a micro-batch.
        recovery: what happens when a worker is lost.
        seed: of data order and dropout; default: that of ``seed_everything``, else drawn by the leader.

    Raises:
        ConfigError: options that cannot work, as far as this process can tell alone.
    """

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
        self._topology: Topology | None = None
        self._runner: StepRunner | None = None
        self._loop_batch: LoopBatch | None = None
        self._step_arguments: tuple[Any, ...] = ()
        self._eval_weight: float | None = None
        self._seed = 0
        self._num_training_loaders = 0
        super().__init__()

    # ------------------------------------------------------------------ who and where

    @property
    def cluster_environment(self) -> Any:
        """Lightning's where an outer launcher made the processes (SLURM, torchrun), ours otherwise."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: Any) -> None:
        if type(environment).__name__ == "LightningEnvironment":
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

    # ------------------------------------------------------------------ set-up

    def set_world_ranks(self) -> None:
        """Who logs; called by Lightning once it knows the environment."""
        for name in (f"{self.framework}.utilities.rank_zero", f"{_fabric(self.framework)}.utilities.rank_zero"):
            importlib.import_module(name).rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        num_devices = len(self.parallel_devices or [None])
        environment.validate_settings(num_devices=num_devices, num_nodes=self.num_nodes)
        choose_shapes(self.config, Machine(self.num_nodes, num_devices), ModelSize(0, 0, 0))  # before anybody starts
        if not environment.creates_processes_externally:
            self._launcher = WorkerLauncher.for_job(num_devices, self.num_nodes)

    def setup_environment(self) -> None:
        """Join the job. Collective over all processes."""
        super().setup_environment()
        if not dist.is_initialized():
            self._join()
        self.set_world_ranks()

    def _join(self) -> None:
        backend = "nccl" if self.root_device.type == "cuda" else "gloo"
        if self.world_size == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            return
        environment = self.cluster_environment
        os.environ.setdefault("MASTER_ADDR", environment.main_address)  # SLURM: known to Lightning's environment only
        os.environ.setdefault("MASTER_PORT", str(environment.main_port))
        dist.init_process_group(backend, init_method="env://", rank=self.global_rank, world_size=self.world_size)

    def connect(self, model: Any) -> None:
        """Lightning hands the module over."""
        super().connect(model)
        transfer_each(model, _apply_to_micro_batches)

    def setup(self, trainer: Any) -> None:
        """Cut the model and make the optimizer. Collective over all processes."""
        self.accelerator.setup(trainer)
        module = self.lightning_module
        checks.check_trainer(trainer, module)
        keep_samplers(trainer)
        self._loop_batch = None
        sharded = _SHARDED.get(module)
        if sharded is None:
            self.precision_plugin.convert_module(module)
            self.model_to_device()
            sharded = self._shard(module)
        self._topology = sharded.groups.topology
        self._runner = StepRunner(sharded, ControlPlane(sharded.groups, self.root_device), self._seed)
        self._share_metrics(module)
        if trainer.state.fn == "fit":
            self._num_training_loaders = 0
            self.setup_optimizers(trainer)
            checks.check_optimizers(self.optimizers, module)
        self.setup_precision_plugin()

    def _shard(self, module: Any) -> ShardedModel:
        choice, self._seed = agree_with_leader((self._choose(module), self._own_seed()), self.root_device)
        topology = Topology.from_shapes(choice.shapes)
        plan = self._plan(module, topology)
        groups = Groups(topology, self.global_rank, self.root_device.type)
        sharded = shard_model(module, plan, groups, self._mixed_precision(), forward_roots(module))
        _SHARDED[module] = sharded
        first_screen(sharded, choice, self, module)
        return sharded

    def _plan(self, module: Any, topology: Topology) -> ModelPlan:
        if isinstance(self.config.plan, ModelPlan):
            return self.config.plan
        return plan_model(module, topology.num_roles, topology.loss_order, self.config.plan)

    def _choose(self, module: Any) -> ShapeChoice:
        parameters = list(module.parameters())
        size = ModelSize.of(
            sum(p.numel() for p in parameters),
            sum(p.numel() * p.element_size() for p in parameters),
            self.precision_plugin.precision,
        )
        memory = None
        if self.root_device.type == "cuda":
            memory = torch.cuda.get_device_properties(self.root_device).total_memory
        return choose_shapes(self.config, Machine(self.num_nodes, self.world_size // self.num_nodes, memory), size)

    def _own_seed(self) -> int:
        if self.config.seed is not None:
            return self.config.seed
        return int(os.environ["PL_GLOBAL_SEED"]) if "PL_GLOBAL_SEED" in os.environ else secrets.randbits(32)

    def _mixed_precision(self) -> MixedPrecisionPolicy | None:
        precision = self.precision_plugin.precision
        if precision == "bf16-mixed":
            return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return MixedPrecisionPolicy(reduce_dtype=torch.float32) if precision == "bf16-true" else None

    def _share_metrics(self, module: torch.nn.Module) -> None:
        """torchmetrics gather over all processes by themselves, which would count a row once per role."""
        for part in module.modules():
            if getattr(part, "dist_sync_fn", 0) is None and hasattr(part, "_defaults"):
                object.__setattr__(part, "dist_sync_fn", lambda value, group=None: self.control.gather_rows(value))

    def model_to_device(self) -> None:
        """The whole module to this worker's device, before it is cut."""
        self.lightning_module.to(self.root_device)

    def teardown(self) -> None:
        """Leaves the cut model where it is: moving it would break FSDP's buffers."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.cluster_environment.teardown()
        if self.lightning_module is not None:
            stop_transfer_each(self.lightning_module)

    # ------------------------------------------------------------------ data

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
        loader = rebuild_loader(
            dataloader,
            LoaderPlan(
                self.topology,
                self.control.row,
                self._seed,
                self.control.num_rows,
                training,
                lambda: trainer.accumulate_grad_batches,
            ),
        )
        if callable(set_epoch := getattr(getattr(loader, "sampler", None), "set_epoch", None)):
            set_epoch(trainer.current_epoch)  # Lightning creates the first iterator before it tells the epoch
        return loader

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves each micro-batch through the user's transfer hooks; callbacks get the first one."""
        micro = as_micro_batches(batch)
        if micro is None:
            return super().batch_to_device(batch, device, dataloader_idx)
        moved = tuple(super(NTPStrategyLogic, self).batch_to_device(b, device, dataloader_idx) for b in micro.batches)
        weights = tuple(
            weigh(part, count, self.config.batch_weight) for part, count in zip(moved, micro.counts, strict=True)
        )
        self._loop_batch = LoopBatch(moved, weights, tuple(count == 0 for count in micro.counts))
        return moved[0]

    def _taken_batch(self) -> LoopBatch:
        if self._loop_batch is None:
            raise ConfigError(
                "a step got a batch that the strategy did not load; steps that take dataloader_iter are not supported, let them "
                "take a batch"
            )
        return self._loop_batch

    # ------------------------------------------------------------------ a training step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch."""
        self._step_arguments = args[1:]
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Backward of one micro-batch, scaled by its count; Lightning's division by accumulate_grad_batches is undone."""
        accumulate = self.lightning_module.trainer.accumulate_grad_batches
        return super().backward(closure_loss * (self.runner.loss_scale * accumulate), optimizer, *args, **kwargs)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """One loop batch; at the end of a window the update. Collective over all workers with a role."""
        trainer, runner = self.lightning_module.trainer, self.runner
        last = ends_window(trainer)
        runner.begin(float(self.control.num_rows * trainer.accumulate_grad_batches))
        batch, self._loop_batch = self._taken_batch(), None
        loss = runner.run(
            trainer,
            self.lightning_module,
            batch,
            last,
            closure,
            lambda part: self.training_step(part, *self._step_arguments),
        )
        if not last:
            return loss
        total = runner.total_count()
        window = runner.end()
        if total == 0:
            optimizer.zero_grad()  # nothing in the whole window counts: no update, as a mean over nothing is none
            return loss
        self.sharded.scale_gradients(window.constant / total)
        run_after_closure(self.precision_plugin, self.lightning_module, optimizer)
        optimizer.step(**kwargs)
        return loss

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        clip_by_norm_(self.sharded, float(clip_val), global_norm(self.sharded))

    def _clip_by_value(self, optimizer: Any, clip_val: float) -> None:
        clip_by_value_(self.sharded, float(clip_val))

    # ------------------------------------------------------------------ evaluation

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

    # ------------------------------------------------------------------ messages

    def barrier(self, name: str | None = None) -> None:
        """Wait for all workers."""
        if self._runner is not None:
            self.control.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of worker `src`."""
        if self._runner is None:
            return agree_with_leader(obj, self.root_device) if dist.is_initialized() else obj
        return self.control.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over data rows, each counted once. In an evaluation step a mean is weighted by what each row's batch counts.

        In `training_step` the value stays as it is: `self.log(sync_dist=True)` is reduced once per loop batch, when all
        micro-batches have run, as rows may run different numbers of them.
        """
        if not isinstance(tensor, torch.Tensor) or self._runner is None or self.runner.in_training_step:
            return tensor
        return self.control.reduce_rows(tensor, str(reduce_op or "sum"), self._eval_weight)

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
        return torch.stack(self.control.gather_rows(tensor))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all workers, or any of them, say yes."""
        return self.control.all_agree(decision) if all else self.control.any_agrees(decision)

    # ------------------------------------------------------------------ checkpoints

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

    def _precision_class(self) -> type[Any]:
        return importlib.import_module(f"{self.framework}.plugins.precision").Precision


def forward_roots(module: torch.nn.Module, prefix: str = "") -> list[str]:
    """Names of the submodules whose forward the user's steps call: children with parameters, looking through containers.

    Raises:
        ConfigError: the module has parameters of its own, which no forward of a submodule would gather.
    """
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise ConfigError(
            f"parameter {prefix}{own[0]} belongs to the LightningModule itself; put it into a submodule whose forward you call, so "
            "that it can be gathered before use"
        )
    roots: list[str] = []
    for name, child in module.named_children():
        if next(child.parameters(), None) is None:
            continue
        is_container = isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict))
        roots += forward_roots(child, f"{prefix}{name}.") if is_container else [f"{prefix}{name}"]
    return roots


def _apply_to_micro_batches(batch: Any, apply: Callable[[Any], Any]) -> Any:
    micro = as_micro_batches(batch)
    if micro is None:
        return apply(batch)
    return MicroBatches(tuple(apply(part) for part in micro.batches), micro.counts)


def _fabric(framework: str) -> str:
    return "lightning.fabric" if framework == "lightning.pytorch" else "lightning_fabric"


@lru_cache
def strategy_class(framework: str = "lightning.pytorch") -> type[NTPStrategyLogic]:
    """`NTPStrategyLogic` over the ParallelStrategy of ``lightning.pytorch`` or ``pytorch_lightning``: two class trees."""
    base = importlib.import_module(f"{framework}.strategies").ParallelStrategy
    namespace = {"__doc__": NTPStrategyLogic.__doc__, "__module__": __name__, "framework": framework}
    return type(base)("NTPStrategy", (NTPStrategyLogic, base), namespace)
