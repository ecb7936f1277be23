"""Losing workers without Lightning: who notices, who is freed, who agrees on what, and what is left behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import types
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_ntp.errors import ConfigError, PlanMismatchError
from lightning_ntp.strategy import rendezvous
from lightning_ntp.strategy.coordinator import Coordinator, Event, Patience
from lightning_ntp.strategy.deadline import HangDeadline
from lightning_ntp.strategy.generation import (
    Decision,
    FencedError,
    GenerationBrokenError,
    MemberConfig,
    Outcome,
    is_poisoned,
)
from lightning_ntp.strategy.life_signs import StandstillProbe, StepClock, being_debugged
from lightning_ntp.strategy.membership import Member
from lightning_ntp.strategy.sockets import GroupSockets
from lightning_ntp.testing import Fault, FaultScript
from tests.forked import ForkedJob, Log

NUM_STEPS = 6
COLLECTIVES = 12
"""Per step: enough that a kill after a few milliseconds strikes inside of them."""


def train(address: rendezvous.JobAddress, log: Log) -> None:
    """A training loop in miniature: all-reduces, vote, update; after a loss the same step again."""
    faults = FaultScript.from_env(os.environ)
    torch.set_num_threads(1)
    with_slow_voter = "slow-voter" in os.environ.get("NTP_TEST", "")
    member = Member(address, MemberConfig(heartbeat_seconds=0.1, group_timeout_seconds=12), faults=faults)
    step = _enter(member, -1 if address.worker > 3 else 0, log)
    attempt = 0
    while step < NUM_STEPS:
        decision, error = None, None
        try:
            decision = _step(member, faults, step, attempt, with_slow_voter)
        except Exception as caught:
            if not member.confirm_loss(caught):
                member.report_error(caught)
                raise
            error = type(caught).__name__
        if decision is not None:
            log(committed=step)
            step, attempt = step + 1, 0
            faults.fire(address.worker, step - 1, "after_commit")
            if not decision.regroup:
                continue
        else:
            log(lost=step, error=error, freed=member.broken_at_seconds)
            faults.fire(address.worker, step, "broken")
            attempt += 1
        step = _enter(member, step, log)
    member.close()


def _enter(member: Member, step: int, log: Log) -> int:
    generation = member.join({"step": step})
    steps = {info["step"] for info in generation.infos} - {-1}
    log(
        joined=generation.number,
        members=generation.members,
        steps=sorted(steps),
        rank=dist.get_rank(),
        fds=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
    )
    return max(steps)


def _step(member: Member, faults: FaultScript, step: int, attempt: int, with_slow_voter: bool) -> Decision:
    member.progress("step")
    generation = member.generation
    assert generation is not None
    faults.fire(member.worker, step, "sync")
    for _ in range(COLLECTIVES):
        total = torch.full((50_000,), float(member.worker))
        dist.all_reduce(total)
        if total[-1].item() != sum(generation.members):
            raise AssertionError(f"all_reduce over {generation.members} gave {total[-1].item()}")
    if with_slow_voter and member.worker == 1:
        time.sleep(0.3)
    return member.agree(step, attempt)


def check_survivors(job: ForkedJob, survivors: set[int], num_steps: int = NUM_STEPS) -> None:
    """Each survivor has committed each step once and in order; whenever they met, they were at the same step."""
    for worker in survivors:
        committed = [line["committed"] for line in job.lines if "committed" in line and line["worker"] == worker]
        assert committed == list(range(num_steps)), f"worker {worker}"
    assert all(len(line["steps"]) == 1 for line in job.lines if "joined" in line)
    assert job.worlds()[-1] == tuple(sorted(survivors))


@pytest.mark.parametrize("victim", [2, 0])
def test_three_of_four_go_on_when_one_is_killed_in_an_all_reduce(victim: int, tmp_path: Path) -> None:
    job = ForkedJob(train, 4, tmp_path, faults=FaultScript(Fault("kill", victim, "sync", 3, delay_seconds=0.004)))
    assert job.run() == 0
    check_survivors(job, {0, 1, 2, 3} - {victim})
    broken = next(event for event in job.events if event.kind == "broken")
    assert broken.workers == (victim,) and broken.why == f"worker {victim}: killed by SIGKILL"
    freed = [line["freed"] - broken.seconds for line in job.lines if "lost" in line]
    assert len(freed) == 3 and max(freed) < 3.0


def test_a_stopped_worker_is_fenced(tmp_path: Path) -> None:
    job = ForkedJob(
        train,
        4,
        tmp_path,
        faults=FaultScript(Fault("stop", 1, "sync", 2)),
        patience=Patience(hang_seconds=1.5, join_seconds=30.0, start_seconds=40.0),
    )
    assert job.run() == 0
    check_survivors(job, {0, 2, 3})
    broken = next(event for event in job.events if event.kind == "broken")
    assert broken.workers == (1,) and "gave no sign of life for" in broken.why
    assert not Path(f"/proc/{job.pids[1]}").exists()


@pytest.mark.parametrize(("phase", "expected"), [("vote", 2), ("decide", 2), ("after_commit", 3)])
def test_survivors_agree_whenever_the_last_voter_dies(
    phase: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 votes last: it dies before its vote, between the last vote and the decision, or after the decision."""
    monkeypatch.setenv("NTP_TEST", "slow-voter")
    job = ForkedJob(train, 4, tmp_path, faults=FaultScript(Fault("kill", 1, phase, 2)))
    assert job.run() == 0
    check_survivors(job, {0, 2, 3})
    met = [line["steps"] for line in job.lines if line.get("joined") == 2]
    assert met == [[expected]] * 3


