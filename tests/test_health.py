"""Xid, memory errors and lost GPUs with a pretended NVML; a driver that hangs; what NCCL is told and which are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy import nccl
from lightning_ntp.strategy.health import GpuProbe, HealthEvent, HealthWatch, child_command
from lightning_ntp.strategy.nvml_child import watch
from lightning_ntp.strategy.supervisor_config import SupervisorConfig
from tests.forked import ForkedJob
from tests.test_membership import check_survivors, train

FAKE = """
import os, time
NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST = 10, 15
NVML_TEMPERATURE_GPU = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0
nvmlEventTypeXidCriticalError, nvmlEventTypeDoubleBitEccError = 8, 2
class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"error {value}")
        self.value = value
class Event:
    def __init__(self, device, kind, data):
        self.device, self.eventType, self.eventData = device, kind, data
script = []
ecc, lost = {}, set()
def nvmlInit(): pass
def nvmlEventSetCreate(): return "set"
def nvmlDeviceGetHandleByUUID(uuid): return uuid
def nvmlDeviceRegisterEvents(handle, types, events):
    if handle == "GPU-virtual":
        raise NVMLError(3)
def nvmlEventSetWait_v2(events, milliseconds):
    if not script:
        raise NVMLError(NVML_ERROR_TIMEOUT)
    todo = script.pop(0)
    if callable(todo):
        todo()
        raise NVMLError(NVML_ERROR_TIMEOUT)
    return Event(*todo)
def nvmlDeviceGetUUID(handle):
    if handle in lost:
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return handle.encode()
def nvmlDeviceGetTemperature(handle, sensor): return 30
def nvmlDeviceGetTotalEccErrors(handle, kind, counter):
    if handle == "GPU-virtual":
        raise NVMLError(3)
    return ecc.get(handle, 0)
