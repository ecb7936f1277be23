"""The process groups of one generation: who talks to whom on each axis.

[Note: order] A topology speaks of workers, a generation of global ranks, and after a loss or a return the two follow different
orders: positions on the tp axis are those of the roles, whoever plays them. Everything that reads a group by position (FSDP's
chunks, exchanges, gathers) needs the group in the topology's order, and torch sorts unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from lightning_ntp.dtensor.dispatch import forget_meshes
from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy._torch_private import new_group_in_order
from lightning_ntp.sync_plan import Slot
from lightning_ntp.topology import Topology


class Groups:
    """Process groups over a topology for one worker.

    Args:
        topology: who plays what, in worker ids.
        worker: this process's id.
        device_type: of the mesh, ``"cpu"`` or ``"cuda"``.
        members: worker ids by global rank of this generation; None: they are the global ranks, as in the first one.

    Attributes:
        tp: the roles of this worker's data row.
        fsdp: the workers of this replica that play its role.
        replica: all workers of this replica.
        slots: per slot that this worker hosts, its hosts in all replicas.
        live: every worker that holds a role; its first one is the leader.
        everyone: the same and then the spares.
        mesh: (fsdp, tp) of this replica.

    Raises:
        ConfigError: a worker of the topology is no member.

    Collective over the default group: every rank of it makes all groups, in one order. A rank without a role gets only
    `everyone`.
    """

    tp: ProcessGroup
    fsdp: ProcessGroup
    replica: ProcessGroup
    live: ProcessGroup
    everyone: ProcessGroup
    mesh: DeviceMesh

    def __init__(
        self, topology: Topology, worker: int, device_type: str = "cpu", members: Sequence[int] | None = None
    ) -> None:
        self.topology, self.worker, self.device_type = topology, worker, device_type
        self.members = tuple(range(dist.get_world_size()) if members is None else members)
        absent = {*topology.workers, *topology.spares, worker}.difference(self.members)
        if absent:
            raise ConfigError(f"workers {sorted(absent)} of the topology are not among the members {self.members}")
        self.slots: dict[Slot, ProcessGroup] = {}
        self._made: list[ProcessGroup] = []
        for replica in topology.replicas:
            for row in replica.grid:
                self._keep("tp", row)
            for column in zip(*replica.grid, strict=True):
                self._keep("fsdp", column)
            self._keep("replica", replica.workers)
        for slot in topology.slots:
            group = self._new([topology.host(index, slot) for index in range(len(topology.replicas))])
            if group is not None:
                self.slots[slot] = group
        self._keep("live", topology.workers)
        if topology.spares:
            self._keep("everyone", topology.workers + topology.spares)
        elif self.has_role:
            self.everyone = self.live
        if self.has_role:
            grid = torch.tensor([self._ranks(row) for row in topology.replica_of(worker).grid])
            self.mesh = DeviceMesh.from_group([self.fsdp, self.tp], device_type, mesh=grid, mesh_dim_names=("fsdp", "tp"))

    @property
    def has_role(self) -> bool:
        """Whether this worker plays one; a parked spare does not."""
        return self.worker in self.topology.workers

    @property
    def leader(self) -> int:
        """The lowest worker with a role."""
        return self.topology.leader

    def global_rank(self, worker: int) -> int:
        """A member's number in this generation."""
        return self.members.index(worker)

    def destroy(self) -> None:
        """Give up every group made here. Local."""
        for group in reversed(self._made):
            dist.destroy_process_group(group)
        self._made.clear()
        forget_meshes()

    def _ranks(self, workers: Sequence[int]) -> list[int]:
        return [self.global_rank(worker) for worker in workers]

    def _new(self, workers: Sequence[int]) -> ProcessGroup | None:
        group = new_group_in_order(self._ranks(workers))
        if group is None or self.worker not in workers:
            return None
        self._made.append(group)
        return group

    def _keep(self, name: str, workers: Sequence[int]) -> None:
        group = self._new(workers)
        if group is not None:
            setattr(self, name, group)
