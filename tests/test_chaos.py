"""Random faults with fixed seeds; `make chaos` draws from the same for half an hour."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import draw
from benchmarks.leaks import MOST_GROWN, leaks, usage
from benchmarks.recovery_job import shapes_of
from lightning_ntp.testing import FaultScript
from tests.survival import Run


@pytest.mark.parametrize("seed", [8, 41])
def test_a_sample_of_random_faults(seed: int, tmp_path: Path) -> None:
    episode = draw(random.Random(seed))
    shapes = shapes_of(list(episode.replicas))
    run = Run(
        tmp_path,
        FaultScript(*episode.faults),
        workers=sum(fsdp * tp for fsdp, tp in shapes),
        strategy={"replica_sizes": shapes},
        accumulate_grad_batches=episode.accumulate,
        max_epochs=4,
        patience={"hang_seconds": 5.0},
    )
    ended = {line["worker"] for line in run.lines("finished")}
    run.check(ended)
    assert set(range(run.workers)) - ended <= {fault.worker for fault in episode.faults}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_two_minutes_of_chaos(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--minutes", "2", "--seed", "1"]
    done = subprocess.run(command, check=False, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.search(r"seed 1: (\d+) faults in (\d+) episodes, 0 of them failed\nleaked: nothing\n", done.stdout)
    assert said is not None and int(said[1]) >= int(said[2]) >= 1, done.stdout


def test_episodes_are_such_that_a_job_must_survive_them() -> None:
    for seed in range(200):
        episode = draw(random.Random(seed))
        assert episode.faults[0].step is not None, "a recovery must be under way before one can be hit"
        steps = [fault.step for fault in episode.faults if fault.step is not None]
        assert len(set(steps)) == len(steps) and len({fault.worker for fault in episode.faults}) == len(episode.faults)


def test_leaks_are_found(tmp_path: Path) -> None:
    few, many = dict.fromkeys(MOST_GROWN, 10), dict.fromkeys(MOST_GROWN, 40)
    events = [{"kind": "start", "worker": 0, "pid": 12345, "endpoint": ""}]
    events += [{"kind": "commit", "worker": 0, "usage": used} for used in (few, few, many)]
    before = leaks(events[:-1])  # other tests keep a pool of workers
    assert all(line.startswith("leaked process: ") for line in before)
    assert [line for line in leaks(events) if line not in before] == [
        f"leaked {kind}: worker 0 had 10 at first and 40 at the end" for kind in MOST_GROWN
    ]
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert any(line.startswith(f"leaked process: {child.pid}, ") for line in leaks(events[:-1]))
    finally:
        child.kill()
        child.communicate()
    assert usage().keys() == MOST_GROWN.keys()
