"""Who writes what of a checkpoint: everything once, and about the same number of elements by each worker."""

from __future__ import annotations

from collections import Counter

import pytest

from lightning_ntp.layout import nested_layouts
from lightning_ntp.model_spec import ParamSpec
from lightning_ntp.topology import Topology
from lightning_ntp.write_plan import written_cells
from tests.plan_cases import specs_for

SHAPES = [[(1, 4), (1, 3)], [(2, 2), (2, 2)], [(3, 1), (1, 2)], [(1, 1)], [(2, 4), (2, 3), (1, 2)], [(1, 2), (1, 4)]]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("small", [0, 1 << 16])
def test_every_element_is_written_once_by_somebody_who_holds_it(shapes, small):
    topology = Topology.from_shapes(shapes)
    for index, spec in enumerate(specs_for(topology)):
        count: Counter[tuple[int, int]] = Counter()
        for worker in topology.workers:
            own = spec.cell(topology.coordinates(worker))
            for cell in written_cells(spec, index, topology, worker, small):
                assert sum(piece.numel for piece in own.pieces(cell)) == cell.numel
                for row in cell.rows:
                    for column in cell.columns:
                        count.update((r, c) for r in range(row.start, row.stop) for c in range(column.start, column.stop))
        assert len(count) == spec.numel and set(count.values()) <= {1}, spec.fqn


def _layer(topology: Topology, width: int = 768, inner: int = 2048) -> list[ParamSpec]:
    layouts = nested_layouts(inner, topology.num_roles, topology.loss_order)
    return [
        ParamSpec("up", (inner, width), 0, layouts),
        ParamSpec("down", (width, inner), 1, layouts),
        ParamSpec("own", (width, width)),
        ParamSpec("norm", (width,)),
    ]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_all_workers_write_about_the_same(shapes):
    topology = Topology.from_shapes(shapes)
    written: Counter[int] = Counter()
    num_parts: Counter[int] = Counter()
    specs = _layer(topology) * 16
    for index, spec in enumerate(specs):
        for worker in topology.workers:
            cells = written_cells(spec, index, topology, worker)
            written[worker] += sum(cell.numel for cell in cells)
            num_parts[worker] += len(cells)
    mean = sum(spec.numel for spec in specs) / len(topology.workers)
    assert max(written.values()) <= 1.2 * mean, written
    if len(set(shapes)) == 1:
        assert max(num_parts.values()) <= len(specs)
