"""Who is alive and plays which role: replicas as grids of workers, and what a loss or a return makes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_ntp.errors import ConfigError
from lightning_ntp.layout import Relief
from lightning_ntp.model_spec import Coordinates


@dataclass(frozen=True, slots=True)
class Replica:
    """The live workers of one copy of the model: ``grid[fsdp coordinate][tp position]``.

    relief: what slow roles of it keep, see `layout.Relief`. It ends when the replica changes.
    """

    grid: tuple[tuple[int, ...], ...]
    relief: Relief = ()

    def __post_init__(self) -> None:
        if not self.grid or not self.grid[0] or len({len(row) for row in self.grid}) != 1:
            raise ConfigError(f"a replica is a full (fsdp, tp) grid of workers, got {self.grid}")
        if self.relief and len(self.relief) >= self.degree:
            raise ConfigError(f"relief {self.relief} leaves none of {self.degree} roles to take over")

    @property
    def fsdp_size(self) -> int:
        """Workers that share a role's parameters."""
        return len(self.grid)

    @property
    def degree(self) -> int:
        """Number of live roles."""
        return len(self.grid[0])

    @property
    def workers(self) -> tuple[int, ...]:
        """All workers, fsdp-major: the order of the replica's process group."""
        return tuple(worker for row in self.grid for worker in row)


@dataclass(frozen=True, slots=True)
class Position:
    """Indices of a worker: ``replicas[replica].grid[fsdp][tp]``."""

    replica: int
    fsdp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Slot:
    """One worker's part of the sync layout: fsdp coordinate and role in the sync grid."""

    fsdp: int
    role: int


