"""Costs of a cut model: bytes are those of its reshard plan, and a shape that its layouts lack is never chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightning_ntp.errors import ConfigError, UnrecoverableError
from lightning_ntp.layout import nested_layouts
from lightning_ntp.model_spec import ParamSpec
from lightning_ntp.plan_cost import PlanCost
from lightning_ntp.planner import further_losses, plan_placement
from lightning_ntp.presets import GPUS
from lightning_ntp.reshard import plan_reshard
from lightning_ntp.topology import Topology

HEADS, HEAD_SIZE, HIDDEN, FFN = 6, 4, 24, 50


def params_for(num_roles: int, order: Sequence[int]) -> list[ParamSpec]:
    heads = nested_layouts(HEADS, num_roles, order).scaled(HEAD_SIZE)
    ffn = nested_layouts(FFN, num_roles, order)
    return [
        ParamSpec("q", (HEADS * HEAD_SIZE, HIDDEN), 0, heads),
        ParamSpec("o", (HIDDEN, HEADS * HEAD_SIZE), 1, heads),
        ParamSpec("up", (FFN, HIDDEN), 0, ffn),
        ParamSpec("norm", (HIDDEN,)),
    ]


def cost_of(topology: Topology, **options: object) -> PlanCost:
    return PlanCost(lambda order: params_for(topology.num_roles, order), topology, GPUS["h100"], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shapes", "lost"), [([(1, 3)] * 2, [4]), ([(1, 3)] * 2, [0]), ([(2, 3)] * 2, [7]), ([(3, 1)] * 2, [1]), ([(2, 2)] * 2, [5])]
)
def test_a_loss_moves_what_its_reshard_plan_says(shapes: list[tuple[int, int]], lost: list[int]) -> None:
    old = Topology.from_shapes(shapes)
    cost = cost_of(old, tokens_per_sample=16_384)  # with few tokens a step the sync is dear, and fewer replicas are faster
    placement = plan_placement(old, cost, 12, lost, refactor=False)
    plan = plan_reshard(params_for(old.num_roles, placement.topology.loss_order), old, placement.topology, lost)
    assert placement.moved_bytes == plan.bytes(12) > 0
    assert set(placement.topology.workers) | set(placement.topology.spares) == set(old.workers) - set(lost)


def test_pure_fsdp_drops_the_row() -> None:
    old = Topology.from_shapes([(3, 1)] * 2)
    shapes = [(r.fsdp_size, r.degree) for r in plan_placement(old, cost_of(old), 12, [1]).topology.replicas]
    assert shapes == [(2, 1), (3, 1)]


def test_the_fullest_worker_sets_time_and_memory() -> None:
    topology = Topology.from_shapes([(1, 4)] * 2)
    cost = cost_of(topology)
    # at degree 4: 2 heads of 6 (q and o), 13 of 50 columns, the norm
    assert cost.elements(4) == 2 * 2 * HEAD_SIZE * HIDDEN + 13 * HIDDEN + HIDDEN
    assert cost.memory_bytes(4) == 16 * cost.elements(4)
    assert cost.elements(4, 2) < cost.elements(4)
    assert cost.sample_seconds(3) == pytest.approx(cost.sample_seconds(4) * cost.elements(3) / cost.elements(4))


def test_what_does_not_fit_is_not_chosen() -> None:
    topology = Topology.from_shapes([(1, 3)] * 2)
    cost = cost_of(topology)
    tight = replace(GPUS["h100"], memory_bytes=cost.memory_bytes(3) / 0.9)
    narrow = PlanCost(cost.params_for, topology, tight)
    placement = plan_placement(topology, narrow, 12, [4])
    assert [replica.degree for replica in placement.topology.replicas] == [3] and placement.dropped_replicas == 1
    assert [len(p.topology.replicas) for p in further_losses(placement, narrow, 12, 5)] == []
    assert not narrow.fits(4), "more roles than were planned"


def test_a_region_without_a_holder_is_said() -> None:
    topology = Topology.from_shapes([(1, 3)])
    with pytest.raises(UnrecoverableError, match="q"):
        plan_placement(topology, cost_of(topology), 12, [1])


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="tokens_per_sample must be a finite number above 0"):
        cost_of(Topology.from_shapes([(1, 2)]), tokens_per_sample=0)
