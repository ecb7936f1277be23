"""A sharded job and its one-process twin, without Lightning: what the parity tests compare."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_ntp.strategy.clipping import clip_by_norm_, global_norm
from lightning_ntp.strategy.fsdp import ShardedModel, local_of, park_model, shard_model
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.huggingface import plan_model
from lightning_ntp.strategy.state import MoveReport, rebuild
from lightning_ntp.topology import Topology
from tests.models import IGNORED

Batch = dict[str, torch.Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter], **options: object) -> torch.optim.Optimizer:
    """What jobs and twins train with unless told otherwise."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, **options)


def count_tokens(batch: Batch) -> int:
    """Labels that a causal LM's mean loss counts: the first one of each sample predicts nothing."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def uneven_shares(num_samples: int, num_rows: int) -> list[slice]:
    """Data row i gets about (i + 1) parts: unequal on purpose."""
    weights = [sum(range(1, i + 2)) for i in range(num_rows)]
    cuts = [0] + [round(w * num_samples / weights[-1]) for w in weights]
    return [slice(a, b) for a, b in itertools.pairwise(cuts)]


class ShardedJob:
    """This worker's part of a ragged job. `micro_batches` says how many each replica runs per window."""

    def __init__(
        self,
        model: nn.Module,
        topology: Topology,
        worker: int,
        micro_batches: Sequence[int] = (),
        members: Sequence[int] | None = None,
        make_optimizer: MakeOptimizer | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        joins: bool = False,
        **optimizer: object,
    ) -> None:
        self.topology, self.worker = topology, worker
        self.groups = Groups(topology, worker, members=members)
        plan = plan_model(model, topology.num_roles, topology.loss_order)
        self.sharded: ShardedModel = (park_model if joins else shard_model)(model, plan, self.groups, mp_policy)
        self.model = model
        self.micro_batches = list(micro_batches) or [1] * len(topology.replicas)
        make = make_optimizer or partial(adamw, **optimizer)
        self.optimizer = make(model.parameters())

    def move(
        self, topology: Topology, members: Sequence[int], held_steps: Mapping[int, int | None], batch_bytes: int = 2**26
    ) -> MoveReport:
        """Go on under another topology; the default group is that of the new generation."""
        if topology is not self.topology:  # a newcomer has made its groups at once
            self.topology, self.groups = topology, Groups(topology, self.worker, members=members)
        self.micro_batches = [1] * len(topology.replicas)
        return rebuild(self.sharded, [self.optimizer], self.groups, held_steps, batch_bytes=batch_bytes)

    def backward(self, batch: Batch) -> torch.Tensor:
        """Gradients of the token mean over the global batch; returns that loss."""
        at = self.topology.position(self.worker)
        shares = uneven_shares(len(batch["labels"]), len(self.topology.data_rows))
        mine = shares[self.topology.data_row(self.worker)]
        tokens, total = count_tokens(batch), torch.zeros((), dtype=torch.float64)
        self.optimizer.zero_grad()
        self.sharded.begin_window()
        parts = self._cut({k: v[mine] for k, v in batch.items()}, self.micro_batches[at.replica])
        for index, part in enumerate(parts):
            self.sharded.set_last_micro_batch(index == len(parts) - 1)
            loss = self.model(**part, use_cache=False).loss * (count_tokens(part) / tokens)
            loss.backward()
            total += loss.detach()
        self.sharded.finish_backward()
        if at.tp == 0:
            self.loss = total.clone()
        else:
            self.loss = torch.zeros_like(total)
        dist.all_reduce(self.loss, group=self.groups.live)
        return self.loss

    @torch.no_grad()
    def logits_error(self, twin: Twin, batch: Batch) -> torch.Tensor:
        """Largest error of this data row's training logits on its share, on all workers, relative to the largest logit."""
        mine = uneven_shares(len(batch["labels"]), len(self.topology.data_rows))[self.topology.data_row(self.worker)]
        ids = batch["input_ids"][mine]
        wanted = twin.model(input_ids=ids, use_cache=False).logits
        logits = self.model(input_ids=ids, use_cache=False).logits
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
        worst = (whole - wanted).abs().max() / wanted.abs().max()
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.groups.live)
        return worst

    def step(self, batch: Batch, max_norm: float | None = 0.5) -> torch.Tensor:
        """One AdamW step with clipping; returns the norm before it."""
        self.backward(batch)
        norm = global_norm(self.sharded)
        if max_norm is not None:
            clip_by_norm_(self.sharded, max_norm, norm)
        self.optimizer.step()
        return norm

    def errors(self, twin: Twin, what: Callable[[nn.Parameter], torch.Tensor]) -> dict[str, float]:
        """Per parameter the largest error over all copies on all workers, relative to its largest element."""
        at, names, values = self.sharded.coordinates, [], []
        for spec, parameter in self.sharded.parameters():
            whole = what(twin.parameters[spec.fqn]).detach().reshape(spec.matrix_shape)
            cell = spec.cell(at)
            rows = [i for s in cell.rows for i in range(s.start, s.stop)]
            columns = [i for s in cell.columns for i in range(s.start, s.stop)]
            mine = local_of(what(parameter)).reshape(cell.shape)
            wanted = whole[rows][:, columns]
            names.append(spec.fqn)
            values.append(((mine - wanted).abs().max() / whole.abs().max()).item() if mine.numel() else 0.0)
        worst = torch.tensor(values)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.groups.live)
        return dict(zip(names, worst.tolist(), strict=True))

    def drifted(self) -> int:
        """Elements whose copies on different workers are not the same bits."""
        at, count = self.sharded.coordinates, 0
        for spec, parameter in self.sharded.parameters():
            cell = spec.cell(at)
            rows = torch.tensor([i for s in cell.rows for i in range(s.start, s.stop)], dtype=torch.long)
            columns = torch.tensor([i for s in cell.columns for i in range(s.start, s.stop)], dtype=torch.long)
            bits = local_of(parameter).reshape(cell.shape).view(torch.int64)
            highest = torch.full(spec.matrix_shape, -(2**63), dtype=torch.int64)
            lowest = torch.full(spec.matrix_shape, 2**63 - 1, dtype=torch.int64)
            highest[rows[:, None], columns[None]] = bits
            lowest[rows[:, None], columns[None]] = bits
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.groups.live)
            dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self.groups.live)
            count += int((highest != lowest).sum())
        return count

    def _cut(self, batch: Batch, num_parts: int) -> list[Batch]:
        size = -(-len(batch["labels"]) // num_parts)
        parts = [{k: v[i * size : (i + 1) * size] for k, v in batch.items()} for i in range(num_parts)]
        return [part if len(part["labels"]) else self._ghost(batch) for part in parts]

    @staticmethod
    def _ghost(batch: Batch) -> Batch:
        return {k: v[:1] for k, v in batch.items()} | {"labels": torch.full_like(batch["labels"][:1], IGNORED)}


class Twin:
    """The same model in one process on the whole global batch."""

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer | None = None) -> None:
        self.model = model
        self.optimizer = (make_optimizer or adamw)(model.parameters())
        self.parameters = dict(model.named_parameters())

    def backward(self, batch: Batch) -> torch.Tensor:
        """Gradients of HF's own mean loss."""
        self.optimizer.zero_grad()
        loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def step(self, batch: Batch, max_norm: float | None = 0.5) -> torch.Tensor:
        """One AdamW step with torch's own clipping; returns the norm before it."""
        self.backward(batch)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm if max_norm is not None else float("inf"))
        self.optimizer.step()
        return norm