def test_two_losses_the_second_during_the_recovery_of_the_first(tmp_path: Path) -> None:
    faults = FaultScript(Fault("kill", 3, "sync", 2, delay_seconds=0.004), Fault("kill", 0, "broken", 2))
    job = ForkedJob(train, 4, tmp_path, faults=faults)
    assert job.run() == 0
    check_survivors(job, {1, 2})


def test_a_loss_while_the_first_groups_are_made(tmp_path: Path) -> None:
    """The others wait in gloo's own rendezvous for the worker that never comes."""
    job = ForkedJob(train, 4, tmp_path, faults=FaultScript(Fault("kill", 2, "connect")))
    assert job.run() == 0
    check_survivors(job, {0, 1, 3})


def test_all_lost(tmp_path: Path) -> None:
    faults = FaultScript(*(Fault("kill", worker, "after_commit", 1) for worker in range(2)))
    job = ForkedJob(train, 2, tmp_path, faults=faults)
    assert job.run() == 128 + signal.SIGKILL
    assert b"all 2 workers are lost" in job.printed


def test_a_user_exception_is_no_loss(tmp_path: Path) -> None:
    job = ForkedJob(train, 4, tmp_path, faults=FaultScript(Fault("raise", 1, "sync", 2)))
    assert job.run() == 1
    text = job.printed.decode()
    first = text[: text.index("[supervisor]")]
    assert first.startswith("Traceback") and "InjectedFault: injected into worker 1 at step 2, phase sync" in first
    assert "worker 1: exit code 1; the job of 4 workers has ended" in text
    assert job.wall_seconds < 10
    assert not any(Path(f"/proc/{pid}").exists() for pid in job.pids.values())
    assert [event.kind for event in job.events] == ["formed"]


def test_replacements_are_taken_in_and_nothing_grows(tmp_path: Path) -> None:
    """Workers 3, 4, 5, 6 die one after the other; each time a fresh one enters at a step boundary. Worker 0 sees it all."""
    faults = FaultScript(*(Fault("kill", worker, "sync", step) for worker, step in [(3, 0), (4, 2), (5, 3), (6, 4)]))
    job = ForkedJob(train_until_seven, 4, tmp_path, faults=faults, max_respawns=4)
    assert job.run() == 0
    assert job.worlds()[-1] == (0, 1, 2, 7)
    assert (0, 1, 2, 4) in job.worlds()
    mine = [line for line in job.lines if line["worker"] == 0 and "joined" in line and len(line["members"]) == 4]
    assert len(mine) >= 2  # one is not entered if its next victim dies while it is formed
    # Fewer where a peer was killed, and its connections closed, before this line was written.
    assert max(line["fds"] for line in mine[1:]) <= mine[0]["fds"]
    assert max(line["threads"] for line in mine[1:]) <= mine[0]["threads"]


