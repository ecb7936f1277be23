"""Who plays what: roles, slots, losses and returns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.errors import ConfigError
from lightning_ntp.topology import Replica, Slot, Topology
from tests.plan_cases import topologies


@given(topologies())
def test_each_replica_lacks_a_prefix_of_the_loss_order_and_hosts_every_slot(topology):
    for index, replica in enumerate(topology.replicas):
        missing = set(range(topology.num_roles)) - set(topology.roles(replica.degree))
        assert missing == set(topology.loss_order[: topology.num_roles - replica.degree])
        hosts = [topology.host(index, slot) for slot in topology.slots]
        assert set(hosts) <= set(replica.workers)
        assert all(topology.coordinates(h).role == s.role for h, s in zip(hosts, topology.slots, strict=True))


@given(topologies(), st.data())
def test_a_loss_keeps_everybody_else_and_nesting(topology, data):
    worker = data.draw(st.sampled_from(topology.workers))
    if len(topology.replicas) == 1 and topology.replicas[0].degree == 1:
        with pytest.raises(ConfigError, match="last role of the last replica"):
            topology.without(worker)
        return
    after = topology.without(worker)
    assert set(after.workers) | set(after.spares) == (set(topology.workers) | set(topology.spares)) - {worker}
    lost_replica = topology.position(worker).replica
    untouched = [r for i, r in enumerate(topology.replicas) if i != lost_replica]
    assert [r for r in after.replicas if r in untouched] == untouched


def test_first_loss_leads_the_order_and_a_later_one_is_relabelled():
    healthy = Topology.from_shapes([(1, 3), (1, 3)])
    assert healthy.loss_order == (2, 1)
    hurt = healthy.without(1)
    assert hurt.loss_order == (1, 2)
    assert hurt.replicas == (Replica(((0, 2),)), Replica(((3, 4, 5),)))
    both = hurt.without(3)
    assert both.replicas[1] == Replica(((4, 5),)), "the worker of role 1, which has to go, takes role 0 over"
    assert both.coordinates(4).role == 0


def test_a_return_is_the_reverse():
    healthy = Topology.from_shapes([(1, 3), (1, 3)])
    back = healthy.without(1).with_worker(0, 1)
    assert back.replicas == healthy.replicas


def test_column_mates_of_a_lost_role_are_parked_and_come_back():
    hurt = Topology.from_shapes([(2, 2), (2, 2)]).without(3)
    assert hurt.replicas[0] == Replica(((0,), (2,)))
    assert hurt.spares == (1,)
    assert hurt.without(1).spares == ()
    back = hurt.with_workers(0, (1, 9))
    assert back.replicas[0] == Replica(((0, 1), (2, 9)))
    assert back.spares == ()


def test_smaller_fsdp_hosts_several_slots():
    topology = Topology.from_shapes([(2, 1), (1, 1)])
    assert [topology.host(1, slot) for slot in topology.slots] == [2, 2]
    assert topology.slots == (Slot(0, 0), Slot(1, 0))
    assert topology.data_rows == ((0, 0), (0, 1), (1, 0))
    assert topology.data_row(2) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology.from_shapes([]), r"at least \(1, 1\), got \[\]"),
        (lambda: Topology.from_shapes([(0, 2)]), r"got \[\(0, 2\)\]"),
        (lambda: Topology(2, (Replica(((0, 1, 2),)),)), "3 roles, healthy ones have 2"),
        (lambda: Topology(2, (Replica(((0, 1),)), Replica(((1, 2),)))), "appears twice"),
        (lambda: Topology(2, (Replica(((0, 1),)),), (5,)), r"distinct roles of 0..1"),
        (lambda: Replica(((0, 1), (2,))), "full"),
        (lambda: Topology.from_shapes([(1, 2)]).position(7), "worker 7 holds no role"),
        (lambda: Topology.from_shapes([(1, 2)]).with_worker(0, 5), "degree 2/2"),
    ],
)
def test_bad_input_says_what_is_wrong(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
