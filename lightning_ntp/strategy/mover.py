"""Carries out the batches of a reshard plan on local tensors; decides nothing.

    old cell --own pieces--> new cell <--pieces of peers--
       |                        |
       +--- what the new one lacks, kept as rests: old = new + rests
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from lightning_ntp.dtensor.collectives import exchange_uneven
from lightning_ntp.model_spec import Cell, ParamSpec, Piece
from lightning_ntp.reshard import Batch, Kept, ReshardPlan, Transfer
from lightning_ntp.strategy.fsdp import local_shape
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.held import Cells, HeldState, Moved, copy_common

Move = tuple[Kept, Transfer]


class Mover:
    """Fills this worker's new cells one tensor after the other and gives the old ones up as it goes.

    Args:
        held: the old cells, under ``held.record.topology``; what has moved is noted there.
        groups: of the new generation.
        moves: the plan.
        params: how parameters are cut under the new topology.
        kept: all tensors that are cut like a parameter.
        holds: whether the old cells are of the right step.

    Attributes:
        new: the new cells.
        received_bytes: in exchanges.
        peak_bytes: most that was held beyond the old cells at any time: new cells, rests, send and receive buffers.
    """

    def __init__(
        self,
        held: HeldState,
        groups: Groups,
        moves: ReshardPlan,
        params: Sequence[ParamSpec],
        kept: Sequence[Kept],
        holds: bool = True,
    ) -> None:
        self.held, self.groups, self.kept = held, groups, kept
        self.new: Cells = {}
        self.received_bytes = self.peak_bytes = self._bytes = 0
        me = groups.worker
        self._everyone = groups.topology.workers + groups.topology.spares
        self._local = {
            fqn: [transfer for transfer in transfers if transfer.is_local and transfer.destination == me]
            for fqn, transfers in moves.by_fqn.items()
        }
        self._wanted: dict[str, tuple[ParamSpec, Cell]] = {}
        if groups.has_role:
            at = groups.topology.coordinates(me)
            self._wanted = {spec.fqn: (spec, spec.cell(at)) for spec in params}
        self._had = held.old_cells(me) if holds else {}

    @torch.no_grad()
    def run(self, batches: Sequence[Batch]) -> None:
        """All batches. Collective over everyone."""
        last = {tensor: number for number, batch in enumerate(batches) for tensor, _ in batch.moves}
        closing: dict[int, list[Kept]] = defaultdict(list)
        for tensor in self.kept:
            if tensor in last:
                closing[last[tensor]].append(tensor)
            else:
                self._open(tensor)
                self._close(tensor)
        opened: set[Kept] = set()
        for number, batch in enumerate(batches):
            for tensor in dict.fromkeys(tensor for tensor, _ in batch.moves):
                if tensor not in opened:
                    opened.add(tensor)
                    self._open(tensor)
            self._exchange(batch)
            for tensor in closing[number]:
                self._close(tensor)

    def _open(self, tensor: Kept) -> None:
        """Make the new cell and copy what is here; a cell that stays as it is keeps its storage."""
        if not self._wanted:
            return
        key, (spec, cell) = (tensor.fqn, tensor.label), self._wanted[tensor.fqn]
        if self._had.get(tensor.fqn) == cell:
            self.new[key] = self.held.cells[key]
            return
        self.new[key] = torch.empty(local_shape(spec, cell), dtype=_dtype(tensor.dtype), device=self.groups.device_type)
        self._count(self.new[key])
        for transfer in self._local.get(tensor.fqn, ()):
            self._target(tensor, transfer).copy_(self._source(tensor, transfer))

    def _close(self, tensor: Kept) -> None:
        """Nobody needs the old cell any more: keep only what it takes to put it together again."""
        key, had = (tensor.fqn, tensor.label), self._had.get(tensor.fqn)
        if had is None or not self._wanted or had == self._wanted[tensor.fqn][1]:
            return  # nothing is given up, or, by a worker that is being parked, everything at the end
        old, wanted = self.held.cells[key], self._wanted[tensor.fqn][1]
        rests = []
        for part in had.minus(wanted):
            rest = torch.empty(part.shape, dtype=old.dtype, device=old.device)
            copy_common(old, had, rest, part)
            rests.append((part, rest))
        self.held.moved[key] = Moved(self.new[key], wanted, tuple(rests))
        del self.held.cells[key]
        self._count(*(rest for _, rest in rests))
        self._bytes -= old.numel() * old.element_size()

    def _exchange(self, batch: Batch) -> None:
        me, dtype = self.groups.worker, _dtype(batch.dtype)
        sent, due = _by_peer(batch, me, self._everyone)
        packed = torch.empty(_numel(sent), dtype=dtype, device=self.groups.device_type)
        at = 0
        for tensor, transfer in (move for moves in sent for move in moves):
            size = transfer.piece.numel
            packed[at : at + size].view(len(transfer.piece.rows), -1).copy_(self._source(tensor, transfer))
            at += size
        received = exchange_uneven(
            packed, [_numel([moves]) for moves in sent], [_numel([moves]) for moves in due], self.groups.everyone
        )
        self._count(packed, received)
        at = 0
        for tensor, transfer in (move for moves in due for move in moves):
            size = transfer.piece.numel
            self._target(tensor, transfer).copy_(received[at : at + size].view(len(transfer.piece.rows), -1))
            at += size
        self.received_bytes += at * dtype.itemsize
        self._bytes -= (packed.numel() + received.numel()) * dtype.itemsize

    def _source(self, tensor: Kept, transfer: Transfer) -> torch.Tensor:
        piece = transfer.piece
        matrix = self.held.cells[tensor.fqn, tensor.label].view(self._had[tensor.fqn].shape)
        return _block(matrix, piece, piece.source_row, piece.source_column)

    def _target(self, tensor: Kept, transfer: Transfer) -> torch.Tensor:
        piece = transfer.piece
        matrix = self.new[tensor.fqn, tensor.label].view(self._wanted[tensor.fqn][1].shape)
        return _block(matrix, piece, piece.destination_row, piece.destination_column)

    def _count(self, *tensors: torch.Tensor) -> None:
        self._bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.peak_bytes = max(self.peak_bytes, self._bytes)


def _by_peer(batch: Batch, me: int, everyone: Sequence[int]) -> tuple[list[list[Move]], list[list[Move]]]:
    """What this worker sends to each and gets from each, in plan order."""
    sent: dict[int, list[Move]] = defaultdict(list)
    due: dict[int, list[Move]] = defaultdict(list)
    for move in batch.moves:
        if move[1].source == me:
            sent[move[1].destination].append(move)
        if move[1].destination == me:
            due[move[1].source].append(move)
    return [sent[peer] for peer in everyone], [due[peer] for peer in everyone]


def _block(matrix: torch.Tensor, piece: Piece, row: int, column: int) -> torch.Tensor:
    return matrix[row : row + len(piece.rows), column : column + len(piece.columns)]


def _numel(parts: Sequence[Sequence[Move]]) -> int:
    return sum(transfer.piece.numel for moves in parts for _, transfer in moves)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype
