"""A run that goes on from a checkpoint inside an epoch is the run that never stopped: samples, losses, parameters."""

from __future__ import annotations

import itertools
import multiprocessing
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import SumMetric

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.data import LoaderPlan, rebuild_loader
from lightning_ntp.strategy.resume import DataPosition, EpochCounts, Resumable, Start, rewrite_counters
from lightning_ntp.strategy.sampler import global_order
from lightning_ntp.topology import Topology
from tests import lightning_jobs as jobs

SIZE, BATCH = 29, 4


@pytest.mark.parametrize(
    ("epochs", "batches", "is_last", "position", "is_exact"),
    [
        ((0, 0, 0), (0, 0, 0), False, (0, 0), True),  # before anything
        ((1, 1, 0), (2, 2, 1), False, (0, 2), True),  # on_train_batch_end
        ((1, 1, 0), (3, 3, 2), False, (0, 2), False),  # inside a window
        ((1, 1, 0), (3, 2, 2), False, (0, 2), False),  # an exception in a batch
        ((1, 1, 0), (4, 3, 3), True, (0, 2), False),  # an exception in the last batch
        ((1, 1, 0), (5, 5, 4), True, (1, 0), False),  # on_train_batch_end of the last batch; its short window has stepped
        ((1, 1, 0), (5, 5, 5), True, (1, 0), True),  # on_validation_end after it
        ((1, 1, 1), (5, 5, 5), True, (1, 0), True),  # on_train_epoch_end
        ((1, 1, 1), (4, 4, 4), False, (0, 4), False),  # max_steps ended the epoch early
        ((2, 1, 1), (5, 5, 5), True, (1, 0), True),  # on_train_epoch_start
        ((2, 2, 1), (1, 1, 0), False, (1, 0), False),  # inside the first window of an epoch
    ],
)
def test_the_position_is_behind_the_last_whole_step(epochs, batches, is_last, position, is_exact) -> None:
    counts = EpochCounts(*epochs, *batches, is_last, window=2)
    assert counts.position == position
    assert counts.is_exact == is_exact


def test_rewritten_counters_keep_the_totals_of_earlier_epochs() -> None:
    names = ("ready", "started", "processed", "completed")
    loop = {
        "epoch_progress": {"total": dict.fromkeys(names, 2), "current": dict.fromkeys(names, 2)},
        "epoch_loop.batch_progress": {
            "total": dict.fromkeys(names, 8), "current": dict.fromkeys(names, 3), "is_last_batch": False,
        },
        "epoch_loop.state_dict": {"_batches_that_stepped": 4},
    }  # fmt: skip
    rewrite_counters(loop, DataPosition(1, 2))
    assert loop["epoch_progress"]["current"] == {"ready": 2, "started": 2, "processed": 1, "completed": 1}
    batches = loop["epoch_loop.batch_progress"]
    assert batches == {"total": dict.fromkeys(names, 7), "current": dict.fromkeys(names, 2), "is_last_batch": False}
    batches["is_last_batch"] = True
    rewrite_counters(loop, DataPosition(1, 0))
    assert loop["epoch_loop.state_dict"]["_batches_that_stepped"] == 5
    assert loop["epoch_progress"]["current"] == {"ready": 2, "started": 1, "processed": 1, "completed": 1}


class _Source(Resumable):
    def __init__(self, per_batch: int, num_units: int | None = 29, num_readers: int = 0) -> None:
        self.per_batch, self.num_units, self.num_readers, self.epoch = per_batch, num_units, num_readers, 0
        self.renumbered: list[tuple[int, int]] = []
        self.on_resume = lambda old, new: self.renumbered.append((old, new))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def epoch_of_next_pass(self) -> int:
        return self.epoch


def _saved(source: _Source, epoch: int, batches: int) -> dict[str, Any]:
    source.set_epoch(epoch)
    source.begin_pass()
    source.progress = lambda: DataPosition(epoch, batches)
    return source.state_dict()


