"""Who writes which part of a checkpoint: every element once, spread over all workers of all replicas.

    replica with the most workers --its cells--> split over all replicas by their workers --met with own cell--> own part

Replicas of one shape so write one rectangle per worker and parameter. Small parameters go to one replica each, in turn, as
every rectangle costs a header.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from lightning_ntp.layout import Span, intersect, slice_storage, subtract, total_length
from lightning_ntp.model_spec import Cell, ParamSpec
from lightning_ntp.topology import Topology

SMALL_NUMEL = 1 << 16
"""Parameters of fewer elements are written by one replica."""

_GOLDEN = 2654435761


class Party(NamedTuple):
    """Who writes a part: a replica, or one role of it where all roles hold the same."""

    replica: int
    role: int | None = None


def written_cells(
    spec: ParamSpec, index: int, topology: Topology, worker: int, small_numel: int = SMALL_NUMEL
) -> tuple[Cell, ...]:
    """What `worker` writes of a parameter, or of a tensor laid out like it: disjoint parts of its own cell.

    Over all workers of the topology every element appears exactly once.

    Args:
        spec: of the parameter.
        index: its number in the plan; parameters take turns in who writes the first part.
        topology: of the workers that write.
        worker: one of them.
        small_numel: parameters of fewer elements are written by one replica.
    """
    at, replica = topology.coordinates(worker), topology.position(worker).replica
    lowest = topology.roles(at.degree)[0]
    own, party = spec.owned_cell(at, lowest), Party(replica)
    if spec.dim is None:
        own, party = spec.cell(at), Party(replica, at.role)  # every role holds it: they share the work
    parties = _parties(spec, topology)
    found, alone = [], spec.numel < small_numel
    for number, cell in enumerate(_reference_cells(spec, topology)):
        columns = _common(own.columns, cell.columns)
        if not columns or not intersect(own.rows, cell.rows):
            continue
        start, stop = _share(parties, party, index, 0 if alone else number, alone)
        length = total_length(cell.rows)
        rows = slice_storage(cell.rows, int(length * start), int(length * stop))
        part = Cell(_common(own.rows, rows), columns)
        if part.numel:
            found.append(part)
    return tuple(found)


def _share(
    parties: list[tuple[Party, int]], party: Party, index: int, number: int, alone: bool
) -> tuple[Fraction, Fraction]:
    """Which part of a cell's rows a party writes, as fractions.

    Who comes first changes from cell to cell: the roles of another replica hold the cell's rows in pieces of unequal size.
    """
    scattered = (index + number) * _GOLDEN >> 16  # layers repeat, so counting would favour the same ones
    if alone:
        tickets = [name for name, weight in parties for _ in range(weight)]
        return Fraction(0), Fraction(int(tickets[scattered % len(tickets)] == party))
    turn = scattered % len(parties)
    order = parties[turn:] + parties[:turn]
    ends = [0, *accumulate(weight for _, weight in order)]
    at = [name for name, _ in order].index(party)
    return Fraction(ends[at], ends[-1]), Fraction(ends[at + 1], ends[-1])


def _parties(spec: ParamSpec, topology: Topology) -> list[tuple[Party, int]]:
    """Who shares the writing, each with its weight in workers: replicas, or their roles where all hold the same."""
    if spec.dim is not None:
        return [(Party(number), len(replica.workers)) for number, replica in enumerate(topology.replicas)]
    return [
        (Party(number, role), replica.fsdp_size)
        for number, replica in enumerate(topology.replicas)
        for role in topology.roles(replica.degree)
    ]


def _reference_cells(spec: ParamSpec, topology: Topology) -> Iterator[Cell]:
    """The owned cells of the replica with the most workers: over them every element once."""
    reference = max(topology.replicas, key=lambda replica: len(replica.workers))
    lowest = topology.roles(reference.degree)[0]
    for worker in reference.workers:
        cell = spec.owned_cell(topology.coordinates(worker), lowest)
        if cell.numel:
            yield cell


def _common(spans: tuple[Span, ...], others: tuple[Span, ...]) -> tuple[Span, ...]:
    """Indices of both, in the order of the first."""
    return subtract(spans, subtract(spans, others))
