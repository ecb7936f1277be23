"""`ntp launch` and its ways in: options, SLURM, GPUs, torchrun; the sbatch file with a pretended srun and scontrol."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.gpus import select_gpus, visible_gpus
from lightning_ntp.strategy.launcher import why_no_recovery
from lightning_ntp.strategy.launching import LaunchOptions, drain, find_job, plan_launch, script_command
from lightning_ntp.strategy.rendezvous import Endpoint, host_store, put_json
from lightning_ntp.strategy.slurm import SlurmTask
from lightning_ntp.strategy.supervisor_config import SupervisorConfig

ROOT = Path(__file__).parent.parent
SMI = "0, GPU-aaaa-1\n1, GPU-bbbb-2\n2, GPU-abcd-3\n"
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
TOKEN = "a-token-of-the-job"


@pytest.mark.parametrize(
    ("chosen", "wanted"),
    [
        (None, ("GPU-aaaa-1", "GPU-bbbb-2", "GPU-abcd-3")),
        ("2,0", ("GPU-abcd-3", "GPU-aaaa-1")),
        ("GPU-b", ("GPU-bbbb-2",)),
        ("GPU-a,0", ()),  # two begin like that: CUDA stops there
        ("1,7,0", ("GPU-bbbb-2",)),
        ("1,1", ("GPU-bbbb-2",)),
        ("MIG-xyz", ()),
    ],
)
def test_gpus_are_read_as_cuda_reads_them(chosen: str | None, wanted: tuple[str, ...]) -> None:
    assert select_gpus(SMI, chosen) == wanted
    if chosen is not None:
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": chosen}, lambda: SMI) == wanted


def test_without_gpus_nothing_is_asked_and_nothing_bound() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, lambda: pytest.fail("asked")) == ()
    assert select_gpus("", None) == () and select_gpus("No devices were found", None) == ()
    assert "NTP_GPU_UUID" not in SupervisorConfig().worker_environ({}, {}, 0)
    environ = SupervisorConfig(gpus=("GPU-a", "GPU-b"), hidden=("HOME",)).worker_environ({}, {"LOCAL_RANK": "1"}, 1)
    assert environ["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b" and environ["NTP_GPU_UUID"] == "GPU-b"
    assert "HOME" not in environ


def test_one_node() -> None:
    plan = plan_launch(LaunchOptions(num_workers=4), {})
    assert (plan.node, plan.num_workers, plan.recovery) == (0, 4, True)
    assert plan.config.listen == "127.0.0.1:0" and plan.config.num_nodes == 1
    assert not plan_launch(LaunchOptions(num_workers=4), {"NTP_RECOVERY": "off"}).recovery


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        (LaunchOptions(), {"CUDA_VISIBLE_DEVICES": ""}, "say how many workers: --workers N"),
        (LaunchOptions(1, num_nodes=2, node_rank=2), {}, "--node-rank 2: wanted a number below --nodes 2"),
        (LaunchOptions(1, num_nodes=2, node_rank=1), {}, "several nodes need --endpoint HOST:PORT"),
        (LaunchOptions(1, num_nodes=2, endpoint="h:1"), {}, "several nodes need one secret: set NTP_JOB_TOKEN"),
        (LaunchOptions(1, num_nodes=2, endpoint="h"), {"NTP_JOB_TOKEN": TOKEN}, "endpoint 'h': wanted HOST:PORT"),
        (LaunchOptions(1), {**SLURM, "SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS='many': srun sets it"),
    ],
)
def test_what_is_missing_is_named(options: LaunchOptions, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_launch(options, environ)


def test_an_srun_task_is_a_node_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ntp.strategy.slurm.expand_hosts", lambda nodes: f"first-of-{nodes}\nsecond\n")
    plan = plan_launch(LaunchOptions(), SLURM | {"NTP_JOB_TOKEN": TOKEN})
    assert (plan.node, plan.num_workers, plan.config.num_nodes) == (3, 1, 4)
    assert plan.config.identity == {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}
    assert plan.config.hidden == ("SLURM_NTASKS",) and plan.config.log_folder == Path("ntp_logs/slurm-1234.0.0")
    endpoint = Endpoint.parse(plan.config.listen)
    assert endpoint.host == "first-of-n[1-2]" and 20000 <= endpoint.port < 40000
    per_node = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "NTP_JOB_TOKEN": TOKEN}
    assert plan_launch(LaunchOptions(num_workers=8), per_node).config.identity == {}
    assert SlurmTask.from_env({"SLURM_JOB_ID": "1"}) is None


def test_why_there_is_no_recovery() -> None:
    assert "torchrun ends all workers" in why_no_recovery({"TORCHELASTIC_RUN_ID": "x"})
    assert "srun ntp launch" in why_no_recovery({"SLURM_PROCID": "0"})
    assert why_no_recovery({"NTP_STORE_ENDPOINT": "h:1", "NTP_RECOVERY": "off"}) == "NTP_RECOVERY is off"
    assert why_no_recovery({"NTP_STORE_ENDPOINT": "h:1", "NTP_RECOVERY": "on"}) == why_no_recovery({}) == ""


def test_script_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no script 'train.py' here"):
        script_command("train.py", [])
    Path("train.py").touch()
    assert script_command("train.py", ["--x"]) == (sys.executable, "train.py", "--x")
    assert script_command("-m", ["package"])[1:] == ("-m", "package")


def test_drain_finds_the_job_and_knows_who_is_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no running job found: wanted .*job.json"):
        find_job(None, None, {}, tmp_path)
    store, endpoint = host_store("127.0.0.1:0", TOKEN, {})
    put_json(store, "places", {"0": (0, 0), "1": (0, 1), "2": (1, 0)})
    (tmp_path / "run").mkdir()
    (tmp_path / "run/job.json").write_text(f'{{"endpoint": "{endpoint}", "token": "{TOKEN}"}}')
    assert find_job(None, None, {}, tmp_path) == find_job(tmp_path / "run", None, {}) == (endpoint, TOKEN)
    assert find_job(None, "h:1", {"NTP_JOB_TOKEN": "t"}) == (Endpoint("h", 1), "t")
    assert drain("node0", endpoint, TOKEN) == [0, 1] and drain("2", endpoint, TOKEN) == [2]
    assert store.get("leave/2") == b'"drain"' and store.add("leaves", 0) == 2
    with pytest.raises(ConfigError, match=r"'7' is none of the workers \[0, 1, 2\] and nodes \['node0', 'node1'\]"):
        drain("7", endpoint, TOKEN)


def programs(folder: Path, **texts: str) -> dict[str, str]:
    """An environment in which these programs come first."""
    for name, text in texts.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": str(os.getpid()),
        "NTP_TEST_FOLDER": str(folder),
    }


SCONTROL = """#!/bin/bash
[ "$1" = show ] && echo 127.0.0.1 || echo "$@" > "$NTP_TEST_FOLDER/requeued"
"""
SRUN = """#!/bin/bash
# Two tasks on two nodes; the code of the worst, as srun gives it.
echo "$@" > "$NTP_TEST_FOLDER/srun"
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2 SLURM_STEP_TASKS_PER_NODE="1(x2)" SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2]
SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NODEID=1 "$@" & other=$!
SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 "$@"; first=$?
wait $other; second=$?
exit $((first > second ? first : second))
"""
TRAIN = """
import os
from pathlib import Path
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "NTP_RECOVERY")
text = " ".join(os.environ[name] for name in names) + (" tasks" if "SLURM_NTASKS" in os.environ else "")
Path(os.environ["NTP_TEST_FOLDER"], "worker" + os.environ["RANK"]).write_text(text)
"""


def test_the_sbatch_file_runs_a_job_over_two_nodes(tmp_path: Path) -> None:
    environ = programs(
        tmp_path, srun=SRUN, scontrol=SCONTROL, ntp=f'#!/bin/bash\nexec {sys.executable} -m lightning_ntp "$@"\n'
    )
    (tmp_path / "train.py").write_text(TRAIN)
    command = ["bash", str(ROOT / "examples/train.sbatch"), "--workers", "2", "train.py"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "srun").read_text().startswith("--no-kill --kill-on-bad-exit=0 ntp launch --exit-file ")
    texts = [(tmp_path / f"worker{rank}").read_text() for rank in range(4)]
    assert texts == [f"{rank} {rank % 2} 4 {rank // 2} 127.0.0.1 on" for rank in range(4)]
    assert not (tmp_path / "requeued").exists()
    assert list((tmp_path / "ntp_logs").glob(f"slurm-{environ['SLURM_JOB_ID']}.0.0/events.jsonl"))
    assert not list(tmp_path.glob(".ntp-exit-*"))


@pytest.mark.parametrize(
    ("written", "code", "requeued"),
    [("0", 0, False), ("78", 78, True), ("1", 1, False), ("77", 77, False), (None, 75, True)],
)
def test_the_sbatch_file_requeues_what_can_go_on(written: str | None, code: int, requeued: bool, tmp_path: Path) -> None:
    """Whatever srun says (137: a node was lost), the first node's word counts; without it the store's node was lost."""
    write = "" if written is None else f'echo {written} > "$6"; '
    environ = programs(tmp_path, srun=f"#!/bin/bash\n{write}exit 137\n", scontrol=SCONTROL)
    command = ["bash", str(ROOT / "examples/train.sbatch"), "train.py"]
    assert subprocess.run(command, env=environ, cwd=tmp_path, check=False).returncode == code
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == f"requeue {environ['SLURM_JOB_ID']}\n"
