"""Gradient sync of one FSDP bucket over ragged replicas: carries out a `SyncPlan` inside FSDP2's all-reduce hook.

[Note: accumulation] FSDP2 calls the hook at every micro-batch and then adds the buffer to ``param.grad``. Replicas may run different
numbers of micro-batches, so only the last one of a window exchanges: the earlier ones are set aside in a buffer of the reduce
dtype and FSDP2 is left with zeros.

[Note: order] All replicas must reduce their buckets in one order; equal sizes in another order would be summed silently. Each
exchange extends a digest that the strategy compares at the vote, before any update.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup

from lightning_ntp.dtensor.collectives import exchange_uneven, sum_in_place
from lightning_ntp.errors import PlanMismatchError
from lightning_ntp.sync_plan import FlatView, Slot, SyncPiece, SyncPlan


@dataclass
class WindowState:
    """What all buckets of a model share during one optimizer step's window of micro-batches.

    Args:
        is_last_micro_batch: whether the backward that runs now ends the window and therefore exchanges.
        sent_elements: elements this worker has sent inside its replica since `begin`.
    """

    is_last_micro_batch: bool = True
    sent_elements: int = 0
    order: list[int] = field(default_factory=list)
    held: list[tuple[torch.cuda.Event, torch.Tensor]] = field(default_factory=list)

    def begin(self) -> None:
        """Forget the last window."""
        self.is_last_micro_batch = True
        self.sent_elements = 0
        self.order.clear()
        self.release()

    def hold(self, buffer: torch.Tensor) -> None:
        """Keep a CUDA buffer alive until the work queued on it so far is done.

        FSDP2 allocates the bucket on its reduce-scatter stream and keeps no reference once it is cast; without ours the
        allocator could hand the memory to the next bucket while this one is still being reduced on another stream.
        """
        if buffer.is_cuda:
            self.held = [(event, held) for event, held in self.held if not event.query()]
            self.held.append((torch.cuda.current_stream().record_event(), buffer))

    def release(self) -> None:
        """End of backward: the optimizer's stream has been joined, nothing needs the buffers."""
        self.held.clear()

    @property
    def order_digest(self) -> int:
        """63 bits over the sequence of exchanged buckets; equal on all workers of a healthy job."""
        digest = hashlib.sha256(",".join(map(str, self.order)).encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


class BucketSync:
    """The all-reduce hook of one FSDP unit.

    Args:
        index: number of the bucket, equal on all workers.
        plan: this worker's part.
        replica_group: all workers of this replica, in the order of ``plan.peers``.
        slot_groups: per hosted slot, its hosts in all replicas.
        window: shared state, see `WindowState`.
    """

    def __init__(
        self,
        index: int,
        plan: SyncPlan,
        replica_group: ProcessGroup,
        slot_groups: Mapping[Slot, ProcessGroup],
        window: WindowState,
    ) -> None:
        self.index, self.plan, self.window = index, plan, window
        self._replica_group = replica_group
        self._slot_groups = [slot_groups[slot] for slot in plan.slots]
        self._accumulated: torch.Tensor | None = None
        self._slot_at = {slot: at for at, slot in enumerate(plan.slots)}
        self._sent = tuple(tuple(piece for piece in pieces if piece.adds) for pieces in plan.outgoing)
        self._received = tuple(tuple(piece for piece in pieces if piece.adds) for pieces in plan.incoming)

    def __call__(self, flat: torch.Tensor) -> None:
        """Replace FSDP2's reduce-scattered bucket by the sum over all replicas, in place.

        Args:
            flat: 1-D, ``plan.flat_numel`` elements of the reduce dtype.

        Raises:
            PlanMismatchError: the bucket has another size than planned.

        Collective over all workers in the last micro-batch of a window, local before it.
        """
        if flat.numel() != self.plan.flat_numel:
            raise PlanMismatchError(
                f"bucket {self.index} ({self.plan.names[0]} and {len(self.plan.names) - 1} more): got {flat.numel()} gradient "
                f"elements, planned {self.plan.flat_numel}; a parameter without a gradient is left out by FSDP2"
            )
        if not self.window.is_last_micro_batch:
            self._set_aside(flat)
            return
        if self._accumulated is not None:
            flat += self._accumulated
            self._accumulated = None
        self.window.order.append(self.index)
        self._reduce(flat)
        self.window.hold(flat)

    def forget(self) -> None:
        """Drop what earlier micro-batches of an abandoned window left."""
        self._accumulated = None

    def _set_aside(self, flat: torch.Tensor) -> None:
        if self._accumulated is None:
            self._accumulated = flat.clone()
        else:
            self._accumulated += flat
        flat.zero_()

    def _reduce(self, flat: torch.Tensor) -> None:
        if self.plan.is_in_place:
            sum_in_place(flat, self._slot_groups[0])
            return
        slots = [flat.new_zeros(numel) for numel in self.plan.slot_numels]
        for piece in self.plan.local:
            if piece.adds:
                self._slot_part(slots, piece).add_(self._cell_part(flat, piece))
        if self.plan.exchanges:
            parts = self._move(flat, [[self._cell_part(flat, p) for p in pieces] for pieces in self._sent], self._received)
            for piece, part in parts:
                self._slot_part(slots, piece).add_(part)
        for slot, group in zip(slots, self._slot_groups, strict=True):
            sum_in_place(slot, group)
        for piece in self.plan.local:
            self._cell_part(flat, piece).copy_(self._slot_part(slots, piece))
        if self.plan.exchanges:
            back = [[self._slot_part(slots, p) for p in pieces] for pieces in self.plan.incoming]
            for piece, part in self._move(flat, back, self.plan.outgoing):
                self._cell_part(flat, piece).copy_(part)

    def _move(
        self, like: torch.Tensor, outgoing: Sequence[Sequence[torch.Tensor]], incoming: Sequence[Sequence[SyncPiece]]
    ) -> list[tuple[SyncPiece, torch.Tensor]]:
        """One coalesced exchange inside the replica; returns what arrived, per piece as a matrix."""
        parts = [part.reshape(-1) for parts in outgoing for part in parts]
        send = torch.cat(parts) if parts else like.new_empty(0)
        sent = [sum(part.numel() for part in parts) for parts in outgoing]
        expected = [sum(piece.piece.numel for piece in pieces) for pieces in incoming]
        received = exchange_uneven(send, sent, expected, self._replica_group)
        self.window.sent_elements += send.numel()
        pieces = [piece for from_peer in incoming for piece in from_peer]
        chunks = received.split([piece.piece.numel for piece in pieces]) if pieces else ()
        return [
            (piece, chunk.view(len(piece.piece.rows), len(piece.piece.columns)))
            for piece, chunk in zip(pieces, chunks, strict=True)
        ]

    def _cell_part(self, flat: torch.Tensor, piece: SyncPiece) -> torch.Tensor:
        p = piece.piece
        return _block(flat, self.plan.cells[piece.param], p.source_row, p.source_column, len(p.rows), len(p.columns))

    def _slot_part(self, slots: Sequence[torch.Tensor], piece: SyncPiece) -> torch.Tensor:
        p, at = piece.piece, self._slot_at[piece.slot]
        view = self.plan.slot_views[at][piece.param]
        return _block(slots[at], view, p.destination_row, p.destination_column, len(p.rows), len(p.columns))


def _block(flat: torch.Tensor, view: FlatView, row: int, column: int, rows: int, columns: int) -> torch.Tensor:
    """A rectangle of a matrix that lies in a flat buffer, as a view of (rows, columns)."""
    return flat.as_strided((rows, columns), (view.columns, 1), view.offset + row * view.columns + column)
