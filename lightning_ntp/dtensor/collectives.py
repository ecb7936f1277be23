"""Every data collective of the layers and of the gradient sync. No list collectives: gloo refuses uneven ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def sum_in_place(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Sum a tensor of one shape over a group, in place. Collective over `group`; free for a group of one."""
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
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
    dist.all_to_all_single(received, send, list(receive_sizes), list(send_sizes), group=group)
    return received


def broadcast_in_place(tensor: torch.Tensor, source: int, group: ProcessGroup) -> None:
    """Overwrite a tensor with that of global rank `source`. Collective over `group`; free for a group of one."""
    if group.size() > 1:
        dist.broadcast(tensor, src=source, group=group)
