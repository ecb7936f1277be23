"""The supervisor as plain launcher: real processes, none of which imports torch (20 ms each)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.rendezvous import Endpoint, JobAddress, connect_store, host_store
from lightning_ntp.strategy.supervisor import Supervisor
from lightning_ntp.strategy.supervisor_config import SupervisorConfig
from lightning_ntp.strategy.worker_process import Process, StderrRelay, describe_exit, shell_code, start_worker

PATIENCE = SupervisorConfig(settle_seconds=0.3, grace_seconds=0.5, abandon_seconds=5.0)


class Job:
    """Runs a worker program under a supervisor; keeps what was printed and which processes were started."""

    def __init__(self, program: str, num_workers: int, env: Mapping[str, str] | None = None) -> None:
        self.pids: list[int] = []
        self.printed = b""
        command = [sys.executable, "-S", "-E", "-c", textwrap.dedent(program)]
        self.supervisor = Supervisor(command, num_workers, env, config=PATIENCE, start=self._start, write=self._print)

    def _start(self, command: Sequence[str], environ: Mapping[str, str]) -> Process:
        process = start_worker(command, environ)
        self.pids.append(process.pid)
        return process

    def _print(self, data: bytes) -> None:
        self.printed += data

    def run(self) -> int:
        began = time.monotonic()
        code = self.supervisor.run()
        self.wall_seconds = time.monotonic() - began
        assert [pid for pid in self.pids if is_alive(pid)] == []
        return code


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone_within(pids: list[int], limit_seconds: float) -> bool:
    deadline = time.monotonic() + limit_seconds
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_workers_get_their_environment(tmp_path: Path) -> None:
    program = """
        import os
        names = ("NTP_WORKER_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "EXTRA")
        with open(os.path.join(os.environ["WHERE"], os.environ["RANK"]), "w") as file:
            print(*(os.environ[name] for name in names), file=file)
            print(os.environ["NTP_STORE_ENDPOINT"], os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], file=file)
            print(os.environ["NTP_JOB_TOKEN"], file=file)
    """
    job = Job(program, 3, {"WHERE": str(tmp_path), "EXTRA": "7"})
    assert job.run() == 0
    port = job.supervisor.endpoint.port
    for worker in range(3):
        lines = (tmp_path / str(worker)).read_text().splitlines()
        assert lines[0] == f"{worker} {worker} {worker} 3 3 0 7"
        assert lines[1] == f"127.0.0.1:{port} 127.0.0.1 {port}"
        assert lines[2] == job.supervisor.token
    assert job.printed == b""


def test_first_traceback_first_and_everybody_ends() -> None:
    """Worker 2 raises; its peers lose their connections and complain sooner, one of them never ends by itself."""
    program = """
        import os, sys, time
        rank = os.environ["RANK"]
        if rank == "0":
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
        if rank == "1":
            time.sleep(60)
        time.sleep(0.1)
        raise ValueError("the cause")
    """
    job = Job(program, 3)
    assert job.run() == 1
    text = job.printed.decode()
    assert text.index("the cause") < text.index("Connection closed")
    assert text.startswith("Traceback")
    assert "[supervisor] worker 2: exit code 1; the job of 3 workers has ended." in text
    assert job.wall_seconds < 10


def test_a_killed_worker_ends_the_job_with_its_signal() -> None:
    program = """
        import os, signal, time
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    """
    job = Job(program, 2)
    assert job.run() == 128 + signal.SIGKILL
    assert b"worker 1: killed by SIGKILL" in job.printed


def test_a_worker_that_ignores_sigterm_or_is_stopped_is_killed() -> None:
    program = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        if os.environ["RANK"] == "2":
            time.sleep(0.2)
            sys.exit(3)
        time.sleep(60)
    """
    job = Job(program, 3)
    assert job.run() == 3
    assert job.wall_seconds < 10


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    program = """
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-S", "-E", "-c", "import time; time.sleep(60)"])
        open(os.environ["WHERE"], "w").write(str(child.pid))
    """
    job = Job(program, 1, {"WHERE": str(tmp_path / "pid")})
    assert job.run() == 0
    assert gone_within([int((tmp_path / "pid").read_text())], 2.0)


