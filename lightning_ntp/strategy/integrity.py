"""Silent corruption: after a step all holders of an element hold the same bits, so sums of them are compared, line by line.

    cell of a tensor -> one 64-bit sum per line and segment -> smallest and largest over all holders -> unequal: who differs?

A line is an index of the dim that tp cuts, a segment a run of the other dim that no worker's fsdp cut divides; a sum is weighted by
position with odd numbers, so that a single flipped bit always changes it.

That holders have the same bits needs elementwise optimizers that round an element alike wherever it lies; see `why_not_comparable`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch

from lightning_ntp.dtensor.collectives import exchange_uneven, max_in_place
from lightning_ntp.layout import Span
from lightning_ntp.model_spec import Cell, ParamSpec
from lightning_ntp.strategy.control import gather_live
from lightning_ntp.strategy.fsdp import ShardedModel, local_of
from lightning_ntp.strategy.held import is_cell
from lightning_ntp.topology import Topology

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_MAX_ELEMENTS = 2**18
"""So many elements are summed at once: what they need for it, 16 bytes each, fits into caches."""

_MAX_SUMS = 2**20
"""After so many sums they are compared: a large model has millions."""

_Part = tuple[ParamSpec, str, torch.Tensor]
"""A tensor's parameter, its label, and what this worker holds of it."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One place where holders of the same elements differ.

    Args:
        fqn: parameter.
        label: ``""`` for the parameter, ``"0/exp_avg"`` for a state of optimizer 0.
        rows, columns: of the parameter seen as a matrix.
        culprits: workers that differ from the majority; empty if there is none.
        holders: all workers that hold the place, each with its sum.
        topology: of the job, to name replicas and roles.
    """

    fqn: str
    label: str
    rows: Span
    columns: Span
    culprits: tuple[int, ...]
    holders: Mapping[int, int]
    topology: Topology

    def __str__(self) -> str:
        what = f"{self.label.partition('/')[2]} of {self.fqn}" if self.label else self.fqn
        where = f"{what}  rows{self.rows} columns{self.columns}"
        if self.culprits:
            return f"{where}: {', '.join(map(self._name, self.culprits))} differs from the other holders"
        groups = sorted({value: None for value in self.holders.values()})
        sides = [" and ".join(self._name(w) for w, v in self.holders.items() if v == value) for value in groups]
        return f"{where}: {' | '.join(sides)} differ, and there is no majority to tell who is right"

    @property
    def source(self) -> int:
        """The lowest worker of the majority: who has the right bits."""
        return next(worker for worker in self.holders if worker not in self.culprits)

    def _name(self, worker: int) -> str:
        at = self.topology.position(worker)
        return f"worker {worker} (r{at.replica}/tp{self.topology.coordinates(worker).role})"


@dataclass(frozen=True, slots=True)
class IntegrityReport:
    """What a check found and mended; the same on all workers.

    Args:
        damages: places that differ.
        num_repaired: how many of them were overwritten with the majority's bits.
    """

    damages: tuple[Damage, ...]
    num_repaired: int = 0

    @property
    def num_open(self) -> int:
        """Places of which nobody can tell who is right."""
        return sum(not damage.culprits for damage in self.damages)

    @property
    def culprits(self) -> tuple[int, ...]:
        """Workers that a majority has shown to be wrong, ascending."""
        return tuple(sorted({worker for damage in self.damages for worker in damage.culprits}))


def why_not_comparable(optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> str:
    """Why copies of the same element differ although nothing is damaged; "" if they do not. Local."""
    if device.type == "cpu" and any(group.get("fused") for each in optimizers for group in each.param_groups):
        return "fused=True on CPU rounds the last elements of a tensor otherwise than the rest, and replicas cut tensors differently"
    return ""


@torch.no_grad()
def check_integrity(
    sharded: ShardedModel, optimizers: Sequence[torch.optim.Optimizer] = (), repair: bool = False
) -> IntegrityReport:
    """Compare all copies of parameters and optimizer state, bit by bit through sums.

    Args:
        sharded: between two steps.
        optimizers: whose per-parameter state is compared as well.
        repair: overwrite what differs from a majority of at least two equal holders.

    Elements that have a single holder cannot be compared and are not. Collective over all workers with a role.
    """
    tensors = list(_tensors(sharded, optimizers))
    grids = {spec.fqn: _Grid.of(spec, sharded.groups.topology) for spec in sharded.plan.params}
    damages: list[Damage] = []
    run: list[_Part] = []
    num_sums = 0
    for number, part in enumerate(tensors, start=1):
        run.append(part)
        num_sums += grids[part[0].fqn].num_places
        if num_sums >= _MAX_SUMS or number == len(tensors):
            damages += _differences(sharded, run, grids)
            run, num_sums = [], 0
    report = IntegrityReport(tuple(damages))
    return _repair(sharded, report, tensors) if repair and damages else report


def _differences(sharded: ShardedModel, parts: Sequence[_Part], grids: Mapping[str, _Grid]) -> list[Damage]:
    """Where copies of these tensors differ; the same on all workers. Collective over all workers with a role."""
    at, groups = sharded.coordinates, sharded.groups
    sums, holds = [], []
    for spec, _, local in parts:
        own, mask = grids[spec.fqn].sums(local, spec.cell(at))
        sums.append(own.reshape(-1))
        holds.append(mask.reshape(-1))
    mine, held = torch.cat(sums), torch.cat(holds)
    # ``-1 - x`` turns the order of all 64-bit numbers round, so that one maximum gives the smallest and the largest.
    lowest = torch.full_like(mine, torch.iinfo(torch.int64).min)
    both = torch.stack([torch.where(held, mine, lowest), torch.where(held, -1 - mine, lowest)]).to(groups.device_type)
    max_in_place(both, groups.live)
    wrong = (both[0] != -1 - both[1]).nonzero().reshape(-1).tolist()
    if not wrong:
        return []
    everyone = gather_live({place: int(mine[place]) for place in wrong if held[place]}, groups)
    damages = []
    for place in wrong:
        values = {
            worker: found[place] for worker, found in zip(groups.topology.workers, everyone, strict=True) if place in found
        }
        number, offset = _locate(place, [part.numel() for part in sums])
        spec, label, _ = parts[number]
        rows, columns = grids[spec.fqn].place(offset)
        damages.append(Damage(spec.fqn, label, rows, columns, _culprits(values), values, groups.topology))
    return damages


def _culprits(values: Mapping[int, int]) -> tuple[int, ...]:
    value, count = Counter(values.values()).most_common(1)[0]
    return tuple(worker for worker in values if values[worker] != value) if 2 * count > len(values) else ()


def _locate(place: int, sizes: Sequence[int]) -> tuple[int, int]:
    for number, size in enumerate(sizes):
        if place < size:
            return number, place
        place -= size
    raise IndexError(place)


def _tensors(sharded: ShardedModel, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[_Part]:
    """(spec, label, local tensor), in one order on all workers."""
    for spec, parameter in sharded.parameters():
        yield spec, "", local_of(parameter)
        for index, optimizer in enumerate(optimizers):
            state = getattr(optimizer, "_optimizer", optimizer).state.get(parameter, {})
            for key in sorted(key for key, value in state.items() if is_cell(parameter, value)):
                yield spec, f"{index}/{key}", local_of(state[key])


@dataclass(frozen=True)
class _Grid:
    """Lines x segments of one parameter, equal for all workers."""

    line_dim: int
    num_lines: int
    segments: tuple[Span, ...]

    @classmethod
    def of(cls, spec: ParamSpec, topology: Topology) -> _Grid:
        line_dim = 0 if spec.dim is None else spec.dim
        cells = [spec.cell(topology.coordinates(worker)) for worker in topology.workers]
        spans = [span for cell in cells for span in (cell.columns if line_dim == 0 else cell.rows)]
        cuts = sorted({0, spec.matrix_shape[1 - line_dim], *(edge for span in spans for edge in (span.start, span.stop))})
        segments = tuple(Span(a, b) for a, b in pairwise(cuts))
        return cls(line_dim, spec.matrix_shape[line_dim], segments)

    @property
    def num_places(self) -> int:
        """Sums over a whole parameter."""
        return self.num_lines * len(self.segments)

    def sums(self, local: torch.Tensor, cell: Cell) -> tuple[torch.Tensor, torch.Tensor]:
        """(lines, segments) int64: this worker's sums, and whether it holds the place."""
        bits = local.reshape(cell.shape).contiguous().view(_INTEGERS[local.element_size()])
        lines, others = (cell.rows, cell.columns) if self.line_dim == 0 else (cell.columns, cell.rows)
        bits = bits if self.line_dim == 0 else bits.t()
        own = torch.zeros((self.num_lines, len(self.segments)), dtype=torch.int64, device=local.device)
        mask = torch.zeros_like(own, dtype=torch.bool)
        at = _indices(lines, local.device)
        start = 0
        for span in others:
            for number, segment in enumerate(self.segments):
                if span.start <= segment.start and segment.stop <= span.stop:
                    part = bits[:, start + segment.start - span.start : start + segment.stop - span.start]
                    own[at, number] = _weighted_sums(part, segment)
                    mask[at, number] = True
            start += len(span)
        return own, mask

    def place(self, offset: int) -> tuple[Span, Span]:
        """Rows and columns of an entry."""
        line, number = divmod(offset, len(self.segments))
        pair = Span(line, line + 1), self.segments[number]
        return pair if self.line_dim == 0 else (pair[1], pair[0])


