"""Worker ids are stable over the job, global ranks are not: nothing may take the one for the other."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.control import ControlPlane
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.whole import whole_tensors
from lightning_ntp.topology import Replica, Topology
from tests.engine import ShardedJob, Twin
from tests.models import batch, float64_norms, tiny
from tests.saves import load_job, save_job

CASES = {
    "workers 0, 2, 3, 5": (Topology(2, (Replica(((0, 2),)), Replica(((3, 5),)))), (0, 2, 3, 5)),
    "relabelled, ranks in another order": (Topology(3, (Replica(((5, 3, 0),)), Replica(((4, 2),)))), (2, 5, 0, 4, 3)),
    "columns and rows against the ranks": (
        Topology(2, (Replica(((5, 0), (2, 7))), Replica(((8,), (3,)))), (0,)),
        (3, 0, 8, 7, 5, 2),
    ),
}


def steps_and_messages(rank, world, case, folder):
    topology, members = case
    worker = members[rank]
    with float64_norms():
        model = tiny("llama")
        if worker != topology.leader:  # the leader's start has to win, whatever its global rank
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        job, twin = ShardedJob(model, topology, worker, members=members), Twin(tiny("llama"))
        for step in range(2):
            data = batch(101, 11, 9, seed=step)
            norm, wanted = job.step(data), twin.step(data)
        worst = max(job.errors(twin, lambda p: p).values())
        whole = dict(whole_tensors(job.sharded))
        control = ControlPlane(job.groups, torch.device("cpu"))
        messages = [control.broadcast(worker), control.gather_objects(worker)]
        save_job(job, folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        load_job(job, folder)
        loaded = max(job.errors(twin, lambda p: p).values())
    wrong = [fqn for fqn, tensor in whole.items() if not torch.allclose(tensor, twin.parameters[fqn], rtol=1e-9, atol=1e-12)]
    return {"worst": max(worst, loaded, abs(norm / wanted - 1).item()), "wrong": wrong, "messages": messages, "drifted": job.drifted()}


@pytest.mark.parametrize("name", CASES)
def test_worker_ids_need_not_be_global_ranks(pool, name, tmp_path):
    topology, members = CASES[name]
    for report in pool.run(steps_and_messages, len(members), CASES[name], tmp_path / "checkpoint"):
        assert report["worst"] < 1e-10
        assert report["wrong"] == []
        assert report["drifted"] == 0
        speakers = [min(topology.replicas[r].grid[f]) for r, f in topology.data_rows]
        assert report["messages"] == [topology.leader, speakers]


def with_members(rank, world, members):
    try:
        Groups(Topology.from_shapes([(1, 2)]), members[rank], members=members)
    except ConfigError as error:
        return str(error)
    return "made"


def test_a_worker_that_is_no_member_is_named(pool):
    messages = pool.run(with_members, 2, (0, 7))
    assert messages == ["workers [1] of the topology are not among the members (0, 7)"] * 2


def parked(rank, world):
    topology = Topology(1, (Replica(((0,), (1,))),), spares=(2,))
    groups = Groups(topology, rank)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=groups.everyone)
    return groups.has_role, hasattr(groups, "live"), groups.everyone.size(), float(total)


def test_a_parked_spare_has_only_the_group_of_everyone(pool):
    assert pool.run(parked, 3) == [(True, True, 3, 3.0), (True, True, 3, 3.0), (False, False, 3, 3.0)]


def timeouts(rank, world):
    groups = Groups(Topology.from_shapes([(1, 2), (1, 1)]), rank)
    made = [dist.group.WORLD, *groups._made]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in made}, len(made)


def test_every_group_has_the_timeout_of_the_default_group(pool):
    """Torch would give each new one 30 minutes, and a call that no cut frees would hold its worker for as long."""
    for found, num_groups in pool.run(timeouts, 3, timeout=77):
        assert found == {timedelta(seconds=77)}
        assert num_groups > 3
