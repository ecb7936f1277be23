"""W&B as it really behaves: its run files read back, its resume rules, wrong keys and dead networks. The wandb package is the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lightning_ntp.cli import app
from lightning_ntp.errors import ConfigError
from lightning_ntp.goodput_totals import BADPUT
from lightning_ntp.strategy.wandb_log import EVENT_COLUMNS, event_row
from lightning_ntp.strategy.wandb_offline import OfflineRun, find_wandb_file, read_offline_folder, read_wandb
from tests.wandb_server import WandbServer

ROOT = Path(__file__).parent.parent

WRITER = """
import os, signal, sys, time
import wandb
from lightning.pytorch.loggers import WandbLogger
from lightning_ntp.strategy.wandb_log import WandbRun

folder, leader, fate = sys.argv[1:]
logger = WandbLogger(project="p", save_dir=folder, settings=wandb.Settings(init_timeout=2, login_timeout=1, finish_timeout=2))
run = WandbRun(logger, "ntp-job")
run.hold()
assert logger.version == "ntp-job" and not run.is_open
logger.log_hyperparams({"alpha": 3})
run.release()
run.describe({"topology": "2 x (1x3)"})
rows = [{"t": 10**18, "event": "loss", "step": 4, "workers": [4], "why": "killed"}, {"t": 2 * 10**18, "event": "recovery", "step": 4}]
for step in range(300):
    logger.log_metrics({"goodput/cumulative": 0.5, "ntp/wall_s": float(step)}, step=step)
run.alert("lost worker 4", "killed")
run.log_events(rows[: 1 + int(leader)], 0)
run.summarize({"goodput/cumulative": 0.5})
run.close()
if fate == "killed":
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
if fate == "outage":
    print("READY", flush=True)
    sys.stdin.readline()
    run.log_events(rows, 0)  # blocks for minutes, beside the others
    for step in range(300, 600):
        logger.log_metrics({"goodput/cumulative": 0.6, "ntp/wall_s": float(step)}, step=step)
wandb.finish()
print("ID", run.id, "FAILED", run.num_failed, flush=True)
"""


def _writer(folder: Path, leader: int, fate: str, **env: str) -> subprocess.Popen[str]:
    folder.mkdir(parents=True, exist_ok=True)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "WANDB_SILENT": "true"} | env
    command = [sys.executable, "-c", WRITER, str(folder), str(leader), fate]
    return subprocess.Popen(
        command, env=environ, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _online(url: str) -> dict[str, str]:
    return {"WANDB_MODE": "online", "WANDB_BASE_URL": url, "WANDB_API_KEY": "a" * 40}


def _offline_runs(folder: Path) -> list[OfflineRun]:
    return [read_wandb(file) for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)]


@pytest.fixture(scope="module")
def two_leaders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the first leader of a job was killed and the second one ended well, offline."""
    folder = tmp_path_factory.mktemp("leaders")
    for leader, fate in ((0, "killed"), (1, "ends")):
        process = _writer(folder, leader, fate, WANDB_MODE="offline")
        output, _ = process.communicate(timeout=100)
        assert process.returncode == (-9 if fate == "killed" else 0), output
    return folder


def test_after_the_loss_of_the_leader_the_next_one_writes_the_same_run(two_leaders: Path) -> None:
    tmp_path = two_leaders
    first, second = _offline_runs(tmp_path)
    assert second.run_id == "ntp-job"
    assert first.run_id in ("ntp-job", ""), "what the killed one had not yet written in blocks of 32 KiB is gone"
    assert {file.name for file in tmp_path.glob("wandb/offline-run-*/*.wandb")} == {"run-ntp-job.wandb"}
    assert second.config["alpha"] == 3 and second.config["ntp"]["topology"] == "2 x (1x3)"
    assert second.metrics["goodput/*"] == "ntp/wall_s"
    assert second.alerts == ["lost worker 4"]
    assert second.summary["goodput/cumulative"] == 0.5
    assert [row["ntp/wall_s"] for row in second.rows if "goodput/cumulative" in row] == [float(step) for step in range(300)]
    table = json.loads(next(tmp_path.glob("wandb/offline-run-*/files/media/table/ntp/events*.json")).read_text())
    assert table["columns"] == list(EVENT_COLUMNS)
    assert max(len(json.loads(file.read_text())["data"]) for file in tmp_path.glob("wandb/*/files/media/table/ntp/events*.json")) == 2


@pytest.mark.full
def test_online_two_leaders_make_one_run(tmp_path: Path) -> None:
    with WandbServer() as server:
        for leader, fate in ((0, "killed"), (1, "ends")):
            process = _writer(tmp_path, leader, fate, **_online(server.url))
            output, _ = process.communicate(timeout=100)
            assert process.returncode == (-9 if fate == "killed" else 0), output
        assert set(server.runs) == {"ntp-job"}
        assert server.num_streamed > 0
    assert not list(tmp_path.glob("wandb/offline-run-*"))


