"""Gradient sync of one FSDP bucket over ragged replicas: carries out a `SyncPlan` inside FSDP2's all-reduce hook.

[Note: accumulation] FSDP2 calls the hook at every micro-batch and then adds the buffer to ``param.grad``. Replicas may run different
numbers of micro-batches, so only the last one of a window exchanges: the earlier ones are set aside in a buffer of the reduce
dtype and FSDP2 is left with zeros.

[Note: order] All replicas must reduce their buckets in one order; equal sizes in another order would be summed silently. Each
exchange extends a digest that the strategy compares at the vote, before any update.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup

from lightning_ntp.dtensor.collectives import exchange_uneven, sum_in_place
from lightning_ntp.dtensor.stopwatch import STOPWATCH
from lightning_ntp.errors import PlanMismatchError
from lightning_ntp.kernels.blocks import Block, Moves, PackedRuns, padded
from lightning_ntp.kernels.pack import move_blocks, pack, unpack
from lightning_ntp.model_spec import Piece
from lightning_ntp.sync_plan import FlatView, Slot, SyncPiece, SyncPlan


@dataclass
class WindowState:
    """What all buckets of a model share during one optimizer step's window of micro-batches.

    Args:
        is_last_micro_batch: whether the backward that runs now ends the window and therefore exchanges.
        more_to_come: whether this backward will reach the bucket again: the step ran its unit several times.
        sent_elements: elements this worker has sent inside its replica since `begin`, padding not counted.
        order: buckets exchanged since `begin`.
        used: names of the parameters that have had a gradient since `begin`.
        on_exchange: called with a bucket's number before its exchange.
    """

    is_last_micro_batch: bool = True
    more_to_come: bool = False
    sent_elements: int = 0
    order: list[int] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    held: list[tuple[torch.cuda.Event, torch.Tensor]] = field(default_factory=list)
    on_exchange: Callable[[int], None] = lambda index: None

    def begin(self) -> None:
        """Forget the last window."""
        self.is_last_micro_batch = True
        self.more_to_come = False
        self.sent_elements = 0
        self.order.clear()
        self.used.clear()
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
        self._moves: BucketMoves | None = None

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
                f"elements, planned {self.plan.flat_numel}; was a parameter frozen or set free after the model had been cut?"
            )
        STOPWATCH.mark()
        if self.window.more_to_come or not self.window.is_last_micro_batch:
            self._set_aside(flat)
            return
        if self._accumulated is not None:
            flat += self._accumulated
            self._accumulated = None
        self.window.order.append(self.index)
        self.window.on_exchange(self.index)
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
        moves = self._moves_for(flat)
        slots = flat.new_zeros(moves.slots_numel)
        move_blocks(flat, slots, moves.local_adds, add=True)
        if self.plan.exchanges:
            unpack(self._move(flat, moves.sent, moves.received), moves.received, slots, add=True)
        for offset, numel, group in zip(moves.slot_offsets, self.plan.slot_numels, self._slot_groups, strict=True):
            sum_in_place(slots[offset : offset + numel], group)
        move_blocks(slots, flat, moves.local_back)
        if self.plan.exchanges:
            unpack(self._move(slots, moves.returned, moves.got_back), moves.got_back, flat)

    def _moves_for(self, flat: torch.Tensor) -> BucketMoves:
        """Made at the first exchange: only then is the reduce dtype known."""
        if self._moves is None or self._moves.sent.item_bytes != flat.element_size():
            self._moves = BucketMoves.of(self.plan, flat.element_size())
        return self._moves

    def _move(self, buffer: torch.Tensor, outgoing: PackedRuns, incoming: PackedRuns) -> torch.Tensor:
        """One coalesced exchange inside the replica; returns what arrived, packed."""
        self.window.sent_elements += outgoing.numel
        return exchange_uneven(pack(buffer, outgoing), outgoing.sizes, incoming.sizes, self._replica_group)


@dataclass(frozen=True)
class BucketMoves:
    """A `SyncPlan` as rectangles of two flat buffers: FSDP2's bucket, and all hosted slots one after another.

    Args:
        slot_offsets: where each hosted slot begins in the buffer of slots; aligned like a peer's run.
        slots_numel: elements of that buffer.
        local_adds: bucket -> slots of this worker's own.
        local_back: the same slots -> bucket, with the copies that do not add.
        sent: of the bucket, to the hosts of its pieces.
        received: into the slots, from the workers whose pieces are hosted here.
        returned: of the slots, back to them.
        got_back: into the bucket, from the hosts.
    """

    slot_offsets: tuple[int, ...]
    slots_numel: int
    local_adds: Moves
    local_back: Moves
    sent: PackedRuns
    received: PackedRuns
    returned: PackedRuns
    got_back: PackedRuns

    @classmethod
    def of(cls, plan: SyncPlan, item_bytes: int) -> BucketMoves:
        """For a reduce dtype of `item_bytes`. Local."""
        ends = list(itertools.accumulate((padded(numel, item_bytes) for numel in plan.slot_numels), initial=0))
        offset_of = dict(zip(plan.slots, ends, strict=False))
        views_of = dict(zip(plan.slots, plan.slot_views, strict=True))

        def in_bucket(p: SyncPiece) -> Block:
            return _block(plan.cells[p.param], 0, p.piece.source_row, p.piece.source_column, p.piece)

        def in_slots(p: SyncPiece) -> Block:
            view = views_of[p.slot][p.param]
            return _block(view, offset_of[p.slot], p.piece.destination_row, p.piece.destination_column, p.piece)

        def runs(place: Callable[[SyncPiece], Block], peers: Sequence[Sequence[SyncPiece]], all_of: bool) -> PackedRuns:
            return PackedRuns.of(([place(p) for p in pieces if all_of or p.adds] for pieces in peers), item_bytes)

        return cls(
            slot_offsets=tuple(ends[:-1]),
            slots_numel=ends[-1],
            local_adds=Moves(tuple((in_bucket(p), in_slots(p)) for p in plan.local if p.adds)),
            local_back=Moves(tuple((in_slots(p), in_bucket(p)) for p in plan.local)),
            sent=runs(in_bucket, plan.outgoing, all_of=False),
            received=runs(in_slots, plan.incoming, all_of=False),
            returned=runs(in_slots, plan.incoming, all_of=True),
            got_back=runs(in_bucket, plan.outgoing, all_of=True),
        )


def _block(view: FlatView, start: int, row: int, column: int, piece: Piece) -> Block:
    """A rectangle of a matrix that lies in a flat buffer from `start` on."""
    offset = start + view.offset + row * view.columns + column
    return Block(offset, view.columns, len(piece.rows), len(piece.columns))