def test_another_global_batch_size_keeps_the_samples_and_the_length_of_the_epoch() -> None:
    state = _saved(_Source(8), 3, 2)
    for per_batch, number, total in ((8, 2, 4), (12, 1, 3), (5, 3, 6), (16, 1, 2)):
        resumed = _Source(per_batch)
        resumed.load_state_dict(state)
        start = resumed.begin_pass()
        assert (resumed.epoch, start) == (3, Start(number, 16))
        assert resumed.renumbered == [(2, number)]
        assert number + -(-(29 - 16) // per_batch) == total == -(-29 // per_batch)
        again = _Source(8)
        again.load_state_dict(resumed.state_dict() | {"epoch": 3})
        resumed.progress = lambda n=number: DataPosition(3, n + 1)
        assert resumed.state_dict()["units"] == 16 + per_batch
        assert resumed.begin_pass() == Start(), "the next epoch is whole"


def test_what_cannot_go_on_inside_an_epoch_says_so() -> None:
    state = _saved(_Source(8, num_readers=2), 0, 2)
    with pytest.raises(ConfigError, match=r"inside epoch 0, behind 16 units.* 29 in all, and this run's data has 30"):
        _Source(8, 30, 2).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"read by 2 process\(es\); this run reads it with 3.* num_workers=2"):
        _Source(8, num_readers=3).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"global batches of 8; this run has 12, and 2 reading processes"):
        _Source(12, num_readers=2).load_state_dict(state)
    whole_epoch = _saved(_Source(8), 1, 0)
    other = _Source(8, 30)
    other.load_state_dict(whole_epoch)
    assert (other.epoch, other.begin_pass()) == (1, Start())


class Recorded(jobs.TinyLlama):
    """Remembers the samples and the loss of each loop batch."""

    def __init__(self) -> None:
        super().__init__()
        self.record: list[Any] = []
        self.epochs: list[list[float]] = []
        self.seen_indices = SumMetric()
        self.validated: list[Any] = []

    def training_step(self, samples: jobs.Sample, batch_idx: int) -> Any:
        loss = super().training_step(samples, batch_idx)
        self.seen_indices.update(samples["index"].double())
        self.log("seen", self.seen_indices, on_epoch=True, on_step=False)
        top = samples["index"].double().max()
        self.log("top", top, on_epoch=True, on_step=False, sync_dist=True, reduce_fx="max")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = self.trainer.callback_metrics["train_step"].item()
        ids = [index for micro in self.seen for index in micro]
        self.seen.clear()
        self.record.append([self.trainer.current_epoch, batch_idx, self.trainer.global_step, loss, ids])

    def on_train_epoch_start(self) -> None:
        self.hooks.append(f"start {self.trainer.current_epoch}")

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.hooks.append(f"end {self.trainer.current_epoch}")
        logged = self.trainer.callback_metrics
        self.epochs.append([self.trainer.current_epoch, *(logged[name].item() for name in ("train_epoch", "seen", "top"))])

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append((self.trainer.global_step, self.trainer.callback_metrics["val_epoch"].item()))


class SaveAt(L.Callback):
    """Saves at given points of the run."""

    def __init__(self, folder: str, points: tuple[str, ...]) -> None:
        self.folder, self.points = folder, points

    def _save(self, trainer: L.Trainer, name: str) -> None:
        if name in self.points:
            trainer.save_checkpoint(f"{self.folder}/{name}.ckpt")

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._save(trainer, f"batch-{trainer.current_epoch}-{batch_idx}")

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        self._save(trainer, f"validation-{trainer.current_epoch}-{trainer.fit_loop.epoch_loop.batch_idx}")

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self._save(trainer, f"epoch-{trainer.current_epoch}")

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        self._save(trainer, "end")


