"""Which topology follows a loss or a return: nobody is forgotten, and what comes back finds its place."""


import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.errors import ConfigError, UnrecoverableError
from lightning_ntp.next_topology import next_topology
from lightning_ntp.plan_cost import PlanCost
from lightning_ntp.presets import GPUS
from lightning_ntp.topology import Replica, Topology
from tests.plan_cases import specs_for


def following(old, lost=(), joined=(), healthy=None, domain_size=8, **options):
    def params(order):
        return specs_for(Topology(old.num_roles, old.replicas, tuple(order)), heads=12, group=2, ffn=24, hidden=12)

    cost = PlanCost(params, old, GPUS["h100"], domain_size=domain_size)
    return next_topology(old, lost, joined, healthy=healthy or old, cost=cost, **options)


THREES = Topology.from_shapes([(1, 3), (1, 3)])


def test_a_lost_role_is_shrunk_and_comes_back_in_its_own_replica():
    hurt = following(THREES, [4])
    assert hurt == THREES.without(4)
    both = following(hurt, [0], healthy=THREES)
    assert [replica.degree for replica in both.replicas] == [2, 2]
    back = following(both, [], [4], healthy=THREES)
    assert [replica.degree for replica in back.replicas] == [2, 3]
    assert 4 in back.replicas[1].workers
    whole = following(back, [], [0], healthy=THREES)
    assert [replica.workers for replica in whole.replicas] == [tuple(r.workers) for r in whole.replicas]
    assert all(replica.degree == 3 for replica in whole.replicas)
    assert set(whole.replicas[0].workers) == {0, 1, 2}


def test_a_loss_and_a_return_in_one_change():
    hurt = following(THREES, [5])
    swapped = following(hurt, [1], [5], healthy=THREES, domain_size=3)
    assert [replica.degree for replica in swapped.replicas] == [2, 3]
    assert set(swapped.replicas[1].workers) == {3, 4, 5}


def test_replacements_build_the_lost_replica_anew_at_its_place():
    alone = following(THREES, [0, 1, 2])
    assert [replica.workers for replica in alone.replicas] == [(3, 4, 5)]
    places = {7: 0, 8: 2, 9: 1}
    first = following(alone, [], [7], healthy=THREES, domain_size=6, places=places)
    assert [replica.grid for replica in first.replicas] == [((7,),), ((3, 4, 5),)]
    whole = following(first, [], [8, 9], healthy=THREES, domain_size=6, places=places)
    assert [set(replica.workers) for replica in whole.replicas] == [{7, 8, 9}, {3, 4, 5}] and not whole.spares
    assert following(alone, [], [7, 8, 9], healthy=THREES, domain_size=6, places=places).replicas[0].grid == ((7, 9, 8),)


def test_pure_fsdp_goes_on_with_one_row_less_and_takes_it_back_at_its_place():
    rows = Topology.from_shapes([(3, 1), (3, 1)])
    hurt = following(rows, [4])
    assert hurt.replicas == (rows.replicas[0], Replica(((3,), (5,))))
    assert following(hurt, [], [4], healthy=rows).replicas == rows.replicas


def test_a_column_mate_is_parked_and_replaces_the_next_loss():
    squares = Topology.from_shapes([(2, 2), (2, 2)])
    hurt = following(squares, [7])
    assert (hurt.replicas[1].fsdp_size * hurt.replicas[1].degree, len(hurt.spares)) == (2, 1)
    spare = hurt.spares[0]
    next_loss = hurt.replicas[1].workers[0]
    after = following(hurt, [next_loss], healthy=squares)
    assert spare in after.replicas[1].workers
    assert after.replicas[1].fsdp_size * after.replicas[1].degree == 2
    back = following(following(hurt, [], [7], healthy=squares), healthy=squares)
    assert back.replicas[1].fsdp_size == back.replicas[1].degree == 2
    assert back.spares == ()


def test_a_replica_changes_its_shape_rather_than_park_a_worker_and_gets_it_back():
    squares = Topology.from_shapes([(2, 2), (2, 2)])
    hurt = following(squares, [7], reshape=True)
    assert hurt.replicas == (squares.replicas[0], Replica(((4,), (5,), (6,))))
    assert hurt.spares == ()
    back = following(hurt, [], [7], healthy=squares, reshape=True)
    assert back.replicas == squares.replicas


def test_a_whole_replica_is_dropped_and_comes_back_in_its_old_place():
    one = following(THREES, [0, 1, 2])
    assert one.replicas == (THREES.replicas[1],)
    partly = following(one, [], [1, 2], healthy=THREES)
    assert sorted(partly.replicas[0].workers) == [1, 2]
    whole = following(partly, [], [0], healthy=THREES)
    assert sorted(whole.replicas[0].workers) == [0, 1, 2]
    assert whole.replicas[1] == THREES.replicas[1]


def test_a_newcomer_without_a_home_takes_a_role_that_was_missing_from_the_start():
    ragged = Topology.from_shapes([(1, 3), (1, 2)])
    grown = following(ragged, [], [5], places={5: 5})
    assert [replica.workers for replica in grown.replicas] == [(0, 1, 2), (3, 4, 5)]
    twice = following(THREES, [0, 4, 5], [9, 10], healthy=THREES, domain_size=3)
    assert [replica.degree for replica in twice.replicas] == [3, 2], "the smallest first, then in order"
    assert following(THREES, [], [9]).spares == (9,)


@given(st.data())
def test_whatever_happens_nobody_is_forgotten_and_a_complete_job_is_complete_again(data):
    shapes = data.draw(st.sampled_from([[(1, 3), (1, 3)], [(2, 2), (2, 2)], [(3, 1), (3, 1)], [(2, 2), (1, 3)], [(1, 4), (1, 3)]]))
    healthy = Topology.from_shapes(shapes)
    now, missing = healthy, set()
    for _ in range(data.draw(st.integers(1, 5))):
        there = sorted(now.workers + now.spares)
        lost = set(data.draw(st.lists(st.sampled_from(there), unique=True, max_size=2)))
        joined = set(data.draw(st.lists(st.sampled_from(sorted(missing)), unique=True))) if missing else set()
        try:
            now = following(now, lost, joined, healthy=healthy)
        except UnrecoverableError:
            return
        missing = (missing | lost) - joined
        assert sorted(now.workers + now.spares) == sorted(set(healthy.workers) - missing)
    if missing:
        now = following(now, [], missing, healthy=healthy)
    assert sorted(len(replica.workers) for replica in now.replicas) == sorted(f * t for f, t in shapes)
    assert now.spares == ()


def test_who_is_there_cannot_join():
    with pytest.raises(ConfigError, match=r"workers \[2\] join a job in which they are"):
        following(THREES, [], [2])


def test_digests_tell_topologies_apart():
    assert THREES.digest == Topology.from_shapes([(1, 3), (1, 3)]).digest
    assert THREES.digest != THREES.without(4).digest != THREES.without(3).digest
