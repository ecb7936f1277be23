"""`make goodput`: what a drill says, how committed steps become a record, and that the simulator predicts the records we keep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.policies.drill import PHASE, SAVE_EVERY, Drill, Return, last_step, usual_drill
from benchmarks.policies.record import Account, Mark, Struck
from lightning_ntp.calibration import RunRecord, predict, read_records
from lightning_ntp.cli import app
from lightning_ntp.errors import ConfigError
from lightning_ntp.testing import Fault

RECORDS = Path(__file__).parent / "records"
"""Of real runs: ntp under the usual drill, the others under a drill of two losses and one return. They are not compared with each other."""

STEP = {(3, 3): 0.8, (2, 3): 1.0, (1, 3): 1.2, (3,): 1.5}
RECOVERY, REJOIN, STARTING, SAVE, BATCH = 1.5, 1.0, 2.0, 0.1, 12


def _degrees(drill: Drill, down: set[int], whole: bool) -> tuple[int, ...]:
    lost = [len(down & set(drill.mates(replica * drill.degree))) for replica in range(drill.replicas)]
    return tuple(sorted(drill.degree - gone for gone in lost if not (whole and gone)))


def play(policy: str, drill: Drill, shrinking_batch: bool = False) -> Account:
    """A run by the clock: nothing but a list of times. Losses cost the running step (or all since the save) and a pause."""
    whole, now, step = policy != "ntp", 0.0, 0
    marks: list[Mark] = []
    struck: list[Struck] = []
    losses, returns = {fault.step: fault for fault in drill.losses}, list(drill.returns)
    opened: dict[Return, float] = {}
    down, working = set[int](), _degrees(drill, set(), whole)
    while step < drill.steps:
        opened = {back: opened.get(back, now) for back in returns if back.step <= step}
        for back, at in opened.items():
            if policy == "restart" or now >= at + STARTING:
                returns.remove(back)
                down.discard(back.gpu)
        degrees = _degrees(drill, down, whole)
        now += REJOIN if sum(degrees) > sum(working) else 0.0
        working = degrees
        fault = losses.pop(step, None)
        if fault is not None:
            down.add(fault.worker)
            after = _degrees(drill, down, whole)
            if after != working:
                struck.append(Struck(now + fault.delay_seconds, fault.worker))
                now, working = now + fault.delay_seconds + RECOVERY, after
                step = step // SAVE_EVERY * SAVE_EVERY if policy == "restart" else step
        samples = BATCH * len(working) / 2 if shrinking_batch else float(BATCH)
        now += STEP[working] / (1 if not shrinking_batch else 3 - len(working))
        marks.append(Mark(now, step, working, samples))
        step += 1
        if policy == "restart" and step % SAVE_EVERY == 0:
            now += SAVE
    return Account(policy, drill, marks, struck, BATCH)


def test_the_usual_drill_has_six_losses_and_leaves_a_whole_replica() -> None:
    drill = usual_drill()
    assert len(drill.losses) == 6 and len(drill.returns) == 4
    assert all(drill.whole_replicas(step) for step in range(drill.steps))
    assert drill.down(drill.steps) == {3, 4}
    assert Drill.from_json(drill.to_json()) == drill
    assert usual_drill(2.0).steps == 2 * drill.steps


def test_a_dropped_replica_is_back_when_all_of_its_gpus_are() -> None:
    drill = usual_drill()
    first, second = drill.returns[:2]
    assert drill.back_at(first.gpu, 10, whole=False) == first.step
    assert drill.back_at(first.gpu, 10, whole=True) == drill.back_at(0, 10, whole=True) == second.step
    assert drill.back_at(3, drill.losses[4].step or 0, whole=False) is None
    assert {fault.worker for fault in drill.script(whole=True).faults[:3]} == {0, 1, 2}


def _kill(gpu: int, step: int) -> Fault:
    return Fault("kill", gpu, PHASE, step)


@pytest.mark.parametrize(
    ("losses", "returns", "words"),
    [
        ((_kill(1, 3),), (Return(2, 8),), "GPU 2 cannot be back at step 8"),
        ((_kill(1, 3), _kill(4, 5)), (), "no replica is whole"),
    ],
)
def test_drills_that_cannot_be(losses: tuple[Fault, ...], returns: tuple[Return, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Drill(20, 3, 2, losses, returns)


def test_the_newest_step_of_logs_whose_writers_were_killed(tmp_path: Path) -> None:
    assert last_step(tmp_path) == -1
    (tmp_path / "0-1.jsonl").write_text('{"kind": "commit", "step": 4}\n{"kind": "step", "step": 4}\n')
    (tmp_path / "1-2.jsonl").write_text('{"kind": "commit", "step": 5}\n{"kind": "comm')
    assert last_step(tmp_path) == 5


@pytest.mark.parametrize("policy", ["ntp", "drop", "restart", "torchft"])
def test_costs_are_found_in_a_played_run_and_predict_it(policy: str) -> None:
    account = play(policy, usual_drill(), shrinking_batch=policy == "torchft")
    found = account.record()
    assert found["recovery_seconds"] == pytest.approx([RECOVERY] * (6 if policy == "ntp" else 3))
    saved = SAVE if policy == "restart" else 0.0  # it is stopped right after a checkpoint
    assert found["rejoin_seconds"] == pytest.approx([REJOIN + saved] * (4 if policy == "ntp" else 2))
    assert found["step_seconds"]["3,3"] == pytest.approx(STEP[3, 3])
    assert len(found["changes"]) == 10
    record = RunRecord.from_dict(json.loads(json.dumps(found)))
    assert abs(predict(record).error) < 0.05
    if policy == "restart":
        assert found["lost_steps"] > 3 and found["checkpoint_seconds"] == pytest.approx(SAVE)
    if policy == "torchft":
        assert found["step_samples"]["3"] == BATCH / 2


def test_a_run_that_ends_before_its_gpus_are_taken_in_is_no_record() -> None:
    drill = usual_drill()
    late = Drill(42, 3, 2, drill.losses[:2], drill.returns[:2])
    with pytest.raises(ConfigError, match="taken in before the run ended; stretch the drill"):
        play("ntp", late).record()


@pytest.mark.parametrize("policy", ["ntp", "drop", "restart", "torchft"])
def test_the_goodput_of_real_runs_is_predicted_within_five_percent(policy: str) -> None:
    (record,) = read_records(RECORDS / f"{policy}.json")
    kinds = [change.kind for change in record.changes]
    assert (kinds.count("loss"), kinds.count("return")) == (6, 4)
    assert abs(predict(record).error) < 0.05


def test_the_command_takes_a_folder_of_records() -> None:
    rows = json.loads(CliRunner().invoke(app, ["calibrate", str(RECORDS), "--json"]).output)
    assert {row["policy"] for row in rows} == {"ntp", "drop", "restart", "torchft"}
    assert all(abs(row["error"]) < 0.05 for row in rows)


def test_a_folder_without_records(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no \\*.json in this folder"):
        read_records(tmp_path)