@dataclass(frozen=True)
class Topology:
    """All replicas of a job, their healthy degree and the order in which roles are given up.

    Args:
        num_roles: degree of a healthy replica.
        replicas: grids of workers; degrees and fsdp sizes may all differ.
        loss_order: roles, first lost first; completed to ``num_roles - 1`` roles with the highest remaining ones.
        spares: live workers without a role (parked until one is needed).

    A replica of degree d lacks exactly the first ``num_roles - d`` roles of the loss order, so that layouts nest.
    """

    num_roles: int
    replicas: tuple[Replica, ...]
    loss_order: tuple[int, ...] = ()
    spares: tuple[int, ...] = ()
    _positions: dict[int, Position] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ConfigError("a topology needs at least one replica")
        order = tuple(self.loss_order)
        proper = len(set(order)) == len(order) < self.num_roles and set(order) <= set(range(self.num_roles))
        if not proper:
            raise ConfigError(f"loss_order {order} must name distinct roles of 0..{self.num_roles - 1}, and not all")
        rest = [role for role in reversed(range(self.num_roles)) if role not in order]
        object.__setattr__(self, "loss_order", (*order, *rest)[: self.num_roles - 1])
        for replica in self.replicas:
            if replica.degree > self.num_roles:
                raise ConfigError(f"a replica has {replica.degree} roles, healthy ones have {self.num_roles}")
        workers = [worker for replica in self.replicas for worker in replica.workers] + list(self.spares)
        if len(set(workers)) != len(workers):
            raise ConfigError(f"a worker appears twice in {sorted(workers)}")
        positions = {
            worker: Position(r, f, t)
            for r, replica in enumerate(self.replicas)
            for f, row in enumerate(replica.grid)
            for t, worker in enumerate(row)
        }
        object.__setattr__(self, "_positions", positions)

    @classmethod
    def from_shapes(
        cls, shapes: Sequence[tuple[int, int]], loss_order: Sequence[int] = (), num_roles: int | None = None
    ) -> Topology:
        """Replicas of the given (fsdp, tp) shapes over workers 0, 1, ... in order.

        Raises:
            ConfigError: an empty list or a size below 1.
        """
        if not shapes or any(fsdp < 1 or tp < 1 for fsdp, tp in shapes):
            raise ConfigError(f"replica shapes are (fsdp, tp) of at least (1, 1), got {list(shapes)}")
        replicas, at = [], 0
        for fsdp, tp in shapes:
            replicas.append(Replica(tuple(tuple(range(at + f * tp, at + (f + 1) * tp)) for f in range(fsdp))))
            at += fsdp * tp
        return cls(num_roles or max(tp for _, tp in shapes), tuple(replicas), tuple(loss_order))

    def to_data(self) -> dict[str, Any]:
        """As JSON values; `from_data` reads them."""
        grids = [[list(row) for row in replica.grid] for replica in self.replicas]
        reliefs = [replica.relief for replica in self.replicas]
        return {
            "num_roles": self.num_roles,
            "grids": grids,
            "reliefs": reliefs,
            "loss_order": self.loss_order,
            "spares": self.spares,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Topology:
        """What `to_data` has said."""
        replicas = tuple(
            Replica(tuple(tuple(row) for row in grid), tuple((role, kept) for role, kept in relief))
            for grid, relief in zip(data["grids"], data["reliefs"], strict=True)
        )
        return cls(data["num_roles"], replicas, tuple(data["loss_order"]), tuple(data["spares"]))

    @property
    def workers(self) -> tuple[int, ...]:
        """Workers that hold a role, ascending."""
        return tuple(sorted(self._positions))

    @property
    def leader(self) -> int:
        """The lowest live worker."""
        return self.workers[0]

    def roles(self, degree: int) -> tuple[int, ...]:
        """Live roles at `degree`, ascending: position on the tp axis -> role."""
        gone = set(self.loss_order[: self.num_roles - degree])
        return tuple(role for role in range(self.num_roles) if role not in gone)

    def position(self, worker: int) -> Position:
        """Where a worker stands; ConfigError when it holds no role."""
        if worker not in self._positions:
            raise ConfigError(f"worker {worker} holds no role; workers with roles: {self.workers}")
        return self._positions[worker]

    def replica_of(self, worker: int) -> Replica:
        """The replica that a worker belongs to."""
        return self.replicas[self.position(worker).replica]

    def coordinates(self, worker: int) -> Coordinates:
        """A worker's degree, role, fsdp size and fsdp coordinate."""
        at, replica = self.position(worker), self.replica_of(worker)
        return Coordinates(replica.degree, self.roles(replica.degree)[at.tp], replica.fsdp_size, at.fsdp, replica.relief)

    @property
    def data_rows(self) -> tuple[tuple[int, int], ...]:
        """(replica, fsdp coordinate) of every group of roles that sees the same samples."""
        return tuple((r, f) for r, replica in enumerate(self.replicas) for f in range(replica.fsdp_size))

    def data_row(self, worker: int) -> int:
        """Index of the worker's data row in `data_rows`."""
        at = self.position(worker)
        return self.data_rows.index((at.replica, at.fsdp))

    @property
    def sync_degree(self) -> int:
        """Degree of the sync layout: the smallest of all replicas."""
        return min(replica.degree for replica in self.replicas)

    @property
    def sync_fsdp_size(self) -> int:
        """Fsdp size of the sync grid: the largest of all replicas."""
        return max(replica.fsdp_size for replica in self.replicas)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Slots in the one order in which every worker reduces them."""
        return tuple(Slot(f, role) for f in range(self.sync_fsdp_size) for role in self.roles(self.sync_degree))

    def slot_coordinates(self, slot: Slot) -> Coordinates:
        """A slot seen as a worker of a replica that has the sync layout."""
        return Coordinates(self.sync_degree, slot.role, self.sync_fsdp_size, slot.fsdp)

    def host(self, replica: int, slot: Slot) -> int:
        """The worker of a replica that reduces a slot; one of a smaller fsdp size hosts several."""
        grid = self.replicas[replica].grid
        position = self.roles(len(grid[0])).index(slot.role)
        return grid[slot.fsdp * len(grid) // self.sync_fsdp_size][position]

    @property
    def digest(self) -> str:
        """Equal on two workers exactly when their topologies are; to be compared before groups are made of them."""
        whole = (self.num_roles, self.loss_order, self.replicas, self.spares)
        return hashlib.sha256(repr(whole).encode()).hexdigest()[:16]

    def without(self, worker: int) -> Topology:
        """The topology after `worker` is lost and its replica goes on with one role less.

        While every replica is complete, the lost role becomes the first of the loss order. Later the replica must lack the
        next role of the order: the worker that played it takes the lost role over. Other workers of the lost column of a
        replica with fsdp > 1 are parked as spares. A replica without roles left is dropped.

        Raises:
            ConfigError: the worker has no role and is no spare, or the last replica would go.
        """
        if worker in self.spares:
            return replace(self, spares=tuple(spare for spare in self.spares if spare != worker))
        at, replica = self.position(worker), self.replica_of(worker)
        parked = tuple(row[at.tp] for row in replica.grid if row[at.tp] != worker)
        if replica.degree == 1:
            if len(self.replicas) == 1:
                raise ConfigError(f"worker {worker} is the last role of the last replica; nothing is left to train with")
            return replace(self, replicas=self._replaced(at.replica, None), spares=self.spares + parked)
        order = self.loss_order
        lost = self.roles(replica.degree)[at.tp]
        if all(other.degree == self.num_roles for other in self.replicas):
            order = (lost, *(role for role in order if role != lost))[: self.num_roles - 1]
        wanted = order[self.num_roles - replica.degree]
        grid = tuple(self._drop(row, at.tp, replica.degree, lost, wanted) for row in replica.grid)
        return replace(
            self, loss_order=order, replicas=self._replaced(at.replica, Replica(grid)), spares=self.spares + parked
        )

    def with_workers(self, replica: int, workers: Iterable[int]) -> Topology:
        """The topology after one worker per fsdp coordinate brings back the role that `replica` lost last.

        Raises:
            ConfigError: the replica is complete, or the number of workers is not its fsdp size.
        """
        old, new = self.replicas[replica], tuple(workers)
        if old.degree == self.num_roles or len(new) != old.fsdp_size:
            raise ConfigError(
                f"replica {replica} of degree {old.degree}/{self.num_roles} takes {old.fsdp_size} worker(s) for the role it "
                f"lost last, got {new}"
            )
        at = self.roles(old.degree + 1).index(self.loss_order[self.num_roles - old.degree - 1])
        grid = tuple((*row[:at], worker, *row[at:]) for row, worker in zip(old.grid, new, strict=True))
        spares = tuple(spare for spare in self.spares if spare not in new)
        return replace(self, replicas=self._replaced(replica, Replica(grid)), spares=spares)

    def with_worker(self, replica: int, worker: int) -> Topology:
        """`with_workers` for a replica of fsdp size 1."""
        return self.with_workers(replica, (worker,))

    def _drop(self, row: tuple[int, ...], lost_at: int, degree: int, lost: int, wanted: int) -> tuple[int, ...]:
        plays = dict(zip(self.roles(degree), row, strict=True))
        del plays[lost]
        if lost != wanted:
            plays[lost] = plays.pop(wanted)
        return tuple(plays[role] for role in sorted(plays))

    def _replaced(self, index: int, replica: Replica | None) -> tuple[Replica, ...]:
        changed = () if replica is None else (replica,)
        return (*self.replicas[:index], *changed, *self.replicas[index + 1 :])

    def __repr__(self) -> str:
        shapes = ", ".join(f"{r.fsdp_size}x{r.degree}{' relieved' if r.relief else ''}" for r in self.replicas)
        return f"Topology({shapes}; {self.num_roles} roles, lost first {self.loss_order})"
