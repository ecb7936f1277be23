"""The global order of samples, shares of data rows, and the loaders built on them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.data import LoaderPlan, rebuild_loader
from lightning_ntp.strategy.resume import DataPosition
from lightning_ntp.strategy.sampler import GlobalBatchSampler, RowShares, deal, derive_seed, global_order
from lightning_ntp.strategy.streams import MicroBatches, StreamLoader
from lightning_ntp.strategy.weights import num_samples, weigh
from lightning_ntp.topology import Topology

RAGGED = Topology.from_shapes([(1, 3), (1, 2)])


class Numbers(Dataset[int]):
    """0 .. size - 1."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Noise(Numbers):
    """Random augmentation from Python's and torch's generators."""

    def __getitem__(self, index: int) -> float:
        return index + random.random() + float(torch.rand(()))


class Stream(IterableDataset[int]):
    """0 .. size - 1, in an order that depends on the epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter([(i + self.epoch) % self.size for i in range(self.size)])


def plan(
    topology: Topology, row: int, training: bool = True, window: int = 1, healthy: int | None = None
) -> LoaderPlan:
    return LoaderPlan(topology, row, 5, healthy or len(topology.data_rows), training, lambda: window)


def loads(loader: DataLoader, topology: Topology, epoch: int = 0, **options) -> list[list[MicroBatches]]:
    """Per loop batch the micro-batches of each data row."""
    rows = []
    for row in range(len(topology.data_rows)):
        rebuilt = rebuild_loader(loader, plan(topology, row, **options))
        if hasattr(getattr(rebuilt, "sampler", None), "set_epoch"):
            rebuilt.sampler.set_epoch(epoch)
        rows.append(list(rebuilt))
    assert len({len(batches) for batches in rows}) == 1, "every worker must see the same number of loop batches"
    return [list(batches) for batches in zip(*rows, strict=True)]


def counted(loop_batch: list[MicroBatches]) -> list[int]:
    """Samples of a loop batch that count, in the order of data rows."""
    return [int(x) for row in loop_batch for b, c in zip(row.batches, row.counts, strict=True) if c for x in b]


@given(st.integers(0, 300), st.lists(st.integers(0, 8), min_size=1, max_size=7).filter(any))
def test_dealing_is_exact_close_to_proportional_and_never_takes_back(total, weights):
    counts, more = deal(total, tuple(weights)), deal(total + 1, tuple(weights))
    assert sum(counts) == total
    assert all(after >= before for before, after in zip(counts, more, strict=True))
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - total * weight / sum(weights)) <= len(weights) / 2 + 0.5
        assert weight or count == 0


def test_dealing_one_by_one_from_the_start_gives_the_same():
    weights = (4, 3, 1)
    counts = [0, 0, 0]
    for total in range(200):
        assert deal(total, weights) == tuple(counts)
        best = max(range(3), key=lambda i: (weights[i] / (2 * counts[i] + 1), -i))
        counts[best] += 1


def test_dealing_refuses_weights_that_say_nothing():
    with pytest.raises(ConfigError, match="one above"):
        deal(3, (0, 0))


def test_global_batch_of_seven_over_degrees_four_and_three_is_shared_four_to_three():
    shares = RowShares.training(Topology.from_shapes([(1, 4), (1, 3)]), batch_size=4)
    assert shares.shares(7) == (4, 3)


def test_global_batch_stays_and_micro_batches_stay_small_after_a_loss():
    healthy = Topology.from_shapes([(1, 4), (1, 4)])
    hurt = healthy.without(7).without(6).without(5)  # degrees 4 and 1
    shares = RowShares.training(hurt, batch_size=4, num_healthy_rows=2)
    assert shares.global_batch_size == 8
    assert shares.shares(8) == (6, 2)
    assert [shares.micro_batch_sizes(row, 8) for row in (0, 1)] == [(3, 3), (2,)]


def test_rows_of_one_replica_run_equally_many_micro_batches_and_ghosts_count_nothing():
    topology = Topology.from_shapes([(3, 1), (1, 1)])
    shares = RowShares(1, 6, (1, 1, 1, 1), (0, 0, 0, 1))
    sizes = [shares.micro_batch_sizes(row, 5) for row in range(4)]
    assert sizes == [(1, 1), (1, 0), (1, 0), (1,)]
    assert shares.cut(1, "abcde")[1] == (("a",), 0)
    assert topology.data_rows == ((0, 0), (0, 1), (0, 2), (1, 0))


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 40),
    st.booleans(),
    st.integers(1, 3),
)
def test_every_sample_counts_exactly_once_in_the_global_order(shapes, batch_size, size, drop_last, window):
    topology = Topology.from_shapes(shapes)
    order = global_order(RandomSampler(range(size)) if size else range(0), 5, 3)
    full = batch_size * len(topology.data_rows)
    rows = [
        GlobalBatchSampler(order, RowShares.training(topology, batch_size), r, 5, drop_last, window=lambda: window)
        for r in range(len(topology.data_rows))
    ]
    batches = [list(row) for row in rows]
    assert all(len(b) == len(row) == (size // full if drop_last else -(-size // full)) for b, row in zip(batches, rows))
    used = []
    for requests in zip(*batches, strict=True):
        for request in requests:
            assert all(len(i) <= batch_size for i in request.indices)
            used += [x for i, c in zip(request.indices, request.counts, strict=True) if c for x in i]
        replicas = {
            r: {len(q.counts) for q, (x, _) in zip(requests, topology.data_rows) if x == r} for r in range(len(shapes))
        }
        assert all(len(numbers) == 1 for numbers in replicas.values())
    assert used == order[: size // full * full if drop_last else size]


def test_shares_of_a_window_follow_the_degrees_over_the_whole_window():
    shares = RowShares.training(RAGGED, batch_size=1)  # two samples per loop batch over degrees 3 and 2
    dealt, total = 0, Counter()
    for _ in range(5):
        for row, share in enumerate(shares.shares(2, dealt)):
            total[row] += share
        dealt += 2
    assert (total[0], total[1]) == (6, 4)


def test_order_depends_on_seed_and_epoch_only():
    sampler = RandomSampler(range(50))
    torch.manual_seed(1)
    first = global_order(sampler, 5, 2)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert global_order(sampler, 5, 2) == first
    assert torch.equal(torch.get_rng_state(), before), "drawing the order must not move the process's own randomness"
    assert global_order(sampler, 5, 3) != first
    assert global_order(sampler, 6, 2) != first


def test_a_samplers_own_generator_counts_and_may_have_been_used():
    def order(user_seed: int, drawn: int) -> list[int]:
        generator = torch.Generator().manual_seed(user_seed)
        torch.rand(drawn, generator=generator)
        shares = RowShares.training(RAGGED, 2)
        rows = GlobalBatchSampler(RandomSampler(range(20), generator=generator), shares, 0, 5)
        assert list(rows) == list(rows), "each pass over one epoch is the same"
        return [x for request in rows for i in request.indices for x in i]

    assert order(1, 0) == order(1, 3)
    assert order(1, 0) != order(2, 0)


def test_a_distributed_sampler_is_asked_for_all_samples():
    sampler = DistributedSampler(range(10), num_replicas=2, rank=1, shuffle=True, seed=3)
    assert sorted(global_order(sampler, 0, 0)) == list(range(10))
    assert global_order(sampler, 0, 1) != global_order(sampler, 0, 0)


def test_start_at_goes_on_in_the_undisturbed_order():
    rows = GlobalBatchSampler(RandomSampler(range(23)), RowShares.training(RAGGED, 2), 1, 5, window=lambda: 2)
    rows.set_epoch(4)
    whole = list(rows)
    rows.start_at(3)
    assert list(rows) == whole[3:]
    assert list(rows) == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_map_style_loader(num_workers):
    loader = DataLoader(Numbers(19), batch_size=4, shuffle=True, num_workers=num_workers)
    batches = loads(loader, RAGGED, epoch=1)
    order = global_order(RandomSampler(range(19)), 5, 1)
    assert [x for b in batches for x in counted(b)] == order
    assert [len(counted(b)) for b in batches] == [8, 8, 3]
    assert batches[0][0].counts == (3, 2) and batches[0][1].counts == (3,)


def test_uneven_last_batch_leaves_a_ghost():
    batches = loads(DataLoader(Numbers(9), batch_size=4), RAGGED)
    assert counted(batches[1]) == [8]
    assert batches[1][1].counts == (0,)
    assert batches[1][1].batches[0].tolist() == [8]


def test_dataset_shorter_than_a_global_batch_is_one_batch():
    batches = loads(DataLoader(Numbers(1), batch_size=4), Topology.from_shapes([(2, 1), (1, 2)]))
    assert len(batches) == 1 and counted(batches[0]) == [0]
    assert sum(sum(row.counts) for row in batches[0]) == 1


def test_dataset_shorter_than_a_global_batch_with_drop_last_says_what_to_do():
    loader = DataLoader(Numbers(7), batch_size=4, drop_last=True)
    with pytest.raises(ConfigError, match=r"7 samples and drop_last=True, one global batch takes 8 .*drop_last=False"):
        rebuild_loader(loader, plan(RAGGED, 0))
    assert list(rebuild_loader(loader, plan(RAGGED, 0, training=False))) == []


def test_custom_batch_sampler_is_joined_and_cut_again():
    lengths = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    batches = loads(DataLoader(Numbers(10), batch_sampler=lengths), RAGGED)
    assert [counted(b) for b in batches] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert all(len(part) <= 3 for b in batches for row in b for part in row.batches)


def test_a_list_of_batches_goes_around_the_rows():
    batches = loads([torch.arange(i, i + 2) for i in range(0, 10, 2)], RAGGED)
    assert [counted(b) for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches[2][1].counts == (0,)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_stream_is_read_in_order(num_workers):
    loader = DataLoader(Stream(11), batch_size=2, num_workers=num_workers)
    for epoch in (0, 1):
        batches = loads(loader, RAGGED, epoch=epoch)
        assert [x for b in batches for x in counted(b)] == [(i + epoch) % 11 for i in range(11)]
    assert loads(DataLoader(Stream(11), batch_size=2, drop_last=True), RAGGED)[-1][0].counts != (0,)
    assert len(loads(DataLoader(Stream(11), batch_size=2, drop_last=True), RAGGED)) == 2


def test_evaluation_runs_one_micro_batch_per_row():
    topology = Topology.from_shapes([(2, 2), (1, 3)])
    batches = loads(DataLoader(Numbers(13), batch_size=2), topology, training=False)
    assert [x for b in batches for x in counted(b)] == list(range(13))
    assert all(len(row.counts) == 1 for b in batches for row in b)
    assert [row.counts for row in batches[-1]] == [(1,), (0,), (0,)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_augmentation_is_a_function_of_seed_epoch_and_sample(num_workers):
    loader = DataLoader(Noise(6), batch_size=2, num_workers=num_workers)
    first, again = loads(loader, RAGGED), loads(loader, RAGGED)
    other_split = loads(loader, Topology.from_shapes([(1, 1), (1, 1), (1, 1)]))
    values = [
        sorted(float(x) for b in batches for row in b for part, c in zip(*row) if c for x in part)
        for batches in (first, again, other_split, loads(loader, RAGGED, epoch=1))
    ]
    assert values[0] == values[1] == values[2] != values[3]


def test_derived_seeds_differ_by_order_and_part():
    assert len({derive_seed(1, 2, 3), derive_seed(3, 2, 1), derive_seed(12, 3), derive_seed(1, 23)}) == 4
    assert derive_seed(1) == derive_seed(1) < 2**63


def test_batch_weights():
    batch = {"labels": torch.tensor([[1, 2, -100], [-100, 4, 5]])}
    assert weigh(batch, 2, "samples") == 2
    assert weigh(batch, 2, "tokens") == 3
    assert weigh(batch, 0, "tokens") == 0
    assert weigh(batch, 2, lambda b: b["labels"].numel()) == 6
    with pytest.raises(ConfigError, match="a list has none"):
        weigh([1], 1, "tokens")
    with pytest.raises(ConfigError, match='"samples", "tokens" or a function'):
        weigh(batch, 1, "words")
    with pytest.raises(ConfigError, match="at least 0"):
        weigh(batch, 1, lambda b: float("nan"))
    assert num_samples({"text": "x", "ids": torch.zeros(3, 2)}) == 3


class ShuffledBatches:
    """Ready-made batches in an order drawn anew in each pass."""

    def __len__(self) -> int:
        return 10

    def __iter__(self):
        return iter([torch.tensor([2 * i, 2 * i + 1]) for i in torch.randperm(10)])


LOADERS = {
    "map": lambda workers: DataLoader(Noise(23), batch_size=2, shuffle=True, num_workers=workers),
    "batch sampler": lambda workers: DataLoader(
        Noise(23), batch_sampler=BatchSampler(RandomSampler(range(23)), 3, drop_last=False), num_workers=workers
    ),
    "stream": lambda workers: DataLoader(Stream(23), batch_size=2, num_workers=workers),
    "persistent stream": lambda workers: DataLoader(
        Stream(23), batch_size=2, num_workers=workers, persistent_workers=workers > 0
    ),
    "ready batches": lambda workers: ShuffledBatches(),
    "ready batches of a loader": lambda workers: DataLoader(
        torch.arange(20).view(10, 2), batch_size=None, shuffle=True, num_workers=workers
    ),
}


def _plain(batches: list[MicroBatches]) -> list:
    return [([part.tolist() for part in micro.batches], micro.counts) for micro in batches]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_rebuilt_loader_starts_at_a_global_batch_and_the_next_epoch_is_whole(kind, num_workers):
    """Also on other shapes: the same samples remain, in the same order."""
    hurt = RAGGED.without(4)
    make = LOADERS[kind]
    rest: dict[bool, list[list[MicroBatches]]] = {True: [], False: []}
    for row in range(2):
        whole = rebuild_loader(make(num_workers), plan(RAGGED, row, window=2))
        undisturbed = []
        for epoch in (1, 2):
            whole.sampler.set_epoch(epoch)
            undisturbed.append(list(whole))
        resumed = rebuild_loader(make(num_workers), replace(plan(RAGGED, row, window=2), start_at=2))
        resumed.sampler.set_epoch(1)
        first = list(resumed)
        assert _plain(first) == _plain(undisturbed[0][2:])
        resumed.sampler.set_epoch(2)
        assert _plain(list(resumed)) == _plain(undisturbed[1])
        if not kind.startswith("ready"):
            assert len(undisturbed[0]) > 3
        elsewhere = rebuild_loader(make(num_workers), replace(plan(hurt, row, window=2), start_at=2))
        elsewhere.sampler.set_epoch(1)
        rest[True].append(first)
        rest[False].append(list(elsewhere))
    ids = [[counted(list(batch)) for batch in zip(*rows, strict=True)] for rows in rest.values()]
    assert ids[0] == ids[1]


class Tape(Stream):
    """A stream that can say where it is, and counts what it is asked to read. Each DataLoader worker has its part."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.at = 0
        self.num_read = torch.zeros(8, dtype=torch.long).share_memory_()

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at, self.epoch = state["at"], state["epoch"]

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        reader, num_readers = (0, 1) if info is None else (info.id, info.num_workers)
        own = [(i + self.epoch) % self.size for i in range(self.size)][reader::num_readers]
        if reader == num_readers - 1:
            own = own[: len(own) // 2]  # its data ends early
        while self.at < len(own):
            self.at += 1
            self.num_read[reader] += 1
            yield own[self.at - 1]
        self.at = 0


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("stop", [1, 6, 8])
def test_a_stream_goes_on_from_its_state_or_by_reading(num_workers, tells, stop, monkeypatch):
    if not tells:
        monkeypatch.delattr(Tape, "state_dict")

    def loader(size: int = 61) -> tuple[Tape, StreamLoader]:
        tape = Tape(size)
        rebuilt = rebuild_loader(DataLoader(tape, batch_size=2, num_workers=num_workers), plan(RAGGED, 0))
        rebuilt.set_epoch(1)
        return tape, rebuilt

    _, straight = loader()
    whole = _plain(list(straight))
    straight.set_epoch(2)
    next_epoch = _plain(list(straight))
    _, stopped = loader()
    stopped.progress = lambda: DataPosition(1, stop)
    batches = iter(stopped)
    for _ in range(min(stop + 2, len(whole))):  # two more than are committed: prefetched, or of an open window
        next(batches)
    saved = stopped.state_dict()
    assert ("readers" in saved) == (tells and max(1, num_workers) <= stop < len(whole) - (num_workers == 3))
    tape, resumed = loader()
    resumed.load_state_dict(saved)
    assert _plain(list(resumed)) == whole[stop:]
    unread = 4 * (len(whole) - stop) + 3 * 4
    assert ("readers" not in saved) or int(tape.num_read.sum()) <= unread, "what came before was read again"
    resumed.set_epoch(2)
    assert _plain(list(resumed)) == next_epoch
    tape, rebuilt = loader()
    rebuilt.continue_from(stopped, stop)
    assert _plain(list(rebuilt)) == whole[stop:]
    assert ("readers" not in saved) or int(tape.num_read.sum()) <= unread


def test_a_stream_with_a_shuffle_buffer_is_read_again():
    rows = datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=2)
    for stream, tells in ((rows, True), (rows.shuffle(seed=3, buffer_size=8), False)):
        rebuilt = rebuild_loader(DataLoader(stream, batch_size=2), plan(RAGGED, 0))
        assert rebuilt.dataset.tells_state == tells
        whole = [micro.batches for micro in rebuilt]
        stopped = rebuild_loader(DataLoader(stream, batch_size=2), plan(RAGGED, 0))
        stopped.progress = lambda: DataPosition(0, 3)
        batches = iter(stopped)
        for _ in range(4):
            next(batches)
        saved = stopped.state_dict()
        assert ("readers" in saved) == tells
        resumed = rebuild_loader(DataLoader(stream, batch_size=2), plan(RAGGED, 0))
        resumed.load_state_dict(saved)
        rest = [micro.batches for micro in resumed]
        assert [[part["x"].tolist() for part in parts] for parts in rest] == [
            [part["x"].tolist() for part in parts] for parts in whole[3:]
        ]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_global_batch_that_shrinks_and_grows_inside_an_epoch_leaves_order_and_samples_as_they_are(kind, num_workers):
    """Two loop batches by five workers, one by three of them, and on by all five."""
    few = RAGGED.without(4).without(3)
    turns = ((RAGGED, 5, 2), (few, 3, 1), (RAGGED, 5, 100))
    make = LOADERS[kind]
    whole = [list(rebuild_loader(make(num_workers), plan(RAGGED, row))) for row in range(2)]
    wanted = [i for batch in zip(*whole, strict=True) for i in counted(list(batch))]
    seen, sizes, loaders = [], [], None
    for topology, at_work, count in turns:
        rows = range(len(topology.data_rows))
        plans = [replace(plan(topology, row, healthy=2), devices=(at_work, 5)) for row in rows]
        new = [rebuild_loader(make(num_workers), one) for one in plans]
        if loaders is not None:
            for loader in new:
                loader.continue_from(loaders[0], len(sizes))
        length = None if kind.endswith("stream") else len(new[0])
        passes = [itertools.islice(iter(loader), count) for loader in new]
        for batch in zip(*passes, strict=True):
            seen += counted(list(batch))
            sizes.append(len(counted(list(batch))))
        assert length is None or (len(sizes) == length if count == 100 else len(sizes) < length)
        loaders = new
    assert seen == wanted, "each sample once, in the order of a run that nothing happened to"
    unit = {"map": 1, "stream": 1, "persistent stream": 1, "batch sampler": 3}.get(kind, 2)
    scale = 2 if unit == 1 else unit
    full, small = 2 * scale, max(unit, 2 * scale * 3 // 5 // unit * unit)
    assert sizes[:4] == [full, full, small, full] and set(sizes[4:-1]) <= {full}


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")
def test_a_stream_read_in_turns_cannot_shrink_its_global_batches():
    with pytest.raises(ConfigError, match=r"stream that 2 processes read in turns.*num_workers=1 or 0"):
        rebuild_loader(LOADERS["stream"](2), replace(plan(RAGGED, 0), devices=(5, 5)))
    rebuild_loader(LOADERS["map"](2), replace(plan(RAGGED, 0), devices=(5, 5)))
