"""Which piece of which parameter moves from whom to whom when the topology changes. Plans are values; `strategy` moves."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from lightning_ntp.errors import PlanMismatchError, UnrecoverableError
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


def plan_reshard(
    params: Iterable[ParamSpec], old: Topology, new: Topology, dead: Collection[int] = ()
) -> ReshardPlan:
    """What each worker of `new` must receive to hold its cells, given what live workers hold under `old`.

    Sources in order: own memory, own replica, the other replicas (starting with the next one, so that the load spreads).

    Raises:
        UnrecoverableError: no live worker holds some region of a parameter.
    """
    transfers: list[Transfer] = []
    live = [worker for worker in old.workers if worker not in dead]
    sources_of = {worker: _sources(worker, old, new, live) for worker in new.workers}
    for spec in params:
        held = {worker: spec.cell(old.coordinates(worker)) for worker in live}
        for worker, sources in sources_of.items():
            transfers += _fill(spec, worker, spec.cell(new.coordinates(worker)), sources, held)
    return ReshardPlan(tuple(transfers))


def _sources(worker: int, old: Topology, new: Topology, live: Sequence[int]) -> list[int]:
    home = old.position(worker).replica if worker in live else new.position(worker).replica

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
