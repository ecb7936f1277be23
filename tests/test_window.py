"""What must agree before an update: the order in which buckets were reduced."""

import pytest

from lightning_ntp.errors import PlanMismatchError
from lightning_ntp.strategy.control import ControlPlane
from lightning_ntp.strategy.window import StepRunner
from lightning_ntp.topology import Topology
from tests.engine import ShardedJob
from tests.models import batch, tiny


def _other_order(rank, world, swap):
    job = ShardedJob(tiny("llama"), Topology.from_shapes([(1, 2), (1, 1)]), rank)
    job.backward(batch(101, 6, 5))
    runner = StepRunner(job.sharded, ControlPlane(job.groups, job.loss.device), 0)
    order = list(job.sharded.window.order)
    runner.begin(6.0)
    job.sharded.window.order += order[::-1] if swap and rank == 2 else order
    if not swap:
        return runner.total_count()
    with pytest.raises(PlanMismatchError, match=r"in the order \[.*nothing was updated"):
        runner.total_count()
    return None


def test_buckets_reduced_in_another_order_stop_the_step_before_the_update(pool):
    pool.run(_other_order, 3, True)
    assert pool.run(_other_order, 3, False) == [0.0, 0.0, 0.0]
