"""What the recovery moves inside Lightning: the sharded model and its optimizers, and everything that depends on who is alive."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from lightning_ntp.errors import PlanMismatchError
from lightning_ntp.next_topology import next_topology
from lightning_ntp.plan_cost import PlanCost
from lightning_ntp.planner_start import STATE_BYTES_PER_PARAMETER
from lightning_ntp.strategy.base import fabric_of
from lightning_ntp.strategy.control import ControlPlane, gather_everyone
from lightning_ntp.strategy.damage import flip_bit
from lightning_ntp.strategy.generation import Generation
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.lean import given_up, is_out_of_memory
from lightning_ntp.strategy.membership import Member
from lightning_ntp.strategy.outlook import device_spec
from lightning_ntp.strategy.recovery import Regroup
from lightning_ntp.strategy.rendezvous import EXIT_PARKED
from lightning_ntp.strategy.row_trail import check_told
from lightning_ntp.strategy.screen import layout
from lightning_ntp.strategy.slowness import Slowness
from lightning_ntp.strategy.state import rebuild
from lightning_ntp.strategy.takeover import take_over
from lightning_ntp.testing import Fault
from lightning_ntp.topology import Topology

_log = logging.getLogger(__name__)


class Regrouping(Slowness):
    """The strategy as a `recovery.Job`."""

    @property
    def step(self) -> int:
        """Optimizer steps that are complete here."""
        return self._held_step

    def info(self) -> dict[str, Any]:
        """For the others when this worker joins: the step of its state, None while it has none, and the job for newcomers."""
        told: dict[str, Any] = {"setups": self._num_setups, "briefed": not self._is_newcomer or self._live is not None}
        told |= {"host": socket.gethostname(), "place": self._place, "out_of_memory": self._is_out_of_memory}
        if self._runner is None:
            return told | {"step": None}
        step = None if self._awaits_state else self._held_step
        ran = list(self.sharded.watch.trail.entries)
        job = {"topology": self.topology.to_data(), "healthy": self._healthy.to_data()}
        return told | {"step": step, "job": job, "ran": ran}

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
        if self._is_newcomer:
            self._learn(generation)
        if self._topology is None:
            return Regroup(generation, (), ())
        old, members = self._topology, set(generation.members)
        if self._runner is not None:
            check_told(old, generation, self.sharded.watch.trail.names)
        known = {*old.workers, *old.spares}
        lost, joined = tuple(sorted(known - members)), tuple(sorted(members - known))
        strangers = self._strangers(generation)
        going = (set(generation.leaving) & members) | strangers
        staying = members - going
        self._must_end = self.why_end(len(staying) if staying & set(old.workers) else 0)
        if self._must_end:
            going = strangers  # the others save together, and all end
        elif hungry := {worker for worker, info in generation.who_said() if info.get("out_of_memory")}:
            going |= given_up(old, hungry, {*lost, *going}, joined) & members
            if self.is_global_zero:
                _log.warning("memory of workers %s does not suffice: workers %s go, with their replica", sorted(hungry), sorted(going))
        places = {worker: info.get("place", worker) for worker, info in generation.who_said()}
        told = None if self._runner is None else self._next(old, {*lost, *going} & known, set(joined) - going, places)
        plans = {repr(plan): plan for plan in gather_everyone(told) if plan is not None}  # newcomers have no model to ask yet
        if len(plans) > 1:
            raise PlanMismatchError(f"members of generation {generation.number} plan different topologies: {sorted(plans)}")
        new = Topology.from_data(next(iter(plans.values())))
        parked = tuple(sorted(set(new.spares) - going))
        leavers = (*sorted(going), *parked)
        new = replace(new, spares=tuple(sorted(leavers)))  # they hand out what they hold before they go
        degrees = tuple(replica.degree for replica in new.replicas)
        return Regroup(generation, lost, joined, leavers, parked, new, layout(new), degrees, new.num_roles)

    def why_end(self, num_workers: int) -> str:
        """Why a job that goes on with so many workers has to end at the next step boundary; "" if it need not. Local."""
        wanted = self.config.recovery.min_workers
        if num_workers >= wanted:
            return ""
        return f"{num_workers} workers are left, and min_workers is {wanted}" if num_workers else "every worker was asked to leave"

    def _next(self, old: Topology, lost: set[int], joined: set[int], places: Mapping[int, int]) -> dict[str, Any]:
        if not lost and not joined:
            return self.dealt_anew(old).to_data()
        new = next_topology(old, lost, joined, healthy=self._healthy, cost=self._costs(), reshape=True, places=places)
        return new.to_data()

    def _strangers(self, generation: Generation) -> set[int]:
        """Newcomers whose script is at another `fit` or evaluation than the members: they cannot follow."""
        setups = {worker: info["setups"] for worker, info in generation.who_said()}
        here = [setups[worker] for worker, info in generation.who_said() if info["step"] is not None]
        return {worker for worker, count in setups.items() if here and count != here[0]}

    def _learn(self, generation: Generation) -> None:
        """A newcomer's picture of the job that it joins: the topology that holds the state, as the members see it. Local."""
        job = next(info["job"] for _, info in generation.who_said() if "job" in info)
        self._topology, self._healthy = Topology.from_data(job["topology"]), Topology.from_data(job["healthy"])
        self._num_healthy_rows = len(self._healthy.data_rows)
        self._held_step = max(info["step"] for info in generation.infos if info["step"] is not None)

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
        if regroup.topology is None:
            return 0
        member, generation = self._own_member(), regroup.generation
        topology: Topology = regroup.topology
        with member.groups:
            groups = Groups(topology, member.worker, self.root_device.type, generation.members)
        if self._runner is None:
            self.park(groups)
        steps = {worker: info["step"] for worker, info in generation.who_said()}
        with torch.inference_mode(False):
            report = rebuild(self.sharded, self.state_holders, groups, steps, agree=agree)
        self._topology, self._held_step, self._awaits_state = topology, report.step, False
        self._is_out_of_memory = False
        self.note_neighbours()
        if groups.has_role:
            self.runner.control = ControlPlane(groups, self.root_device)
        return report.received_bytes

    def ran_out_of_memory(self, error: Exception) -> bool:
        """Whether `error` is that of an allocation that failed, for the first time in this recovery. Local."""
        is_first, is_one = not self._is_out_of_memory, is_out_of_memory(error)
        self._is_out_of_memory |= is_one
        return is_first and is_one

    @abstractmethod
    def park(self, groups: Groups) -> None:
        """Make of a newcomer's module what `rebuild` fills. Local."""

    @abstractmethod
    def brief_newcomers(self) -> None:
        """Tell newcomers where the fit stands. All members."""

    def leave(self, exit_code: int = 0) -> None:
        """End this process, which is no loss. Does not return. Local."""
        for logger in self.lightning_module.trainer.loggers if self.is_global_zero else ():
            logger.finalize("success")
        self._own_member().leave(frees_role=exit_code != EXIT_PARKED)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)  # an exception would run the user's on_exception hooks, which may wait for workers that have gone on

    def resume(self, regroup: Regroup) -> None:
        """A look at all copies of the state, loaders of the new data rows, and the open window up to where this worker was in it.

        All members.
        """
        if self._runner is None:
            return
        if not all(info.get("briefed", True) for info in regroup.generation.infos):
            self.brief_newcomers()
        self.inspect()
        if self._is_newcomer:
            return  # its loops have not begun
        self.restart_data()
        if self.is_global_zero and not self._has_led:
            self._has_led = True
            take_over(self.lightning_module.trainer)
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
