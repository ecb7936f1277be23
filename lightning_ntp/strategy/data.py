"""Loaders that yield, per loop batch, one data row's micro-batches of the global batch.

    user's DataLoader  --rebuild_loader-->  DataLoader over MicroBatches

Lightning's loop sees one batch and the same number of batches on every worker; the strategy unpacks `MicroBatches`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.resume import DataPosition, Resumable, Start
from lightning_ntp.strategy.sampler import (
    GlobalBatchSampler,
    MicroBatchRequest,
    RowShares,
    derive_seed,
    global_order,
    seeded_randomness,
)
from lightning_ntp.strategy.streams import MicroBatches, MicroBatchStream, SizedStream, StreamLoader, as_is, length_of
from lightning_ntp.strategy.weights import num_samples
from lightning_ntp.topology import Topology


def as_micro_batches(batch: Any) -> MicroBatches | None:
    """What Lightning's loader made of our batches: themselves, or one of them inside a list, tuple or dict of one loader."""
    if isinstance(batch, MicroBatches):
        return batch
    inside = list(batch.values()) if isinstance(batch, dict) else batch
    if not isinstance(inside, (list, tuple)) or len(inside) != 1 or not isinstance(inside[0], MicroBatches):
        return None
    parts = inside[0].batches
    wrapped = [{key: part for key in batch} if isinstance(batch, dict) else type(batch)([part]) for part in parts]
    return MicroBatches(tuple(wrapped), inside[0].counts)


