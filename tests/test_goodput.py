"""The ledger: its buckets sum to wall time x owned GPUs whatever happens, on disk as in memory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.errors import ConfigError
from lightning_ntp.goodput import Ledger, steady_clock
from lightning_ntp.goodput_file import History, LedgerFile, Segment, read_ledger
from lightning_ntp.goodput_merge import merge, read_run
from lightning_ntp.goodput_totals import BUCKETS, IDLE, LOST, PRODUCTIVE, GoodputWindow, numbers, ranges

GPUS = range(6)


class Clock:
    """Time by hand."""

    def __init__(self, now: int = 1_000) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


def _history(records: list[dict[str, Any]], tmp: Path, worker: int = 0, own: tuple[int, ...] = ()) -> History:
    path = tmp / f"ledger-{worker}.jsonl"
    path.unlink(missing_ok=True)
    file = LedgerFile(path, {"worker": worker, "own": own})
    for record in records:
        file.write(record)
    return read_ledger(path)


gpus = st.sets(st.sampled_from(GPUS), max_size=6)
actions = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from(BUCKETS)),
    st.tuples(st.just("lose"), gpus),
    st.tuples(st.just("restore"), gpus),
    st.tuples(st.just("own"), gpus),
    st.tuples(st.just("release"), gpus),
    st.tuples(st.just("commit"), st.integers(0, 99)),
    st.tuples(st.just("discard")),
    st.tuples(st.just("move"), st.integers(0, 50), st.sampled_from(BUCKETS), st.sampled_from(BUCKETS)),
    st.tuples(st.just("flush")),
    st.tuples(st.just("note"), st.just("x")),
)
scripts = st.lists(st.tuples(actions, st.integers(-20, 60)), max_size=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ledger")


def _play(ledger: Ledger, clock: Clock, script: list[Any]) -> dict[int, int]:
    """Runs a script; nanoseconds each GPU was owned, counted here from the forward ticks of the clock alone."""
    owned = dict.fromkeys(ledger.live | ledger.idle, 0)
    members = set(owned)
    for (name, *args), tick in script:
        getattr(ledger, name)(*args)
        if name == "own":
            members |= args[0]
        elif name == "release":
            members -= args[0]
        for gpu in members:
            owned[gpu] = owned.get(gpu, 0) + max(0, tick)
        clock.now += tick
        ledger.totals()  # a clock that jumps back is seen by whoever looks
    return owned


@given(scripts)
def test_buckets_sum_to_owned_time_and_the_file_says_the_same(folder: Path, script: list[Any]) -> None:
    clock, records = Clock(), []
    ledger = Ledger(range(3), clock, records.append)
    owned = _play(ledger, clock, script)
    totals = ledger.totals()
    assert sum(totals.gpu_ns.values()) == sum(owned.values())
    assert all(ns >= 0 for ns in totals.gpu_ns.values())
    assert {gpu: sum(ledger.of(gpu).values()) for gpu in owned} == owned
    history = _history(records, folder)
    assert history.gpu_ns() == totals.gpu_ns
    assert history.job == totals.job_ns
    assert history.num_damaged == 0
    state = ledger.state_dict()
    assert {k: v for k, v in history.state()["spent"].items() if sum(v)} == {k: v for k, v in state["spent"].items() if sum(v)}


@given(scripts, scripts, st.integers(-100, 500), st.booleans())
def test_a_resumed_ledger_goes_on(folder: Path, first: list[Any], second: list[Any], away: int, rolled_back: bool) -> None:
    clock, records = Clock(10_000), []
    ledger = Ledger(range(3), clock, records.append)
    saved = ledger.state_dict()
    _play(ledger, clock, first)
    end = ledger.totals()
    state = json.loads(json.dumps(ledger.state_dict()))

    own_start = end.at_ns + away
    later = Clock(own_start + 30)
    resumed = Ledger(range(4), later, records.append, start_ns=own_start)
    resumed.enter("data_wait")
    later.now += 7
    resumed.load_state_dict(state, saved if rolled_back else None)
    totals = resumed.totals()
    still_owned = {int(gpu) for gpu in (*state["live"], *state["idle"])}
    for gpu in still_owned:
        earlier = sum(state["spent"][str(gpu)])
        assert sum(resumed.of(gpu).values()) == earlier + totals.at_ns - end.at_ns
    assert sum(totals.job_ns.values()) == totals.at_ns - 10_000
    if rolled_back:
        assert totals.gpu_ns[PRODUCTIVE] == 0
    _play(resumed, later, second)
    totals = resumed.totals()
    resumed.flush()
    history = _history(records, folder)
    assert history.gpu_ns() == totals.gpu_ns
    assert history.job == totals.job_ns


def test_init_that_overlaps_the_earlier_process_counts_once() -> None:
    clock = Clock(0)
    old = Ledger([0, 1], clock, bucket="productive")
    clock.now = 100
    state = old.state_dict()
    new_clock = Clock(160)
    new = Ledger([0, 1], new_clock, start_ns=70)
    new.load_state_dict(state)
    totals = new.totals()
    assert totals.gpu_ns["init"] == 2 * 60
    assert totals.gpu_ns[PRODUCTIVE] == 2 * 100
    assert totals.job_ns[IDLE] == 0


def test_a_lost_gpu_a_lost_step_and_a_return() -> None:
    clock = Clock(0)
    ledger = Ledger(range(4), clock)
    _pass(ledger, clock, "productive", 50)
    ledger.commit(1)
    _pass(ledger, clock, "data_wait", 3)
    _pass(ledger, clock, "productive", 20)
    _pass(ledger, clock, "detection", 5)
    ledger.discard()
    ledger.lose([3])
    _pass(ledger, clock, "reshard", 7)
    _pass(ledger, clock, "productive", 30)
    ledger.commit(2)
    ledger.restore([3])
    _pass(ledger, clock, "productive", 10)
    totals = ledger.totals()
    assert totals.gpu_ns[LOST] == 4 * 20
    assert totals.gpu_ns[IDLE] == 37
    assert totals.gpu_ns["reshard"] == 3 * 7
    assert totals.gpu_ns[PRODUCTIVE] == 4 * 50 + 3 * 30 + 4 * 10
    assert totals.goodput == pytest.approx(90 / 125)
    assert totals.capacity_weighted == pytest.approx(330 / 500)
    assert (totals.num_live, totals.num_owned) == (4, 4)


def _pass(ledger: Ledger, clock: Clock, bucket: str, ns: int) -> None:
    ledger.enter(bucket)
    clock.now += ns
    ledger.totals()


def test_work_that_a_restart_throws_away_is_lost_step() -> None:
    clock = Clock(0)
    ledger = Ledger([0, 1], clock)
    _pass(ledger, clock, "productive", 40)
    ledger.commit(4)
    checkpoint = ledger.state_dict()
    _pass(ledger, clock, "productive", 25)
    ledger.commit(6)
    crashed = ledger.state_dict()
    new_clock = Clock(100)
    resumed = Ledger([0, 1], new_clock, start_ns=90)
    resumed.load_state_dict(crashed, checkpoint)
    totals = resumed.totals()
    assert resumed.step == 4
    assert totals.job_ns == dict.fromkeys(BUCKETS, 0) | {PRODUCTIVE: 40, LOST: 25, IDLE: 25, "init": 10}


def test_a_window_forgets() -> None:
    clock = Clock(0)
    ledger, window = Ledger([0], clock), GoodputWindow(seconds=10)
    second = 10**9
    for bucket, wanted in (("eval", 0), ("productive", 1 / 2), ("productive", 1), ("eval", 1 / 2), ("eval", 0)):
        _pass(ledger, clock, bucket, 5 * second)
        assert window.add(ledger.totals()).goodput == wanted


def _train(ledger: Ledger, clock: Clock, steps: int) -> None:
    for step in range(steps):
        _pass(ledger, clock, "data_wait", 2)
        _pass(ledger, clock, "productive", 8)
        ledger.commit(step + 1)
    ledger.flush()


def test_a_crash_in_the_middle_of_a_write_leaves_a_readable_file(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "ledger-0.jsonl"
    ledger = Ledger([0, 1], clock, LedgerFile(path, {"worker": 0}).write)
    _train(ledger, clock, 3)
    whole = path.read_bytes()
    _train(ledger, clock, 3)
    added = path.read_bytes()[len(whole) :]
    for cut in range(len(added) - 1):
        path.write_bytes(whole + added[:cut])
        history = read_ledger(path)
        assert sum(history.gpu_ns().values()) == 2 * 30
        assert history.num_damaged == (cut > 0)
    again = LedgerFile(path, {"worker": 0})  # the next process goes on behind the torn line
    later = Clock(clock.now)
    resumed = Ledger([0, 1], later, again.write, start_ns=later.now)
    resumed.load_state_dict(read_ledger(path).state())
    _train(resumed, later, 1)
    history = read_ledger(path)
    assert sum(history.gpu_ns().values()) == 2 * (later.now - 1_000)
    assert history.gpu_ns()[IDLE] == 2 * 30, "what the torn line said is unknown: all that is sure is that the GPUs were owned"


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, path = Clock(), tmp_path / "ledger-0.jsonl"
    file = LedgerFile(path, {"worker": 0})
    ledger = Ledger([0, 1], clock, file.write)
    _train(ledger, clock, 2)
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:11]))
    _train(ledger, clock, 1)
    monkeypatch.setattr(os, "write", _no_space)
    _train(ledger, clock, 1)
    assert file.num_failed == 2
    monkeypatch.setattr(os, "write", real_write)
    _train(ledger, clock, 1)
    history = read_ledger(path)
    assert history.gpu_ns() == ledger.totals().gpu_ns
    assert history.num_damaged == 1


def _no_space(fd: int, data: bytes) -> int:
    raise OSError(28, "No space left on device")


def _viewed(tmp: Path, worker: int, generation: int, play: Callable[[Ledger, Clock], None]) -> History:
    clock, records = Clock(), []
    ledger = Ledger(range(3), clock, records.append)
    ledger.generation = generation
    clock.now += 1
    ledger.totals()
    ledger.flush()
    play(ledger, clock)
    ledger.flush()
    return _history(records, tmp, worker, own=(worker,))


def test_merging_believes_each_worker_about_itself_and_the_leader_about_the_dead(tmp_path: Path) -> None:
    def leader(ledger: Ledger, clock: Clock) -> None:
        _train(ledger, clock, 10)
        ledger.lose([2])
        _train(ledger, clock, 10)

    def waits(ledger: Ledger, clock: Clock) -> None:
        for _ in range(20):
            _pass(ledger, clock, "data_wait", 5)
            _pass(ledger, clock, "productive", 5)

    def dies(ledger: Ledger, clock: Clock) -> None:
        _pass(ledger, clock, "productive", 60)

    histories = [_viewed(tmp_path, w, 0, play) for w, play in enumerate((leader, waits, dies))]
    histories[0].generation = 1
    merged = merge(histories)
    assert sum(merged.gpu_ns().values()) == 3 * 201
    by_gpu = {gpu: _sums(segments) for gpu, segments in merged.segments.items()}
    assert by_gpu[0] == {"init": 1, "data_wait": 40, PRODUCTIVE: 160}
    assert by_gpu[1] == {"init": 1, "data_wait": 100, PRODUCTIVE: 100}
    assert by_gpu[2] == {"init": 1, PRODUCTIVE: 60 + 32, "data_wait": 8, IDLE: 100}
    assert read_run(tmp_path).gpu_ns().keys() == set(BUCKETS)


def test_a_replacement_is_not_believed_about_the_time_before_it_came(tmp_path: Path) -> None:
    """It knows sums only of that time: spread over all of it they would be idle time where its predecessor worked."""
    clock = Clock()
    lead = Ledger(range(3), clock, LedgerFile(tmp_path / "ledger-0.jsonl", {"worker": 0, "own": [0]}).write)
    dead = Ledger(range(3), clock, LedgerFile(tmp_path / "ledger-2.jsonl", {"worker": 2, "own": [2]}).write)
    for ledger in (lead, dead):
        ledger.enter("productive")
    clock.now += 100
    for ledger in (lead, dead):
        ledger.state_dict()
    lead.lose([2])
    clock.now += 300
    lead.restore([2])
    header = {"worker": 6, "own": [2], "t": clock.now}
    newcomer = Ledger([6], clock, LedgerFile(tmp_path / "ledger-6.jsonl", header).write)
    newcomer.join(lead.state_dict())
    newcomer.enter("data_wait")
    clock.now += 50
    for ledger in (lead, newcomer):
        ledger.state_dict()
    assert _sums(read_run(tmp_path).segments[2]) == {PRODUCTIVE: 100, IDLE: 300, "data_wait": 50}


def _sums(segments: list[Segment]) -> dict[str, int]:
    total: dict[str, int] = {}
    for segment in segments:
        for bucket, ns in segment.spent.items():
            total[bucket] = total.get(bucket, 0) + ns
    return total


@given(scripts, scripts, scripts)
def test_merged_ledgers_still_sum(folder: Path, a: list[Any], b: list[Any], c: list[Any]) -> None:
    histories = [_viewed(folder, w, w % 2, lambda led, clock, s=s: _play(led, clock, s)) for w, s in enumerate((a, b, c))]  # type: ignore[misc]
    merged = merge(histories)
    lead = histories[1]
    assert sum(merged.gpu_ns().values()) == sum(lead.gpu_ns().values())
    for segments in merged.segments.values():
        assert all(one.end_ns <= two.start_ns for one, two in pairwise(segments))


def test_of_two_that_claim_to_lead_the_newer_generation_is_believed(tmp_path: Path) -> None:
    old = _viewed(tmp_path, 0, 1, lambda ledger, clock: _pass(ledger, clock, "productive", 100))
    new = _viewed(tmp_path, 2, 2, lambda ledger, clock: _pass(ledger, clock, "reshard", 80))
    for history, said in ((old, "old"), (new, "new")):
        history.events = [{"t": 5, "event": "recovery", "key": [2], "who": said}, {"t": 9, "event": "loss", "key": [1], "who": said}]
    merged = merge([old, new])
    assert merged.worker == 2
    assert merged.gpu_ns()["reshard"] == 80 * 2  # GPU 0 is judged by its own worker
    assert [event["who"] for event in merged.events] == ["new", "new"]


def test_damaged_lines_are_counted_and_their_time_stays_owned(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "ledger-0.jsonl"
    ledger = Ledger([0], clock, LedgerFile(path, {"worker": 0}).write)
    for _ in range(3):
        _train(ledger, clock, 1)
    lines = path.read_text().splitlines()
    lines[2] = '{"kind":"time","t":"soon"}'
    lines.append('{"kind":"unheard of"}')
    path.write_text("\n".join(lines) + "\n")
    history = read_ledger(path)
    assert history.num_damaged == 2
    assert history.gpu_ns() == dict.fromkeys(BUCKETS, 0) | {"data_wait": 4, PRODUCTIVE: 16, "other": 10}


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one GPU"):
        Ledger([], Clock())
    ledger = Ledger([0], Clock())
    with pytest.raises(ConfigError, match="no goodput bucket 'sleep'"):
        ledger.enter("sleep")
    with pytest.raises(ConfigError, match="no state of a goodput ledger"):
        ledger.load_state_dict({"at_ns": 3})
    with pytest.raises(ConfigError, match="cannot read the ledger"):
        read_ledger(tmp_path / "none.jsonl")
    (tmp_path / "text.jsonl").write_text("hello\n")
    with pytest.raises(ConfigError, match="is no ledger"):
        read_ledger(tmp_path / "text.jsonl")
    with pytest.raises(ConfigError, match=r"holds no ledger-"):
        read_run(tmp_path)


@given(st.sets(st.integers(0, 40)))
def test_ranges_come_back(wanted: set[int]) -> None:
    assert set(numbers(ranges(wanted))) == wanted


def test_the_steady_clock_is_a_wall_clock() -> None:
    clock = steady_clock()
    assert abs(clock() - time.time_ns()) < 10**9
