"""A worker without the memory for what it should take over: the hurt replica goes, the job stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_ntp.errors import UnrecoverableError
from lightning_ntp.strategy.lean import given_up, is_out_of_memory
from lightning_ntp.testing import Fault, FaultScript
from lightning_ntp.topology import Topology
from tests.survival import Run

THREES = Topology.from_shapes([(1, 3), (1, 3), (1, 3)])


def test_out_of_memory_while_state_moves_costs_the_replica_and_not_the_job(tmp_path: Path) -> None:
    """Worker 3 has received everything when it fails, so that the old cells have to be put together again."""
    run = Run(tmp_path, FaultScript(Fault("kill", 4, "sync", 2), Fault("out-of-memory", 3, "moved", 2)))
    run.check({0, 1, 2})
    assert {"1 replica(s) of fsdp x tp: 1x3; 1 data row(s)"} == {line["topology"] for line in run.lines("recovered")}
    assert "worker 3: out of memory while state moved: injected into worker 3" in (tmp_path / "ntp" / "events.jsonl").read_text()


def test_what_failed_allocations_look_like() -> None:
    with pytest.raises(RuntimeError) as host:
        torch.empty(2**58, dtype=torch.uint8)
    assert is_out_of_memory(host.value) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("Connection closed by peer"))


def test_who_goes() -> None:
    assert given_up(THREES, {3}, {4}, ()) == {3, 4, 5}
    assert given_up(THREES, {0}, {4}, ()) == {3, 4, 5}, "a healthy replica that was to change stays as it is"
    assert given_up(THREES, {0}, {1, 4, 8}, ()) == {0, 1, 2}
    assert given_up(THREES.without(4), {9}, (), {9}) == {9}, "a newcomer that does not fit"
    assert given_up(THREES, {5}, (), ()) == {3, 4, 5}
    with pytest.raises(UnrecoverableError, match=r"workers \[0, 3, 6\] ran out of memory .* Start again from the last checkpoint"):
        given_up(THREES, {0, 3, 6}, {1, 4, 7}, ())
