"""The Lightning strategy: when to act. Everything that acts lives in the modules it calls."""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_ntp.model_spec import ModelPlan
from lightning_ntp.next_topology import WorkerCount, next_topology
from lightning_ntp.planner_start import Machine, ModelSize, StartPlan, plan_start
from lightning_ntp.strategy import checks, joining
from lightning_ntp.strategy._lightning_private import (
    guard_prepare_data,
    keep_samplers,
    resume_from,
    stop_transfer_each,
    take_sigterm,
    transfer_each,
)
from lightning_ntp.strategy._torch_private import move_to_device
from lightning_ntp.strategy.adapters import initialise_adapters
from lightning_ntp.strategy.averaging import Averaging
from lightning_ntp.strategy.base import cut_of, keep_cut
from lightning_ntp.strategy.callback import ensure_callback
from lightning_ntp.strategy.compiling import Compiling
from lightning_ntp.strategy.control import ControlPlane, agree_with_leader, gather_everyone
from lightning_ntp.strategy.data import MicroBatches, as_micro_batches
from lightning_ntp.strategy.domains import find_domains, own_place
from lightning_ntp.strategy.evaluation import Evaluation
from lightning_ntp.strategy.fsdp import ShardedModel, shard_model, start_equal
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.launcher import WorkerLauncher
from lightning_ntp.strategy.life_signs import show_stacks_on_request
from lightning_ntp.strategy.manual import ManualOptimization
from lightning_ntp.strategy.messages import Messages
from lightning_ntp.strategy.newcomers import Newcomers
from lightning_ntp.strategy.pace import PaceMeter
from lightning_ntp.strategy.restart import Restart
from lightning_ntp.strategy.screen import first_screen
from lightning_ntp.strategy.takeover import adopt_versions, versions
from lightning_ntp.strategy.weight_files import read_cells, sources_of
from lightning_ntp.strategy.window import StepRunner
from lightning_ntp.topology import Topology


