"""Several nodes, emulated on this machine: a supervisor and agents, each a process of its own with two workers."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_ntp.strategy import rendezvous
from lightning_ntp.strategy.coordinator import Patience
from lightning_ntp.strategy.generation import MemberConfig
from lightning_ntp.strategy.job_log import read_events
from lightning_ntp.strategy.launching import drain
from lightning_ntp.strategy.membership import Member
from tests.forked import ForkedJob, ForkedNode, Log

TOKEN = "token-of-the-nodes"
PATIENCE = Patience(hang_seconds=20.0, join_seconds=30.0, start_seconds=40.0, node_seconds=6.0, doubted_node_seconds=1.5)


def work(address: rendezvous.JobAddress, log: Log) -> None:
    """All-reduces until the file "enough" appears beside the log; leaves when asked to, hands out nothing."""
    torch.set_num_threads(1)
    member = Member(address, MemberConfig(heartbeat_seconds=0.1, group_timeout_seconds=12))
    generation = member.join()
    log(joined=generation.members, host_pid=os.getppid())
    done = Path(os.environ["NTP_TEST_FOLDER"]) / "enough"
    step = 0
    while True:
        decision = None
        try:
            total = torch.ones(1000) * (1.0 if done.exists() else 0.0)
            dist.all_reduce(total)
            decision = member.agree(step)
        except Exception as caught:
            if not member.confirm_loss(caught):
                raise
        if decision is not None and not decision.regroup:
            step += 1
            if total[0].item() > 0:
                return member.close()
            time.sleep(0.02)
            continue
        generation = member.join()
        log(joined=generation.members)
        step = 0
        if address.worker in generation.leaving:
            log(left=True)
            return member.leave()
        if generation.leaving:
            log(joined=member.join(regroup=True).members)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Nodes:
    """Node 0 in this process, the others forked; `then` runs on a thread once a generation of `num_workers` stands."""

    def __init__(self, folder: Path, num_nodes: int = 2, newcomers: int = 0, **options: object) -> None:
        os.environ["NTP_TEST_FOLDER"] = str(folder)
        self.folder = folder
        self.listen = free_address()
        numbers = [*range(1, num_nodes), *[None] * newcomers]
        self.nodes = [ForkedNode(work, 2, folder, node=n, listen=self.listen, token=TOKEN) for n in numbers]
        self.job = ForkedJob(
            work, 2, folder, patience=PATIENCE, num_nodes=num_nodes, listen=self.listen, token=TOKEN,
            log_folder=folder / "logs", **options,
        )  # fmt: skip

    def run(self, then: Callable[[], None]) -> int:
        def soon() -> None:
            self.until(lambda: any(len(world) == 4 for world in self.job.worlds()))
            then()

        thread = threading.Thread(target=soon)
        thread.start()
        code = self.job.run()
        thread.join()
        return code

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 40
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)

    def enough(self) -> None:
        (self.folder / "enough").touch()

    def enough_after(self, *world: int) -> None:
        self.until(lambda: world in self.job.worlds())
        self.enough()

    def worker_pids(self) -> list[int]:
        return [line["pid"] for line in self.job.lines if "pid" in line]


def test_two_nodes_work_together_and_leave_their_logs(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    assert nodes.run(nodes.enough) == 0 and nodes.nodes[0].wait() == 0
    assert nodes.job.worlds() == [(0, 1, 2, 3)]
    kinds = [event["kind"] for event in read_events(tmp_path / "logs/events.jsonl")]
    assert kinds[:3] == ["start", "node", "formed"] and kinds[3:] == ["exit"] * 4 + ["end"]


def test_the_job_goes_on_without_a_node_that_is_killed(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)

    def then() -> None:
        os.kill(nodes.nodes[0].pid, signal.SIGKILL)
        nodes.enough_after(0, 1)

    assert nodes.run(then) == 0 and nodes.nodes[0].wait() == -signal.SIGKILL
    broken = next(event for event in nodes.job.events if event.kind == "broken")
    assert broken.workers == (2, 3) and "node 1" in broken.why and "gave no sign of life for" in broken.why
    text = nodes.job.printed.decode()
    assert "worker 2 (node 1" in text and "stands with 2 workers [0, 1]" in text


def test_a_node_that_is_drained_leaves_without_a_loss(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)

    def then() -> None:
        assert drain("node1", rendezvous.Endpoint.parse(nodes.listen), TOKEN) == [2, 3]
        nodes.enough_after(0, 1)

    assert nodes.run(then) == 0 and nodes.nodes[0].wait() == 0
    assert sorted(line["worker"] for line in nodes.job.lines if "left" in line) == [2, 3]
    assert not any(event.kind == "broken" for event in nodes.job.events)


def test_sigterm_on_a_node_makes_it_leave(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)

    def then() -> None:
        os.kill(nodes.nodes[0].pid, signal.SIGTERM)
        nodes.enough_after(0, 1)

    assert nodes.run(then) == 0 and nodes.nodes[0].wait() == 0
    assert sorted(line["worker"] for line in nodes.job.lines if "left" in line) == [2, 3]
    events = [event for event in read_events(tmp_path / "logs/events.jsonl") if event["kind"] == "leaving"]
    assert [event["why"] for event in events] == ["SIGTERM", "SIGTERM"]
    assert not any(event.kind == "broken" for event in nodes.job.events)


def test_a_node_may_join_a_job_that_runs(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, num_nodes=1, newcomers=1)
    assert nodes.run(nodes.enough) == 0 and nodes.nodes[0].wait() == 0
    assert nodes.job.worlds()[-1] == (0, 1, 2, 3)
    assert not any(event.kind == "broken" for event in nodes.job.events)


def test_when_the_node_with_the_store_dies_the_others_end_to_be_requeued(tmp_path: Path) -> None:
    """EXIT_NO_SUPERVISOR, and no worker is left."""
    os.environ["NTP_TEST_FOLDER"] = str(tmp_path)
    listen = free_address()
    other = ForkedNode(work, 2, tmp_path, node=1, listen=listen, token=TOKEN)
    first = os.fork()
    if first == 0:
        job = ForkedJob(work, 2, tmp_path, patience=PATIENCE, num_nodes=2, listen=listen, token=TOKEN)
        os._exit(job.run())
    log = tmp_path / "log.jsonl"
    deadline = time.monotonic() + 40
    while not (log.exists() and log.read_text().count("joined") == 4) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    assert other.wait() == rendezvous.EXIT_NO_SUPERVISOR
    assert _children_of(first) == [] and _children_of(other.pid) == []


def _children_of(pid: int) -> list[str]:
    """Live processes of the session that `pid` started; workers have sessions of their own, so look at the parent."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if fields[0] != "Z" and int(fields[1]) == pid:
            found.append(stat.parent.name)
    return found
