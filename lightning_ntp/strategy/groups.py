"""The process groups of one generation: who talks to whom on each axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from lightning_ntp.dtensor.dispatch import forget_meshes
from lightning_ntp.sync_plan import Slot
from lightning_ntp.topology import Topology


class Groups:
    """Process groups over a topology for one worker; a worker's number is its global rank in this generation.

    Args:
        topology: who plays what.
        worker: this process.
        device_type: of the mesh, ``"cpu"`` or ``"cuda"``.

    Attributes:
        tp: the roles of this worker's data row.
        fsdp: the workers of this replica that play its role.
        replica: all workers of this replica.
        slots: per slot that this worker hosts, its hosts in all replicas.
        live: every worker that holds a role.
        mesh: (fsdp, tp) of this replica.

    Collective over the default group: every rank of it makes all groups, in one order. A rank without a role gets none.
    """

    tp: ProcessGroup
    fsdp: ProcessGroup
    replica: ProcessGroup
    live: ProcessGroup
    mesh: DeviceMesh

    def __init__(self, topology: Topology, worker: int, device_type: str = "cpu") -> None:
        self.topology, self.worker, self.device_type = topology, worker, device_type
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
        if worker in topology.workers:
            grid = torch.tensor(topology.replica_of(worker).grid)
            self.mesh = DeviceMesh.from_group([self.fsdp, self.tp], device_type, mesh=grid, mesh_dim_names=("fsdp", "tp"))

    @property
    def leader(self) -> int:
        """Global rank of the lowest worker with a role."""
        return self.topology.leader

    def destroy(self) -> None:
        """Give up every group made here. Local."""
        for group in reversed(self._made):
            dist.destroy_process_group(group)
        self._made.clear()
        forget_meshes()

    def _new(self, ranks: Sequence[int]) -> ProcessGroup | None:
        group = dist.new_group(list(ranks))
        if self.worker not in ranks:
            return None
        self._made.append(group)
        return group

    def _keep(self, name: str, ranks: Sequence[int]) -> None:
        group = self._new(ranks)
        if group is not None:
            setattr(self, name, group)