class MicroBatchDataset(Dataset[MicroBatches]):
    """Map-style: answers a `MicroBatchRequest` with collated micro-batches.

    Each sample is drawn with Python's and torch's generators set from (seed, epoch, index), so that all roles of a data row,
    and a replay after a loss, see the same augmentation.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate

    def __getitem__(self, request: MicroBatchRequest) -> MicroBatches:
        return MicroBatches(tuple(self._load(request, part) for part in request.indices), request.counts)

    def _load(self, request: MicroBatchRequest, indices: Sequence[Any]) -> Any:
        seeds = [index if isinstance(index, int) else position for position, index in enumerate(indices)]
        if hasattr(self.dataset, "__getitems__"):
            with seeded_randomness(request.seed, request.epoch, seeds[0]):
                return self.collate(self.dataset.__getitems__(list(indices)))
        samples = []
        for index, sample_seed in zip(indices, seeds, strict=True):
            with seeded_randomness(request.seed, request.epoch, sample_seed):
                samples.append(self.dataset[index])
        with seeded_randomness(request.seed, request.epoch, seeds[0], len(indices)):
            return self.collate(samples)


class ReadyBatches(Resumable):
    """Any other iterable of ready-made batches: each run of `num_healthy_rows` of them is a loop batch, one per data row.

    Where a replica is gone, its batches go to the rows that are left.
    """

    num_readers = 1

    def __init__(self, batches: Iterable[Any], shares: RowShares, row: int, seed: int) -> None:
        self.batches, self.row, self.seed = batches, row, seed
        self.shares = replace(shares, batch_size=1)
        self.per_batch = shares.num_ready_batches
        self.num_units = length_of(batches)
        if isinstance(batches, DataLoader) and isinstance(batches.dataset, IterableDataset):
            self.num_readers = max(1, batches.num_workers)
        self.epoch = 0
        self.sampler = self  # Lightning tells samplers the epoch

    def set_epoch(self, epoch: int) -> None:
        """Which pass the next `iter` starts; handed on to whatever the user's loader shuffles by."""
        self.epoch = epoch

    @property
    def epoch_of_next_pass(self) -> int:
        """What `set_epoch` was told."""
        return self.epoch

    def __iter__(self) -> Iterator[MicroBatches]:
        start = self.begin_pass()
        for part in (self.batches, getattr(self.batches, "sampler", None), getattr(self.batches, "dataset", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(self.epoch)
        with seeded_randomness(self.seed, self.epoch):
            stream = iter(self.batches)
        num_read = 0
        for number in itertools.count():
            wanted = self.per_batch if num_read >= start.unit else min(self.per_batch, start.unit - num_read)
            # A loader that shuffles without a generator of its own draws its order at the first batch.
            with seeded_randomness(self.seed, self.epoch, number):
                batches = list(itertools.islice(stream, wanted))
            if not batches:
                return
            num_read += len(batches)
            if num_read <= start.unit:
                continue
            parts = self.shares.cut(self.row, batches)
            yield MicroBatches(
                tuple(batch for (batch,), _ in parts), tuple(num_samples(batch) * count for (batch,), count in parts)
            )


class _SizedReadyBatches(ReadyBatches):
    """Ready-made batches whose number is known."""

    def __len__(self) -> int:
        return self.length_of_next_pass()


class MicroBatchLoader(Resumable, DataLoader[MicroBatches]):
    """A DataLoader over `MicroBatchDataset` whose pass may begin in the middle.

    A pass reads its epoch and its start at its first batch, not at `iter`: Lightning calls `iter` before it tells the epoch,
    and worker processes would prefetch the wrong one.
    """

    sampler: GlobalBatchSampler

    def __init__(self, dataset: MicroBatchDataset, sampler: GlobalBatchSampler, **options: Any) -> None:
        super().__init__(dataset, batch_size=None, collate_fn=as_is, sampler=sampler, **options)
        self.per_batch, self.num_units, self.leaves_out_rest = sampler.per_batch, sampler.num_units, sampler.drop_last

    def __len__(self) -> int:
        return self.length_of_next_pass()

    def set_epoch(self, epoch: int) -> None:
        """Which pass over the data the next `iter` starts."""
        self.sampler.set_epoch(epoch)

    @property
    def epoch_of_next_pass(self) -> int:
        """What `set_epoch` was told."""
        return self.sampler.epoch

    def __iter__(self) -> Any:
        self.sampler.start_at(*self.begin_pass())
        yield from super().__iter__()


@dataclass(frozen=True, slots=True)
class LoaderPlan:
    """What a worker needs to know to take its share of a loader.

    Args:
        topology: live replicas.
        row: this worker's data row.
        seed: the leader's.
        num_healthy_rows: data rows of the healthy job.
        training: shares by capability and window; else equal shares in one micro-batch each.
        window: loop batches per optimizer step.
        start_at: loop batches (global batches) of the epoch that are trained on already: the first pass leaves them out and
            goes on in the order of an undisturbed run. The length of the loader stays that of the whole epoch. Where an
            earlier loader of the same epoch is at hand, its `start_of` says it exactly.
        manual: the user's training_step optimizes, see `RowShares.manual`.
        progress: position of the running job, for checkpoints.
        weights: of the data rows' shares in training; by their devices unless given.
        devices: (at work, of the healthy job) where the global batch shrinks in this proportion; None where it stays.
    """

    topology: Topology
    row: int
    seed: int
    num_healthy_rows: int
    training: bool
    window: Callable[[], int] = lambda: 1
    start_at: int | Start = 0
    manual: bool = False
    progress: Callable[[], DataPosition] = lambda: DataPosition(0, 0)
    weights: tuple[int, ...] | None = None
    devices: tuple[int, int] | None = None

    def shares(self, batch_size: int) -> RowShares:
        """Who runs how much when the user's loader has this batch size."""
        if self.training and self.manual:
            return RowShares.manual(self.topology, batch_size, self.num_healthy_rows)
        if self.training:
            devices = self.devices or (1, 1)
            return RowShares.training(self.topology, batch_size, self.num_healthy_rows, self.weights, devices)
        return RowShares.evaluation(self.topology, batch_size)


def rebuild_loader(loader: Any, plan: LoaderPlan) -> MicroBatchLoader | StreamLoader | ReadyBatches:
    """The user's loader as one that yields this data row's `MicroBatches`.

    Keeps the dataset, ``collate_fn``, sampler or batch sampler, workers, pinning and time-outs of a DataLoader. Without
    batching by torch (``batch_size=None``), and for any other iterable, its items are taken as ready-made batches.

    The state of torchdata's StatefulDataLoader is not asked for: it counts one process's batches. The position is in the strategy's
    checkpoints, in samples of the job.

    Raises:
        ConfigError: a training loader that leaves out its last batch and has fewer samples than one global batch, a
            StatefulDataLoader that was told to begin in the middle, or a stream with several readers under batches that shrink.
    """
    if getattr(loader, "next_iter_state", None) is not None:
        raise ConfigError(
            f"the {type(loader).__name__} was given a position by load_state_dict, which counts the batches of one process. Give the "
            "checkpoint to Trainer.fit(ckpt_path=...): it holds the position in samples, for any number of data rows"
        )
    rebuilt = _rebuild(loader, plan)
    if plan.training and plan.devices is not None and rebuilt.num_readers > 1:
        raise ConfigError(
            f'batch_policy="shrink" with a stream that {rebuilt.num_readers} processes read in turns: they take turns by global batches, '
            'so these must keep their size. Give the DataLoader num_workers=1 or 0, or use batch_policy="keep"'
        )
    rebuilt.start_at(plan.start_at)
    rebuilt.progress = plan.progress
    return rebuilt


def _rebuild(loader: Any, plan: LoaderPlan) -> MicroBatchLoader | StreamLoader | ReadyBatches:
    if not isinstance(loader, DataLoader) or (loader.batch_size is None and loader.batch_sampler is None):
        kind = ReadyBatches if length_of(loader) is None else _SizedReadyBatches
        return kind(loader, plan.shares(1), plan.row, plan.seed)
    if isinstance(loader.dataset, IterableDataset):
        return _rebuild_stream(loader, plan)
    source: Any = loader.sampler if loader.batch_size is not None else loader.batch_sampler
    batch_size = loader.batch_size or _largest_batch(source, plan.seed)
    sampler = GlobalBatchSampler(
        source,
        plan.shares(batch_size),
        plan.row,
        plan.seed,
        drop_last=loader.drop_last and loader.batch_size is not None,
        batched=loader.batch_size is None,
        window=plan.window if plan.training else lambda: 1,
        # torchdata's own sampler draws a seed in each process where the user gives none.
        seeded=loader.generator is not None or not type(loader.sampler).__module__.startswith("torchdata."),
    )
    if plan.training and len(sampler) == 0:
        raise ConfigError(
            f"the training loader has {len(source)} samples and drop_last={loader.drop_last}, one global batch takes "
            f"{sampler.shares.global_batch_size} (batch_size={batch_size} x {plan.num_healthy_rows} data rows), so nothing "
            "would be trained; set drop_last=False, a smaller batch_size or fewer data rows"
        )
    dataset = MicroBatchDataset(loader.dataset, loader.collate_fn)
    return MicroBatchLoader(dataset, sampler=sampler, **_worker_options(loader, plan.seed))


def _rebuild_stream(loader: DataLoader[Any], plan: LoaderPlan) -> StreamLoader:
    if loader.batch_size is None:
        raise ConfigError("an iterable dataset with a batch_sampler cannot be shared; give the DataLoader a batch_size")
    kind = MicroBatchStream if length_of(loader.dataset) is None else SizedStream
    stream = kind(
        cast(Iterable[Any], loader.dataset),
        loader.collate_fn,
        plan.shares(loader.batch_size),
        plan.row,
        plan.seed,
        loader.drop_last,
    )
    return StreamLoader(stream, **_worker_options(loader, plan.seed))


def _worker_options(loader: DataLoader[Any], seed: int) -> dict[str, Any]:
    options = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "persistent_workers": loader.persistent_workers,
        # Seeds of DataLoader workers come from here: the same on all roles, whatever else each process drew before.
        "generator": torch.Generator().manual_seed(derive_seed(seed)),
    }
    if loader.num_workers > 0:
        options |= {
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    return options


def _largest_batch(batch_sampler: Any, seed: int) -> int:
    size = getattr(batch_sampler, "batch_size", None)
    if isinstance(size, int) and size > 0:
        return size
    return max((len(batch) for batch in global_order(batch_sampler, seed, 0)), default=1)