def _weighted_sums(part: torch.Tensor, segment: Span) -> torch.Tensor:
    """One int64 per line of (lines, segment) integers, modulo 2**64."""
    weights = 2 * torch.arange(segment.start, segment.stop, device=part.device) + 1
    step = max(1, _MAX_ELEMENTS // max(1, len(segment)))
    sums = [(lines.to(torch.int64) * weights).sum(1) for lines in part.split(step)] if len(part) else []
    return torch.cat(sums) if sums else part.new_empty(0, dtype=torch.int64)


def _indices(spans: Sequence[Span], device: torch.device) -> torch.Tensor:
    parts = [torch.arange(span.start, span.stop, device=device) for span in spans]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def _repair(sharded: ShardedModel, report: IntegrityReport, tensors: Sequence[_Part]) -> IntegrityReport:
    """Culprits get the bits of the lowest worker of the majority. Collective over all workers with a role."""
    groups = sharded.groups
    workers, me, at = groups.topology.workers, groups.worker, sharded.coordinates
    local = {(spec.fqn, label): (spec.cell(at), tensor) for spec, label, tensor in tensors}
    repaired = [damage for damage in report.damages if damage.culprits]
    for key, damages in groupby(repaired, lambda damage: (damage.fqn, damage.label)):
        cell, tensor = local[key]
        routes = [(damage.source, culprit, _blocks(damage, cell, tensor)) for damage in damages for culprit in damage.culprits]
        leaves = [[block for s, c, blocks in routes if (s, c) == (me, worker) for block in blocks] for worker in workers]
        comes = [[block for s, c, blocks in routes if (s, c) == (worker, me) for block in blocks] for worker in workers]
        packed = [block.reshape(-1) for blocks in leaves for block in blocks]
        received = exchange_uneven(
            torch.cat(packed) if packed else tensor.new_empty(0), _numels(leaves), _numels(comes), groups.live
        )
        start = 0
        for block in (block for blocks in comes for block in blocks):
            block.copy_(received[start : start + block.numel()].view(block.shape))
            start += block.numel()
    return IntegrityReport(report.damages, len(repaired))


def _blocks(damage: Damage, cell: Cell, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Views of a worker's part of a damaged place."""
    bits = tensor.view(cell.shape) if cell.numel else tensor
    return [
        bits[p.source_row : p.source_row + len(p.rows), p.source_column : p.source_column + len(p.columns)]
        for p in cell.pieces(Cell((damage.rows,), (damage.columns,)))
    ]


def _numels(blocks: Sequence[Sequence[torch.Tensor]]) -> list[int]:
    return [sum(block.numel() for block in each) for each in blocks]
