"""Where bytes lie: rectangles inside flat buffers, and the moves between them. Integers only; `pack` carries them out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from lightning_ntp.errors import ConfigError

ALIGNMENT_BYTES = 16
"""What every peer's run is padded to: NCCL is much slower on byte counts that 16 does not divide (NVIDIA/nccl #413)."""


def padded(numel: int, item_bytes: int) -> int:
    """The next number of elements that fills whole units of `ALIGNMENT_BYTES`."""
    unit = max(ALIGNMENT_BYTES // item_bytes, 1)
    return -(-numel // unit) * unit


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle inside a flat buffer, all in elements.

    Args:
        offset: of its first element.
        stride: from the start of one row to the start of the next.
        rows: number of rows.
        columns: contiguous elements per row.
    """

    offset: int
    stride: int
    rows: int
    columns: int

    def __post_init__(self) -> None:
        if min(self.offset, self.rows, self.columns) < 0 or (self.rows > 1 and self.stride < self.columns):
            raise ConfigError(f"a block needs sizes >= 0 and rows that do not overlap, got {self}")

    @classmethod
    def run(cls, offset: int, rows: int, columns: int) -> Block:
        """A rectangle stored without gaps."""
        return cls(offset, columns, rows, columns)

    @property
    def numel(self) -> int:
        """Elements of the rectangle."""
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """One past the last element; `offset` if there is none."""
        return self.offset + (self.rows - 1) * self.stride + self.columns if self.numel else self.offset


@dataclass(frozen=True)
class Moves:
    """Rectangles of one flat buffer that go to rectangles of another, pair by pair.

    Args:
        pairs: (source, destination) of equal rows and columns; empty ones are dropped. Destinations must not overlap:
            their order would count.

    Raises:
        ConfigError: a pair of unequal shape.
    """

    pairs: tuple[tuple[Block, Block], ...]
    _tables: dict[torch.device, torch.Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for source, destination in self.pairs:
            if (source.rows, source.columns) != (destination.rows, destination.columns):
                raise ConfigError(f"source and destination of a move differ in shape: {source} -> {destination}")
        object.__setattr__(self, "pairs", tuple(pair for pair in self.pairs if pair[0].numel))

    @cached_property
    def numel(self) -> int:
        """Elements that move."""
        return sum(source.numel for source, _ in self.pairs)

    @cached_property
    def source_end(self) -> int:
        """Elements that the source buffer must have at least."""
        return max((source.end for source, _ in self.pairs), default=0)

    @cached_property
    def destination_end(self) -> int:
        """Elements that the destination buffer must have at least."""
        return max((destination.end for _, destination in self.pairs), default=0)

    def inverse(self) -> Moves:
        """The way back; the caller answers for sources that do not overlap."""
        return Moves(tuple((destination, source) for source, destination in self.pairs))

    def table(self, device: torch.device) -> torch.Tensor:
        """(6, pairs + 1) int64 on `device`, made once: first element's number, columns, offset and stride of both sides.

        A last column that no element belongs to keeps the size of the table above 1, which torch.compile treats apart.
        """
        if device not in self._tables:
            lines, first = [], 0
            for source, to in self.pairs:
                lines.append((first, source.columns, source.offset, source.stride, to.offset, to.stride))
                first += source.numel
            lines.append((first, 1, 0, 1, 0, 1))
            self._tables[device] = torch.tensor(lines, dtype=torch.long).t().contiguous().to(device)
        return self._tables[device]


@dataclass(frozen=True)
class PackedRuns:
    """One flat buffer with a run per peer, each padded to whole units of `ALIGNMENT_BYTES`.

    Args:
        peers: per peer, the rectangles that lie in its run one after another, where they lie in the unpacked buffer.
        item_bytes: of the packed buffer's elements.
    """

    peers: tuple[tuple[Block, ...], ...]
    item_bytes: int

    @classmethod
    def of(cls, peers: Iterable[Sequence[Block]], item_bytes: int) -> PackedRuns:
        """From any iterables."""
        return cls(tuple(tuple(blocks) for blocks in peers), item_bytes)

    @cached_property
    def numel(self) -> int:
        """Elements that carry something, padding not counted."""
        return sum(block.numel for blocks in self.peers for block in blocks)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements per run, padding counted: what an exchange sends or expects per peer."""
        return tuple(padded(sum(block.numel for block in blocks), self.item_bytes) for blocks in self.peers)

    @cached_property
    def packing(self) -> Moves:
        """Unpacked buffer -> packed buffer, all runs at once."""
        return Moves(tuple(pair for pairs in self._pairs for pair in pairs))

    @cached_property
    def unpacking(self) -> Moves:
        """Packed buffer -> unpacked buffer, all runs at once."""
        return self.packing.inverse()

    @cached_property
    def unpacking_by_peer(self) -> tuple[Moves, ...]:
        """The same run by run: where rectangles of different peers lie on one another and add up, in the peers' order."""
        return tuple(Moves(tuple(pairs)).inverse() for pairs in self._pairs)

    @cached_property
    def _pairs(self) -> list[list[tuple[Block, Block]]]:
        found, start = [], 0
        for blocks, size in zip(self.peers, self.sizes, strict=True):
            pairs, at = [], start
            for block in blocks:
                pairs.append((block, Block.run(at, block.rows, block.columns)))
                at += block.numel
            found.append(pairs)
            start += size
        return found