def train_until_seven(address: rendezvous.JobAddress, log: Log) -> None:
    """Like `train`, but a step is only taken with four members, so that every replacement is met; ends with worker 7."""
    faults = FaultScript.from_env(os.environ)
    member = Member(address, MemberConfig(heartbeat_seconds=0.1, group_timeout_seconds=12))
    _enter(member, 0, log)
    step = 0
    while True:
        generation, decision = member.generation, None
        assert generation is not None
        try:
            if generation.num_members == 4 and generation.members[-1] < 7:
                faults = FaultScript(*(f for f in faults.faults if f.worker == member.worker))
                for fault in faults.faults:
                    faults.fire(member.worker, fault.step, "sync")
            dist.all_reduce(torch.ones(10))
            decision = member.agree(step)
        except Exception as caught:
            if not member.confirm_loss(caught):
                raise
        if decision is None or decision.regroup:
            step = 0
            _enter(member, 0, log)
            continue
        step += 1
        if generation.members[-1] == 7:
            return member.close()
        time.sleep(0.01)


@pytest.fixture
def hosted() -> Iterator[tuple[dist.Store, rendezvous.JobAddress]]:
    """A job's store in this process, and the address of its worker 0."""
    store, endpoint = rendezvous.host_store(rendezvous.LOOPBACK, "token-of-the-test", {})
    yield store, rendezvous.JobAddress(endpoint, "token-of-the-test", 0, recovery=True)


class Bench:
    """A coordinator with a clock that the test turns."""

    def __init__(self, store: dist.Store, num_workers: int, patience: Patience | None = None) -> None:
        self.now = 100.0
        self.store = store
        self.events: list[Event] = []
        self.coordinator = Coordinator(
            store, range(num_workers), patience or Patience(), lambda: self.now, self.events.append
        )

    def join(self, *workers: int, generation: int | None = None) -> None:
        number = generation or self.coordinator.generation
        for worker in workers:
            rendezvous.put_json(self.store, f"join/{number}/{worker}", worker * 10)
            self.store.add(f"joined/{number}", 1)

    def leave(self, worker: int, frees_role: bool) -> None:
        rendezvous.put_json(self.store, f"left/{worker}", frees_role)
        self.store.add("leaves", 1)
        self.coordinator.tick()

    def beat(self, worker: int, beats: int, progress: int = 0, phase: str = "step") -> None:
        sign = {"beats": beats, "progress": progress, "phase": phase}
        rendezvous.put_json(self.store, f"heartbeat/{worker}", sign)

    def world(self, number: int) -> list[int] | None:
        found = rendezvous.peek_json(self.store, f"world/{number}")
        return None if found is None else found["members"]


def test_coordinator_forms_with_all_and_keeps_survivors_first(hosted: tuple[dist.Store, object]) -> None:
    bench = Bench(hosted[0], 3)
    bench.join(0, 2)
    bench.coordinator.tick()
    assert bench.world(1) is None
    bench.join(1)
    bench.coordinator.tick()
    assert bench.world(1) == [0, 1, 2]
    bench.coordinator.lose({0: "gone"})
    assert rendezvous.peek_json(bench.store, "ended/1/2") == {"broken": True, "workers": [0], "why": "gone"}
    bench.coordinator.expect(3)
    bench.join(1, 2, 3)
    bench.coordinator.tick()
    assert bench.world(2) == [1, 2], "after a loss survivors may be anywhere: a newcomer waits for their step boundary"
    assert rendezvous.peek_json(bench.store, "world/2")["infos"] == [10, 20]
    assert rendezvous.peek_json(bench.store, "world/2")["fenced"] == {"0": "gone"}


def test_coordinator_loss_while_forming_answers_those_who_wait(hosted: tuple[dist.Store, object]) -> None:
    bench = Bench(hosted[0], 2)
    bench.join(0)
    bench.coordinator.lose({1: "gone"})
    assert bench.world(1) == [] and bench.coordinator.generation == 2
    bench.join(0)
    bench.coordinator.tick()
    assert bench.world(2) == [0]


def test_coordinator_calls_members_together_for_a_newcomer(hosted: tuple[dist.Store, object]) -> None:
    bench = Bench(hosted[0], 2)
    bench.join(0, 1)
    bench.coordinator.tick()
    bench.coordinator.expect(2)
    bench.coordinator.tick()
    assert not bench.store.check(["regroup/1"])
    bench.join(2, generation=2)
    bench.coordinator.tick()
    assert bench.store.check(["regroup/1"]) and not bench.coordinator.forming
    bench.store.add("regrouping/1", 1)
    bench.coordinator.tick()
    assert bench.coordinator.forming and bench.coordinator.generation == 2


