"""State moves of a bare model: after a loss or a return the lost cells come from live holders, in place.

    take (held.py) --> record told to newcomers --> plan (reshard.py), digest compared --> cut anew, without storage (fsdp.py)
                                                                                             |
    the same module and optimizers <-- give (held.py) <-- batches of pieces, one exchange each

[Note: what a failure leaves] A tensor that has got its new cell gives up the old one except for what the new one lacks, so that
this worker can put the old one together again by itself. A second loss in the middle breaks an exchange; the next call finds
``sharded.held``, goes back to the old cells and starts over. The old ones are given up for good once all have everything.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_ntp.dtensor.collectives import exchange_uneven, max_in_place
from lightning_ntp.errors import PlanMismatchError, UnrecoverableError
from lightning_ntp.model_spec import ModelPlan, ParamSpec
from lightning_ntp.reshard import ReshardPlan, batches, plan_reshard
from lightning_ntp.strategy import held
from lightning_ntp.strategy.fsdp import ShardedModel, cut_again, uncut
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.mover import Mover

BATCH_BYTES = 64 * 2**20
"""Most that a worker sends or receives in one exchange."""


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What a rebuild moved.

    Args:
        step: optimizer step of the state.
        digest: of the plan.
        planned_bytes: by worker, what it has to receive; workers that receive nothing are left out.
        received_bytes: what this worker received in the exchanges, buffers of the module not counted.
        peak_extra_bytes: most that this worker held beyond what it had before: new cells, send and receive buffers.
        seconds: of the whole call.
    """

    step: int
    digest: str
    planned_bytes: Mapping[int, int]
    received_bytes: int
    peak_extra_bytes: int
    seconds: float

    @property
    def moved_bytes(self) -> int:
        """Over all workers."""
        return sum(self.planned_bytes.values())


def rebuild(
    sharded: ShardedModel,
    optimizers: Sequence[torch.optim.Optimizer],
    groups: Groups,
    held_steps: Mapping[int, int | None],
    *,
    batch_bytes: int = BATCH_BYTES,
    agree: Callable[[], object] = lambda: None,
) -> MoveReport:
    """Go on with the model under another topology: same module, same optimizers, same values.

    Args:
        sharded: the model; its old groups may be gone, only their topology is looked at. A newcomer passes what
            `fsdp.park_model` made of its module.
        optimizers: over the module's parameters; Lightning's wrappers are fine.
        groups: of the new generation, its topology in them.
        held_steps: for each worker of the new topology and each spare, the optimizer step at which the state it holds is complete;
            None: it holds nothing. Only holders of the highest step are sources.
        batch_bytes: most that a worker sends or receives in one exchange.
        agree: called once all new cells of this worker are complete and before they replace the old ones, which is local: a vote
            that raises on all if somebody was lost meanwhile, so that the state has moved for all or for nobody.

    Gradients are dropped. A worker without a role in the new topology gives its storage up.

    Raises:
        UnrecoverableError: no holder is left of some region of a parameter. On all workers, before anything moves.
        PlanMismatchError: workers would move different things. On all workers, before anything moves.

    Collective over all workers with a role, and the spares.
    """
    started = time.monotonic()
    inner = [getattr(optimizer, "_optimizer", optimizer) for optimizer in optimizers]
    if sharded.held is None:
        sharded.held = held.take(sharded, inner)
    else:
        uncut(sharded)
        sharded.held.go_back()
    job = _Job.agree(sharded, groups, held_steps)
    exchanges = batches(job.moves, job.record.kept, batch_bytes)
    _compare(job, groups)
    for fqn, parameter in sharded.module.named_parameters():
        parameter.requires_grad_(fqn in job.record.trained)
    if groups.has_role:
        cut_again(sharded, job.plan, groups)
    mover = Mover(sharded.held, groups, job.moves, job.plan.params, job.record.kept, job.holds)
    mover.run(exchanges)
    _send_buffers(sharded, job, groups)
    planned = _planned_bytes(job)
    if mover.received_bytes != planned.get(groups.worker, 0):
        raise PlanMismatchError(f"received {mover.received_bytes} bytes, planned {planned.get(groups.worker, 0)}")
    agree()
    if not job.holds:
        held.follow(inner, job.record)
    if groups.has_role:
        held.give(sharded, inner, job.record, mover.new)
    else:
        sharded.plan, sharded.groups = job.plan, groups
    sharded.held = None
    return MoveReport(
        job.step, job.moves.digest, planned, mover.received_bytes, mover.peak_bytes, time.monotonic() - started
    )


