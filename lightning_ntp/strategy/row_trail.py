"""Which parts of a model a data row has run, held against the other rows of its replica, which must run the same.

[Note: rows of one replica] FSDP gathers a part's parameters from all rows of a replica. A row that skips a part answers the others'
gather with that of its next one: parts of equal size give them rubbish without a word, others end in a lost connection (gloo) or
a hang (NCCL). Three nets, the first one of gloo alone, where a small message costs little beside a gather:

    before each gather    the rows tell each other which part comes; none gathers where they differ
    at the vote           digests of all that was run in the window; before any update
    after a hang          what the rows had run, told at the next regrouping
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_ntp.dtensor.collectives import gather_numbers
from lightning_ntp.errors import PlanMismatchError
from lightning_ntp.strategy._torch_private import bucket_parameters
from lightning_ntp.strategy.generation import Generation
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.topology import Topology

BACKWARD, MICRO_BATCH = -1, -2
"""Entries of a trail beside the numbers of parts: the beginnings of a backward and of a micro-batch."""

_WAY_OUT = (
    "The rows of one replica (fsdp size above 1) gather each part's parameters from one another, so they must run the same parts of "
    "the model in the same order; nothing was updated. Let the branch depend on something that all rows share, or run the part on "
    "every row and multiply its output by 0 where it is not wanted, or set fsdp_size=1: replicas may differ."
)


class RowTrail:
    """What this worker's data row has run since the window began.

    Args:
        names: of the parts, by their numbers.
        first_row: number of the first data row of this replica.
        compare: hands this row's next entry to the other rows and returns those of all; None where it would cost too much.
            Collective over the fsdp axis.
    """

    def __init__(
        self, names: Sequence[str] = (), first_row: int = 0, compare: Callable[[int], Sequence[int]] | None = None
    ) -> None:
        self.names, self._first_row, self._compare = tuple(names), first_row, compare
        self.entries: list[int] = []

    @classmethod
    def of(cls, module: nn.Module, units: Sequence[FSDPModule], groups: Groups) -> RowTrail:
        """This worker's, over the units of `module`: those with a bucket first. Rows are compared on CPU only. Local."""
        topology, name_of = groups.topology, {part: name for name, part in module.named_modules()}
        ordered = sorted(units, key=lambda unit: not any(p.requires_grad for p in bucket_parameters(unit)))
        names = [name_of[unit] for unit in ordered]
        first_row = topology.data_rows.index((topology.position(groups.worker).replica, 0))
        compares = groups.device_type == "cpu" and groups.fsdp.size() > 1
        return cls(names, first_row, partial(gather_numbers, group=groups.fsdp) if compares else None)

    def enter(self, entry: int, keep: bool = True) -> None:
        """Call before the row runs a part, or begins a backward.

        Args:
            keep: False for what is not part of a training step: it is compared only.

        Raises:
            PlanMismatchError: another row of the replica is about to do something else.

        Collective over the fsdp axis where rows are compared, else local.
        """
        if self._compare is not None:
            found = self._compare(entry)
            if len(set(found)) > 1:
                raise mismatch({self._first_row + f: [*self.entries, other] for f, other in enumerate(found)}, self.names)
        if keep:
            self.entries.append(entry)

    def begin_micro_batch(self) -> None:
        """Call before its forward. Local."""
        self.entries.append(MICRO_BATCH)

    def clear(self) -> None:
        """A window begins. Local."""
        self.entries.clear()

    @property
    def digest(self) -> int:
        """63 bits over the entries; equal on all rows of a replica in a healthy job."""
        whole = hashlib.sha256(",".join(map(str, self.entries)).encode()).digest()
        return int.from_bytes(whole[:8], "little") >> 1


def row_ballot(digest: int, groups: Groups) -> list[int]:
    """This worker's part of a maximum over all workers that tells whether the rows of each replica have equal digests."""
    own, replicas = groups.topology.position(groups.worker).replica, range(len(groups.topology.replicas))
    return [value if replica == own else -(2**63) for value in (digest, -digest) for replica in replicas]


def rows_agree(highest: Sequence[int]) -> bool:
    """Whether they have, from that maximum."""
    half = len(highest) // 2
    return all(one == -other for one, other in zip(highest[:half], highest[half:], strict=True))


def check_rows(
    topology: Topology, trails: Sequence[Sequence[int] | None], names: Sequence[str], ended: bool = True
) -> None:
    """Holds the rows of each replica against one another. Local.

    Args:
        trails: of all data rows; None where nobody knows.
        ended: whether the rows are through; else one that has only run less than another is behind, which is no difference.

    Raises:
        PlanMismatchError: see `mismatch`.
    """
    for index in range(len(topology.replicas)):
        rows = enumerate(zip(topology.data_rows, trails, strict=True))
        known = {row: trail for row, ((replica, _), trail) in rows if replica == index and trail is not None}
        if _fork(known.values(), ended) is not None:
            raise mismatch(known, names, ended)


def check_told(topology: Topology, generation: Generation, names: Sequence[str]) -> None:
    """`check_rows` for the rows of a topology whose workers meet again, with what each told as ``ran``. Local."""
    told = {worker: info.get("ran") for worker, info in generation.who_said()}
    rows = [topology.replicas[r].grid[f] for r, f in topology.data_rows]
    check_rows(topology, [next((told[w] for w in row if told.get(w)), None) for row in rows], names, ended=False)


def _fork(trails: Collection[Sequence[int]], ended: bool) -> int | None:
    """The first place at which trails differ."""
    for at, entries in enumerate(itertools.zip_longest(*trails)):
        if len(set(entries) - (set() if ended else {None})) > 1:
            return at
    return None


def mismatch(trails: Mapping[int, Sequence[int]], names: Sequence[str], ended: bool = True) -> PlanMismatchError:
    """The error for data rows of one replica whose trails part: where, and which row does what there."""
    at = _fork(trails.values(), ended) or 0
    common = max(trails.values(), key=len)[:at]
    where = f"after {_said(common[-1], names)}" if common and common[-1] != MICRO_BATCH else "at its beginning"
    does = "; ".join(f"data row {row} {_does(trail[at : at + 1], names)}" for row, trail in trails.items())
    return PlanMismatchError(
        f"the data rows of one replica run different parts of the model. Micro-batch {max(common.count(MICRO_BATCH), 1)} of the step, "
        f"{where}: {does}. {_WAY_OUT}"
    )


def _does(entries: Sequence[int], names: Sequence[str]) -> str:
    entry = entries[0] if entries else MICRO_BATCH
    return {BACKWARD: "begins its backward", MICRO_BATCH: "is done"}.get(entry, f"runs {_said(entry, names)}")


def _said(entry: int, names: Sequence[str]) -> str:
    return "the beginning of backward" if entry == BACKWARD else names[entry] or "the model"