def test_a_logged_traceback_of_a_living_worker_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ntp.strategy.crew.HOLD_SECONDS", 0.1)
    program = """
        import sys, time, traceback
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        time.sleep(0.6)
        print("still here", file=sys.stderr)
    """
    job = Job(program, 1)
    assert job.run() == 0
    assert job.printed.index(b"ZeroDivisionError") < job.printed.index(b"still here")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_all(number: signal.Signals) -> None:
    program = """
        import time
        time.sleep(60)
    """
    job = Job(program, 3)
    timer = threading.Timer(0.4, os.kill, (os.getpid(), number))
    timer.start()
    assert job.run() == 128 + number
    timer.join()
    assert job.wall_seconds < 5
    assert f"the supervisor got {number.name}".encode() in job.printed
    assert (b"KeyboardInterrupt" in job.printed) == (number == signal.SIGINT)


def test_workers_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    worker = (
        "import os, time; open(os.environ['WHERE'] + os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(60)"
    )
    program = f"""
        import sys
        from lightning_ntp.strategy.supervisor import Supervisor
        sys.exit(Supervisor([sys.executable, "-S", "-E", "-c", {worker!r}], 2).run())
    """
    where = str(tmp_path / "pid")
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], env={**os.environ, "WHERE": where, "PYTHONPATH": os.getcwd()}
    ) as supervisor:
        deadline = time.monotonic() + 40
        while not all((text := Path(where + rank)).exists() and text.read_text() for rank in "01"):
            assert time.monotonic() < deadline and supervisor.poll() is None
            time.sleep(0.02)
        pids = [int(Path(where + rank).read_text()) for rank in "01"]
        supervisor.kill()
    assert gone_within(pids, 2.0)


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"cannot listen on {listen} .*another job may be using this port"):
            Supervisor(["true"], 1, config=SupervisorConfig(listen=listen)).run()


def test_a_worker_of_another_job_is_refused_and_writes_nothing() -> None:
    store, endpoint = host_store("127.0.0.1:0", "token-of-job-a", {"num_workers": 1})
    keys = store.num_keys()
    with pytest.raises(ConfigError, match=f"store at {endpoint} does not know this job's token"):
        connect_store(endpoint, "token-of-job-b")
    assert store.num_keys() == keys
    assert connect_store(endpoint, "token-of-job-a").check(["job"])


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "NTP_STORE_ENDPOINT is not set.*run the script itself"),
        ({"NTP_STORE_ENDPOINT": "x", "NTP_JOB_TOKEN": "t" * 9, "NTP_WORKER_ID": "0"}, "endpoint 'x': wanted HOST:PORT"),
        ({"NTP_STORE_ENDPOINT": "h:1", "NTP_JOB_TOKEN": "a/b", "NTP_WORKER_ID": "0"}, "token must be 8 to 128"),
        ({"NTP_STORE_ENDPOINT": "h:1", "NTP_JOB_TOKEN": "t" * 9, "NTP_WORKER_ID": "one"}, "NTP_WORKER_ID='one'"),
    ],
)
def test_bad_environment(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobAddress.from_env(environ)


def test_address_survives_the_environment() -> None:
    address = JobAddress(Endpoint("127.0.0.1", 4000), "t" * 32, 3, recovery=True)
    assert JobAddress.from_env(address.to_env()) == address


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1), "the command is empty"),
        ((["true"], 0), "num_workers is 0; wanted 1 or more"),
    ],
)
def test_bad_arguments(arguments: tuple[list[str], int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Supervisor(*arguments)


def test_bad_config() -> None:
    with pytest.raises(ConfigError, match=r"SupervisorConfig.grace_seconds is -1"):
        SupervisorConfig(grace_seconds=-1)


def test_relay_holds_a_traceback_and_knows_who_is_blamed() -> None:
    seen: list[bytes] = []
    relay = StderrRelay(seen.append)
    relay.feed(b"50%|###", 0.0)
    relay.feed(b"\nTraceback (most recent call last):\n  ...\nRuntimeError: Connection reset by peer\n", 1.0)
    assert b"".join(seen) == b"50%|###\n"
    assert relay.has_traceback and relay.blames_a_peer and relay.held_since == 1.0
    relay.release()
    assert b"".join(seen).endswith(b"reset by peer\n") and not relay.holding


def test_exit_words() -> None:
    assert (describe_exit(3), describe_exit(-9), describe_exit(-100)) == (
        "exit code 3",
        "killed by SIGKILL",
        "killed by signal 100",
    )
    assert (shell_code(3), shell_code(-9)) == (3, 137)
