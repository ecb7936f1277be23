"""Streams: read in one global order on every worker, which keeps its data row's share; and how a run goes on inside one.

    positions: a stream that can say where it is (``state_dict``, ``load_state_dict``) is put back there;
               any other is read again up to the position, and nothing is made of what was read

Inside DataLoader workers each reads what the dataset gives to it, and they take turns by global batches.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_ntp.strategy.resume import Resumable, Start
from lightning_ntp.strategy.sampler import RowShares, seeded_randomness


class MicroBatches(NamedTuple):
    """What one data row runs for one loop batch.

    Args:
        batches: each as the user's ``collate_fn`` makes it.
        counts: samples of each that count; 0 marks a ghost, a copy of a real sample that keeps collectives company.
    """

    batches: tuple[Any, ...]
    counts: tuple[int, ...]


class Reading(NamedTuple):
    """What a reading process hands over.

    Args:
        batch: None for one that was read (or counted) and not collated, as an earlier run has trained on it.
        reader: number of the process.
        num_read: global batches that it has read so far.
        state: of the dataset behind them; None where it cannot say.
    """

    batch: MicroBatches | None
    reader: int
    num_read: int
    state: Any


class MicroBatchStream(IterableDataset[Reading]):
    """Iterable: reads the whole stream in its order on every worker and keeps this data row's share.

    The stream must be the same on every worker; do not split it by rank.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        collate: Callable[[list[Any]], Any],
        shares: RowShares,
        row: int,
        seed: int,
        drop_last: bool,
    ) -> None:
        self.dataset, self.collate, self.shares, self.row = dataset, collate, shares, row
        self.seed, self.drop_last = seed, drop_last
        self.tells_state = _tells_state(dataset)
        self.resumed: tuple[int, Sequence[Mapping[str, Any]]] | None = None
        # Read by persistent DataLoader workers.
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()
        self.skipped = torch.zeros(2, dtype=torch.long).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Which pass over the stream the next `iter` starts; handed on to datasets that shuffle by epoch."""
        self.epoch.fill_(epoch)

    def skip(self, num_batches: int, num_samples: int) -> None:
        """Let the next `iter` leave out the start of the stream by reading it.

        Args:
            num_batches: loop batches over all readers; each is handed over as a `Reading` without batch.
            num_samples: left out without a trace, for a position between two global batches; one reader only.
        """
        self.skipped[0], self.skipped[1] = num_batches, num_samples

    def go_on(self, epoch: int, readers: Sequence[Mapping[str, Any]]) -> None:
        """Let the pass over `epoch` begin with each reader where it was: its ``num_read`` and the dataset's ``state``."""
        self.resumed = epoch, readers

    def __iter__(self) -> Iterator[Reading]:
        epoch, (num_skipped, left_out) = int(self.epoch), self.skipped.tolist()
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        info = get_worker_info()
        reader, num_readers = (0, 1) if info is None else (info.id, info.num_workers)
        first = 0
        if self.resumed is not None and self.resumed[0] == epoch:
            own = self.resumed[1][reader]
            first = own["num_read"]
            cast(Stateful, self.dataset).load_state_dict(own["state"])
            # Those that are a batch ahead pass once, so that the turns go on where they were.
            if first == max(each["num_read"] for each in self.resumed[1]):
                yield Reading(None, reader, first, own["state"])
        with seeded_randomness(self.seed, epoch, reader):
            stream = iter(self.dataset)
            next(itertools.islice(stream, left_out, left_out), None)
        for number in itertools.count(first):
            with seeded_randomness(self.seed, epoch, reader, number):
                samples = list(itertools.islice(stream, self.shares.global_batch_size))
            if not samples or (self.drop_last and len(samples) < self.shares.global_batch_size):
                return
            if number * num_readers + reader < num_skipped:
                yield Reading(None, reader, number + 1, None)
                continue
            # At its end a dataset may say that it is at its start again.
            ended = len(samples) < self.shares.global_batch_size
            state = None if ended or not self.tells_state else cast(Stateful, self.dataset).state_dict()
            yield Reading(self._own_share(samples, epoch, reader, number), reader, number + 1, state)

    def _own_share(self, samples: Sequence[Any], epoch: int, reader: int, number: int) -> MicroBatches:
        parts = self.shares.cut(self.row, samples)
        with seeded_randomness(self.seed, epoch, reader, number, self.row):
            batches = tuple(self.collate(list(part)) for part, _ in parts)
        return MicroBatches(batches, tuple(count for _, count in parts))


class SizedStream(MicroBatchStream):
    """A stream whose dataset knows its length."""

    def __len__(self) -> int:
        size, full = len(cast(Sized, self.dataset)), self.shares.global_batch_size
        return size // full if self.drop_last else -(-size // full)


