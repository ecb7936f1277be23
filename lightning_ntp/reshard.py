"""Which piece of which parameter moves from whom to whom when the topology changes. Plans are values; `strategy` moves."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_ntp.errors import PlanMismatchError, UnrecoverableError
from lightning_ntp.layout import Span
from lightning_ntp.model_spec import Cell, ParamSpec, Piece
from lightning_ntp.topology import Topology


@dataclass(frozen=True, slots=True)
class Transfer:
    """One rectangle of a parameter that `destination` takes from `source`; equal workers: it stays, perhaps elsewhere."""

    fqn: str
    source: int
    destination: int
    piece: Piece

    @property
    def is_local(self) -> bool:
        """Whether nothing crosses a wire."""
        return self.source == self.destination

    def inverse(self) -> Transfer:
        """The way back."""
        p = self.piece
        back = Piece(p.rows, p.columns, p.destination_row, p.destination_column, p.source_row, p.source_column)
        return Transfer(self.fqn, self.destination, self.source, back)

    def split(self, max_elements: int) -> Iterator[Transfer]:
        """The same in runs of rows of at most `max_elements` (at least one row each)."""
        piece = self.piece
        step = max(max_elements // len(piece.columns), 1)
        for start in range(0, len(piece.rows), step):
            rows = Span(piece.rows.start + start, min(piece.rows.start + start + step, piece.rows.stop))
            moved = (piece.source_row + start, piece.source_column, piece.destination_row + start, piece.destination_column)
            yield replace(self, piece=Piece(rows, piece.columns, *moved))

    def __repr__(self) -> str:
        return f"{self.source} -> {self.destination}  {self.fqn}  rows{self.piece.rows} columns{self.piece.columns}"


@dataclass(frozen=True)
class ReshardPlan:
    """A frozen set of transfers in one order on all workers."""

    transfers: tuple[Transfer, ...]

    @property
    def moved_elements(self) -> int:
        """Elements that cross a wire."""
        return sum(transfer.piece.numel for transfer in self.transfers if not transfer.is_local)

    def bytes(self, element_bytes: int = 4) -> int:
        """Bytes that cross a wire when each element (with all that is kept beside it) takes `element_bytes`."""
        return self.moved_elements * element_bytes

    def inverse(self) -> ReshardPlan:
        """The plan that undoes this one where nobody died."""
        return ReshardPlan(tuple(transfer.inverse() for transfer in self.transfers))

    @cached_property
    def by_fqn(self) -> Mapping[str, tuple[Transfer, ...]]:
        """Transfers of each parameter, in plan order."""
        found: dict[str, list[Transfer]] = defaultdict(list)
        for transfer in self.transfers:
            found[transfer.fqn].append(transfer)
        return {fqn: tuple(transfers) for fqn, transfers in found.items()}

    def between(self, source: int, destination: int) -> tuple[Transfer, ...]:
        """Transfers from one worker to another, in plan order."""
        return tuple(t for t in self.transfers if (t.source, t.destination) == (source, destination))

    @property
    def digest(self) -> str:
        """Equal on two workers exactly when they would move the same; compared before anything moves."""
        return hashlib.sha256(repr(self.transfers).encode()).hexdigest()[:16]

    def validate(self, params: Iterable[ParamSpec], new: Topology) -> None:
        """Check that each worker of `new` receives each element of its cells exactly once.

        Raises:
            PlanMismatchError: an element that arrives twice or never.
        """
        arriving: dict[tuple[str, int], list[Piece]] = defaultdict(list)
        for transfer in self.transfers:
            arriving[transfer.fqn, transfer.destination].append(transfer.piece)
        for spec in params:
            for worker in new.workers:
                cell = spec.cell(new.coordinates(worker))
                pieces = arriving[spec.fqn, worker]
                if sum(piece.numel for piece in pieces) != cell.numel or _collide(pieces):
                    raise PlanMismatchError(f"{spec.fqn}: the plan does not fill worker {worker}'s cell exactly once")

    def __repr__(self) -> str:
        moves = [repr(transfer) for transfer in self.transfers if not transfer.is_local]
        return "\n".join([f"ReshardPlan({self.digest}): {len(moves)} moves, {self.moved_elements} elements", *moves])


def _collide(pieces: Sequence[Piece]) -> bool:
    """Whether two pieces of one destination share an element."""
    ordered = sorted(pieces, key=lambda piece: piece.destination_row)
    open_pieces: list[Piece] = []
    for piece in ordered:
        open_pieces = [p for p in open_pieces if p.destination_row + len(p.rows) > piece.destination_row]
        for other in open_pieces:
            apart = (
                other.destination_column + len(other.columns) <= piece.destination_column
                or piece.destination_column + len(piece.columns) <= other.destination_column
            )
            if not apart:
                return True
        open_pieces.append(piece)
    return False


@dataclass(frozen=True, slots=True)
class Kept:
    """One tensor that is cut like a parameter: the parameter itself (label ``""``) or an optimizer's state of it."""

    fqn: str
    label: str
    dtype: str
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What one exchange carries: pieces of tensors of one dtype, in one order on all workers."""

    dtype: str
    moves: tuple[tuple[Kept, Transfer], ...]


def batches(plan: ReshardPlan, kept: Sequence[Kept], limit_bytes: int) -> tuple[Batch, ...]:
    """The plan's moves over a wire in exchanges in which no worker sends or receives more than `limit_bytes`.

    Tensors follow each other in the order of `kept`, dtype by dtype; a piece larger than the limit is split by rows (one row may
    be larger still).
    """
    made: list[Batch] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in kept):
        moves: list[tuple[Kept, Transfer]] = []
        load: dict[tuple[int, bool], int] = defaultdict(int)
        for tensor in (tensor for tensor in kept if tensor.dtype == dtype):
            for whole in plan.by_fqn.get(tensor.fqn, ()):
                for transfer in () if whole.is_local else whole.split(limit_bytes // tensor.item_bytes):
                    size, ends = transfer.piece.numel * tensor.item_bytes, ((transfer.source, False), (transfer.destination, True))
                    if moves and any(load[end] + size > limit_bytes for end in ends):
                        made.append(Batch(dtype, tuple(moves)))
                        moves = []
                        load.clear()
                    for end in ends:
                        load[end] += size
                    moves.append((tensor, transfer))
        if moves:
            made.append(Batch(dtype, tuple(moves)))
    return tuple(made)


def plan_reshard(
    params: Sequence[ParamSpec],
    old: Topology,
    new: Topology,
    dead: Collection[int] = (),
    old_params: Sequence[ParamSpec] | None = None,
) -> ReshardPlan:
    """What each worker of `new` must receive to hold its cells, given what live workers hold under `old`.

    Sources in order: own memory, own replica, the other replicas (starting with the next one, so that the load spreads).

    Args:
        params: how parameters are cut under `new`.
        dead: workers of `old` that are no sources: lost, or holding an older state.
        old_params: how they were cut under `old`, in the same order; None: in the same way.

    Raises:
        UnrecoverableError: no live worker holds some region of a parameter.
    """
    transfers: list[Transfer] = []
    live = [worker for worker in old.workers if worker not in dead]
    sources_of = {worker: _sources(worker, old, new, live) for worker in new.workers}
    known: dict[object, list[Transfer]] = {}  # layers repeat: parameters cut alike move alike
    for spec, old_spec in zip(params, params if old_params is None else old_params, strict=True):
        key = (spec.shape, spec.dim, id(spec.layouts), id(old_spec.layouts))
        if key not in known:
            held = {worker: old_spec.cell(old.coordinates(worker)) for worker in live}
            known[key] = [
                transfer
                for worker, sources in sources_of.items()
                for transfer in _fill(spec, worker, spec.cell(new.coordinates(worker)), sources, held)
            ]
        transfers += [replace(transfer, fqn=spec.fqn) for transfer in known[key]]
    return ReshardPlan(tuple(transfers))


def _sources(worker: int, old: Topology, new: Topology, live: Sequence[int]) -> list[int]:
    # A newcomer takes from its new mates before others; replicas may have changed their numbers.
    mates = (worker,) if worker in live else new.replica_of(worker).workers
    home = next((old.position(mate).replica for mate in mates if mate in live), new.position(worker).replica)

    def distance(source: int) -> tuple[bool, bool, int, int]:
        at = old.position(source)
        return (source != worker, at.replica != home, (at.replica - home) % len(old.replicas), source)

    return sorted(live, key=distance)


def _fill(
    spec: ParamSpec, worker: int, wanted: Cell, sources: Iterable[int], held: dict[int, Cell]
) -> list[Transfer]:
    transfers: list[Transfer] = []
    missing = [wanted] if wanted.numel else []
    for source in sources:
        if not missing:
            break
        rest: list[Cell] = []
        for cell in missing:
            common = _common(held[source], cell)
            if common is None:
                rest.append(cell)
                continue
            transfers += [
                Transfer(spec.fqn, source, worker, _joined(piece, target))
                for piece in held[source].pieces(common)
                for target in Cell((piece.rows,), (piece.columns,)).pieces(wanted)
            ]
            rest += cell.minus(common)
        missing = rest
    if missing:
        raise UnrecoverableError(
            f"{spec.fqn}: no live worker holds rows{missing[0].rows[0]} columns{missing[0].columns[0]} that worker {worker} "
            "needs; one more replica, a buddy copy or a checkpoint would have saved it"
        )
    return transfers


def _joined(origin: Piece, target: Piece) -> Piece:
    """The part `target` of the source's piece `origin`, addressed in the source's and the destination's storage."""
    row = origin.source_row + target.rows.start - origin.rows.start
    column = origin.source_column + target.columns.start - origin.columns.start
    return Piece(target.rows, target.columns, row, column, target.destination_row, target.destination_column)


def _common(source: Cell, wanted: Cell) -> Cell | None:
    pieces = source.pieces(wanted)
    if not pieces:
        return None
    rows = tuple(dict.fromkeys(piece.rows for piece in pieces))
    columns = tuple(dict.fromkeys(piece.columns for piece in pieces))
    return Cell(rows, columns)