def test_coordinator_lets_a_hot_spare_wait_until_a_role_is_free(hosted: tuple[dist.Store, object]) -> None:
    bench = Bench(hosted[0], 4)
    bench.join(0, 1, 2, 3)
    bench.coordinator.tick()
    bench.leave(3, frees_role=False)
    bench.coordinator.expect(4, waits=True)
    bench.join(4, generation=2)
    bench.coordinator.tick()
    assert not bench.store.check(["regroup/1"]), "nobody is disturbed for it"
    bench.coordinator.lose({2: "gone"})
    bench.join(0, 1, 4)
    bench.coordinator.tick()
    assert bench.world(2) == [0, 1] and not bench.store.check(["regroup/2"])
    bench.join(4, generation=3)
    bench.coordinator.tick()
    assert bench.store.check(["regroup/2"]), "at the next step boundary it is taken in"


def test_coordinator_calls_hot_spares_again_when_there_are_more_than_found_no_role(hosted: tuple[dist.Store, object]) -> None:
    bench = Bench(hosted[0], 3)
    bench.join(0, 1, 2)
    bench.coordinator.tick()
    bench.leave(2, frees_role=False)
    bench.coordinator.expect(3)
    bench.join(3, generation=2)
    bench.coordinator.tick()
    bench.store.add("regrouping/1", 1)
    bench.coordinator.tick()
    bench.join(0, 1, 3)
    bench.coordinator.tick()
    assert bench.world(2) == [0, 1, 3]
    bench.leave(3, frees_role=False)  # alone it was of no use
    for spare in (4, 5):
        bench.coordinator.expect(spare, waits=True)
        bench.join(spare, generation=3)
        bench.coordinator.tick()
        assert bench.store.check(["regroup/2"]) is (spare == 5)
    bench.store.add("regrouping/2", 1)
    bench.coordinator.tick()
    bench.join(0, 1, 4, 5)
    bench.coordinator.tick()
    assert bench.world(3) == [0, 1, 4, 5]


@pytest.mark.parametrize("frees_role", [True, False])
def test_coordinator_calls_hot_spares_for_the_role_of_a_member_that_leaves(
    hosted: tuple[dist.Store, object], frees_role: bool
) -> None:
    bench = Bench(hosted[0], 2)
    bench.join(0, 1)
    bench.coordinator.tick()
    bench.coordinator.expect(2, waits=True)
    bench.join(2, generation=2)
    bench.leave(1, frees_role)
    assert bench.coordinator.active == {0} and bench.store.check(["regroup/1"]) is frees_role


def test_a_wait_outlasts_the_patience_of_the_store(hosted: tuple[dist.Store, object]) -> None:
    store = rendezvous.own_connection(hosted[0])
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(dist.DistStoreError):
        rendezvous.get_json(store, "late")
    setter = threading.Timer(0.4, lambda: rendezvous.put_json(hosted[0], "late", 7))
    setter.start()
    assert rendezvous.await_json(store, "late") == 7
    setter.join()
def test_coordinator_takes_in_together_whoever_was_started_together(hosted: tuple[dist.Store, object]) -> None:
    bench = Bench(hosted[0], 2)
    bench.join(0, 1)
    bench.coordinator.tick()
    bench.coordinator.expect(2)
    bench.coordinator.expect(3)
    bench.now += 8
    bench.join(2, generation=2)
    bench.coordinator.tick()
    assert not bench.store.check(["regroup/1"]), "worker 3 is still on its way"
    bench.now += 8.1
    bench.coordinator.tick()
    assert bench.store.check(["regroup/1"]), "it takes twice as long as worker 2: nobody waits any longer"


def test_coordinator_does_not_wait_for_a_companion_that_has_come_or_died(hosted: tuple[dist.Store, object]) -> None:
    bench = Bench(hosted[0], 2)
    bench.join(0, 1)
    bench.coordinator.tick()
    for worker in (2, 3, 4):
        bench.coordinator.expect(worker)
    bench.now += 8
    bench.join(2, 3, generation=2)
    bench.coordinator.tick()
    assert not bench.store.check(["regroup/1"])
    bench.coordinator.lose({4: "gone"})
    bench.coordinator.tick()
    assert bench.store.check(["regroup/1"]) and bench.coordinator.generation == 1


