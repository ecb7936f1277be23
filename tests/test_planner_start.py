"""What the planner makes of a machine and a model before the first step: shapes, reasons, alternatives."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ntp.errors import ConfigError
from lightning_ntp.planner_start import MEMORY_SHARE, Machine, ModelSize, Wanted, plan_start
from lightning_ntp.strategy.checks import fewest_query_heads
from lightning_ntp.strategy.config import StrategyConfig

GIB = 2**30
BILLION = 10**9


def _sizes(num_parameters: int, max_degree: int | None = None) -> ModelSize:
    return ModelSize.of(num_parameters, "32-true", weight_bytes=4 * num_parameters, max_degree=max_degree)


@pytest.mark.parametrize(
    ("machine", "num_parameters", "shapes"),
    [
        (Machine(1, 1), BILLION, [(1, 1)]),
        (Machine(1, 5), BILLION, [(3, 1), (2, 1)]),
        (Machine(1, 8, 80 * GIB), BILLION // 10, [(2, 1)] * 4),
        (Machine(1, 7, 80 * GIB), BILLION // 10, [(3, 1), (2, 1), (2, 1)]),
        (Machine(1, 2, 80 * GIB), BILLION // 10, [(1, 1), (1, 1)]),
        (Machine(1, 8, 80 * GIB), 8 * BILLION, [(2, 2), (2, 2)]),
        (Machine(1, 7, 80 * GIB), 8 * BILLION, [(1, 4), (1, 3)]),
        (Machine(2, 8, 80 * GIB), 8 * BILLION, [(2, 2)] * 4),
        (Machine(1, 8, 80 * GIB), 25 * BILLION, [(1, 8)]),
        (Machine(4, 8, 80 * GIB), 70 * BILLION, [(4, 8)]),
    ],
)
def test_auto_is_the_smallest_replica_with_room_for_a_loss(machine, num_parameters, shapes):
    choice = plan_start(Wanted(), machine, _sizes(num_parameters))
    assert list(choice.shapes) == shapes
    assert choice.reason


@pytest.mark.parametrize(
    ("domain_sizes", "billions", "shapes"),
    [
        ((8, 7), 0.1, [(2, 1)] * 7 + [(1, 1)]),
        ((8, 7), 8, [(1, 4), (1, 4), (1, 4), (1, 3)]),
        ((8, 3), 8, [(1, 4), (1, 4), (1, 3)]),
        ((8, 7), 25, [(1, 8), (1, 7)]),
        ((8, 6), 25, [(7, 2)]),
        ((72,), 70, [(1, 24), (1, 24), (1, 24)]),
        ((8, 8, 8, 8), 70, [(4, 8)]),
    ],
)
def test_auto_fills_every_domain(domain_sizes, billions, shapes):
    machine = Machine(len(domain_sizes), max(domain_sizes), 80 * GIB, domain_sizes, "NVLink fabric")
    choice = plan_start(Wanted(), machine, _sizes(int(billions * BILLION)))
    assert list(choice.shapes) == shapes
    assert sum(fsdp * tp for fsdp, tp in choice.shapes) == sum(domain_sizes)


@settings(max_examples=200, deadline=None)
@given(
    domains=st.lists(st.integers(1, 12), min_size=1, max_size=5).map(tuple),
    parameters=st.integers(1, 60 * BILLION),
    heads=st.sampled_from([1, 3, 8, 64]),
)
def test_auto_keeps_its_promises(domains, parameters, heads):
    machine, model = Machine(len(domains), max(domains), 80 * GIB, domains), _sizes(parameters, heads)
    try:
        choice = plan_start(Wanted(), machine, model)
    except ConfigError:
        assert model.state_bytes > MEMORY_SHARE * 80 * GIB * (sum(domains) - 1), "refused although it fits"
        return
    if sum(domains) == 1:
        assert choice.shapes == ((1, 1),)
        return
    sizes, holds = [len(replica.workers) for replica in choice.topology.replicas], MEMORY_SHARE * 80 * GIB
    assert choice.topology.workers == tuple(range(sum(domains))), "every device takes part"
    assert max(replica.degree for replica in choice.topology.replicas) <= heads
    assert all(size * holds >= model.state_bytes for size in sizes), "a replica that cannot hold the model"
    if "leaves room for a loss" in choice.reason and len(set(domains)) == 1 and "second replica" not in choice.reason:
        assert all((size - 1) * holds >= model.state_bytes for size in sizes)
    if "no replica leaves" in choice.reason:
        ends = set(itertools.accumulate(sizes))
        assert ends.issuperset(itertools.accumulate(domains))


@pytest.mark.parametrize(
    ("options", "num_devices", "shapes"),
    [
        ({"tensor_parallel_size": 4}, 8, [(1, 4), (1, 4)]),
        ({"tensor_parallel_size": 4}, 7, [(1, 4), (1, 3)]),
        ({"num_replicas": 2}, 7, [(4, 1), (3, 1)]),
        ({"num_replicas": 2, "tensor_parallel_size": 2}, 8, [(2, 2), (2, 2)]),
        ({"num_replicas": 1, "tensor_parallel_size": 2, "fsdp_size": 3}, 6, [(3, 2)]),
        ({"fsdp_size": 2}, 8, [(2, 1)] * 4),
        ({"replica_sizes": [3, 2]}, 5, [(1, 3), (1, 2)]),
        ({"replica_sizes": [(2, 2), (1, 3)]}, 7, [(2, 2), (1, 3)]),
    ],
)
def test_given_sizes(options, num_devices, shapes):
    choice = plan_start(StrategyConfig(**options).wanted, Machine(1, num_devices, 80 * GIB), _sizes(BILLION // 10))
    assert list(choice.shapes) == shapes


def test_alternatives_name_their_shapes_and_hold_the_model():
    choice = plan_start(Wanted(), Machine(1, 8, 80 * GIB), _sizes(8 * BILLION))
    assert choice.alternatives == (
        "num_replicas=1: 1 of 4x2",
        "tensor_parallel_size=8: 1 of 1x8",
    )


@pytest.mark.parametrize(
    ("parameters", "heads", "words"),
    [
        (BILLION // 10, None, "1 device(s) hold the model, {room}; fsdp alone cuts its weights, which one device can gather"),
        (8 * BILLION, None, "3 device(s) hold the model, {room}; {large}"),
        (25 * BILLION, 4, "7 device(s) hold the model, {room}; a second replica does not fit; {large}"),
    ],
)
def test_the_reason_says_how_many_and_which_cut(parameters, heads, words):
    reason = plan_start(Wanted(), Machine(1, 8, 80 * GIB), _sizes(parameters, heads)).reason
    large = f"its weights ({4 * parameters / GIB:.1f} GiB) are too large to be gathered whole, so tp cuts them"
    assert reason == words.format(room="one more leaves room for a loss", large=large)


def test_auto_has_no_more_roles_than_query_heads():
    machine, few = Machine(1, 7, 80 * GIB), _sizes(8 * BILLION, max_degree=3)
    assert plan_start(Wanted(), machine, _sizes(8 * BILLION)).shapes == ((1, 4), (1, 3))
    assert plan_start(Wanted(), machine, few).shapes == ((2, 2), (1, 3))
    assert not any("tensor_parallel_size=7" in text for text in plan_start(Wanted(), machine, few).alternatives)


def test_frozen_parameters_need_no_gradients():
    machine, weights = Machine(1, 8, 80 * GIB), 32 * BILLION
    adapters = ModelSize.of(BILLION // 100, "32-true", weight_bytes=weights, frozen_bytes=weights)
    assert len(plan_start(Wanted(), machine, adapters).shapes) == 4
    assert len(plan_start(Wanted(), machine, _sizes(8 * BILLION)).shapes) == 2


def test_query_heads_are_those_of_the_models_inside():
    module, tower, text = torch.nn.Module(), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert fewest_query_heads(module) is None
    tower.config, text.config = SimpleNamespace(num_attention_heads=16), SimpleNamespace(num_attention_heads=6)
    module.tower, module.text = tower, text
    assert fewest_query_heads(module) == 6
