"""What the first screen says of the next losses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_ntp.layout import nested_layouts
from lightning_ntp.model_spec import Coordinates, ModelPlan, ParamSpec
from lightning_ntp.presets import GPUS
from lightning_ntp.strategy.outlook import device_spec, look_ahead
from lightning_ntp.strategy.screen import memory
from lightning_ntp.topology import Topology

SPEC = replace(GPUS["h100"], network_bytes_per_second=450e9)


def plan(num_roles: int) -> ModelPlan:
    layouts = nested_layouts(12, num_roles, range(num_roles - 1, 0, -1))
    return ModelPlan((ParamSpec("up", (12, 64), 0, layouts), ParamSpec("down", (64, 12), 1, layouts)), (), (), num_roles)


def elements(num_roles: int, degree: int, fsdp_size: int = 1) -> int:
    seats = [Coordinates(degree, role, fsdp_size, 0) for role in Topology.from_shapes([(1, num_roles)]).roles(degree)]
    return max(sum(spec.cell(at).numel for spec in plan(num_roles).params) for at in seats)


def test_memory_now_and_after_two_losses() -> None:
    outlook = look_ahead(plan(3), Topology.from_shapes([(1, 3), (1, 3)]), SPEC, 16, 8)
    assert outlook.now.bytes == 16 * elements(3, 3) == 16 * 2 * 4 * 64
    assert [state.shapes for state in outlook.after] == ["1x2, 1x3", "1x2, 1x2"]
    assert [state.bytes for state in outlook.after] == [16 * elements(3, 2)] * 2
    assert outlook.warnings == ()
    assert [name for name, _ in memory(outlook)] == ["memory per worker", "after 1 more loss", "after 2 more losses"]


def test_pure_fsdp_goes_on_with_a_row_less() -> None:
    outlook = look_ahead(plan(1), Topology.from_shapes([(3, 1), (3, 1)]), SPEC, 16, 8)
    assert outlook.after[0].shapes == "2x1, 3x1" and outlook.after[0].bytes == 16 * elements(1, 1, 2)


def test_one_replica_has_no_second_holder() -> None:
    outlook = look_ahead(plan(3), Topology.from_shapes([(1, 3)]), SPEC, 16, 8)
    assert outlook.after == () and "loss 1 in one replica would end the job" in outlook.warnings[0]


def test_a_replica_that_would_not_fit_is_said_to_be_dropped() -> None:
    tight = replace(SPEC, memory_bytes=16 * elements(3, 3) / 0.9)
    outlook = look_ahead(plan(3), Topology.from_shapes([(1, 3), (1, 3)]), tight, 16, 8)
    assert outlook.after[0].shapes == "1x3"
    assert outlook.warnings[0] == "loss 1 costs a whole replica: its other workers cannot hold the model"


def test_a_model_that_fills_the_device_says_so_instead_of_failing() -> None:
    outlook = look_ahead(plan(3), Topology.from_shapes([(1, 3)]), replace(SPEC, memory_bytes=1.0), 16, 8)
    assert outlook.after == () and "no replica can hold the model" in outlook.warnings[0]


@pytest.mark.parametrize(("num_nodes", "fast"), [(1, True), (2, False)])
def test_the_spec_of_a_gpu_has_its_own_memory(monkeypatch: pytest.MonkeyPatch, num_nodes: int, fast: bool) -> None:
    class Properties:
        name, total_memory = "NVIDIA H200", 150 * 10**9

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    spec = device_spec(torch.device("cuda", 0), 8, num_nodes)
    assert (spec.peak_flops, spec.memory_bytes) == (GPUS["h200"].peak_flops, 150e9)
    assert (spec.network_bytes_per_second == spec.nvlink_bytes_per_second) is fast


def test_the_spec_of_a_cpu_worker_shares_the_host() -> None:
    whole, half = (device_spec(torch.device("cpu"), workers, 1).memory_bytes for workers in (1, 2))
    assert whole == 2 * half > 2**30
