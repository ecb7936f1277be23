"""Who writes which part of a checkpoint: every element once, spread over all workers of all replicas.

    replica with the most workers --its cells--> split over all replicas by their workers --met with own cell--> own part

Replicas of one shape so write one rectangle per worker and parameter. Small parameters go to one replica each, in turn, as
every rectangle costs a header.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from lightning_ntp.layout import Span, slice_storage, subtract, total_length
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
    turn = (index * _GOLDEN >> 16) % len(parties)  # scattered: layers repeat, so counting would favour the same ones
    order = parties[turn:] + parties[:turn]
    if spec.numel < small_numel:
        order = order[:1]
    names = [name for name, _ in order]
    if party not in names:
        return ()
    ends = [0, *accumulate(weight for _, weight in order)]
    first, last = ends[names.index(party)], ends[names.index(party) + 1]
    found = []
    for cell in _reference_cells(spec, topology):
        length = total_length(cell.rows)
        rows = slice_storage(cell.rows, length * first // ends[-1], length * last // ends[-1])
        part = Cell(_common(own.rows, rows), _common(own.columns, cell.columns))
        if part.numel:
            found.append(part)
    return tuple(found)


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