def test_who_does_not_outlive_its_neighbours() -> None:
    replicas = (frozenset({0, 1, 2}), frozenset({3, 4, 5}))
    assert is_poisoned(3, replicas, frozenset({4, 9}))
    assert not is_poisoned(0, replicas, frozenset({4}))
    assert not is_poisoned(3, replicas, frozenset({4, 1})), "no replica is whole: what is left goes on in place"
    assert not is_poisoned(3, (), frozenset({4})) and not is_poisoned(3, replicas[1:], frozenset({4}))


def test_a_member_that_has_closed_may_take_its_time_to_exit(hosted: tuple[dist.Store, object]) -> None:
    """Saving weights after the fit and the interpreter's own exit take seconds, without a heartbeat."""
    bench = Bench(hosted[0], 2, Patience(hang_seconds=5, exit_seconds=60))
    for worker in (0, 1):
        bench.beat(worker, 0)
        bench.join(worker)
    bench.coordinator.tick()
    rendezvous.put_json(bench.store, "closed/1", True)
    bench.now += 30
    bench.beat(0, 1)
    assert bench.coordinator.tick().fence == {}
    bench.now += 31
    bench.beat(0, 2)
    assert bench.coordinator.tick().fence == {1: "worker 1 gave no sign of life for 61.0 s"}


def test_coordinator_silence_lateness_and_standstill(hosted: tuple[dist.Store, object]) -> None:
    bench = Bench(hosted[0], 2, Patience(hang_seconds=5, progress_seconds=20, join_seconds=10, start_seconds=50))
    bench.now += 45
    assert bench.coordinator.tick().fence == {}
    bench.join(0)
    bench.now += 10
    assert bench.coordinator.tick().fence == {}  # nobody has shown that this program knows of a membership
    bench.beat(0, -2)
    assert bench.coordinator.tick().fence == {1: "worker 1 did not come to generation 1 within 50 s"}
    bench.join(1)
    bench.coordinator.tick()
    for second in range(20):
        bench.now += 1
        bench.beat(0, second)
        bench.beat(1, min(second, 12))
        bench.coordinator.tick()
    assert bench.coordinator.tick().fence == {1: "worker 1 gave no sign of life for 7.0 s"}
    bench.coordinator.lose({1: "silent"})
    bench.join(0)
    bench.coordinator.tick()
    for second in range(20, 41):
        bench.now += 1
        bench.beat(0, second, phase="compile")
        assert not bench.coordinator.tick().write_stacks
    for second in range(41, 62):
        bench.now += 1
        bench.beat(0, second, progress=1)
        assert not bench.coordinator.tick().write_stacks
    bench.now += 1
    bench.beat(0, 62, progress=1)
    assert bench.coordinator.tick().write_stacks and bench.events[-1].kind == "formed"
    bench.now += 1
    bench.beat(0, 63, progress=1)
    assert not bench.coordinator.tick().write_stacks
    assert bench.events[-1].why == "no worker has got on for 20 s (phases: 0: step)"


def test_coordinator_a_member_that_ended_well_is_missed_only_if_others_need_it(
    hosted: tuple[dist.Store, object],
) -> None:
    bench = Bench(hosted[0], 2)
    bench.join(0, 1)
    bench.coordinator.tick()
    bench.coordinator.finish(1)
    bench.coordinator.tick()
    assert not bench.coordinator.forming
    bench.store.add("suspect/1", 1)
    bench.coordinator.tick()
    assert bench.events[-1].why == "workers [1] ended while others still needed them"


def test_coordinator_deletes_what_nobody_reads_any_more(hosted: tuple[dist.Store, object]) -> None:
    bench = Bench(hosted[0], 8)
    counts = []
    for victim in range(7):
        bench.join(*range(victim, 8))
        bench.coordinator.tick()
        bench.store.set(f"vote/{bench.coordinator.generation}/3/0", "1")
        bench.store.set(f"groups/{bench.coordinator.generation}/0/rank_1", "1")
        counts.append(bench.store.num_keys())
        bench.coordinator.lose({victim: "gone"})
    assert counts[-1] <= counts[2]


