"""Every data collective of the layers and of the gradient sync. No list collectives: gloo refuses uneven ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_ntp.dtensor._torch_private import functional
from lightning_ntp.dtensor.stopwatch import STOPWATCH, Moment


def begin_wait() -> Moment | None:
    """Call before a collective; None where nobody measures, and in traced code, which has no clock."""
    return None if torch.compiler.is_compiling() or not STOPWATCH.running else STOPWATCH.now()


def end_wait(group: ProcessGroup, began: Moment | None) -> None:
    """Call after it, with what `begin_wait` has said: the time between was waiting in `group`."""
    if began is not None:
        STOPWATCH.waited(group, began)


def sum_in_place(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Sum a tensor of one shape over a group, in place. Collective over `group`; free for a group of one."""
    if group.size() > 1:
        began = begin_wait()
        dist.all_reduce(tensor, group=group)
        end_wait(group, began)
    return tensor


def exchange_uneven(
    send: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], group: ProcessGroup
) -> torch.Tensor:
    """Send each peer its run of `send` and receive theirs, in the order of the group.

    Args:
        send: 1-D, ``sum(send_sizes)`` elements.
        send_sizes: elements per peer.
        receive_sizes: elements expected per peer; every pair of peers must agree.

    Returns:
        1-D, ``sum(receive_sizes)`` elements.

    Collective over `group`.
    """
    received = send.new_empty(sum(receive_sizes))
    began = begin_wait()
    dist.all_to_all_single(received, send, list(receive_sizes), list(send_sizes), group=group)
    end_wait(group, began)
    return received


def gather_numbers(number: int, group: ProcessGroup) -> list[int]:
    """The numbers of all peers, in the order of the group. On CPU, so for gloo. Collective over `group`."""
    everyone, began = torch.empty(group.size(), dtype=torch.int64), begin_wait()
    dist.all_gather_into_tensor(everyone, torch.tensor([number]), group=group)
    end_wait(group, began)
    return everyone.tolist()


def broadcast_in_place(tensor: torch.Tensor, source: int, group: ProcessGroup) -> None:
    """Overwrite a tensor with that of global rank `source`. Collective over `group`; free for a group of one."""
    if group.size() > 1:
        dist.broadcast(tensor, src=source, group=group)


def max_in_place(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Elementwise maximum over a group, in place. Collective over `group`; free for a group of one."""
    if group.size() > 1:
        began = begin_wait()
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        end_wait(group, began)
    return tensor


class _CopyToRoles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_in_place(gradients[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _ReduceFromRoles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        return sum_in_place(tensor.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def copy_to_roles(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """A replicated activation enters a region cut over roles: itself; backward sums the roles' gradients.

    Collective over the tp axis in backward.
    """
    return _CopyToRoles.apply(tensor, group) if group.size() > 1 else tensor


def reduce_from_roles(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Partial sums leave a region cut over roles: their sum; backward hands every role the same gradient.

    Collective over the tp axis in forward.
    """
    return _ReduceFromRoles.apply(tensor, group) if group.size() > 1 else tensor


def gather_stacked(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Equal tensors of all peers, one after the other along dim 0. Collective over `group`; traceable."""
    if group.size() == 1:
        return tensor
    began = begin_wait()
    stacked = functional.all_gather_into_tensor(tensor.contiguous(), group.size(), group.group_name)
    return _arrived(stacked, group, began)


def exchange_rows(
    send: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], group: ProcessGroup
) -> torch.Tensor:
    """As `exchange_uneven` for rows of any width: send ``sum(send_sizes)`` rows, get ``sum(receive_sizes)``. Traceable.

    Collective over `group`.
    """
    began = begin_wait()
    received = functional.all_to_all_single(send.contiguous(), list(receive_sizes), list(send_sizes), group.group_name)
    return _arrived(received, group, began)


def reduce_over(tensor: torch.Tensor, operation: str, group: ProcessGroup) -> torch.Tensor:
    """A reduced copy; `operation` is "sum", "max" or "min". Collective over `group`; traceable."""
    if group.size() == 1:
        return tensor
    began = begin_wait()
    return _arrived(functional.all_reduce(tensor.contiguous(), operation, group.group_name), group, began)


def _arrived(tensor: torch.Tensor, group: ProcessGroup, began: Moment | None) -> torch.Tensor:
    result = functional.wait_tensor(tensor)
    end_wait(group, began)
    return result
