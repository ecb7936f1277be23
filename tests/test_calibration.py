"""Prediction against a run that is played step by step here, without the simulator's interval arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lightning_ntp.calibration import RunRecord, predict, read_records
from lightning_ntp.cli import app
from lightning_ntp.errors import ConfigError

STEP = {"3,3": 1.0, "2,3": 1.25, "2,2": 1.5, "3": 2.0}
RECOVERY, REJOIN, SAVE, SAVE_EVERY = 2.0, 1.0, 0.5, 20
CHANGES = [(100.0, 1, "loss"), (260.4, 1, "return"), (300.3, 4, "loss"), (450.2, 4, "return")]


def play(policy: str, wall: float) -> dict[str, Any]:
    """A run of whole steps: a loss in a step costs the step (or all since the last save), then the recovery."""
    pending, down, used = list(CHANGES), set[int](), set[str]()
    now, committed, lost, saved = 0.0, 0, 0, 0
    while True:
        degrees = sorted(3 - len([g for g in down if g // 3 == replica]) for replica in range(2))
        if policy != "ntp":
            degrees = [degree for degree in degrees if degree == 3]
        key = ",".join(map(str, degrees))
        used.add(key)
        end = now + STEP[key]
        if pending and pending[0][0] < end:
            at, gpu, kind = pending.pop(0)
            if kind == "loss":
                down.add(gpu)
                now = at + RECOVERY
                if policy == "restart":
                    lost, committed = lost + committed - saved, saved
                else:
                    lost += 1
            else:  # taken back at the step boundary
                down.discard(gpu)
                committed, now = committed + 1, end + REJOIN
            continue
        if end > wall:
            break
        now, committed = end, committed + 1
        if policy == "restart" and committed % SAVE_EVERY == 0:
            now, saved = now + SAVE, committed
    return {
        "policy": policy,
        "num_gpus": 6,
        "domain_size": 3,
        "global_batch": 12,
        "wall_seconds": now,
        "committed_steps": committed,
        "lost_steps": lost,
        "step_seconds": {key: STEP[key] for key in used},
        "recovery_seconds": [RECOVERY] * 2,
        "rejoin_seconds": [REJOIN] * 2,
        "checkpoint_seconds": SAVE if policy == "restart" else 0.0,
        "checkpoint_every_steps": SAVE_EVERY if policy == "restart" else 0,
        "changes": [{"seconds": t, "gpu": gpu, "kind": kind} for t, gpu, kind in CHANGES],
    }


@pytest.mark.parametrize("policy", ["ntp", "drop", "restart"])
def test_prediction_is_within_five_percent_of_a_played_run(policy: str) -> None:
    found = predict(RunRecord.from_dict(play(policy, 600.0)))
    assert abs(found.error) < 0.05
    parts = found.predicted
    assert parts.goodput + parts.reduced + parts.recovery + parts.lost_work + parts.checkpoints == pytest.approx(1)


def test_dropping_a_replica_is_worse_than_shrinking_it_in_both_columns() -> None:
    ntp, drop = (predict(RunRecord.from_dict(play(policy, 600.0))) for policy in ("ntp", "drop"))
    assert ntp.measured > drop.measured and ntp.predicted.goodput > drop.predicted.goodput


def test_longer_recoveries_lower_the_prediction() -> None:
    record = play("ntp", 600.0)
    slow = predict(RunRecord.from_dict({**record, "recovery_seconds": [30.0]}))
    assert slow.predicted.goodput < predict(RunRecord.from_dict(record)).predicted.goodput - 0.05


def test_the_command_prints_both(tmp_path: Path) -> None:
    path = tmp_path / "goodput.json"
    path.write_text(json.dumps({"runs": [play("ntp", 600.0), play("drop", 600.0)]}))
    assert [record.policy for record in read_records(path)] == ["ntp", "drop"]
    shown = CliRunner().invoke(app, ["calibrate", str(path)])
    assert shown.exit_code == 0 and "measured" in shown.output and "drop" in shown.output
    rows = json.loads(CliRunner().invoke(app, ["calibrate", str(path), "--json"]).output)
    assert [row["policy"] for row in rows] == ["ntp", "drop"] and all(abs(row["error"]) < 0.05 for row in rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_seconds": {"2,3": 1.0}}, "no entry for the healthy job '3,3'"),
        ({"step_seconds": {"3,3": 1.0}}, "no step was committed with replicas of degrees '2,3'"),
        ({"wall_seconds": 0}, "wall_seconds must be a finite number above 0"),
        ({"changes": None}, "no record of a run"),
    ],
)
def test_bad_records(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        predict(RunRecord.from_dict({**play("ntp", 600.0), **change}))


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_records(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="wanted a list of records"):
        read_records(path)
    assert CliRunner().invoke(app, ["calibrate", str(path)]).exit_code == 2