def test_member_alone(hosted: tuple[dist.Store, rendezvous.JobAddress]) -> None:
    """Join, votes, a failed call that is no loss, a mismatch, a break, and being fenced, in one process."""
    store, address = hosted
    bench = Bench(store, 1)
    member = Member(address, MemberConfig(heartbeat_seconds=0.05, confirm_seconds=0.1), exit_process=lambda code: None)
    with pytest.raises(GenerationBrokenError, match="call Member.join first"):
        member.agree(0)
    with ticking(bench):
        generation = member.join("hello")
    assert (generation.members, generation.infos, generation.leader, generation.global_rank) == ((0,), ("hello",), 0, 0)
    assert member.agree(0) == Decision(Outcome.COMMIT)
    assert member.agree(1, ballot=Outcome.SKIP) == Decision(Outcome.SKIP)
    assert not store.check(["vote/1/0/0"]) and store.check(["vote/1/1/0"])
    store.add("vote/1/2/0/skips", 1)
    store.add("vote/1/2/0/skips", 1)
    with pytest.raises(PlanMismatchError, match="step 2: some members voted to commit, others to skip"):
        member.agree(2)
    store.set("regroup/1", "true")
    assert member.agree(3) == Decision(Outcome.COMMIT, regroup=True)
    assert not member.confirm_loss(RuntimeError("a module was skipped")) and not member.confirm_loss(ValueError("mine"))
    assert store.check(["suspect/1"])
    with ticking(bench):
        assert member.join().number == 2
    rendezvous.put_json(store, "ended/2/0", {"broken": True})
    assert member.confirm_loss(RuntimeError("Connection closed by peer"))
    with pytest.raises(GenerationBrokenError, match="generation 2 has lost a member"):
        member.agree(4)
    rendezvous.put_json(store, "generation", 3)
    rendezvous.put_json(store, "world/3", {"members": [], "infos": [], "fenced": {"0": "it was silent"}, "leaving": []})
    with pytest.raises(FencedError, match="worker 0 was given up: it was silent"):
        member.join()
    member.close()
    assert not dist.is_initialized()


