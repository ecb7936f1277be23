"""The ledger of a run that loses two workers, the leader among them, in a Trainer under the real supervisor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_ntp.goodput_merge import read_run
from lightning_ntp.strategy.wandb_offline import read_wandb

ROOT = Path(__file__).parent.parent
FAULTS = [{"action": "kill", "worker": 3, "step": 7, "phase": "backward"}, {"action": "kill", "worker": 0, "step": 20, "phase": "forward"}]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_two_losses_add_up_and_the_next_leader_writes_the_same_wandb_run(tmp_path: Path) -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT), "NTP_FAULTS": json.dumps(FAULTS), "WANDB_SILENT": "true"}
    command = [sys.executable, "-m", "tests.goodput_fit", str(tmp_path)]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = done.stdout + done.stderr
    assert said.count("LOST (3,)") == said.count("RECOVERED (2, 1)") == 3
    assert said.count("LOST (0,)") == said.count("RECOVERED (1, 1)") == 2
    [folder] = (tmp_path / "ntp_logs").iterdir()
    history = read_run(folder)
    spent = history.gpu_ns()
    assert sum(spent.values()) == 4 * (history.at_ns - history.start_ns)
    assert history.step == 45 and history.num_damaged == 0
    assert [event["event"] for event in history.events] == ["start", "loss", "recovery", "loss", "recovery", "end"]
    for bucket in ("productive", "init", "data_wait", "eval", "checkpoint_save", "lost_step", "reshard", "regroup", "degraded_capacity"):
        assert spent[bucket] > 0, bucket
    first, second = (read_wandb(file) for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")))
    assert first.run_id in ("", second.run_id) and second.run_id.startswith("ntp-")
    assert second.alerts == ["lost worker 0", "training goes on"]
    assert second.summary["ntp/num_losses"] == 2
    assert second.summary["ntp/live_gpus"] == 2 and second.summary["ntp/owned_gpus"] == 4