"""


def fake_nvml() -> Any:
    module = SimpleNamespace()
    exec(FAKE, module.__dict__)  # noqa: S102
    return module


def heard(nvml: Any, *uuids: str, rounds: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    watch(nvml, uuids, lambda **event: events.append(event), rounds)
    return [event for event in events if event["kind"] != "beat"]


def test_the_child_reports_xid_ecc_and_lost_gpus_once() -> None:
    nvml = fake_nvml()
    nvml.script += [
        ("GPU-a", 8, 79),
        ("GPU-b", 2, 1),
        lambda: nvml.ecc.update({"GPU-b": 3}),
        lambda: nvml.lost.add("GPU-a"),
    ]
    assert heard(nvml, "GPU-a", "GPU-b", "GPU-virtual", rounds=6) == [
        {"kind": "deaf", "gpu": "GPU-virtual", "why": "error 3"},
        {"kind": "ready"},
        {"kind": "xid", "gpu": "GPU-a", "code": 79},
        {"kind": "ecc", "gpu": "GPU-b", "code": 1},
        {"kind": "ecc", "gpu": "GPU-b", "code": 3},
        {"kind": "gone", "gpu": "GPU-a"},
    ]


def test_the_child_reports_links_that_fail_and_not_the_usual_replays(tmp_path: Path) -> None:
    nvml = fake_nvml()
    nvml.NVML_NVLINK_MAX_LINKS, nvml.NVML_NVLINK_ERROR_DL_REPLAY, nvml.NVML_NVLINK_ERROR_DL_RECOVERY = 4, 0, 1
    counts = {("GPU-a", 0, 0): 10, ("GPU-a", 1, 0): 10, ("GPU-a", 0, 1): 3, ("GPU-a", 1, 1): 3}
    down: set[int] = set()

    def state(handle: str, link: int) -> int:
        if handle != "GPU-a" or link > 1:
            raise nvml.NVMLError(3)
        return int(link not in down)

    nvml.nvmlDeviceGetNvLinkState = state
    nvml.nvmlDeviceGetNvLinkErrorCounter = lambda handle, link, counter: counts[handle, link, counter]
    port = tmp_path / "mlx5_0" / "ports" / "1" / "counters"
    port.mkdir(parents=True)
    (port / "link_downed").write_text("7\n")
    (port / "symbol_error").write_text("N/A\n")

    def later() -> None:
        counts.update({("GPU-a", 0, 0): 900, ("GPU-a", 1, 0): 2500, ("GPU-a", 1, 1): 4})
        (port / "link_downed").write_text("8\n")

    nvml.script += [later, *[lambda: None] * 10, lambda: down.add(1)]
    events: list[dict[str, Any]] = []
    watch(nvml, ["GPU-a", "GPU-b"], lambda **event: events.append(event), 40, tmp_path)
    assert [(e["gpu"], e["code"], e["detail"]) for e in events if e["kind"] == "link"] == [
        ("GPU-a", 2490, "NVLink 1 REPLAY"),
        ("GPU-a", 1, "NVLink 1 RECOVERY"),
        ("mlx5_0 port 1", 1, "link_downed"),
        ("GPU-a", 1, "NVLink 1 down"),
    ]


def test_a_failing_link_loses_nobody_and_is_told() -> None:
    text = json.dumps({"kind": "link", "gpu": "GPU-a", "code": 79, "detail": "NVLink 1 REPLAY"})
    watcher = listen(f"import time; print({text!r}, flush=True); time.sleep(60)")
    heard: list[HealthEvent] = []
    until(lambda: heard.extend(watcher.poll()) or heard)
    watcher.close()
    assert not heard[0].is_fatal  # 79 errors are no Xid 79
    assert str(heard[0]) == "GPU-a: 79 new errors of NVLink 1 REPLAY: a failing link makes all exchanges over it slow"


def test_which_events_lose_a_worker_and_how_they_are_told() -> None:
    assert str(HealthEvent("xid", "GPU-a", 79)) == "GPU-a: Xid 79 (fallen off the bus)"
    assert HealthEvent("xid", "GPU-a", 79).is_fatal and HealthEvent("gone", "GPU-a").is_fatal
    program_error = HealthEvent("xid", "GPU-a", 31)
    assert not program_error.is_fatal and str(program_error) == "GPU-a: Xid 31 (raised by the program)"


def listen(program: str, clock: Any = time.monotonic) -> HealthWatch:
    return HealthWatch([sys.executable, "-S", "-E", "-c", program], clock)


def until(condition: Any, limit_seconds: float = 20.0) -> None:
    deadline = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_real_child_is_heard_and_ends_with_its_owner(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(FAKE + "script.append(('GPU-a', 8, 48))\n")
    command = child_command(("GPU-a",))
    assert command is not None
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    watcher = HealthWatch(["env", f"PYTHONPATH={environ['PYTHONPATH']}", *command], time.monotonic)
    events: list[HealthEvent] = []
    until(lambda: events.extend(watcher.poll()) or events)
    assert events == [HealthEvent("xid", "GPU-a", 48)]
    child = watcher._child
    watcher.close()
    assert isinstance(child, subprocess.Popen)
    until(lambda: child.poll() is not None)
    assert watcher.poll() == []


def test_a_driver_that_hangs_hangs_only_the_child() -> None:
    now = [0.0]
    watcher = listen("import time; time.sleep(600)", lambda: now[0])
    pids = set()
    for _ in range(8):
        assert watcher.poll() == []
        if watcher._child is not None:
            pids.add(watcher._child.pid)
        now[0] += 21.0
    assert len(pids) == 3 and watcher._child is None
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_without_gpus_or_nvml_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert child_command(()) is None and HealthWatch(None, time.monotonic).poll() == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert child_command(("GPU-a",)) is None


def test_probe_of_a_place() -> None:
    probe = GpuProbe("GPU-aaaa", lambda: "0, GPU-aaaa\n")
    until(lambda: probe.answer is not None)
    gone = GpuProbe("GPU-aaaa", lambda: "")
    until(lambda: gone.answer is not None)
    assert probe.answer is True and gone.answer is False


def test_the_worker_on_a_broken_gpu_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import json, os, sys, time\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.02)\n"
        "print(json.dumps({'kind': 'xid', 'gpu': 'GPU-2', 'code': 79}), flush=True); time.sleep(60)"
    )
    command = (sys.executable, "-S", "-E", "-c", program, str(tmp_path / "log.jsonl"))
    monkeypatch.setattr("lightning_ntp.strategy.supervisor_base.child_command", lambda gpus: command)
    monkeypatch.setenv("NTP_TEST", "slow-voter")
    job = ForkedJob(train, 4, tmp_path, gpus=tuple(f"GPU-{slot}" for slot in range(4)))
    assert job.run() == 0
    check_survivors(job, {0, 1, 3})
    broken = next(event for event in job.events if event.kind == "broken")
    assert broken.workers == (2,) and broken.why == "worker 2: GPU-2: Xid 79 (fallen off the bus)"
    assert "slot 2, GPU-2)" in job.printed.decode()


def test_nccl_is_told_what_recovery_needs(tmp_path: Path) -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_FR_BUFFER_SIZE": "7"}
    nccl.prepare_environ(environ, tmp_path)
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2" and environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert environ["TORCH_FR_BUFFER_SIZE"] == environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "7"
    assert environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/nccl_trace_rank_"


def test_a_conflicting_value_is_named() -> None:
    with pytest.raises(ConfigError, match=r"TORCH_NCCL_ASYNC_ERROR_HANDLING=1: recovery needs 0 or 2, else torch's watchdog"):
        nccl.prepare_environ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, None)


@pytest.mark.parametrize("version", [(2, 28, 3), (2, 28, 5), (2, 28, 8)])
def test_known_bad_nccl_is_refused(version: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"NCCL 2\.28\.\d cannot make new communicators after an abort"):
        nccl.check_version(version)


@pytest.mark.parametrize("version", [(2, 27, 7), (2, 28, 2), (2, 28, 9), (2, 29, 1)])
def test_other_nccl_is_taken(version: tuple[int, ...]) -> None:
    nccl.check_version(version)


def test_workers_are_told_where_the_logs_are(tmp_path: Path) -> None:
    assert SupervisorConfig(log_folder=tmp_path).worker_environ({}, {}, 0)["NTP_LOG_FOLDER"] == str(tmp_path)
