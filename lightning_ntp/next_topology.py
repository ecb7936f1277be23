"""Which topology follows when workers are lost or come back; pure, so that every worker finds the same one alone.

    old, lost, joined --> planner: shapes of the hurt replicas, spares into lost roles --> regrowth: roles, rows and replicas come back
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_ntp.cost_model import GpuSpec
from lightning_ntp.errors import ConfigError
from lightning_ntp.planner import Costs, plan_placement
from lightning_ntp.presets import GPUS
from lightning_ntp.topology import Replica, Topology


def next_topology(
    old: Topology,
    lost: Collection[int],
    joined: Collection[int],
    *,
    healthy: Topology,
    cost: Costs,
    micro_batch: int = 1,
    reshape: bool = False,
    places: Mapping[int, int] | None = None,
) -> Topology:
    """The topology after `lost` workers are gone and `joined` ones stand ready. Local; equal arguments give equal results.

    A worker that joins takes a lost role of its home replica (where it stood in `healthy`, else where its domain is), else one of the
    replica that has the fewest, also one that was missing when the job started; else it is parked as a spare. Who holds state stays
    where it is as far as shapes allow. In replicas that change nobody is relieved any more: a loss moves granules anyway, and who is
    still slow will be named again.

    Args:
        old: the topology that broke, or that is asked to regroup.
        lost: workers of it, spares included, that are gone.
        joined: workers that hold nothing yet.
        healthy: the topology that the job started with: shapes to grow back to.
        cost: what shapes cost; `WorkerCount` where the model is not known.
        micro_batch: see `planner.plan_placement`.
        reshape: give a hurt replica another (fsdp, tp) shape where that parks fewer workers; it moves nearly all of its state.
        places: of workers that came later, the worker of `healthy` at whose place they stand: there is their home.

    Raises:
        ConfigError: a worker joins that is there already, or one is lost that was not.
        UnrecoverableError: nothing that is left can hold the model, or the last holder of a region is gone.
    """
    staying = set(old.workers + old.spares) - set(lost)
    twice = staying & set(joined)
    if twice:
        raise ConfigError(f"workers {sorted(twice)} join a job in which they are")
    ready = replace(old, spares=(*(spare for spare in old.spares if spare not in lost), *sorted(joined)))
    gone = set(lost) - set(old.spares)
    regrowth = _Regrowth(healthy, cost, micro_batch, places=places or {})
    found = _following(ready, gone, regrowth, refactor=False)
    if reshape and gone and found.spares:
        other = _following(ready, gone, regrowth, refactor=True)
        found = min(found, other, key=lambda topology: len(topology.spares))
    return _still_relieved(_with_all_at_work(found, joined), old)


def _following(topology: Topology, gone: Collection[int], regrowth: _Regrowth, refactor: bool) -> Topology:
    if gone:
        # Many micro-batches: shapes are compared by speed, not by what a small batch rounds to.
        batch, micro_batch = 64 * len(topology.data_rows) * regrowth.micro_batch, regrowth.micro_batch
        topology = plan_placement(topology, regrowth.cost, batch, gone, micro_batch=micro_batch, refactor=refactor).topology
    topology = regrowth.of(topology)
    # Whose own place is taken by another of the same domain helps out where one is free.
    return replace(regrowth, anywhere=True).of(topology)


@dataclass(frozen=True)
class WorkerCount:
    """Costs where nothing is known but workers: a shape is as fast as it has many, and everything fits."""

    domain_size: int
    gpu: GpuSpec = GPUS["h100"]

    def sample_seconds(self, degree: int, fsdp_size: int = 1, speed: float = 1.0) -> float:
        """Of one data row, in the time of one worker."""
        return 1 / (degree * speed)

    def sync_seconds(self, sync_degree: int, fsdp_size: int = 1, num_replicas: int = 2) -> float:
        """0."""
        return 0.0

    def power_to_keep_pace(self, degree: int, healthy_degree: int) -> float | None:
        """No advice."""
        return None

    def memory_bytes(self, degree: int, fsdp_size: int = 1, micro_batch: int = 1) -> float:
        """0."""
        return 0.0

    def fits(self, degree: int, fsdp_size: int = 1, micro_batch: int = 1) -> bool:
        """True."""
        return True

    def moved_bytes(self, old: Topology, new: Topology) -> int:
        """0."""
        return 0


@dataclass(frozen=True)
class _Regrowth:
    healthy: Topology
    cost: Costs
    micro_batch: int
    anywhere: bool = False
    places: Mapping[int, int] = field(default_factory=dict)

    def of(self, topology: Topology) -> Topology:
        """Spares back into roles, then rows, then replicas, each in its home."""
        homes = self._homes(topology)
        for index, home in homes.items():
            topology = self._grown(topology, index, home)
        for home in range(len(self.healthy.replicas)):
            if home not in self._homes(topology).values():
                topology = self._with_replica(topology, home)
        return topology

    def _homes(self, topology: Topology) -> dict[int, int]:
        """Replica -> home, each home once: where most of its workers come from."""
        counts = [
            (-sum(self._home(worker) == home for worker in replica.workers), home, index)
            for index, replica in enumerate(topology.replicas)
            for home in range(len(self.healthy.replicas))
        ]
        homes: dict[int, int] = {}
        for _, home, index in sorted(counts):
            if index not in homes and home not in homes.values():
                homes[index] = home
        return homes

    def _place(self, worker: int) -> int:
        return self.places.get(worker, worker)

    def _domain(self, worker: int) -> int:
        return self._place(worker) // self.cost.domain_size

    def _home(self, worker: int) -> int | None:
        for index, replica in enumerate(self.healthy.replicas):
            if self._place(worker) in replica.workers:
                return index
        for index, replica in enumerate(self.healthy.replicas):
            if any(self._domain(mate) == self._domain(worker) for mate in replica.workers):
                return index
        return None

    def _pool(self, topology: Topology, home: int) -> list[int]:
        domains = {self._domain(mate) for mate in self.healthy.replicas[home].workers if self.anywhere}
        fits = [s for s in sorted(topology.spares) if self._home(s) == home or self._domain(s) in domains]
        return sorted(fits, key=lambda spare: self._home(spare) != home)

    def _grown(self, topology: Topology, index: int, home: int) -> Topology:
        wanted = self.healthy.replicas[home]
        while True:
            replica, pool = topology.replicas[index], self._pool(topology, home)
            rows, degree = replica.fsdp_size, replica.degree
            if degree < wanted.degree and len(pool) >= rows and self._fits(rows, degree + 1):
                topology = topology.with_workers(index, self._seats(topology, index, pool))
            elif rows < wanted.fsdp_size and len(pool) >= degree and self._fits(rows + 1, degree):
                topology = _with_row(topology, index, pool[:degree], self._coordinate(replica, pool[:degree], wanted))
            elif self._needs_both(replica, wanted, pool):
                return _reshaped(topology, index, wanted, pool)
            else:
                return topology

    def _seats(self, topology: Topology, index: int, pool: Sequence[int]) -> list[int]:
        """One worker per data row; who stood in the row before comes back to it."""
        grid, left = topology.replicas[index].grid, list(pool)
        old_rows = [set(row) for replica in self.healthy.replicas for row in replica.grid]
        seats: list[int] = []
        for row in grid:
            mates = next((old for old in old_rows if old & {self._place(worker) for worker in row}), set())
            chosen = next((worker for worker in left if self._place(worker) in mates), left[0])
            left.remove(chosen)
            seats.append(chosen)
        return seats

    def _coordinate(self, replica: Replica, row: Sequence[int], wanted: Replica) -> int:
        """Where the new row stands: at its old place among the rows that are there, else at the end."""
        place = {worker: at for at, workers in enumerate(wanted.grid) for worker in workers}
        at = place.get(self._place(row[0]), wanted.fsdp_size)
        return sum(place.get(self._place(workers[0]), wanted.fsdp_size) < at for workers in replica.grid)

    def _needs_both(self, replica: Replica, wanted: Replica, pool: Sequence[int]) -> bool:
        is_whole = (replica.fsdp_size, replica.degree) == (wanted.fsdp_size, wanted.degree)
        enough = len(replica.workers) + len(pool) >= len(wanted.workers)
        return not is_whole and enough and self._fits(wanted.fsdp_size, wanted.degree)

    def _with_replica(self, topology: Topology, home: int) -> Topology:
        """A replica of the spares at home, in the fastest shape that they can take."""
        pool, wanted = self._pool(topology, home), self.healthy.replicas[home]
        shapes = [
            (rows, degree)
            for degree in range(1, wanted.degree + 1)
            for rows in range(1, wanted.fsdp_size + 1)
            if rows * degree <= len(pool) and self._fits(rows, degree)
        ]
        if not shapes:
            return topology
        rows, degree = max(shapes, key=lambda shape: shape[0] / self.cost.sample_seconds(shape[1], shape[0]))
        seats = {worker: at for at, worker in enumerate(wanted.workers)}
        used = sorted(pool, key=lambda worker: seats.get(self._place(worker), len(seats)))[: rows * degree]
        grid = tuple(tuple(used[row * degree : (row + 1) * degree]) for row in range(rows))
        at = sum(other < home for other in self._homes(topology).values())
        replicas = (*topology.replicas[:at], Replica(grid), *topology.replicas[at:])
        return replace(topology, replicas=replicas, spares=_without(topology.spares, used))

    def _fits(self, rows: int, degree: int) -> bool:
        return self.cost.fits(degree, rows, self.micro_batch)


def _with_all_at_work(topology: Topology, joined: Collection[int]) -> Topology:
    """Those who have found no place at home in lost roles elsewhere, the smallest replica's first."""
    while True:
        free = sorted(set(joined) & set(topology.spares))
        hurt = [
            (replica.degree, index)
            for index, replica in enumerate(topology.replicas)
            if replica.degree < topology.num_roles and replica.fsdp_size <= len(free)
        ]
        if not hurt:
            return topology
        _, index = min(hurt)
        topology = topology.with_workers(index, free[: topology.replicas[index].fsdp_size])


