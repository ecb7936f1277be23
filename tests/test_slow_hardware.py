"""A worker that is slow inside a real fit: it is named, the others' waiting is counted, and shares follow without changing a result."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_ntp.dtensor.collectives import reduce_over, sum_in_place
from lightning_ntp.dtensor.stopwatch import STOPWATCH
from lightning_ntp.errors import ConfigError
from lightning_ntp.links import Exchanged
from lightning_ntp.stragglers import Fractions, Measured, SlowConfig, even_fractions
from lightning_ntp.strategy.alerts import slow_alerts
from lightning_ntp.strategy.config import RecoveryConfig
from lightning_ntp.strategy.control import ControlPlane
from lightning_ntp.strategy.events import CommitEvent, Observers, SlowEvent
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.pace import Heard, PaceMeter
from lightning_ntp.strategy.slowness import Slowness
from lightning_ntp.testing import Fault, FaultScript
from lightning_ntp.topology import Topology
from tests import lightning_jobs as jobs
from tests.engine import ShardedJob
from tests.goodput_runs import MS, Job
from tests.models import batch, tiny
from tests.survival import Run

SLOW = FaultScript(Fault("slow", 3, "forward", step=1, seconds=0.4))


def test_shares_follow_a_slow_worker_and_the_run_equals_one_that_nothing_happened_to(tmp_path: Path) -> None:
    slow = {"mode": "act", "factor": 1.5, "steps": 2, "cost_seconds": 0.0}
    run = Run(tmp_path, SLOW, workers=4, strategy={"replica_sizes": [2, 2]}, slow=slow, max_epochs=3)
    run.check({0, 1, 2, 3})
    told = [line for line in run.lines("slow") if line["worker"] == 0]
    named = next(line for line in told if line["slow"] == "worker" and line["workers"] == [3])
    assert named["factor"] > 1.5
    assert f"worker 3 ({socket.gethostname()}, replica 1, role 1) computes" in named["words"]
    assert "would help" in named["words"]
    changed = next(line for line in told if line["slow"] == "shares")
    rows: dict[int, list[int]] = {0: [], 1: []}
    for line in run.lines("step"):
        if line["worker"] in (0, 2) and line["step"] > changed["at"] and line["samples"] == 8:
            rows[line["row"]].append(len(line["ids"]))
    assert rows[0] and min(rows[0]) > max(rows[1])
    waited = {line["step"]: line["waited"] for line in run.lines("step") if line["worker"] == 1}
    assert waited[named["at"] - 1] > 0 and waited[0] == 0
    for worker in (1, 2, 3):  # all say the same at the same commit
        own = [line for line in run.lines("slow") if line["worker"] == worker]
        assert [(line["slow"], line["at"], line["words"]) for line in own] == [(line["slow"], line["at"], line["words"]) for line in told]


def test_a_slow_role_hands_granules_to_its_neighbours_and_the_run_equals_one_that_nothing_happened_to(tmp_path: Path) -> None:
    faults = FaultScript(Fault("slow", 1, "forward", step=1, seconds=0.3), Fault("kill", 4, "sync", step=11))
    slow = {"mode": "act", "factor": 1.5, "steps": 2, "cost_seconds": 0.0}
    model = {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48, "intermediate_size": 96}
    strategy = {"replica_sizes": [3, 2]}
    run = Run(tmp_path, faults, workers=5, strategy=strategy, model=model, slow=slow, max_epochs=4)
    run.check({0, 1, 2, 3})
    told = [line for line in run.lines("slow") if line["worker"] == 0]
    deals = [line for line in told if line["slow"] == "shares" and "of the replica's granules" in line["words"]]
    assert deals and "replica 0: role 1 keeps " in deals[0]["words"]
    moves = [line for line in run.lines("recovered") if line["worker"] == 0]
    eased = [line for line in moves if "slow role 1 of replica 0 relieved" in line["topology"]]
    assert eased and not eased[0]["gone"] and not eased[0]["joined"]
    received = {line["worker"]: line["moved"] for line in run.lines("recovered") if line["recovered"] == eased[0]["recovered"]}
    assert received[0] and received[2] and not received[1] and not received[3] and not received[4]
    [loss] = [line for line in moves if line["gone"]]
    assert loss["gone"] == [4] and "slow role 1 of replica 0 relieved" in loss["topology"], "another replica's loss changes nothing here"


def waits(rank: int, world: int) -> tuple[list[int], dict[str, int], str]:
    group = torch.distributed.group.WORLD
    assert group is not None
    before = torch.zeros(1)
    sum_in_place(before, group)  # not measured: the watch does not run
    STOPWATCH.begin(cuda=False)
    if rank == 1:
        time.sleep(0.3)
    sum_in_place(before, group)
    reduce_over(before, "max", group)
    STOPWATCH.mark()
    sum_in_place(before, group)  # after the mark: an exchange, but not in the way of computing
    lap = STOPWATCH.end()
    computed, by_group = lap.read()
    return [computed, len(lap.waits), lap.num_waits], by_group, group.group_name


def test_only_the_late_one_has_computed_and_the_others_have_waited(pool: Any) -> None:
    laps = pool.run(waits, 3)
    for (_, num_waits, num_in_the_way), by_group, name in laps:
        assert (num_waits, num_in_the_way) == (3, 2) and set(by_group) == {name}
    computed, waited = [lap[0][0] for lap in laps], [lap[1][lap[2]] for lap in laps]
    assert computed[1] == max(computed) > 0.29e9 and waited[1] == min(waited)


def fsdp_waits(rank: int, world: int) -> tuple[int, int]:
    job = ShardedJob(tiny("llama"), Topology.from_shapes([(2, 1)]), rank)
    STOPWATCH.begin(cuda=False)
    if rank == 1:
        time.sleep(0.3)
    job.backward(batch(101, 6, 5))
    computed, by_group = STOPWATCH.end().read()
    return computed, by_group[job.groups.fsdp.group_name]


def test_waiting_in_the_collectives_of_fsdp_is_no_computing(pool: Any) -> None:
    (quick, waited), (slow, waited_less) = pool.run(fsdp_waits, 2)
    assert slow > quick and waited > waited_less


def meters(rank: int, world: int) -> list[Any]:
    topology = Topology.from_shapes([(1, 2), (1, 1)])
    groups = Groups(topology, rank)
    control = ControlPlane(groups, torch.device("cpu"))
    meter = PaceMeter(on=True)
    heard = []
    for samples in (3, 5):
        meter.begin_window()
        meter.begin()
        for group in groups.slots.values():
            sum_in_place(torch.zeros(2), group)
        STOPWATCH.mark()
        meter.end(samples + rank)
        told = control.extreme(torch.tensor([7, *meter.outgoing(groups)]), largest=True).tolist()
        meter.incoming(told[1:], groups)
        heard.append(meter.heard)
        meter.reshare_seconds, meter.move_seconds = rank / 4, rank / 8
        meter.commit(groups)
    groups.destroy()
    return heard


def test_all_hear_the_same_of_the_window_before(pool: Any) -> None:
    first, second = zip(*pool.run(meters, 3), strict=True)
    assert first == (None, None, None)
    assert second[0] == second[1] == second[2]
    assert [one.samples for one in second[0].measured.values()] == [3, 4, 5] and (second[0].reshare_seconds, second[0].move_seconds) == (0.5, 0.25)
    assert all(one.slot_seconds >= 0 and one.tp_seconds == 0 for one in second[0].exchanged.values())


def test_whoever_has_nothing_to_say_keeps_all_from_judging() -> None:
    class ThreeWorkers:
        topology, worker = Topology.from_shapes([(1, 1)] * 3), 1

    meter, groups = PaceMeter(on=True), ThreeWorkers()
    meter.incoming([5, 1, 0, 0, 0, 0] * 2 + [0] * 6, groups)  # type: ignore[arg-type]
    assert meter.heard is None
    meter.incoming([5 * 10**9, 2, 10**9, 2 * 10**9, 0, 0] * 3, groups)  # type: ignore[arg-type]
    assert meter.heard is not None and meter.heard.measured[2] == Measured(5.0, 2)
    assert meter.heard.exchanged[0] == Exchanged(1.0, 2.0)
    assert meter.outgoing(groups) == [0] * 18 and PaceMeter().outgoing(groups) == []  # type: ignore[arg-type]


class Judge(Slowness):
    """What judges after each commit, without a fit around it."""

    topology = Topology.from_shapes([(1, 2), (1, 2)])
    is_global_zero = True

    def __init__(self, mode: str) -> None:
        slow = SlowConfig(mode, steps=3, horizon_seconds=100.0, cost_seconds=5.0)  # type: ignore[arg-type]
        self.config: Any = SimpleNamespace(recovery=RecoveryConfig(slow=slow))
        said = [(worker, {"host": f"node{worker // 2}"}) for worker in range(4)]
        self.recovery: Any = SimpleNamespace(member=SimpleNamespace(generation=SimpleNamespace(who_said=lambda: said)))
        self.observers, self.told, self._held_step = Observers(), [], 7
        self.observers.add(self)  # type: ignore[arg-type]

    runner: Any = SimpleNamespace(pace=PaceMeter())

    def on_slow(self, event: SlowEvent) -> None:
        self.told.append(event)

    def work_fractions(self, topology: Topology) -> Fractions:
        return even_fractions(topology)

    def save_and_end(self, trainer: Any) -> None:
        raise AssertionError("a slow worker ends no job")

    def judge(self, seconds: tuple[float, ...], slots: tuple[float, ...] = (0.1,) * 4, times: int = 8, move_seconds: float = 0.0) -> float:
        measured = {worker: Measured(one, 80) for worker, one in enumerate(seconds)}
        exchanged = {worker: Exchanged(0.1, one) for worker, one in enumerate(slots)}
        self.runner.pace.heard = Heard(measured, exchanged, 0.0, move_seconds)
        return [self.judge_pace() for _ in range(times)][-1]


def test_advice_names_worker_host_factor_and_what_would_help(caplog: pytest.LogCaptureFixture) -> None:
    job = Judge("advise")
    assert job.judge((1.0, 1.0, 1.0, 2.0)) == pytest.approx(1.0)
    [event] = job.told
    assert (event.kind, event.workers, event.step, event.factor) == ("worker", (3,), 7, pytest.approx(2.0))
    assert event.words.startswith("worker 3 (node1, replica 1, role 1) computes 2.0 times as long as usual for the same work")
    for words in ("batch shares by speed (3", "its neighbours take some of its granules (33% less", "leave without it: ntp drain 3 (3"):
        assert words in event.words, event.words
    assert caplog.messages == [f"step 7: {event.words}"]
    assert job._next_deal is None
    assert job.judge((1.0,) * 4, times=60) == 0.0
    assert job.told[-1].kind == "well" and job.told[-1].words == "worker 3 (node1, replica 1, role 1) computes as fast as the others again"


def test_shares_are_changed_only_where_that_pays() -> None:
    job = Judge("act")
    job.judge((1.0, 1.0, 1.0, 1.4), times=5, move_seconds=99.0)
    assert [event.kind for event in job.told] == ["worker", "shares"]
    assert job._next_deal is not None and job._next_deal[1].weights == (1000, 714)
    assert job._next_deal[1].topology == job.topology
    assert "weights [1000, 714] of the data rows, 1" in job.told[-1].words
    miser = Judge("act")
    miser.config.recovery = RecoveryConfig(slow=SlowConfig("act", steps=3, horizon_seconds=20.0, cost_seconds=5.0))
    miser.judge((1.0, 1.0, 1.0, 1.4), times=5)
    assert [event.kind for event in miser.told] == ["worker"] and miser._next_deal is None


def test_granules_of_a_slow_role_go_to_its_neighbours() -> None:
    job = Judge("act")
    job.judge((1.0, 1.0, 1.0, 1.4), times=5)
    assert job._next_deal is not None
    eased = job.dealt_anew(job.topology)
    assert [replica.relief for replica in eased.replicas] == [(), ((1, 833),)]
    words = "replica 1: role 1 keeps 42% of the replica's granules; batch shares follow the speeds: weights [1000, 857]"
    assert words in job.told[-1].words, job.told[-1].words
    assert job.dealt_anew(eased) is eased, "a deal is for the topology that it was made for"
    alone = Judge("act")
    alone.recovery.member = None
    alone.judge((1.0, 1.0, 1.0, 1.4), times=5)
    assert alone._next_deal is not None and alone._next_deal[1].topology == alone.topology


def test_a_slow_link_between_replicas_is_named_with_its_hosts() -> None:
    job = Judge("advise")
    job.judge((1.0,) * 4, (0.6, 0.1, 0.6, 0.3))
    [event] = job.told
    assert (event.kind, event.workers) == ("link", (0, 2))
    assert "the exchange of workers 0 and 2 (gradient sync between replicas), on node0, node1 takes 6.0 times as long" in event.words


def manual(rank: int, world: int) -> str:
    class Manual(jobs.TinyLlama):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=[1, 1], recovery=RecoveryConfig(slow=SlowConfig("act")))
        try:
            jobs.trainer(strategy, world).fit(Manual(), jobs.loader(8, 2))
        except ConfigError as error:
            return str(error)
    return ""


def test_shares_that_cannot_follow_are_refused_by_name(pool: Any) -> None:
    for said in pool.run(manual, 2):
        assert 'SlowConfig(mode="act") with automatic_optimization=False' in said and 'use mode="off"' in said


def test_the_ledger_has_what_the_others_waited_and_the_event() -> None:
    job = Job()
    job.train(10, ms=400)
    before = job.ledger.totals()
    job.ledger.enter("productive")
    job.pass_ms(400)
    job.observer.on_slow(SlowEvent("worker", 11, (4,), 2.5, "worker 4 is slow"))
    job.observer.on_commit(CommitEvent(10, 8.0, True, 1, 1, 0.0, straggler_seconds=0.25))
    spent = job.ledger.totals().since(before)
    assert spent.job_ns["straggler"] == 250 * MS and spent.job_ns["productive"] == 150 * MS
    assert spent.gpu_ns["straggler"] == 6 * 250 * MS and sum(spent.gpu_ns.values()) == 6 * 400 * MS
    row = job.observer.events[-1]
    assert (row["event"], row["workers"], row["gpus"], row["roles"]) == ("slow", [4], [4], ["r1/fsdp0/tp1"])
    assert row["why"] == "worker 4 is slow" and row["factor"] == 2.5


def test_who_is_alerted_of_what() -> None:
    event = SlowEvent("worker", 7, (3,), 2.0, "worker 3 computes 2.0 times as long")
    [alert] = slow_alerts(event, "job")
    assert (alert.kind, alert.title, alert.text) == ("slow", "slow worker: 3", event.words)
    assert slow_alerts(SlowEvent("link", 7, (0, 4), 3.0, "slow"), "job")[0].title == "slow link: 0, 4"
    assert [slow_alerts(SlowEvent(kind, 7, (3,), 1.0, ""), "job") for kind in ("well", "shares")] == [[], []]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_the_streams_are_timed_and_not_the_host() -> None:
    STOPWATCH.begin(cuda=True)
    matrix = torch.ones(4096, 4096, device="cuda")
    for _ in range(50):
        matrix = matrix @ matrix
    STOPWATCH.mark()
    lap = STOPWATCH.end()
    torch.cuda.synchronize()
    assert lap.read()[0] > 1e6
