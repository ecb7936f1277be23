"""Plans of moves: complete, minimal, invertible."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.errors import PlanMismatchError, UnrecoverableError
from lightning_ntp.layout import Span
from lightning_ntp.model_spec import Cell, ParamSpec, Piece
from lightning_ntp.reshard import ReshardPlan, Transfer, plan_reshard
from lightning_ntp.topology import Topology
from tests.plan_cases import specs_for, topologies

cells = st.lists(st.lists(st.integers(0, 9), unique=True, max_size=6), min_size=2, max_size=2).map(
    lambda pair: Cell(*(tuple(Span(i, i + 1) for i in part) for part in pair))
)


def elements(cell):
    spread = [[i for s in part for i in range(s.start, s.stop)] for part in (cell.rows, cell.columns)]
    return {(r, c) for r in spread[0] for c in spread[1]}


@given(cells, cells)
def test_cells_intersect_and_subtract_like_sets(first, second):
    found = [
        (r, c)
        for p in first.pieces(second)
        for r in range(p.rows.start, p.rows.stop)
        for c in range(p.columns.start, p.columns.stop)
    ]
    assert len(found) == len(set(found))
    assert set(found) == elements(first) & elements(second)
    rest = first.minus(second)
    assert len(rest) <= 2
    left = [element for cell in rest for element in elements(cell)]
    assert sorted(left) == sorted(elements(first) - elements(second))


@given(topologies())
def test_owned_cells_of_a_replica_hold_each_element_once(topology):
    for replica in topology.replicas:
        lowest = topology.roles(replica.degree)[0]
        for spec in specs_for(topology):
            owned = [e for w in replica.workers for e in elements(spec.owned_cell(topology.coordinates(w), lowest))]
            rows, columns = spec.matrix_shape
            assert sorted(owned) == [(r, c) for r in range(rows) for c in range(columns)]


def execute(plan, specs, old, new, dead):
    """Move numbered elements as a mover would and return {(fqn, worker): matrix as dict of stored position}."""
    out = {}
    for transfer in plan.transfers:
        assert transfer.source not in dead
        source = next(s for s in specs if s.fqn == transfer.fqn).cell(old.coordinates(transfer.source))
        rows = [i for s in source.rows for i in range(s.start, s.stop)]
        columns = [i for s in source.columns for i in range(s.start, s.stop)]
        p = transfer.piece
        for r in range(len(p.rows)):
            for c in range(len(p.columns)):
                value = (rows[p.source_row + r], columns[p.source_column + c])
                target = (transfer.fqn, transfer.destination, p.destination_row + r, p.destination_column + c)
                assert target not in out, "arrives twice"
                out[target] = value
    return out


@given(topologies(), st.data())
def test_after_any_survivable_loss_every_cell_is_filled_rightly(topology, data):
    worker = data.draw(st.sampled_from(topology.workers))
    if len(topology.replicas) == 1:
        return
    new = topology.without(worker)
    old = replace(topology, loss_order=new.loss_order)
    specs = specs_for(new)
    try:
        plan = plan_reshard(specs, old, new, {worker})
    except UnrecoverableError:
        others = [r for r in old.replicas if worker not in r.workers]
        assert not others, "another replica holds everything"
        return
    plan.validate(specs, new)
    arrived = execute(plan, specs, old, new, {worker})
    for spec in specs:
        for destination in new.workers:
            cell = spec.cell(new.coordinates(destination))
            rows = [i for s in cell.rows for i in range(s.start, s.stop)]
            columns = [i for s in cell.columns for i in range(s.start, s.stop)]
            for r, row in enumerate(rows):
                for c, column in enumerate(columns):
                    assert arrived[spec.fqn, destination, r, c] == (row, column)


@given(st.integers(2, 6), st.integers(2, 3), st.data())
def test_a_loss_next_in_the_order_moves_the_lost_roles_elements_and_nothing_in_healthy_replicas(roles, replicas, data):
    healthy = Topology.from_shapes([(1, roles)] * replicas)
    worker = data.draw(st.sampled_from(healthy.workers))
    new = healthy.without(worker)
    old = replace(healthy, loss_order=new.loss_order)
    specs = specs_for(new, heads=12, group=1, ffn=24)
    plan = plan_reshard(specs, old, new, {worker})
    lost = old.coordinates(worker)
    wanted = sum(spec.cell(lost).numel for spec in specs if spec.dim is not None)
    assert plan.moved_elements == wanted
    assert plan.bytes(12) == 12 * wanted
    hurt = new.replicas[old.position(worker).replica].workers
    assert {t.destination for t in plan.transfers if not t.is_local} <= set(hurt)


@given(topologies(), st.data())
def test_going_back_is_the_inverse(topology, data):
    index = data.draw(st.sampled_from(range(len(topology.replicas))))
    replica = topology.replicas[index]
    if replica.degree == topology.num_roles:
        return
    grown = topology.with_workers(index, range(100, 100 + replica.fsdp_size))
    specs = specs_for(topology)
    plan = plan_reshard(specs, topology, grown)
    plan.validate(specs, grown)
    assert plan.inverse().inverse() == plan
    assert plan.inverse().moved_elements == plan.moved_elements
    assert plan.inverse().digest != plan.digest


def test_relabelling_moves_at_most_twice_the_bound():
    old = Topology.from_shapes([(1, 3), (1, 2)], (1, 2))
    new = old.without(2)
    assert new.replicas[0].degree == 2
    specs = specs_for(new, heads=12, group=1, ffn=24)
    plan = plan_reshard(specs, old, new, {2})
    held = {w: old.coordinates(w) for w in old.workers if w != 2}
    bound = 0
    for spec in specs:
        for worker in new.workers:
            have = elements(spec.cell(held[worker]))
            bound += len(elements(spec.cell(new.coordinates(worker))) - have)
    assert bound == plan.moved_elements, "whatever a worker lacks comes exactly once"
    lost = sum(spec.cell(old.coordinates(2)).numel for spec in specs if spec.dim is not None)
    assert plan.moved_elements <= 2 * lost


def test_what_nobody_holds_is_unrecoverable_and_says_what_would_have_helped():
    old = Topology.from_shapes([(1, 2)])
    new = old.without(1)
    with pytest.raises(UnrecoverableError, match=r"q.weight: no live worker holds rows\[12:24\).*one more replica"):
        plan_reshard(specs_for(new), Topology(2, old.replicas, new.loss_order), new, {1})


def test_validation_finds_a_hole_and_a_collision():
    topology = Topology.from_shapes([(1, 1)])
    spec = ParamSpec("w", (2, 2))
    half = Piece(Span(0, 1), Span(0, 2), 0, 0, 0, 0)
    for pieces in ([half], [half, half]):
        plan = ReshardPlan(tuple(Transfer("w", 0, 0, piece) for piece in pieces))
        with pytest.raises(PlanMismatchError, match="w: the plan does not fill worker 0's cell exactly once"):
            plan.validate([spec], topology)


def test_a_plan_prints_one_line_per_move():
    move = Transfer("layers.0.wq", 2, 0, Piece(Span(384, 512), Span(0, 8), 0, 0, 0, 0))
    assert repr(move) == "2 -> 0  layers.0.wq  rows[384:512) columns[0:8)"