def _still_relieved(topology: Topology, old: Topology) -> Topology:
    """Replicas in which nothing has changed go on to relieve their slow roles."""
    reliefs = {(replica.grid, old.roles(replica.degree)): replica.relief for replica in old.replicas}
    replicas = (
        replace(replica, relief=reliefs.get((replica.grid, topology.roles(replica.degree)), ()))
        for replica in topology.replicas
    )
    return replace(topology, replicas=tuple(replicas))


def _with_row(topology: Topology, index: int, row: Sequence[int], at: int) -> Topology:
    replica = topology.replicas[index]
    grown = Replica((*replica.grid[:at], tuple(row), *replica.grid[at:]))
    replicas = (*topology.replicas[:index], grown, *topology.replicas[index + 1 :])
    return replace(topology, replicas=replicas, spares=_without(topology.spares, row))


def _reshaped(topology: Topology, index: int, wanted: Replica, pool: Sequence[int]) -> Topology:
    """The healthy shape over a replica's workers and spares: everybody who has a healthy seat takes it."""
    there = [*topology.replicas[index].workers, *pool]
    seated = {worker for worker in wanted.workers if worker in there}
    others = iter([worker for worker in there if worker not in seated])
    grid = tuple(tuple(worker if worker in seated else next(others) for worker in row) for row in wanted.grid)
    used = {worker for row in grid for worker in row}
    replicas = (*topology.replicas[:index], Replica(grid), *topology.replicas[index + 1 :])
    parked = [worker for worker in there if worker not in used and worker not in topology.spares]
    return replace(topology, replicas=replicas, spares=(*_without(topology.spares, used), *parked))


def _without(spares: Sequence[int], used: Collection[int]) -> tuple[int, ...]:
    return tuple(spare for spare in spares if spare not in used)