class NTPStrategyLogic(Messages, Evaluation, Newcomers):
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

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        num_devices = len(self.parallel_devices or [None])
        environment.validate_settings(num_devices=num_devices, num_nodes=self.num_nodes)
        started = environment.world_size() if environment.creates_processes_externally else num_devices * self.num_nodes
        machine = Machine(self.num_nodes, num_devices, domain_sizes=(started,))
        plan_start(self.config.wanted, machine, ModelSize(0, 0))  # sizes that do not add up, before anybody starts
        if not environment.creates_processes_externally:
            self._launcher = WorkerLauncher.for_job(num_devices, self.num_nodes, self.config.recovery)

    def setup_environment(self) -> None:
        """Join the job. Collective over all processes."""
        super().setup_environment()
        device = self.root_device
        member = joining.enter(self.cluster_environment, device, self.config.recovery)
        if member is not None:
            self.recovery.member, self.recovery.job, self.recovery.advises = member, self, self.config.recovery.advise
            self.recovery.num_started = int(os.environ["WORLD_SIZE"])
            self._place = int(os.environ["RANK"])
            if member.generation is None:
                self._is_newcomer, self.cluster_environment.rank = True, member.worker  # never taken for the leader
            else:
                self.recovery.joined(member.generation)
                self.adopt(member.generation)
                guard_prepare_data(self.lightning_module.trainer, self._prepare_data)
        self.set_world_ranks()
        ensure_callback(self.lightning_module.trainer, self.framework)

    def _prepare_data(self, prepare: Callable[[], None]) -> None:
        def with_groups() -> None:
            assert self.recovery.member is not None
            with self.recovery.member.groups:  # Lightning makes one, and waits in it for whoever downloads
                prepare()

        self.recovery.all_or_nobody("start", with_groups)

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
        self.guard_evaluation(trainer)
        if self.recovery.member is not None:
            take_sigterm(trainer, self.recovery.member.request_leave)
            show_stacks_on_request()
        self._loop_batch, self._open_window, self._is_batch_pending = None, None, False
        self._num_setups += 1
        self._num_training_loaders = 0
        self._seed = self.broadcast(self._own_seed())
        if self._is_newcomer:
            self.precision_plugin.convert_module(module)
            self.model_to_device()
            self.enter_running_job(trainer)
        elif (cut := cut_of(module)) is not None:
            self.use(*cut)
        else:
            self.precision_plugin.convert_module(module)
            self.model_to_device()
            choice = self.recovery.all_or_nobody("control", partial(self._agree_on_choice, module))
            healthy = choice.topology
            self.use(self._shard(module, healthy), healthy)
            self.recovery.all_or_nobody("control", lambda: first_screen(self.sharded, choice, self, module))
        restart = Restart.from_env(os.environ)
        if restart is not None and restart.setup == self._num_setups and not self._is_newcomer:
            resume_from(trainer, restart.path)
        if self.recovery.member is not None and not self._is_newcomer:
            self._has_led = self.is_global_zero
            adopt_versions(trainer, self.broadcast(versions(trainer) if self.is_global_zero else None))
        self._share_metrics(module)
        if trainer.state.fn == "fit":
            if not self._is_newcomer:  # it has them already
                self.setup_optimizers(trainer)
            checks.check_optimizers(self.optimizers, module)
            self.check_inspectable()
            self.check_slowness()
        self.setup_precision_plugin()

    def use(self, sharded: ShardedModel, healthy: Topology) -> None:
        """Go on with a cut model. Local."""
        self._topology, self._healthy = sharded.groups.topology, healthy
        self._num_healthy_rows = len(healthy.data_rows)
        pace = PaceMeter(self.measures_pace, self.root_device.type == "cuda")
        self._runner = StepRunner(sharded, ControlPlane(sharded.groups, self.root_device), self._seed, pace)
        keep_cut(self.lightning_module, sharded, healthy)
        if not self._is_newcomer:
            self.note_neighbours()

    def _shard(self, module: Any, healthy: Topology) -> ShardedModel:
        """Cuts the module. A loss before all have the same weights is answered with fewer workers; cutting itself is local."""

        def start() -> tuple[Topology, Groups]:
            topology, groups = self._first_groups(healthy)
            start_equal(module, groups)
            return topology, groups

        initialise_adapters(module)
        sources = sources_of(module)
        topology, groups = self.recovery.all_or_nobody("start", start)
        plan = self.make_plan(module, topology)
        sharded = shard_model(module, plan, groups, self.mixed_precision(), checks.forward_roots(module), equal=True)
        read_cells(sharded, sources)
        return sharded

    def _first_groups(self, healthy: Topology) -> tuple[Topology, Groups]:
        """The groups of those who are there: somebody may have been lost before the job began."""
        member = self.recovery.member
        if member is None or member.generation is None:
            return healthy, Groups(healthy, self.global_rank, self.root_device.type)
        absent = tuple(sorted(set(healthy.workers) - set(member.generation.members)))
        self._must_end = self.why_end(len(healthy.workers) - len(absent))
        costs = WorkerCount(max(len(healthy.workers) // self.num_nodes, 1))
        topology = healthy
        if absent:
            topology = next_topology(healthy, absent, (), healthy=healthy, cost=costs, reshape=True)
        with member.groups:
            return topology, Groups(topology, member.worker, self.root_device.type, member.generation.members)

    def make_plan(self, module: Any, topology: Topology) -> ModelPlan:
        """How the module is cut. Local."""
        # Imports transformers, which takes seconds; the process that only launches workers never comes here.
        from lightning_ntp.strategy.huggingface import plan_model, train_without_cache

        train_without_cache(module)
        if isinstance(self.config.plan, ModelPlan):
            return self.config.plan
        return plan_model(module, topology.num_roles, topology.loss_order, self.config.plan)

    def _agree_on_choice(self, module: Any) -> StartPlan:
        return agree_with_leader(self._choose(module), self.root_device)

    def _choose(self, module: Any) -> StartPlan:
        parameters = list(module.parameters())
        size = ModelSize.of(
            sum(p.numel() for p in parameters if p.requires_grad),
            self.precision_plugin.precision,
            weight_bytes=sum(p.numel() * p.element_size() for p in parameters),
            frozen_bytes=sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad),
            max_degree=checks.fewest_query_heads(module) if self.config.plan == "auto" else None,
        )
        memory = None
        if self.root_device.type == "cuda":
            memory = torch.cuda.get_device_properties(self.root_device).total_memory
        places = gather_everyone(own_place(self.root_device))
        started = self.recovery.num_started or len(places)
        machine = Machine(self.num_nodes, started // self.num_nodes, memory)
        if len(places) == started:  # else somebody was lost already: the shapes are those of the healthy job all the same
            domains = find_domains(places)
            machine = replace(machine, domain_sizes=domains.sizes, domain=domains.kind)
        return plan_start(self.config.wanted, machine, size)

    def _own_seed(self) -> int:
        if self.config.seed is not None:
            return self.config.seed
        return int(os.environ["PL_GLOBAL_SEED"]) if "PL_GLOBAL_SEED" in os.environ else secrets.randbits(32)

    def mixed_precision(self) -> MixedPrecisionPolicy | None:
        """FSDP2's. Local."""
        precision = self.precision_plugin.precision
        if precision == "bf16-mixed":
            return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return MixedPrecisionPolicy(reduce_dtype=torch.float32) if precision == "bf16-true" else None

    def _share_metrics(self, module: torch.nn.Module) -> None:
        """torchmetrics gather over all processes by themselves, which would count a row once per role."""
        for part in module.modules():
            if getattr(part, "dist_sync_fn", 0) is None and hasattr(part, "_defaults"):
                object.__setattr__(part, "dist_sync_fn", lambda value, group=None: self.gather_rows(value))

    def model_to_device(self) -> None:
        """The whole module to this worker's device, before it is cut."""
        move_to_device(self.lightning_module, self.root_device)

    def teardown(self) -> None:
        """Leaves the cut model where it is: moving it would break FSDP's buffers."""
        self.finish_saves()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.cluster_environment.teardown()
        if self.lightning_module is not None:
            stop_transfer_each(self.lightning_module)


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
    return type(base)("NTPStrategy", (Averaging, ManualOptimization, Compiling, NTPStrategyLogic, base), namespace)
