"""What the recovery moves inside Lightning: the sharded model and its optimizers, and everything that depends on who is alive."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lightning_ntp.errors import PlanMismatchError
from lightning_ntp.next_topology import next_topology
from lightning_ntp.plan_cost import PlanCost
from lightning_ntp.strategy.base import fabric_of
from lightning_ntp.strategy.config import STATE_BYTES_PER_PARAMETER
from lightning_ntp.strategy.control import ControlPlane, gather_everyone
from lightning_ntp.strategy.damage import flip_bit
from lightning_ntp.strategy.generation import Generation
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.loading import Loading
from lightning_ntp.strategy.membership import Member
from lightning_ntp.strategy.outlook import device_spec
from lightning_ntp.strategy.recovery import Regroup
from lightning_ntp.strategy.screen import layout
from lightning_ntp.strategy.state import rebuild
from lightning_ntp.strategy.stepping import Stepping
from lightning_ntp.testing import Fault
from lightning_ntp.topology import Topology


class Regrouping(Stepping, Loading):
    """The strategy as a `recovery.Job`."""

    @property
    def step(self) -> int:
        """Optimizer steps that are complete here."""
        return self._held_step

    def info(self) -> dict[str, Any]:
        """For the others when this worker joins: the step of its state, None while it has none."""
        return {"step": None if self._runner is None else self._held_step}

    def damage(self, fault: Fault) -> None:
        """Flip a bit of a parameter that this worker holds. Local."""
        flip_bit(self.lightning_module.named_parameters(), fault)

    def let_go(self) -> None:
        """Whatever waits for the broken groups is dropped with the window's gradients. Local."""
        if self._runner is not None:
            self.runner.window = None

    def adopt(self, generation: Generation) -> None:
        """This worker's global rank is that of the generation. Local."""
        environment = self.cluster_environment
        environment.rank, environment.world = generation.global_rank, generation.num_members
        self.set_world_ranks()

    def set_world_ranks(self) -> None:
        """Who logs; called by Lightning once it knows the environment."""
        for name in (f"{self.framework}.utilities.rank_zero", f"{fabric_of(self.framework)}.utilities.rank_zero"):
            importlib.import_module(name).rank_zero_only.rank = self.global_rank

    def plan(self, generation: Generation) -> Regroup:
        """The topology over the members of a generation, the same on all. All members."""
        self.adopt(generation)
        if self._runner is None:
            return Regroup(generation, (), ())
        old, members = self.topology, set(generation.members)
        known = {*old.workers, *old.spares}
        lost, joined = tuple(sorted(known - members)), tuple(sorted(members - known))
        new = old
        if lost or joined:
            new = next_topology(old, lost, joined, healthy=self._healthy, cost=self._costs(), reshape=True)
        plans = set(gather_everyone(repr((new.replicas, new.loss_order, new.spares))))
        if len(plans) > 1:
            raise PlanMismatchError(f"members of generation {generation.number} plan different topologies: {sorted(plans)}")
        degrees = tuple(replica.degree for replica in new.replicas)
        return Regroup(generation, lost, joined, new, layout(new), degrees, new.num_roles)

    def _costs(self) -> PlanCost:
        """What shapes of this model cost, the same on all members: memory in whole GiB."""
        plan, per_node = self.sharded.plan, max(len(self._healthy.workers) // self.num_nodes, 1)
        spec = device_spec(self.root_device, per_node, self.num_nodes)
        spec = replace(spec, memory_bytes=max(spec.memory_bytes // 2**30, 1) * 2**30)
        each = STATE_BYTES_PER_PARAMETER[self.precision_plugin.precision]
        return PlanCost(
            lambda order: plan.reordered(order).params, self.topology, spec, each, domain_size=per_node
        )

    def move(self, regroup: Regroup, agree: Callable[[], object]) -> int:
        """New groups, and this worker's cells of the new topology; bytes received. All members."""
        if self._runner is None:
            return 0
        member, generation = self._own_member(), regroup.generation
        topology: Topology = regroup.topology
        with member.groups:
            groups = Groups(topology, member.worker, self.root_device.type, generation.members)
        steps = {worker: info["step"] for worker, info in generation.who_said()}
        with torch.inference_mode(False):
            report = rebuild(self.sharded, self.state_holders, groups, steps, agree=agree)
        self._topology = topology
        self.runner.control = ControlPlane(groups, self.root_device)
        self._held_step = report.step
        return report.received_bytes

    def resume(self, regroup: Regroup) -> None:
        """Loaders of the new data rows, and the open window up to where this worker was in it. All members."""
        if self._runner is None:
            return
        self.restart_data()
        self.replay_window()

    def batch_in_words(self) -> str:
        """Where the data of the running step is."""
        trainer = self.lightning_module.trainer
        first = trainer.fit_loop.batch_idx if self._open_window is None else self._open_window.first_batch
        last = first + trainer.accumulate_grad_batches - 1
        return f"Look at loop batches {first} to {last} of epoch {trainer.current_epoch}, global order of seed {self._seed}"

    def _own_member(self) -> Member:
        if self.recovery.member is None:
            raise RuntimeError("recovery is off")
        return self.recovery.member
