"""Private names of torch that `strategy` needs, each with its reason. Tried on torch 2.13; tests/test_fsdp.py is the contract."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import FSDPModule

from lightning_ntp.errors import ConfigError


def bucket_parameters(unit: FSDPModule) -> Sequence[nn.Parameter]:
    """The sharded parameters of one FSDP unit in the order of its flat gradient buffer.

    The order (children before the module's own) is that of FSDP2's managed modules and is public nowhere.
    """
    state: Any = unit._get_fsdp_state()
    group = state._fsdp_param_group
    return [] if group is None else [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]


def fill_unused_gradients(unit: FSDPModule) -> bool:
    """Ask FSDP2 to reduce zeros for parameters without a gradient, so that every worker's bucket has one size.

    Returns False on a torch that lacks the switch (2.11 and 2.12): a unit with unused parameters is then refused by the size
    check of the bucket sync instead of being summed wrongly.
    """
    switch = getattr(unit, "set_reduce_scatter_unused_params", None)
    if switch is None:
        return False
    switch(True)
    return True


def new_group_in_order(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A group whose ranks follow the order of `ranks`; None where this process is not in it. Collective over the default group.

    Raises:
        ConfigError: an order that is not ascending, on a torch that always sorts (before 2.13).
    """
    if list(ranks) == sorted(ranks):
        return dist.new_group(list(ranks))
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise ConfigError(
            f"torch {torch.__version__} cannot make a group in the order {list(ranks)}, which this topology needs: upgrade to "
            "torch 2.13 or restart the job from a checkpoint"
        )
    return dist.new_group(list(ranks), sort_ranks=False)


def abort_groups() -> None:
    """Abort every process group of this process, so that a kernel that waits for a dead peer ends (NCCL; gloo has no abort).

    torch offers no public list of all groups, and aborting only the default one leaves the sub-groups' kernels waiting.
    """
    for group in list(c10d._world.pg_map):
        group.abort()


def end_groups(backend: str) -> None:
    """End the default group and all others, also when a peer is dead.

    `destroy_process_group` waits for NCCL kernels that a dead peer will never finish; only the private variant aborts them.
    """
    if backend == "nccl":
        c10d._abort_process_group()
    else:
        dist.destroy_process_group()
