"""The Lightning strategy: when to act. Everything that acts lives in the modules it calls."""

from __future__ import annotations

import importlib
import os
import secrets
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_ntp.errors import ConfigError
from lightning_ntp.model_spec import ModelPlan
from lightning_ntp.strategy import checks
from lightning_ntp.strategy._lightning_private import (
    ends_window,
    epoch_counts,
    keep_samplers,
    run_after_closure,
    shift_batches,
    stop_transfer_each,
    transfer_each,
)
from lightning_ntp.strategy.base import fabric_of
from lightning_ntp.strategy.compiling import Compiling
from lightning_ntp.strategy.config import (
    Machine,
    ModelSize,
    ShapeChoice,
    choose_shapes,
)
from lightning_ntp.strategy.control import ControlPlane, agree_with_leader, gather_everyone
from lightning_ntp.strategy.data import LoaderPlan, MicroBatches, as_micro_batches, rebuild_loader
from lightning_ntp.strategy.domains import find_domains, own_place
from lightning_ntp.strategy.evaluation import Evaluation
from lightning_ntp.strategy.fsdp import ShardedModel, shard_model
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.launcher import WorkerLauncher
from lightning_ntp.strategy.manual import ManualOptimization
from lightning_ntp.strategy.messages import Messages
from lightning_ntp.strategy.saving import Saving
from lightning_ntp.strategy.screen import first_screen, say_batches
from lightning_ntp.strategy.weights import weigh
from lightning_ntp.strategy.window import LoopBatch, StepRunner
from lightning_ntp.topology import Topology

_SHARDED: weakref.WeakKeyDictionary[torch.nn.Module, ShardedModel] = weakref.WeakKeyDictionary()
"""Modules that are cut already: a second `fit`, `validate` or another Trainer in the same job goes on with them."""


class NTPStrategyLogic(Messages, Evaluation, Saving):
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

    def set_world_ranks(self) -> None:
        """Who logs; called by Lightning once it knows the environment."""
        for name in (f"{self.framework}.utilities.rank_zero", f"{fabric_of(self.framework)}.utilities.rank_zero"):
            importlib.import_module(name).rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        num_devices = len(self.parallel_devices or [None])
        environment.validate_settings(num_devices=num_devices, num_nodes=self.num_nodes)
        started = environment.world_size() if environment.creates_processes_externally else num_devices * self.num_nodes
        machine = Machine(self.num_nodes, num_devices, domain_sizes=(started,))
        choose_shapes(self.config, machine, ModelSize(0, 0, 0))  # sizes that do not add up, before anybody starts
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
        self._seed = agree_with_leader(self._own_seed(), self.root_device)
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
        choice = agree_with_leader(self._choose(module), self.root_device)
        topology = Topology.from_shapes(choice.shapes)
        plan = self._plan(module, topology)
        groups = Groups(topology, self.global_rank, self.root_device.type)
        sharded = shard_model(module, plan, groups, self._mixed_precision(), checks.forward_roots(module))
        _SHARDED[module] = sharded
        first_screen(sharded, choice, self, module)
        return sharded

    def _plan(self, module: Any, topology: Topology) -> ModelPlan:
        # Imports transformers, which takes seconds; the process that only launches workers never comes here.
        from lightning_ntp.strategy.huggingface import plan_model, train_without_cache

        train_without_cache(module)
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
        domains = find_domains(gather_everyone(own_place(self.root_device)))
        machine = Machine(
            self.num_nodes, self.world_size // self.num_nodes, memory, domains.sizes, domains.kind
        )
        return choose_shapes(self.config, machine, size)

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
                manual=not self.lightning_module.automatic_optimization,
                progress=lambda: epoch_counts(trainer).position,
            ),
        )
        if training:
            loader.on_resume = lambda old, new: shift_batches(trainer, new - old)
        if training and self._num_training_loaders == 1:
            batch_size = getattr(dataloader, "batch_size", None)
            say_batches(self, batch_size, self.control.num_rows, trainer.accumulate_grad_batches)
        loader.set_epoch(trainer.current_epoch)  # Lightning creates the first iterator before it tells the epoch
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


def _apply_to_micro_batches(batch: Any, apply: Callable[[Any], Any]) -> Any:
    micro = as_micro_batches(batch)
    if micro is None:
        return apply(batch)
    return MicroBatches(tuple(apply(part) for part in micro.batches), micro.counts)


@lru_cache
def strategy_class(framework: str = "lightning.pytorch") -> type[NTPStrategyLogic]:
    """`NTPStrategyLogic` over the ParallelStrategy of ``lightning.pytorch`` or ``pytorch_lightning``: two class trees."""
    base = importlib.import_module(f"{framework}.strategies").ParallelStrategy
    namespace = {"__doc__": NTPStrategyLogic.__doc__, "__module__": "lightning_ntp", "framework": framework}
    return type(base)("NTPStrategy", (ManualOptimization, Compiling, NTPStrategyLogic, base), namespace)