@dataclass(frozen=True)
class _Job:
    """What all workers agree on before anything moves."""

    step: int
    holders: frozenset[int]
    holds: bool
    record: held.Record
    old_params: tuple[ParamSpec, ...]
    plan: ModelPlan
    moves: ReshardPlan

    @classmethod
    def agree(cls, sharded: ShardedModel, groups: Groups, held_steps: Mapping[int, int | None]) -> _Job:
        new = groups.topology
        present = new.workers + new.spares
        steps = {worker: held_steps.get(worker) for worker in present}
        known = [step for step in steps.values() if step is not None]
        if not known:
            raise UnrecoverableError(
                f"none of the workers {present} holds any state; a host-memory copy on a buddy or a checkpoint would have saved it"
            )
        step = max(known)
        holders = frozenset(worker for worker, at in steps.items() if at == step)
        assert sharded.held is not None
        record = sharded.held.record
        if len(holders) < len(present):
            record = _tell(record, present.index(min(holders)), groups)
        plan = sharded.plan.reordered(new.loss_order)
        old_params = sharded.plan.reordered(record.topology.loss_order).params
        dead = [worker for worker in record.topology.workers if worker not in holders]
        moves = plan_reshard(plan.params, record.topology, new, dead, old_params)
        return cls(step, holders, groups.worker in holders, record, old_params, plan, moves)


def _tell(record: held.Record, speaker: int, groups: Groups) -> held.Record:
    """The record of the lowest holder, for those who hold nothing or something old. Collective over everyone."""
    box: list[Any] = [record]
    dist.broadcast_object_list(box, group_src=speaker, group=groups.everyone)
    told: held.Record = box[0]
    return told


def _compare(job: _Job, groups: Groups) -> None:
    """PlanMismatchError on all workers unless they would move the same. Collective over everyone."""
    same = (job.step, sorted(job.holders), job.moves.digest, job.record.kept)
    number = int.from_bytes(hashlib.sha256(repr(same).encode()).digest()[:7], "little")
    both = torch.tensor([number, -number], dtype=torch.int64, device=groups.device_type)
    max_in_place(both, groups.everyone)
    if int(both[0]) != -int(both[1]):
        raise PlanMismatchError(
            f"workers would move different state: here plan {job.moves.digest} for step {job.step} with {len(job.record.kept)} "
            "tensors; do all of them have the same model, optimizers and list of workers?"
        )


def _planned_bytes(job: _Job) -> dict[int, int]:
    per_element: dict[str, int] = {}
    for kept in job.record.kept:
        per_element[kept.fqn] = per_element.get(kept.fqn, 0) + kept.item_bytes
    planned: dict[int, int] = {}
    for transfer in job.moves.transfers:
        if not transfer.is_local:
            size = transfer.piece.numel * per_element[transfer.fqn]
            planned[transfer.destination] = planned.get(transfer.destination, 0) + size
    return planned


@torch.no_grad()
def _send_buffers(sharded: ShardedModel, job: _Job, groups: Groups) -> None:
    """Newcomers get the module's buffers from the lowest holder; the others keep theirs. Collective over everyone."""
    everyone = groups.topology.workers + groups.topology.spares
    newcomers = [worker for worker in groups.topology.workers if worker not in job.holders]
    if not newcomers:
        return
    speaker, me = min(job.holders), groups.worker
    buffers = list(sharded.module.buffers())
    size = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    flat = [buffer.detach().contiguous().reshape(-1).view(torch.uint8) for buffer in buffers] if me == speaker else []
    packed = torch.cat(flat * len(newcomers)) if flat else torch.empty(0, dtype=torch.uint8, device=groups.device_type)
    received = exchange_uneven(
        packed,
        [size if me == speaker and worker in newcomers else 0 for worker in everyone],
        [size if me in newcomers and worker == speaker else 0 for worker in everyone],
        groups.everyone,
    )
    at = 0
    for buffer in buffers if me in newcomers else ():
        length = buffer.numel() * buffer.element_size()
        buffer.copy_(received[at : at + length].clone().view(buffer.dtype).view(buffer.shape))
        at += length
