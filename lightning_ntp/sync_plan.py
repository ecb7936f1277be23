"""What one worker sends, adds and receives when a bucket of gradients is synchronised over ragged replicas.

    own cells --pieces--> slots of the sync layout --all-reduce over replicas--> slots --pieces--> own cells

Everything is integers and the same on all workers up to who looks at it; `dtensor.grad_sync` carries it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ntp.model_spec import Cell, Coordinates, ParamSpec, Piece
from lightning_ntp.topology import Slot, Topology


@dataclass(frozen=True, slots=True)
class FlatView:
    """A matrix inside a flat buffer: contiguous rows x columns from `offset` on."""

    offset: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Elements of the view."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class SyncPiece:
    """A rectangle between a worker's cell (source side) and a slot (destination side).

    Args:
        param: position of the parameter in the bucket.
        source: worker whose cell it is; it gets the reduced rectangle back.
        host: worker that reduces the slot.
        slot: the slot.
        adds: whether the source's gradient counts in the sum. An extra role whose copy of a replicated parameter already
            has the same gradient as the core roles' only receives.
        piece: where the rectangle lies in the source's cell and in the slot.
    """

    param: int
    source: int
    host: int
    slot: Slot
    adds: bool
    piece: Piece


@dataclass(frozen=True)
class SyncPlan:
    """One bucket seen by one worker.

    Args:
        names: parameters in the order of FSDP2's flat bucket.
        cells: per parameter, its view in the flat buffer (padding skipped).
        flat_numel: elements of the flat buffer, padding included.
        peers: workers of the replica, in the order of its process group.
        slots: slots that this worker hosts, in the global order.
        slot_views: per hosted slot, per parameter its view in the slot's buffer.
        slot_numels: per hosted slot, elements of its buffer (padded like FSDP2's where the slot is a whole cell).
        local: pieces whose source and host are this worker.
        outgoing: per peer, pieces of this worker's cells that the peer hosts.
        incoming: per peer, pieces of the peer's cells that this worker hosts.
        exchanges: whether any worker of the replica exchanges anything: all of them must then call the exchange.
    """

    names: tuple[str, ...]
    cells: tuple[FlatView, ...]
    flat_numel: int
    peers: tuple[int, ...]
    slots: tuple[Slot, ...]
    slot_views: tuple[tuple[FlatView, ...], ...]
    slot_numels: tuple[int, ...]
    local: tuple[SyncPiece, ...]
    outgoing: tuple[tuple[SyncPiece, ...], ...]
    incoming: tuple[tuple[SyncPiece, ...], ...]
    exchanges: bool

    @property
    def sent_elements(self) -> int:
        """Elements that this worker sends inside its replica in one sync: its pieces there, the hosted ones back."""
        there = sum(piece.piece.numel for pieces in self.outgoing for piece in pieces if piece.adds)
        back = sum(piece.piece.numel for pieces in self.incoming for piece in pieces)
        return there + back

    @property
    def is_in_place(self) -> bool:
        """Whether the flat buffer *is* the one hosted slot: then it is all-reduced as it stands and nothing is packed."""
        if self.exchanges or len(self.slots) != 1 or self.slot_numels[0] != self.flat_numel:
            return False
        whole = {piece.param: piece.piece for piece in self.local if piece.adds}
        return self.cells == self.slot_views[0] and all(
            view.numel == 0
            or (index in whole and whole[index].numel == view.numel and whole[index].source_row == 0
                and whole[index].destination_row == 0)
            for index, view in enumerate(self.cells)
        )


def plan_sync(specs: Sequence[ParamSpec], topology: Topology, worker: int) -> SyncPlan:
    """The sync of one bucket for one worker.

    Args:
        specs: the bucket's parameters in the order of FSDP2's flat buffer.
        topology: who plays what.
        worker: for whom.
    """
    replica = topology.position(worker).replica
    me = topology.coordinates(worker)
    cells, flat_numel = _flat_views(specs, me)
    hosted = tuple(slot for slot in topology.slots if topology.host(replica, slot) == worker)
    pieces = _pieces(specs, topology, replica)
    peers = topology.replicas[replica].workers
    slots = [_slot_views(specs, topology, slot) for slot in hosted]
    return SyncPlan(
        names=tuple(spec.fqn for spec in specs),
        cells=cells,
        flat_numel=flat_numel,
        peers=peers,
        slots=hosted,
        slot_views=tuple(views for views, _ in slots),
        slot_numels=tuple(numel for _, numel in slots),
        local=tuple(p for p in pieces if p.source == p.host == worker),
        outgoing=tuple(tuple(p for p in pieces if p.source == worker != p.host == peer) for peer in peers),
        incoming=tuple(tuple(p for p in pieces if p.host == worker != p.source == peer) for peer in peers),
        exchanges=any(p.source != p.host for p in pieces),
    )


def _flat_views(specs: Sequence[ParamSpec], at: Coordinates) -> tuple[tuple[FlatView, ...], int]:
    views, offset = [], 0
    for spec in specs:
        views.append(FlatView(offset, *spec.cell(at).shape))
        rows, columns = spec.flat_shape(at)
        offset += rows * columns
    return tuple(views), offset


def _slot_views(specs: Sequence[ParamSpec], topology: Topology, slot: Slot) -> tuple[tuple[FlatView, ...], int]:
    """Laid out like FSDP2's flat buffer wherever the slot holds a whole cell, so that an even job packs nothing."""
    views, offset, at = [], 0, topology.slot_coordinates(slot)
    for spec in specs:
        cell = _slot_cell(spec, topology, slot)
        views.append(FlatView(offset, *cell.shape))
        rows, columns = spec.flat_shape(at) if cell == spec.cell(at) else cell.shape
        offset += rows * columns
    return tuple(views), offset


def _has_equal_copies(spec: ParamSpec) -> bool:
    return spec.dim is None and not spec.partial


def _slot_cell(spec: ParamSpec, topology: Topology, slot: Slot) -> Cell:
    """Equal copies: every core role has a slot of its own. Everything else: each element in its owner's slot only."""
    at = topology.slot_coordinates(slot)
    if _has_equal_copies(spec):
        return spec.cell(at)
    return spec.owned_cell(at, topology.roles(topology.sync_degree)[0])


def _pieces(specs: Sequence[ParamSpec], topology: Topology, replica: int) -> tuple[SyncPiece, ...]:
    """All pieces of one replica, in one order on all its workers."""
    core = topology.roles(topology.sync_degree)
    sources = [(worker, topology.coordinates(worker)) for worker in topology.replicas[replica].workers]
    found: list[SyncPiece] = []
    held = {(worker, index): spec.cell(at) for worker, at in sources for index, spec in enumerate(specs)}
    for slot in topology.slots:
        host = topology.host(replica, slot)
        for index, spec in enumerate(specs):
            wanted = _slot_cell(spec, topology, slot)
            for worker, at in sources:
                adds = True
                if _has_equal_copies(spec):
                    adds = at.role in core
                    # An extra's copy comes from the first core role; a core role's copy from its own slot.
                    if slot.role != (at.role if adds else core[0]):
                        continue
                for piece in held[worker, index].pieces(wanted):
                    found.append(SyncPiece(index, worker, host, slot, adds, piece))
    return tuple(found)
