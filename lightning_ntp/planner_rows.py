"""Live data rows of replicas, before they get a shape: filling them from spares and packing the hurt ones together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from lightning_ntp.topology import Topology


@dataclass(frozen=True, slots=True)
class Row:
    """Live workers of one data row by the role they played, and where the row stood."""

    replica: int
    coordinate: int
    plays: tuple[tuple[int, int], ...]

    @property
    def workers(self) -> tuple[int, ...]:
        """Live workers."""
        return tuple(worker for _, worker in self.plays)


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one replica to be, with its shape before the loss."""

    rows: tuple[Row, ...]
    fsdp_size: int
    degree: int

    @property
    def workers(self) -> tuple[int, ...]:
        """Live workers, row by row."""
        return tuple(chain.from_iterable(row.workers for row in self.rows))

    @property
    def hurt(self) -> bool:
        """Whether a worker is missing."""
        return len(self.workers) < self.fsdp_size * self.degree

    @property
    def refilled(self) -> bool:
        """Whether spares stand in for lost workers."""
        return any(role < 0 for row in self.rows for role, _ in row.plays)


def live_groups(topology: Topology, gone: set[int]) -> list[Group]:
    """The rows of each replica without the workers that are gone."""
    groups = []
    for index, replica in enumerate(topology.replicas):
        roles = topology.roles(replica.degree)
        rows = tuple(
            Row(index, f, tuple((role, w) for role, w in zip(roles, row, strict=True) if w not in gone))
            for f, row in enumerate(replica.grid)
        )
        groups.append(Group(rows, replica.fsdp_size, replica.degree))
    return groups


def fill_from_spares(groups: Sequence[Group], spares: Sequence[int], domain_size: int) -> tuple[list[Group], list[int]]:
    """Let spares play lost roles: those of the row's own domain, else a whole spare row in place of the hurt one."""
    pool: dict[int, list[int]] = defaultdict(list)
    for spare in sorted(spares):
        pool[spare // domain_size].append(spare)
    filled = []
    for group in groups:
        rows = [_fill_row(row, group.degree, pool, domain_size) for row in group.rows] if group.hurt and pool else group.rows
        filled.append(Group(tuple(rows), group.fsdp_size, group.degree))
    return filled, sorted(chain.from_iterable(pool.values()))


def _fill_row(row: Row, degree: int, pool: dict[int, list[int]], domain_size: int) -> Row:
    missing = degree - len(row.plays)
    if not missing:
        return row
    homes = {worker // domain_size for worker in row.workers}
    for home in homes & pool.keys():
        taken, pool[home] = pool[home][:missing], pool[home][missing:]
        # no role yet (-1): `planner` gives it one that is wanted
        row = Row(row.replica, row.coordinate, (*row.plays, *((-1 - i, worker) for i, worker in enumerate(taken))))
        missing -= len(taken)
    whole = next((home for home in sorted(pool) if len(pool[home]) >= degree), None)
    if not missing or whole is None:
        return row
    taken, pool[whole] = pool[whole][:degree], pool[whole][degree:]
    for worker in row.workers:
        pool[worker // domain_size].append(worker)
    return Row(row.replica, row.coordinate, tuple((-1 - i, worker) for i, worker in enumerate(taken)))


def pack_hurt_rows(groups: Sequence[Group]) -> list[Group]:
    """Exchange rows between hurt replicas of one shape, so that the worst rows share a replica; healthy replicas stay."""
    packed = list(groups)
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        if group.hurt and group.fsdp_size > 1:
            by_shape[group.fsdp_size, group.degree].append(index)
    for (fsdp_size, degree), members in by_shape.items():
        if len(members) < 2:
            continue
        rows = sorted(chain.from_iterable(groups[i].rows for i in members), key=lambda row: len(row.plays))
        for at, index in enumerate(members):
            packed[index] = Group(_seated(rows[at * fsdp_size : (at + 1) * fsdp_size]), fsdp_size, degree)
    return packed


def _seated(rows: Sequence[Row]) -> tuple[Row, ...]:
    """In the order of coordinates: a row that keeps its coordinate keeps its state."""
    seats: dict[int, Row] = {}
    late = []
    for row in rows:
        if row.coordinate in seats:
            late.append(row)
        else:
            seats[row.coordinate] = row
    free = (seat for seat in range(len(rows)) if seat not in seats)
    seats.update(zip(free, late, strict=False))
    return tuple(seats[seat] for seat in sorted(seats))


def by_domain(workers: Iterable[int], domain_size: int) -> list[list[int]]:
    """Workers that share a scale-up domain, in their order; worker w lives in domain ``w // domain_size``."""
    domains: dict[int, list[int]] = defaultdict(list)
    for worker in workers:
        domains[worker // domain_size].append(worker)
    return list(domains.values())