@pytest.mark.full
def test_two_that_claim_to_lead_at_once_still_make_one_run(tmp_path: Path) -> None:
    with WandbServer() as server:
        writers = [_writer(tmp_path / str(leader), leader, "ends", **_online(server.url)) for leader in (0, 1)]
        for process in writers:
            output, _ = process.communicate(timeout=100)
            assert process.returncode == 0 and "ID ntp-job" in output, output
        assert set(server.runs) == {"ntp-job"}


def test_report_on_an_offline_folder_shows_totals_and_the_table_of_events(two_leaders: Path, tmp_path: Path) -> None:
    file = find_wandb_file(two_leaders)
    assert file is not None
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(file.parent), "--html", str(page)])
    assert result.exit_code == 0, result.output
    for words in ("run ntp-job", "goodput: 50.00% of the job's time", "killed", "recovery"):
        assert words in result.output, words
    assert "ntp-job" in page.read_text()


def test_a_wrong_key_is_said_and_the_run_is_kept_on_disk(tmp_path: Path) -> None:
    with WandbServer(accepts_key=False) as server:
        output, _ = _writer(tmp_path, 0, "ends", **_online(server.url)).communicate(timeout=100)
    assert "it is written to disk instead" in output and "ID ntp-job FAILED 0" in output
    [run] = _offline_runs(tmp_path)
    assert run.run_id == "ntp-job" and len(run.rows) == 301


@pytest.mark.full
def test_a_dead_network_is_said_and_the_run_is_kept_on_disk(tmp_path: Path) -> None:
    output, _ = _writer(tmp_path, 0, "ends", **_online("http://127.0.0.1:9")).communicate(timeout=100)
    assert "it is written to disk instead" in output and "ID ntp-job FAILED 0" in output
    assert len(_offline_runs(tmp_path)) == 1


@pytest.mark.full
def test_an_outage_in_the_middle_stops_nobody_and_the_rows_are_on_disk(tmp_path: Path) -> None:
    with WandbServer() as server:
        process = _writer(tmp_path, 0, "outage", **_online(server.url))
        assert process.stdout is not None
        for line in process.stdout:
            if line == "READY\n":
                break
        server.is_up = False
        output, _ = process.communicate("\n", timeout=100)
    assert "ID ntp-job" in output, "training was not stopped, and its end not for long"
    [file] = tmp_path.glob("wandb/run-*/run-ntp-job.wandb")
    assert len([row for row in read_wandb(file).rows if "ntp/wall_s" in row]) >= 600


def test_a_run_file_that_is_being_written_can_be_read_at_any_length(two_leaders: Path, tmp_path: Path) -> None:
    file = find_wandb_file(two_leaders)
    assert file is not None
    data = file.read_bytes()
    assert len(data) > 32768, "the test must see records over the edge of a block"
    cut = tmp_path / "run-cut.wandb"
    lengths = set()
    for size in (7, 100, 5_000, 32_760, 32_768, 32_780, len(data) - 1, len(data)):
        cut.write_bytes(data[:size])
        lengths.add(len(read_wandb(cut).rows))
    assert max(lengths) == 301 and min(lengths) == 0
    cut.write_bytes(b"GARBAGE")
    with pytest.raises(ConfigError, match="no W&B run file"):
        read_wandb(cut)


def test_without_its_ledger_a_run_still_has_totals(tmp_path: Path) -> None:
    row: dict[str, Any] = {f"badput_s/{bucket}": 1.0 for bucket in BADPUT}
    row |= {"goodput/cumulative": 0.75, "goodput/productive_gpu_s": 100.0, "ntp/wall_s": 40.0, "_timestamp": 1e9, "trainer/global_step": 12}
    from lightning_ntp.strategy import wandb_offline

    history = wandb_offline._from_rows(OfflineRun(tmp_path), [row])
    assert sum(history.gpu_ns().values()) == (100 + len(BADPUT)) * 10**9
    assert history.job["productive"] == 30 * 10**9 and history.start_ns == (10**9 - 40) * 10**9
    assert read_offline_folder(tmp_path) is None


def test_rows_of_the_table() -> None:
    row = event_row({"t": 2 * 10**9, "event": "recovery", "workers": [4, 5], "seconds": {"total": 1.0, "planning": 0.25, "moving": 0.5}})
    named = dict(zip(EVENT_COLUMNS, row, strict=True))
    assert (named["time"], named["workers"], named["reshard_s"], named["bytes_moved"]) == (2.0, "4 5", 0.75, None)