def _tells_state(dataset: Any) -> bool:
    """Whether the dataset's state says exactly where it is.

    That of a Hugging Face stream with a shuffle buffer does not: the buffer's samples would be lost.
    """
    part = getattr(dataset, "_ex_iterable", None)
    while part is not None:
        if "BufferShuffled" in type(part).__name__:
            return False
        part = getattr(part, "ex_iterable", None)
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


class StreamLoader(Resumable, DataLoader[Any]):
    """A DataLoader over `MicroBatchStream` whose pass may begin in the middle.

    A pass reads its epoch and its start at its first batch, not at `iter`: Lightning calls `iter` before it tells the epoch,
    and worker processes would prefetch the wrong one.
    """

    dataset: MicroBatchStream

    def __init__(self, dataset: MicroBatchStream, **options: Any) -> None:
        super().__init__(dataset, batch_size=None, collate_fn=as_is, **options)
        self.per_batch = dataset.shares.global_batch_size
        self.num_units = length_of(dataset.dataset)
        self.leaves_out_rest = dataset.drop_last
        self.num_readers = max(1, self.num_workers)
        # Lightning tells samplers the epoch; a stream has none but torch's placeholder, which hands it on.
        cast(Any, self.sampler).set_epoch = dataset.set_epoch
        self._known: list[deque[tuple[int, Reading]]] = []
        self._to_load: Sequence[Mapping[str, Any]] | None = None

    def __len__(self) -> int:
        return self.length_of_next_pass()

    def set_epoch(self, epoch: int) -> None:
        """Which pass over the data the next `iter` starts."""
        self.dataset.set_epoch(epoch)

    @property
    def epoch_of_next_pass(self) -> int:
        """What `set_epoch` was told."""
        return int(self.dataset.epoch)

    def __iter__(self) -> Any:
        start, states = self.begin_pass(), self._to_load
        self.dataset.resumed = None
        self._to_load, self._known = None, [deque() for _ in range(self.num_readers)]
        if states is not None:
            self.dataset.skip(0, 0)
            self.dataset.go_on(self.epoch_of_next_pass, states)
            for reader, own in enumerate(states):
                self._known[reader].append((start.batch - 1, Reading(None, reader, own["num_read"], own["state"])))
        elif self.is_regular(start):
            self.dataset.skip(start.batch, 0)
        else:
            self.dataset.skip(0, start.unit)
        by_reading = states is None and self.is_regular(start)
        number = 0 if by_reading else start.batch
        for reading in super().__iter__():
            if by_reading and number < start.batch:
                number += 1  # counted here: where a reader's data ends early, it makes something of the last ones
                continue
            if reading.batch is None:
                continue
            self._remember(number, reading)
            number += 1
            yield reading.batch

    def _remember(self, number: int, reading: Reading) -> None:
        """Keep the states from the last committed loop batch on."""
        if not self.dataset.tells_state:
            return
        known, committed = self._known[reading.reader], self.progress().batches
        known.append((number, reading._replace(batch=None)))
        while len(known) > 1 and known[1][0] < committed:
            known.popleft()

    def reader_states(self, batch: int) -> list[dict[str, Any]] | None:
        """Where the readers of the running pass were before loop batch `batch`; None unless all can say so in plain data."""
        found = [[each for at, each in known if at < batch] for known in self._known]
        if not found or not all(each and each[-1].state is not None for each in found):
            return None
        readers = [{"num_read": each[-1].num_read, "state": each[-1].state} for each in found]
        return readers if _is_plain(readers) else None

    def state_dict(self) -> dict[str, Any]:
        """See `Resumable`; with the states of the readers where all can say theirs."""
        saved = super().state_dict()
        if saved["batches"] and self.progress().epoch == self._running_epoch:
            readers = self.reader_states(saved["batches"])
            if readers is not None:
                saved["readers"] = readers
        return saved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Resumable`."""
        super().load_state_dict(state)
        self._to_load = state.get("readers") if state["batches"] and self.dataset.tells_state else None

    def start_at(self, batch: int | Start) -> None:
        """See `Resumable`; by reading."""
        super().start_at(batch)
        self._to_load = None

    def continue_from(self, old: Resumable, batch: int) -> None:
        """See `Resumable`; without reading again where the old one's readers could say where they were."""
        super().continue_from(old, batch)
        if isinstance(old, StreamLoader) and old.num_readers == self.num_readers:
            self._to_load = old.reader_states(batch)


def _is_plain(value: Any) -> bool:
    """Whether a checkpoint can hold it: what is no plain data would have to run code when it is loaded."""
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and _is_plain(part) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool, bytes) or isinstance(value, torch.Tensor)


def length_of(thing: Any) -> int | None:
    """``len(thing)``, or None where there is none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):  # what torch and user code raise for streams
        return None


def as_is(item: Any) -> Any:
    """A ``collate_fn`` for items that are batches already."""
    return item