class KnowsWhere(jobs.SampleStream):
    """A stream with a state, as torchdata's loader asks for one."""

    at = 0

    def __iter__(self) -> Any:
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _loader(kind: str) -> DataLoader:
    if kind == "stream":
        return DataLoader(jobs.SampleStream(SIZE), batch_size=BATCH)
    if kind == "stateful map":
        torch.seed()  # no two processes have drawn the same before
        return StatefulDataLoader(jobs.Samples(SIZE), BATCH, shuffle=True)
    if kind == "stateful stream":
        return StatefulDataLoader(KnowsWhere(SIZE), BATCH)
    # A worker of the pool would by default start a fork server for them, in which each imports torch: minutes per run.
    readers = {"num_workers": 2, "multiprocessing_context": "fork"} if kind == "workers" else {}
    return jobs.loader(SIZE, BATCH, shuffle=True, **readers)


def run_and_save(rank: int, world: int, sizes: Any, kind: str, options: dict[str, Any], folder: str, points: Any, ckpt: Any) -> Any:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  daemons may not have children
    with jobs.as_worker(rank, world):
        module = Recorded()
        strategy = jobs.ntp(replica_sizes=sizes, seed=5 if ckpt is None else 6)
        trainer = jobs.trainer(strategy, world, callbacks=[SaveAt(folder, points)], **options)
        trainer.fit(module, _loader(kind), jobs.loader(9, BATCH), ckpt_path=ckpt)
        return {
            "record": module.record,
            "row": strategy.control.row,
            "validated": module.validated,
            "hooks": module.hooks,
            "epochs": module.epochs,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "state": jobs.whole_state(strategy),
        }


def _samples(results: list[Any]) -> list[list[int]]:
    """Of each loop batch of a run, over all data rows; a ghost repeats one of them."""
    rows = {result["row"]: [ids for *_, ids in result["record"]] for result in results}
    return [sorted({*itertools.chain.from_iterable(parts)}) for parts in zip(*rows.values(), strict=True)]


def assert_same_end(resumed: list[Any], whole: list[Any], name: str) -> None:
    tail = len(resumed[0]["record"])
    for ours, theirs in zip(resumed[0]["record"], whole[0]["record"][-tail:], strict=True):
        assert ours[:3] == theirs[:3]
        assert ours[3] == pytest.approx(theirs[3], abs=1e-10)
    assert _samples(resumed) == _samples(whole)[-tail:]
    state, twin = resumed[0]["state"], whole[0]["state"]
    assert max(float((state[name] - twin[name]).abs().max()) for name in twin) < 1e-10
    assert resumed[0]["lr"] == whole[0]["lr"]
    for ours, theirs in zip(resumed[0]["validated"][::-1], whole[0]["validated"][::-1], strict=False):
        assert ours == (theirs[0], pytest.approx(theirs[1], abs=1e-10))
    for result in resumed:  # means over whole epochs, also of that which the run goes on inside
        pairs = list(zip(result["epochs"], whole[0]["epochs"][-len(result["epochs"]) :], strict=True))
        for ours, theirs in pairs:
            assert ours == pytest.approx(theirs, abs=1e-9), name
    assert resumed[0]["hooks"] == whole[0]["hooks"][-len(resumed[0]["hooks"]) :]


OPTIONS = {"max_epochs": 3, "accumulate_grad_batches": 2, "val_check_interval": 3}
"""Four loop batches per epoch, the last two steps of which end with batches 1 and 3."""

STARTS = {
    "batch-0-1": (0, 2),
    "batch-0-2": (0, 2),  # inside a window: its first batch runs again
    "batch-0-3": (1, 0),
    "validation-0-2": (0, 2),
    "epoch-0": (1, 0),
    "batch-1-0": (1, 0),
    "batch-1-1": (1, 2),
    "end": (1, 2),
}
"""Point of a checkpoint -> (epoch, loop batch) at which a run goes on from it."""

SAMPLED = ("batch-0-2", "batch-1-1", "validation-0-2", "end")
SAME, OTHER = (3, [2, 1]), (4, [(1, 3), (1, 1)])


