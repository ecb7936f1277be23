"""The hook by itself: windows, sizes, and the stream code that no machine here can run, on fake streams and groups."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from lightning_ntp.dtensor.grad_sync import BucketSync, WindowState
from lightning_ntp.errors import PlanMismatchError
from lightning_ntp.model_spec import ModelPlan
from lightning_ntp.strategy import fsdp
from lightning_ntp.sync_plan import plan_sync
from lightning_ntp.topology import Topology
from tests.plan_cases import specs_for

ALONE = SimpleNamespace(size=lambda: 1)


def lone_bucket(window=None):
    topology = Topology.from_shapes([(1, 1)])
    specs = specs_for(topology)
    plan = plan_sync(specs, topology, 0)
    return BucketSync(0, plan, ALONE, {slot: ALONE for slot in topology.slots}, window or WindowState())


def test_earlier_micro_batches_are_set_aside_and_the_last_one_gets_their_sum():
    window = WindowState()
    bucket = lone_bucket(window)
    window.begin()
    for value in (1.0, 2.0):
        window.is_last_micro_batch = False
        flat = torch.full((bucket.plan.flat_numel,), value)
        bucket(flat)
        assert not flat.any(), "FSDP2 must add nothing yet"
    window.is_last_micro_batch = True
    flat = torch.full((bucket.plan.flat_numel,), 4.0)
    bucket(flat)
    assert bool((flat == 7.0).all())
    assert window.order == [0]
    again = torch.ones(bucket.plan.flat_numel)
    bucket(again)
    assert bool((again == 1.0).all()), "nothing of the last window is left"


def test_an_abandoned_window_leaves_nothing():
    window = WindowState(is_last_micro_batch=False)
    bucket = lone_bucket(window)
    bucket(torch.ones(bucket.plan.flat_numel))
    bucket.forget()
    window.is_last_micro_batch = True
    flat = torch.ones(bucket.plan.flat_numel)
    bucket(flat)
    assert bool((flat == 1.0).all())


def test_a_bucket_of_another_size_is_an_error_before_anything_is_reduced():
    bucket = lone_bucket()
    with pytest.raises(PlanMismatchError, match=r"bucket 0 \(q.weight and 6 more\): got 3 gradient elements, planned \d+"):
        bucket(torch.ones(3))
    assert bucket.window.order == []


def test_order_digest_tells_sequences_apart():
    first, second = WindowState(order=[1, 12]), WindowState(order=[11, 2])
    assert first.order_digest == WindowState(order=[1, 12]).order_digest != second.order_digest
    assert 0 <= first.order_digest < 2**63


class FakeEvent:
    done = False

    def query(self):
        return self.done


def test_cuda_buffers_are_held_until_their_event_is_done_or_backward_ends():
    window, events = WindowState(), [FakeEvent(), FakeEvent(), FakeEvent()]
    stream = mock.Mock(record_event=mock.Mock(side_effect=events))
    buffers = [SimpleNamespace(is_cuda=True, number=number) for number in range(3)]
    with mock.patch.object(torch.cuda, "current_stream", return_value=stream):
        window.hold(buffers[0])
        window.hold(buffers[1])
        assert [held.number for _, held in window.held] == [0, 1]
        events[0].done = True
        window.hold(buffers[2])
    assert [held.number for _, held in window.held] == [1, 2], "the finished one is given back"
    window.release()
    assert window.held == []
    window.hold(torch.ones(2))
    assert window.held == [], "CPU work is done when the call returns"


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_on_cuda_all_hooks_run_on_one_stream_beside_the_backward(device_type):
    topology = Topology.from_shapes([(1, 1)])
    module = torch.nn.Linear(3, 2, bias=False)
    specs = tuple(spec for spec in specs_for(topology) if spec.fqn == "norm.weight")
    plan = ModelPlan(specs, (), (), 1)
    groups = SimpleNamespace(topology=topology, worker=0, replica=ALONE, slots=dict.fromkeys(topology.slots, ALONE),
                             device_type=device_type)  # fmt: skip
    unit = mock.Mock()
    named = [("norm.weight", module.weight)]
    with (
        mock.patch.object(fsdp, "bucket_parameters", return_value=[module.weight]),
        mock.patch.object(fsdp, "WatchedUnit"),
        mock.patch.object(fsdp, "RowTrail"),
        mock.patch.object(module, "named_parameters", return_value=named),
        mock.patch.object(torch.cuda, "Stream", side_effect=["its own", "another"]),
    ):
        buckets, _ = fsdp._install_hooks(module, plan, groups, [unit, unit], WindowState())
    stream = "its own" if device_type == "cuda" else None
    assert unit.set_all_reduce_hook.call_args_list == [mock.call(bucket, stream=stream) for bucket in buckets]
