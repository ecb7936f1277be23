"""Faults on demand: that they do what they say, where and when they should, and what a job makes of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.damage import flip_bit
from lightning_ntp.testing import Fault, FaultScript, InjectedFault
from tests.forked import ForkedJob
from tests.test_membership import NUM_STEPS, check_survivors, train


def test_fault_script_strikes_once_where_it_should() -> None:
    script = FaultScript(Fault("raise", 1, "sync", 3), Fault("raise", 1, "forward"))
    assert FaultScript.from_json(script.to_json()).faults == script.faults
    script.fire(0, 3, "sync")
    script.fire(1, 2, "sync")
    with pytest.raises(InjectedFault, match="worker 1 at step 3, phase sync"):
        script.fire(1, 3, "sync")
    script.fire(1, 3, "sync")
    with pytest.raises(InjectedFault, match="phase forward"):
        script.fire(1, 17, "forward")
    assert script.faults == [] and FaultScript.from_env({}).faults == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "NTP_FAULTS is no JSON"),
        ('{"action": "kill"}', "NTP_FAULTS: wanted a list such as"),
        ('[{"action": "kill", "rank": 1, "phase": "sync"}]', r"unknown \['rank'\], lacks \['worker'\]"),
        ('[{"action": "maim", "worker": 1, "phase": "sync"}]', "fault action 'maim': wanted one of kill, stop, raise"),
        ('[{"action": "kill", "worker": 1, "phase": "lunch"}]', "fault phase 'lunch': wanted one of start, join"),
        ('[{"action": "kill", "worker": -1, "phase": "sync"}]', "wanted numbers from 0"),
        ('[{"action": "raise", "worker": 1, "phase": "sync", "delay_seconds": 1}]', "fault delay 1 s"),
        ('[{"action": "slow", "worker": 1, "phase": "sync"}]', "more than 0 for the action 'slow'"),
    ],
)
def test_bad_fault_scripts(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FaultScript.from_json(text)


@pytest.mark.parametrize("phase", ["start", "join"])
def test_a_worker_that_dies_before_it_has_joined_is_a_loss(phase: str, tmp_path: Path) -> None:
    job = ForkedJob(train, 4, tmp_path, faults=FaultScript(Fault("kill", 2, phase)))
    assert job.run() == 0
    check_survivors(job, {0, 1, 3})


def test_a_worker_that_dies_while_it_leaves_harms_nobody(tmp_path: Path) -> None:
    job = ForkedJob(train, 4, tmp_path, faults=FaultScript(Fault("kill", 2, "teardown")))
    assert job.run() == 0
    assert {line["worker"] for line in job.lines if line.get("committed") == NUM_STEPS - 1} == {0, 1, 2, 3}


def test_a_worker_without_network_is_lost(tmp_path: Path) -> None:
    job = ForkedJob(train, 4, tmp_path, faults=FaultScript(Fault("drop-network", 1, "sync", 2)))
    assert job.run() == 0
    check_survivors(job, {0, 2, 3})
    broken = next(event for event in job.events if event.kind == "broken")
    assert broken.workers == (1,) and broken.why == "worker 1: exit code 75"


def test_a_slow_worker_stays_slow_and_is_no_loss(tmp_path: Path) -> None:
    job = ForkedJob(train, 3, tmp_path, faults=FaultScript(Fault("slow", 1, "sync", 2, seconds=0.2)))
    assert job.run() == 0
    check_survivors(job, {0, 1, 2})
    assert job.worlds() == [(0, 1, 2)] and job.wall_seconds > 0.2 * (NUM_STEPS - 2)


def test_a_full_disk_fails_writes_until_there_is_room_again(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            FaultScript(Fault("fill-disk", 0, "checkpoint", seconds=0.3)).fire(0, 4, "checkpoint")
            try:
                (tmp_path / "state").write_bytes(b"x")
            except OSError:
                time.sleep(0.6)
                (tmp_path / "state").write_bytes(b"x")
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bit", [0, 7, 15])
def test_one_bit_is_flipped(dtype: torch.dtype, bit: int) -> None:
    parameters = {"a.weight": torch.ones(2, 3, dtype=dtype), "b.weight": torch.ones(2, 3, dtype=dtype)}
    script = FaultScript(Fault("flip-bit", 0, "after_commit", 3, parameter="b.weight", bit=bit))
    with pytest.raises(ConfigError, match="nobody here can flip a bit at phase 'after_commit'"):
        FaultScript(*script.faults).fire(0, 3, "after_commit")
    script.handlers["flip-bit"] = lambda fault: flip_bit(parameters.items(), fault)
    script.fire(0, 3, "after_commit")
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}[parameters["b.weight"].element_size()]
    changed = parameters["b.weight"].view(whole) ^ torch.ones(2, 3, dtype=dtype).view(whole)
    assert changed.flatten().tolist() == [-(1 << 15) if (dtype, bit) == (torch.bfloat16, 15) else 1 << bit, 0, 0, 0, 0, 0]
    assert torch.equal(parameters["a.weight"], torch.ones(2, 3, dtype=dtype))
    with pytest.raises(ConfigError, match="holds no parameter whose name ends in 'c'"):
        flip_bit(parameters.items(), Fault("flip-bit", 0, "vote", parameter="c"))
