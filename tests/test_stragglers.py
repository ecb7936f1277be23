"""Slow workers and links from what all workers measure: named after a while, never by one bad step, and helped only where it pays."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from lightning_ntp.errors import ConfigError
from lightning_ntp.links import Exchanged, Link, LinkWatch
from lightning_ntp.outliers import OutlierLimits, OutlierWatch, Sample
from lightning_ntp.shares import deal
from lightning_ntp.stragglers import Measured, SlowConfig, StragglerWatch, even_fractions
from lightning_ntp.strategy.config import RecoveryConfig
from lightning_ntp.topology import Topology

QUICK = OutlierLimits(patience=5)
SHAPES = ([(1, 3), (1, 3)], [(1, 4), (1, 3), (1, 2)], [(2, 2), (2, 2)], [(1, 1)] * 4, [(4, 1)])


def measured(topology: Topology, speeds: dict[int, float], weights: tuple[int, ...], num_samples: int) -> dict[int, Measured]:
    """What workers of these speeds (units of work per second) say when samples are dealt by `weights`."""
    counts = deal(num_samples, weights)
    told = {}
    for worker in topology.workers:
        count = counts[topology.data_row(worker)]
        told[worker] = Measured(count * even_fractions(topology)[worker] / speeds[worker], count)
    return told


def degrees(topology: Topology) -> tuple[int, ...]:
    return tuple(topology.replicas[replica].degree for replica, _ in topology.data_rows)


def watch(topology: Topology, speeds: dict[int, float], feeds: int = 40, num_samples: int = 120) -> StragglerWatch:
    watch = StragglerWatch(topology, QUICK)
    for _ in range(feeds):
        watch.feed(measured(topology, speeds, degrees(topology), num_samples))
    return watch


@pytest.mark.parametrize("shapes", SHAPES)
def test_exactly_the_slow_worker_is_named_wherever_it_stands(shapes: list[tuple[int, int]]) -> None:
    topology = Topology.from_shapes(shapes)
    for slow in topology.workers:
        speeds = dict.fromkeys(topology.workers, 10.0) | {slow: 4.0}
        watch = StragglerWatch(topology, QUICK)
        turns = [watch.feed(measured(topology, speeds, degrees(topology), 120)) for _ in range(30)]
        assert [(turn.key, turn.is_slow) for each in turns for turn in each] == [(slow, True)]
        assert watch.slow[slow] == pytest.approx(2.5)
        others = max(one.seconds for worker, one in measured(topology, speeds, degrees(topology), 120).items() if worker != slow)
        own = measured(topology, speeds, degrees(topology), 120)[slow].seconds
        assert watch.waiting_seconds() == pytest.approx(own - others)


def test_noise_and_single_bad_steps_name_nobody() -> None:
    topology, draw = Topology.from_shapes([(1, 3), (1, 3)]), random.Random(3)
    watch = StragglerWatch(topology, OutlierLimits(patience=20))
    for step in range(600):
        speeds = {worker: 10.0 / draw.uniform(0.8, 1.25) for worker in topology.workers}
        if step % 40 == 11:
            speeds[draw.randrange(6)] /= 50  # a page fault, a neighbour's backup
        assert watch.feed(measured(topology, speeds, (3, 3), 60)) == []
    assert watch.waiting_seconds() == 0.0


def test_who_recovers_is_taken_off_and_the_band_between_the_limits_changes_nothing() -> None:
    topology = Topology.from_shapes([(1, 2), (1, 2)])
    watch = StragglerWatch(topology, OutlierLimits(enter=1.3, leave=1.15, patience=5, smoothing=0.5))
    turns = []
    for factor, steps in ((1.25, 30), (1.5, 30), (1.2, 30), (1.0, 30)):
        for _ in range(steps):
            turns += watch.feed(measured(topology, dict.fromkeys(range(4), 10.0) | {3: 10.0 / factor}, (2, 2), 64))
        turns.append(factor)
    assert [turn if isinstance(turn, float) else (turn.key, turn.is_slow) for turn in turns] == [
        1.25, (3, True), 1.5, 1.2, (3, False), 1.0,
    ]  # fmt: skip


def test_half_of_the_workers_being_slow_does_not_make_slow_the_measure() -> None:
    topology = Topology.from_shapes([(1, 2), (1, 2)])
    assert set(watch(topology, {0: 10.0, 1: 10.0, 2: 5.0, 3: 5.0}).slow) == {2, 3}


def test_what_costs_next_to_nothing_is_not_worth_a_word() -> None:
    outliers: OutlierWatch[str] = OutlierWatch(QUICK)
    for _ in range(50):
        assert outliers.feed({"a": Sample(1.0, 0.001), "b": Sample(3.0, 0.001), "c": Sample(1.0, 0.001)}, 1.0) == []


@pytest.mark.parametrize("shapes", SHAPES[:4])
def test_new_shares_never_lose_and_are_about_the_best_there_are(shapes: list[tuple[int, int]]) -> None:
    topology, draw = Topology.from_shapes(shapes), random.Random(7)
    for _ in range(25):
        speeds = {worker: draw.uniform(2.0, 10.0) for worker in topology.workers}
        seen = watch(topology, speeds, feeds=4, num_samples=240)
        each, now = seen.sample_seconds(), seen.step_seconds(degrees(topology))
        change = seen.new_deal(degrees(topology), 1e9, 0.0, None)
        best = float(Fraction(240) / sum(Fraction(1) / Fraction(seconds) for seconds in each))  # samples cut into any parts
        if change is None:
            assert best > 0.9 * now
            continue
        assert change.then_seconds < now and change.then_seconds <= best + 1.5 * max(each)
        again = seen.new_deal(change.weights, 1e9, 0.0, None)
        assert again is None  # it settles


def test_a_change_must_pay_over_the_horizon() -> None:
    topology = Topology.from_shapes([(1, 1), (1, 1)])
    seen = watch(topology, {0: 10.0, 1: 5.0}, num_samples=120)  # 60 each: 12 s; 80 and 40: 8 s, a third less
    change = seen.new_deal((1, 1), 30.0, 9.9, None)
    assert change is not None and change.weights == (1000, 500) and change.gain == pytest.approx(1 / 3)
    assert seen.new_deal((1, 1), 30.0, 10.1, None) is None
    assert seen.new_deal((1000, 500), 1e9, 0.0, None) is None


def test_remedies_are_ordered_by_what_they_would_make_of_a_step() -> None:
    topology = Topology.from_shapes([(1, 4), (1, 4)])
    seen = watch(topology, dict.fromkeys(range(8), 10.0) | {5: 5.0}, num_samples=1600)
    found = {remedy.words: remedy.step_seconds for remedy in seen.helps(5, (4, 4))}
    assert seen.step_seconds((4, 4)) == pytest.approx(40.0)  # 800 samples, a quarter of each, at 5 a second
    assert found["its neighbours take some of its granules"] == pytest.approx(800 / 35)
    assert found["batch shares by speed"] == pytest.approx(1600 / 60, rel=0.01)
    assert found["leave without it: ntp drain 5"] == pytest.approx(1600 / 70, rel=0.01)
    assert list(found.values()) == sorted(found.values())


def test_shares_cannot_follow_inside_of_one_replica() -> None:
    topology = Topology.from_shapes([(2, 2)])
    words = [remedy.words for remedy in watch(topology, dict.fromkeys(range(4), 10.0) | {3: 3.0}).helps(3, (2, 2))]
    assert "batch shares by speed" not in words and len(words) == 2
    assert StragglerWatch(topology).new_deal((2, 2), 1e9, 0.0, 0.0) is None  # nothing is known yet


@pytest.mark.parametrize("shapes", [[(1, 4), (1, 4)], [(2, 4)], [(2, 2), (1, 3)]])
def test_neighbours_take_granules_of_a_slow_role_until_it_is_well_again(shapes: list[tuple[int, int]]) -> None:
    topology = Topology.from_shapes(shapes)
    slow = dict.fromkeys(topology.workers, 10.0) | {1: 5.0}
    seen = watch(topology, slow, num_samples=2400)
    change = seen.new_deal(degrees(topology), 1e9, 0.0, 0.0)
    assert change is not None and change.topology == seen.relieved() != topology
    degree = topology.replicas[0].degree
    kept = round(1000 * degree * 0.5 / (degree - 0.5))
    assert change.topology.replicas[0].relief == ((1, kept),)
    assert not any(replica.relief for replica in change.topology.replicas[1:])
    only_shares = seen.new_deal(degrees(topology), 1e9, 0.0, None)
    assert only_shares is None or change.then_seconds < only_shares.then_seconds

    again = watch(change.topology, slow, num_samples=2400)
    assert set(again.slow) == {1}, "it is as slow as before, with less to do"
    assert again.step_seconds(change.weights) == pytest.approx(change.then_seconds, rel=0.02)
    assert again.new_deal(change.weights, 1e9, 0.0, 0.0) is None  # it settles

    well = watch(change.topology, dict.fromkeys(topology.workers, 10.0), num_samples=2400)
    back = well.new_deal(change.weights, 1e9, 0.0, 0.0)
    assert back is not None and back.topology == topology


def test_granules_move_only_where_that_pays_beyond_what_shares_alone_gain() -> None:
    topology = Topology.from_shapes([(1, 2), (1, 2)])
    seen = watch(topology, dict.fromkeys(range(4), 10.0) | {3: 5.0}, num_samples=2400)
    cheap, dear = (seen.new_deal((2, 2), 30.0, 1.0, move) for move in (1.2, 9.0))
    assert cheap is not None and cheap.topology.replicas[1].relief == ((1, 667),)
    assert dear is not None and dear.topology == topology and dear.gain < cheap.gain
    assert seen.new_deal((2, 2), 30.0, 20.0, 20.0) is None


def test_a_replica_of_slow_workers_only_has_nobody_to_relieve_them() -> None:
    topology = Topology.from_shapes([(1, 2), (1, 2), (1, 2)])
    seen = watch(topology, dict.fromkeys(range(6), 10.0) | {4: 5.0, 5: 5.0}, num_samples=2400)
    assert set(seen.slow) == {4, 5} and seen.relieved() == topology


def exchanged(topology: Topology, slow: dict[tuple[int, ...], float], draw: random.Random) -> dict[int, Exchanged]:
    """In each exchange one member comes last, whoever; the others wait for it as well."""
    rows = [row for replica in topology.replicas for row in replica.grid]
    pairs = [tuple(topology.host(replica, slot) for replica in range(len(topology.replicas))) for slot in topology.slots]
    tp, slots = dict.fromkeys(topology.workers, 0.0), dict.fromkeys(topology.workers, 0.0)
    for groups, spent, seconds in ((rows, tp, 0.1), (pairs, slots, 0.2)):
        for group in groups:
            last = draw.choice(group)
            for worker in group:
                spent[worker] += seconds * slow.get(group, 1.0) + (0.0 if worker == last else draw.uniform(0.0, 0.5))
    return {worker: Exchanged(tp[worker], slots[worker]) for worker in topology.workers}


@pytest.mark.parametrize(
    ("shapes", "link", "name"),
    [
        ([(1, 4), (1, 4)], Link("slot", (0, 4)), "workers 0 and 4 (gradient sync between replicas)"),
        ([(1, 4), (1, 4)], Link("slot", (3, 7)), "workers 3 and 7 (gradient sync between replicas)"),
        ([(1, 3), (1, 3), (1, 2)], Link("slot", (1, 4, 7)), "workers 1, 4 and 7 (gradient sync between replicas)"),
        ([(2, 2), (2, 2)], Link("tp", (4, 5)), "workers 4 and 5 (roles of one replica)"),
    ],
)
def test_the_pair_of_roles_with_a_slow_link_is_named_and_not_who_waits(
    shapes: list[tuple[int, int]], link: Link, name: str
) -> None:
    topology, draw = Topology.from_shapes(shapes), random.Random(5)
    links = LinkWatch(topology, OutlierLimits(enter=2.0, leave=1.5, patience=5))
    turns = []
    for slow in ({}, {link.workers: 4.0}, {}):
        for _ in range(60):
            turns += links.feed(exchanged(topology, slow, draw), dict.fromkeys(topology.workers, 1), step_seconds=2.0)
    assert [(turn.key, turn.is_slow) for turn in turns] == [(link, True), (link, False)]
    assert str(link) == name and turns[0].factor > 2


def test_one_link_alone_has_nothing_to_be_compared_with() -> None:
    topology = Topology.from_shapes([(1, 1), (1, 1)])
    links = LinkWatch(topology, QUICK)
    told = {0: Exchanged(0.0, 9.0), 1: Exchanged(0.0, 9.0)}
    assert [turn for _ in range(50) for turn in links.feed(told, {0: 1, 1: 1}, 10.0)] == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SlowConfig(mode="fix"), r'mode is "off", "advise" or "act", got \'fix\''),
        (lambda: SlowConfig(factor=1.0), r"factor is above 1 and steps at least 1, got 1.0 and 20"),
        (lambda: SlowConfig(cost_seconds=-1), r"horizon_seconds and cost_seconds are 0 or more"),
        (lambda: RecoveryConfig(slow="act"), r"slow is a SlowConfig, got str"),
        (lambda: OutlierLimits(enter=1.1, leave=1.2), r"1 <= leave <= enter, got leave=1.2, enter=1.1"),
        (lambda: OutlierLimits(patience=0), r"patience of at least 1"),
    ],
)
def test_options_that_cannot_work(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]
