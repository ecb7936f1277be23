"""The one global order of samples per epoch, and each data row's share of it.

    (seed, epoch) -> order of all samples -> global batches -> shares of the data rows -> micro-batches of at most batch_size

Everything after the order is a pure function of the global batch and the topology, so that every worker knows what the others
run without asking, and a change of membership re-splits the same batch.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_ntp.errors import ConfigError
from lightning_ntp.shares import deal
from lightning_ntp.topology import Topology


def derive_seed(*parts: int) -> int:
    """A 63-bit seed that depends on all parts and their order; neighbouring parts give unrelated seeds."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@contextlib.contextmanager
def seeded_randomness(*parts: int) -> Iterator[None]:
    """Python's, NumPy's and torch's CPU generators run from `derive_seed(*parts)` inside; afterwards they go on as before."""
    numpy = sys.modules.get("numpy")  # not loaded: nobody draws from it
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = None if numpy is None else numpy.random.get_state()
    reseed(*parts)
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def reseed(*parts: int) -> None:
    """Set Python's, NumPy's and torch's CPU generators to `derive_seed(*parts)`."""
    seed = derive_seed(*parts)
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


@dataclass(frozen=True, slots=True)
class RowShares:
    """Who runs how much of each global batch.

    Args:
        batch_size: the user's, in samples per data row of the healthy job; no micro-batch is larger.
        num_healthy_rows: data rows of the healthy job; the global batch stays batch_size * num_healthy_rows after a loss,
            unless `devices` says otherwise.
        weights: per live data row what it can do relative to the others.
        replicas: per live data row the replica it belongs to.
        in_one_piece: each row runs its share as one micro-batch, however large, as in manual optimization.
        devices: (at work, of the healthy job): the global batch shrinks in this proportion.
    """

    batch_size: int
    num_healthy_rows: int
    weights: tuple[int, ...]
    replicas: tuple[int, ...]
    in_one_piece: bool = False
    devices: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.num_healthy_rows < 1:
            raise ConfigError(
                f"batch_size and data rows start at 1, got batch_size={self.batch_size}, rows={self.num_healthy_rows}"
            )
        if len(self.weights) != len(self.replicas):
            raise ConfigError(f"{len(self.weights)} weights for {len(self.replicas)} data rows")
        deal(0, self.weights)

    @classmethod
    def training(
        cls,
        topology: Topology,
        batch_size: int,
        num_healthy_rows: int | None = None,
        weights: tuple[int, ...] | None = None,
        devices: tuple[int, int] = (1, 1),
    ) -> RowShares:
        """In proportion to `weights` where speeds are known, else to the devices of each data row: one role less, a smaller share."""
        rows = topology.data_rows
        degrees = tuple(topology.replicas[replica].degree for replica, _ in rows)
        replicas = tuple(replica for replica, _ in rows)
        return cls(batch_size, num_healthy_rows or len(rows), weights or degrees, replicas, devices=devices)

    @classmethod
    def manual(cls, topology: Topology, batch_size: int, num_healthy_rows: int | None = None) -> RowShares:
        """Equal shares in one piece each: a training_step that optimizes by itself runs once per loop batch."""
        rows = topology.data_rows
        healthy = num_healthy_rows or len(rows)
        return cls(batch_size, healthy, (1,) * len(rows), tuple(replica for replica, _ in rows), in_one_piece=True)

    @classmethod
    def evaluation(cls, topology: Topology, batch_size: int) -> RowShares:
        """Equal shares: every data row runs exactly one micro-batch per global batch, a ghost where no sample is left."""
        rows = topology.data_rows
        return cls(batch_size, len(rows), (1,) * len(rows), tuple(replica for replica, _ in rows))

    @property
    def global_batch_size(self) -> int:
        """Samples of one loop batch over all data rows."""
        return self._shrunk(self.batch_size * self.num_healthy_rows)

    @property
    def num_ready_batches(self) -> int:
        """Ready-made batches of one loop batch over all data rows."""
        return self._shrunk(self.num_healthy_rows)

    def _shrunk(self, number: int) -> int:
        at_work, healthy = self.devices
        return max(1, number * min(at_work, healthy) // healthy)

    def shares(self, num_samples: int, already_dealt: int = 0) -> tuple[int, ...]:
        """Per data row its samples out of the next `num_samples`, when the window has dealt `already_dealt` before."""
        before, after = deal(already_dealt, self.weights), deal(already_dealt + num_samples, self.weights)
        return tuple(b - a for a, b in zip(before, after, strict=True))

    def micro_batch_sizes(self, row: int, num_samples: int, already_dealt: int = 0) -> tuple[int, ...]:
        """Sizes of the micro-batches that a data row runs; 0 is a ghost.

        All rows of one replica run the same number, as FSDP gathers their parameters together; replicas may differ.
        """
        shares = self.shares(num_samples, already_dealt)
        mates = [share for share, replica in zip(shares, self.replicas, strict=True) if replica == self.replicas[row]]
        num_parts = 1 if self.in_one_piece else max(1, *(-(-share // self.batch_size) for share in mates))
        base, rest = divmod(shares[row], num_parts)
        return tuple(base + (part < rest) for part in range(num_parts))

    def cut(self, row: int, samples: Sequence[Any], already_dealt: int = 0) -> tuple[tuple[tuple[Any, ...], int], ...]:
        """A data row's micro-batches of a global batch as (samples, how many count).

        A ghost is a copy of one real sample of which none counts: collectives need every row to run something.
        """
        start = sum(self.shares(len(samples), already_dealt)[:row])
        parts: list[tuple[tuple[Any, ...], int]] = []
        for size in self.micro_batch_sizes(row, len(samples), already_dealt):
            parts.append((tuple(samples[start : start + size]), size) if size else ((samples[0],), 0))
            start += size
        return tuple(parts)


@dataclass(frozen=True, slots=True)
class MicroBatchRequest:
    """What one data row loads for one loop batch: dataset indices per micro-batch, and how many of them count.

    Args:
        seed: of the job.
        epoch: number of the pass over the data; with the seed and an index it fixes a sample's augmentation.
        indices: per micro-batch.
        counts: per micro-batch; 0 marks a ghost.
    """

    seed: int
    epoch: int
    indices: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]


def global_order(sampler: Iterable[Any], seed: int, epoch: int, sampler_seed: int = 0) -> list[Any]:
    """Everything that a user's sampler (or batch sampler) yields in an epoch; the same on every worker.

    The sampler runs with Python's and torch's generators, and one of its own if it has one, set from
    (seed, epoch, sampler_seed). A `DistributedSampler` is asked for the order of one process: the shares are ours.
    """
    if isinstance(sampler, DistributedSampler):
        sampler = _undistributed(sampler)
    elif isinstance(sampler, BatchSampler) and isinstance(sampler.sampler, DistributedSampler):
        sampler = BatchSampler(_undistributed(sampler.sampler), sampler.batch_size, sampler.drop_last)
    for part in (sampler, getattr(sampler, "sampler", None)):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
    for generator in _generators_of(sampler):
        generator.manual_seed(derive_seed(seed, epoch, sampler_seed))
    with seeded_randomness(seed, epoch, sampler_seed):
        return list(sampler)


def _generators_of(sampler: object) -> list[torch.Generator]:
    found = (getattr(part, "generator", None) for part in (sampler, getattr(sampler, "sampler", None)))
    return [generator for generator in found if isinstance(generator, torch.Generator)]


def _undistributed(sampler: DistributedSampler) -> DistributedSampler:
    return DistributedSampler(
        sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed, drop_last=sampler.drop_last
    )


class GlobalBatchSampler(Sampler[MicroBatchRequest]):
    """One request per loop batch for one data row; the same number of them on every worker.

    Args:
        source: the user's sampler (single indices), or batch sampler (`batched`): `num_healthy_rows` of its batches in
            a row make a global batch.
        shares: who runs how much.
        row: this worker's data row.
        seed: the leader's.
        drop_last: leave out the samples that do not fill a global batch.
        batched: `source` yields lists of indices, which are not cut.
        window: loop batches per optimizer step, asked at the start of each epoch.
        seeded: whether a generator of `source` has its seed from the user, who then wants another order for another seed.
    """

    def __init__(
        self,
        source: Iterable[Any],
        shares: RowShares,
        row: int,
        seed: int,
        drop_last: bool = False,
        batched: bool = False,
        window: Callable[[], int] = lambda: 1,
        seeded: bool = True,
    ) -> None:
        self.source, self.shares, self.row, self.seed = source, shares, row, seed
        self.drop_last, self.batched, self.window = drop_last, batched, window
        self.epoch = 0
        self._first = (0, 0)
        generators = _generators_of(source) if seeded else []
        self._source_seed = generators[0].initial_seed() if generators else 0

    def set_epoch(self, epoch: int) -> None:
        """Which pass over the data the next `iter` starts. Called by Lightning."""
        self.epoch = epoch

    def start_at(self, batch: int, unit: int | None = None) -> None:
        """Let the next `iter` begin at this loop batch of the epoch, in the order of an undisturbed run.

        Args:
            batch: number of the first loop batch.
            unit: samples (batches of a batch sampler) before it, where global batches had another size so far.
        """
        self._first = batch, batch * self.per_batch if unit is None else unit

    @property
    def per_batch(self) -> int:
        """Samples of a global batch, or batches of the user's batch sampler in one."""
        return self.shares.num_ready_batches if self.batched else self.shares.global_batch_size

    @property
    def num_units(self) -> int:
        """Samples of an epoch, or batches of the user's batch sampler."""
        return len(cast(Any, self.source))

    def __len__(self) -> int:
        return self.num_units // self.per_batch if self.drop_last else -(-self.num_units // self.per_batch)

    def __iter__(self) -> Iterator[MicroBatchRequest]:
        (first, unit), self._first = self._first, (0, 0)
        # The shares of a window's positions depend on those before them, so start at the epoch's where it is possible.
        base, start = (0, 0) if unit == first * self.per_batch else (first, unit)
        window, dealt = self.window(), 0
        for number, samples in enumerate(self._global_batches(start), base):
            if number % window == 0:
                dealt = 0
            if number >= first:
                yield self._request(samples, dealt)
            dealt += len(samples)

    def _request(self, samples: Sequence[int], dealt: int) -> MicroBatchRequest:
        parts = self.shares.cut(self.row, samples, dealt)
        return MicroBatchRequest(
            self.seed, self.epoch, tuple(indices for indices, _ in parts), tuple(count for _, count in parts)
        )

    def _global_batches(self, first_unit: int) -> Iterator[list[int]]:
        units, per_batch = global_order(self.source, self.seed, self.epoch, self._source_seed), self.per_batch
        for start in range(first_unit, len(units), per_batch):
            batch = units[start : start + per_batch]
            if len(batch) < per_batch and self.drop_last:
                return
            yield list(itertools.chain.from_iterable(batch)) if self.batched else batch
