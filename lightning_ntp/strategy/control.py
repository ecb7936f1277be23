"""Small messages between workers: what Lightning asks of a strategy, with every data row counted once.

All roles of a data row see the same samples and log the same values, so the row's first role speaks for it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_ntp.strategy.groups import Groups

Sent = TypeVar("Sent")


class ControlPlane:
    """Control collectives over the live workers. Every method is collective over all workers with a role.

    Args:
        groups: of the current generation.
        device: where tensors of messages live: the backend's device.
    """

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self.groups, self.device = groups, device
        topology = groups.topology
        self.num_rows = len(topology.data_rows)
        self.row = topology.data_row(groups.worker) if groups.has_role else -1
        # The oldest worker of a row has all that was logged in this epoch; one that joined in its middle has not.
        speakers = [min(topology.replicas[r].grid[f]) for r, f in topology.data_rows]
        self.speaks = groups.worker in speakers
        self._speakers = [topology.workers.index(worker) for worker in speakers]

    def barrier(self) -> None:
        """Wait until all are here."""
        dist.barrier(self.groups.live)

    def broadcast(self, message: Sent, source: int = 0) -> Sent:
        """The object of the live worker number `source` in ascending order; 0 is the leader."""
        box = [message]
        dist.broadcast_object_list(box, group_src=source, group=self.groups.live, device=self.device)
        return box[0]

    def sum_rows(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over data rows; any shape, the same on all."""
        total = value.detach().to(self.device).clone() if self.speaks else torch.zeros_like(value, device=self.device)
        dist.all_reduce(total, group=self.groups.live)
        return total.to(value.device)

    def extreme(self, value: torch.Tensor, largest: bool) -> torch.Tensor:
        """Elementwise maximum or minimum over all workers, whatever their role."""
        result = value.detach().to(self.device).clone()
        dist.all_reduce(result, dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN, group=self.groups.live)
        return result.to(value.device)

    def all_agree(self, decision: bool) -> bool:
        """Whether every worker says yes."""
        return bool(self.extreme(torch.tensor(int(decision)), largest=False))

    def any_agrees(self, decision: bool) -> bool:
        """Whether some worker says yes."""
        return bool(self.extreme(torch.tensor(int(decision)), largest=True))

    def gather_rows(self, value: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all data rows, in their order. Shapes may differ in size, not in the number of dims."""
        shapes = self.gather_objects(tuple(value.shape))
        largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
        padded = value.new_zeros(largest, device=self.device)
        padded[tuple(slice(size) for size in value.shape)] = value.detach().to(self.device)
        everyone = [torch.empty_like(padded) for _ in range(self.groups.live.size())]
        dist.all_gather(everyone, padded, group=self.groups.live)
        spoken = zip(self._speakers, shapes, strict=True)
        return [everyone[s][tuple(slice(size) for size in shape)].to(value.device) for s, shape in spoken]

    def gather_objects(self, message: Sent) -> list[Sent]:
        """The objects of all data rows, in their order."""
        everyone: list[Any] = [None] * self.groups.live.size()
        dist.all_gather_object(everyone, message, group=self.groups.live)
        return [everyone[speaker] for speaker in self._speakers]

    def any_message(self, message: str | None) -> str | None:
        """The message of the lowest worker that has one, whatever its role; None where nobody has."""
        everyone: list[Any] = [None] * self.groups.live.size()
        dist.all_gather_object(everyone, message, group=self.groups.live)
        return next((each for each in everyone if each is not None), None)

    def reduce_rows(self, value: torch.Tensor, operation: str, weight: float | None = None) -> torch.Tensor:
        """Mean, sum, max, min or product over data rows.

        Args:
            value: any shape; integers become float64 for a mean.
            operation: ``"mean"``, ``"avg"``, ``"sum"``, ``"max"``, ``"min"`` or ``"product"``.
            weight: of this row in a mean; a row of weight 0 is left out of every operation.
        """
        operation = operation.lower().rsplit(".", 1)[-1]
        if operation in ("mean", "avg"):
            # Lightning divides a mean by the mean of integer counts: float32 would round thirds.
            floating = value if value.is_floating_point() else value.double()
            own = 1.0 if weight is None else weight
            weighted = floating.double() * own if own else torch.zeros_like(floating, dtype=torch.float64)
            total = self.sum_rows(torch.cat([weighted.reshape(-1), weighted.new_tensor([own])]))
            mean = total[:-1] / total[-1]
            return mean.reshape(value.shape).to(floating.dtype)
        counts = weight is None or weight > 0
        if operation == "sum":
            return self.sum_rows(value if counts else torch.zeros_like(value))
        if operation in ("max", "min"):
            return self.extreme(value if counts else _neutral(value, operation == "max"), operation == "max")
        if operation == "product":
            return torch.stack(self.gather_rows(value if counts else torch.ones_like(value))).prod(0).to(value.dtype)
        raise ValueError(f"reduce: {operation!r} is not one of mean, sum, max, min, product")


def _neutral(value: torch.Tensor, largest: bool) -> torch.Tensor:
    limits = torch.finfo(value.dtype) if value.is_floating_point() else torch.iinfo(value.dtype)
    return torch.full_like(value, limits.min if largest else limits.max)


def agree_with_leader(message: Sent, device: torch.device) -> Sent:
    """The object of global rank 0, before there are groups. Collective over the default group."""
    box = [message]
    dist.broadcast_object_list(box, src=0, device=device)
    return box[0]


def gather_everyone(message: Sent) -> list[Sent]:
    """The objects of all processes by global rank. Collective over the default group."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, message)
    return everyone


def gather_live(message: Sent, groups: Groups) -> list[Sent]:
    """The objects of all workers with a role, ascending, whatever their data row. Collective over them."""
    everyone: list[Any] = [None] * groups.live.size()
    dist.all_gather_object(everyone, message, group=groups.live)
    return everyone