class ticking:
    """``with ticking(bench):`` a coordinator that looks at the store all the time, on its own thread."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._done = bench, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._done.wait(0.005):
            self._bench.coordinator.tick()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()


def test_a_member_whose_supervisor_is_gone_ends(tmp_path: Path) -> None:
    """Also where the kernel does not end it: on another node than the store."""
    ended = threading.Event()
    codes: list[int] = []

    def exit_process(code: int) -> None:
        codes.append(code)
        ended.set()

    pid, endpoint = _host_in_a_child(tmp_path)
    member = Member(
        rendezvous.JobAddress(endpoint, "token-of-the-test", 0),
        MemberConfig(heartbeat_seconds=0.05),
        exit_process=exit_process,
    )
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert ended.wait(5.0) and codes == [rendezvous.EXIT_NO_SUPERVISOR]
    member.close()


def _host_in_a_child(folder: Path) -> tuple[int, rendezvous.Endpoint]:
    where = folder / "endpoint"
    pid = os.fork()
    if pid == 0:
        _store, endpoint = rendezvous.host_store(rendezvous.LOOPBACK, "token-of-the-test", {})
        (folder / "new").write_text(str(endpoint))
        (folder / "new").rename(where)
        time.sleep(30)
        os._exit(0)
    deadline = time.monotonic() + 10
    while not where.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return pid, rendezvous.Endpoint.parse(where.read_text())


def test_cut_spares_listeners_foreign_sockets_and_reused_descriptors() -> None:
    before_server = socket.create_server(("127.0.0.1", 0))
    with GroupSockets() as sockets:
        listener = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        local, peer = socket.socketpair()
        reused = socket.create_connection(before_server.getsockname())
        number = reused.fileno()
    reused.close()
    other = socket.create_connection(before_server.getsockname())
    assert other.fileno() == number
    assert sockets.cut() >= 1
    assert theirs.recv(1) == b"" and ours.recv(1) == b""
    other.settimeout(0.05)
    with pytest.raises(TimeoutError):
        other.recv(1)
    local.send(b"x")
    assert peer.recv(1) == b"x"
    socket.create_connection(listener.getsockname()).close()
    for opened in (before_server, listener, ours, theirs, local, peer, other):
        opened.close()


def test_bad_times() -> None:
    with pytest.raises(ConfigError, match="MemberConfig.confirm_seconds is 0: wanted more than 0"):
        MemberConfig(confirm_seconds=0)
    with pytest.raises(ConfigError, match="Patience.hang_seconds is -1"):
        Patience(hang_seconds=-1)


def test_store_speaks_json_and_listens_on_loopback_only(hosted: tuple[dist.Store, rendezvous.JobAddress]) -> None:
    store, address = hosted
    rendezvous.put_json(store, "world/1", {"members": [0]})
    assert store.get("world/1") == b'{"members": [0]}'
    port = f"{address.endpoint.port:04X}"
    listening = [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    ]
    assert f"0100007F:{port}" in listening and f"00000000:{port}" not in listening
    store.set_timeout(timedelta(seconds=1))


def test_coordinator_breaks_in_doubt_once_all_have_lived_on(hosted: tuple[dist.Store, object]) -> None:
    bench = Bench(hosted[0], 2)
    bench.join(0, 1)
    bench.coordinator.tick()
    for beats in range(2):
        bench.beat(0, beats)
        bench.beat(1, beats)
        bench.coordinator.tick()
    bench.store.add("doubt/1", 1)
    bench.coordinator.tick()
    assert bench.coordinator.suspected
    for beats in range(2, 6):
        bench.now += 1
        bench.beat(0, beats)
        bench.coordinator.tick()
    assert bench.coordinator.suspected  # worker 1 has not been heard since
    for beats in range(6, 9):
        bench.now += 1
        bench.beat(0, beats)
        bench.beat(1, beats)
        bench.coordinator.tick()
    assert bench.events[-1].why == "a collective failed although all workers live"
    assert not bench.coordinator.suspected


def test_coordinator_calls_members_together_for_one_that_must_leave(hosted: tuple[dist.Store, object]) -> None:
    bench = Bench(hosted[0], 3)
    bench.join(0, 1, 2)
    bench.coordinator.tick()
    rendezvous.put_json(bench.store, "leave/2", "drain")
    bench.store.add("leaves", 1)
    bench.coordinator.tick()
    assert bench.store.check(["regroup/1"])
    assert bench.events[-1] == Event("leaving", 1, bench.now, (2,), "drain")
    bench.store.add("regrouping/1", 1)
    bench.coordinator.tick()
    bench.join(0, 1, 2)
    bench.coordinator.tick()
    assert bench.world(2) == [0, 1, 2]
    bench.store.add("regrouping/2", 1)
    bench.coordinator.tick()
    bench.join(0, 1)
    bench.coordinator.tick()
    assert bench.coordinator.forming
    rendezvous.put_json(bench.store, "left/2", True)
    bench.store.add("leaves", 1)
    bench.coordinator.tick()
    assert bench.world(3) == [0, 1]
    assert [event.kind for event in bench.events] == ["formed", "leaving", "formed", "formed"]


def test_hang_deadline_follows_the_measured_steps(hosted: tuple[dist.Store, object]) -> None:
    deadline = HangDeadline(factor=10, floor_seconds=2)
    assert deadline.seconds is None and str(deadline) == "no limit yet"
    for seconds in (30.0, 0.5, 0.5):
        deadline.note_step(seconds)
    assert deadline.seconds == 5.0 and str(deadline) == "5.0 s = 10 x the median step of 0.50 s"
    for _ in range(64):
        deadline.note_step(0.01)
    assert deadline.seconds == 2 and str(deadline) == "2 s"
    assert HangDeadline(10, 2, fixed_seconds=600).seconds == 600
    bench = Bench(hosted[0], 1)
    bench.join(0)
    bench.coordinator.tick()
    for commits in range(1, 4):
        sign = {"beats": commits, "progress": commits, "phase": "step", "commits": commits, "step_seconds": 8.0}
        rendezvous.put_json(bench.store, "heartbeat/0", sign)
        bench.coordinator.tick()
    assert bench.coordinator.deadline.seconds == 80.0


def test_step_clock_leaves_out_what_is_no_step() -> None:
    now = [0.0]
    clock = StepClock(lambda: now[0])
    clock.commit()
    assert clock.sign() == {}
    now[0] = 2.0
    clock.commit()
    assert clock.sign() == {"commits": 1, "step_seconds": 2.0}
    clock.pause()
    now[0] = 90.0
    clock.commit()
    now[0] = 93.0
    clock.commit()
    assert clock.sign() == {"commits": 2, "step_seconds": 3.0}


def test_a_debugger_is_seen() -> None:
    assert not being_debugged(threading.get_ident())
    scope = {"__name__": "pdb", "being_debugged": being_debugged, "ident": threading.get_ident()}
    assert types.FunctionType((lambda: being_debugged(ident)).__code__, scope)()  # noqa: F821  a frame of pdb


def test_a_thread_that_waits_in_a_collective_is_told_from_one_that_works() -> None:
    idents: dict[str, tuple[int, int]] = {}
    done = threading.Event()

    def wait(name: str) -> None:
        idents[name] = threading.get_ident(), threading.get_native_id()
        done.wait(20.0)

    def blocked() -> None:
        idents["blocked"] = threading.get_ident(), threading.get_native_id()
        wait_like_a_collective(2.0)

    threads = [threading.Thread(target=wait, args=("elsewhere",)), threading.Thread(target=blocked)]
    for thread in threads:
        thread.start()
    while len(idents) < 2:
        time.sleep(0.01)
    time.sleep(0.2)
    probes = {name: StandstillProbe(*ids) for name, ids in idents.items()}
    looks = [{name: probe.stands_still() for name, probe in probes.items()} for _ in range(3)]
    done.set()
    for thread in threads:
        thread.join()
    assert looks == [{"elsewhere": False, "blocked": False}] + 2 * [{"elsewhere": False, "blocked": True}]


def wait_like_a_collective(seconds: float) -> None:
    """Sleeps in a frame that looks as if it were torch's."""
    names = {"__name__": "torch.distributed.distributed_c10d", "sleep": time.sleep}
    types.FunctionType((lambda seconds: sleep(seconds)).__code__, names)(seconds)  # type: ignore[name-defined]  # noqa: F821


