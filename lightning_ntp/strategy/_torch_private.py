"""Private names of torch that `strategy` needs, each with its reason. Tried on torch 2.13; tests/test_fsdp.py is the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


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