def _starts(pool, tmp_path, kind, names):
    """The run to the end, and one that `max_steps` stops at "end"; then from each point to the end, on two topologies.

    Where each went on: (epoch, loop batch).
    """
    starts = []
    whole = pool.run(run_and_save, *SAME, kind, OPTIONS, "", (), None)
    pool.run(run_and_save, *SAME, kind, OPTIONS | {"max_steps": 3}, str(tmp_path), tuple(STARTS), None)
    for number, name in enumerate(names):
        world, sizes = (SAME, OTHER)[number % 2]
        resumed = pool.run(run_and_save, world, sizes, kind, OPTIONS, str(tmp_path), (), str(tmp_path / f"{name}.ckpt"))
        assert_same_end(resumed, whole, name)
        starts.append(tuple(resumed[0]["record"][0][:2]))
    return starts


@pytest.mark.parametrize("kind", ["map", pytest.param("stream", marks=pytest.mark.full)])
def test_resumed_inside_an_epoch_equals_the_run_that_never_stopped(pool, tmp_path, kind):
    names = SAMPLED if kind == "map" else SAMPLED[1::2]
    assert _starts(pool, tmp_path, kind, names) == [STARTS[name] for name in names]


def test_another_number_of_data_rows_goes_on_with_the_next_sample(pool, tmp_path):
    pool.run(run_and_save, *SAME, "map", OPTIONS | {"max_epochs": 1}, str(tmp_path), ("batch-0-1",), None)
    options = {"max_epochs": 2, "accumulate_grad_batches": 1}
    resumed = pool.run(run_and_save, 3, [1, 1, 1], "map", options, "", (), str(tmp_path / "batch-0-1.ckpt"))
    first, second = (global_order(RandomSampler(range(SIZE)), 5, epoch) for epoch in (0, 1))
    wanted = [first[16:28], first[28:], second[:12], second[12:24], second[24:]]
    assert _samples(resumed) == [sorted(ids) for ids in wanted]
    assert [entry[:3] for entry in resumed[0]["record"]] == [[0, 1, 2], [0, 2, 3], [1, 0, 4], [1, 1, 5], [1, 2, 6]]


@pytest.mark.parametrize("kind", ["stateful map", pytest.param("stateful stream", marks=pytest.mark.full)])
def test_torchdatas_loader_goes_on_inside_an_epoch(pool, tmp_path, kind):
    options = {"max_epochs": 2}
    whole = pool.run(run_and_save, *SAME, kind, options, str(tmp_path), ("batch-0-1",), None)
    resumed = pool.run(run_and_save, *OTHER, kind, options, "", (), str(tmp_path / "batch-0-1.ckpt"))
    assert resumed[0]["record"][0][:2] == [0, 2]
    assert_same_end(resumed, whole, kind)


def test_a_position_given_to_torchdatas_loader_is_refused() -> None:
    used = StatefulDataLoader(jobs.Samples(SIZE), BATCH)
    next(iter(used))
    resumed = StatefulDataLoader(jobs.Samples(SIZE), BATCH)
    plan = LoaderPlan(Topology.from_shapes([(1, 1)]), 0, 5, 1, training=True)
    assert len(rebuild_loader(resumed, plan)) == -(-SIZE // BATCH)
    resumed.load_state_dict(used.state_dict())
    with pytest.raises(ConfigError, match=r"was given a position by load_state_dict.* Trainer.fit\(ckpt_path=\.\.\.\)"):
        rebuild_loader(resumed, plan)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("order", [1, -1], ids=["forwards", "backwards"])
@pytest.mark.parametrize("kind", ["map", "stream", "workers"])
def test_resumed_at_every_point(pool, tmp_path, kind, order):
    """Backwards the topologies take turns the other way, so that each point is tried on both."""
    names = tuple(STARTS)[::order]
    assert _starts(pool, tmp_path, kind, names) == [STARTS[name] for name in names]