def block_for_ever(address: rendezvous.JobAddress, log: Log) -> None:
    """Worker 1 is blocked where no cut can free it, as gloo's own fault leaves it; then worker 2 dies."""
    member = Member(address, MemberConfig(heartbeat_seconds=0.1, free_seconds=1.0, group_timeout_seconds=30))
    member.join()
    if address.worker == 1:
        wait_like_a_collective(60.0)
    if address.worker == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(10))
    except RuntimeError as error:
        assert member.confirm_loss(error)
    assert member.join().members == (0, 3)
    dist.all_reduce(torch.ones(10))
    member.close()


def test_a_survivor_that_no_cut_frees_leaves_by_itself(tmp_path: Path) -> None:
    job = ForkedJob(block_for_ever, 4, tmp_path)
    assert job.run() == 0
    assert job.worlds() == [(0, 1, 2, 3), (0, 3)]
    assert "worker 1: exit code 76" in [event.why for event in job.events if event.kind == "broken"]
    assert b"wait_like_a_collective" in job.printed and job.wall_seconds < 20


def spin(address: rendezvous.JobAddress, log: Log) -> None:
    """Worker 1 gets into an endless loop in step 5; before that, "compile" takes longer than the deadline."""
    torch.set_num_threads(1)
    member = Member(address, MemberConfig(heartbeat_seconds=0.1, group_timeout_seconds=30))
    generation = member.join()
    step = 0
    while step < 8:
        decision = None
        try:
            member.progress("compile" if step == 4 else "step")
            if step == 4:
                time.sleep(2.0)
            while address.worker == 1 and step == 5:
                pass
            dist.all_reduce(torch.ones(10))
            decision = member.agree(step)
        except Exception as error:
            if not member.confirm_loss(error):
                raise
        if decision is None:
            generation = member.join()
            continue
        step += 1
    log(ended=generation.members)
    member.close()


def test_an_endless_loop_is_found_by_its_standstill_and_all_stacks_are_written_first(tmp_path: Path) -> None:
    patience = Patience(progress_factor=3, progress_floor_seconds=1.0, join_seconds=2.0, start_seconds=40.0)
    job = ForkedJob(spin, 3, tmp_path, patience=patience, log_folder=tmp_path / "logs")
    assert job.run() == 0
    assert [event.kind for event in job.events] == ["formed", "broken", "broken", "formed"]
    stall, loss = (event for event in job.events if event.kind == "broken")
    assert stall.workers == () and stall.why.startswith("no worker has got on for 1 s (phases: 0: step, 1: step, 2: step)")
    assert loss.workers == (1,) and loss.why == "worker 1 did not come to generation 2 within 2 s"
    assert "in spin" in (tmp_path / "logs/worker1.generation1.log").read_text()
    for worker in (0, 2):
        assert "all_reduce" in (tmp_path / f"logs/worker{worker}.generation1.log").read_text()
