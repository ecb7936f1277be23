"""Where a run stands in its data, how a checkpoint says it, and how another run goes on from there.

    Lightning's counters --data_position--> (epoch, committed loop batches) --loader--> units of the user's source (saved)
    saved units --loader of the new run, any number of data rows--> first loop batch --shift_batches--> Lightning's counters

A loop batch is one global batch. Only whole optimizer steps count: what an open accumulation window has run is run again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_ntp.errors import ConfigError


class Start(NamedTuple):
    """Where a pass over the data begins.

    Args:
        batch: number that the first loop batch gets.
        unit: units of the source (samples, or ready-made batches) that come before it.
    """

    batch: int = 0
    unit: int = 0


class DataPosition(NamedTuple):
    """What has been trained on for good: loop batches of `epoch` whose optimizer step is done."""

    epoch: int
    batches: int


@dataclass(frozen=True, slots=True)
class EpochCounts:
    """Lightning's counters, as far as the position follows from them.

    Args:
        ready: epochs announced.
        started: epochs whose start hooks have run.
        processed: epochs left behind, complete or cut short by ``max_steps`` or an early stop.
        batches_ready: loop batches of the latest epoch that were begun.
        batches_processed: loop batches of it that are done.
        batches_completed: those whose end hooks have run.
        all_batches: whether the latest loop batch that was begun is the last one of its epoch.
        window: loop batches per optimizer step.
    """

    ready: int
    started: int
    processed: int
    batches_ready: int
    batches_processed: int
    batches_completed: int
    all_batches: bool
    window: int

    @property
    def is_finished(self) -> bool:
        """Whether every loop batch of the latest epoch is done; its short last window has stepped as well."""
        return self.all_batches and self.batches_processed == self.batches_ready

    @property
    def position(self) -> DataPosition:
        """The position behind the last whole optimizer step."""
        between_epochs = self.processed == self.ready
        if not between_epochs and self.started < self.ready:
            return DataPosition(self.processed, 0)  # the batch counters are still those of the epoch before
        if self.is_finished:
            return DataPosition(self.processed + (not between_epochs), 0)
        done = self.batches_processed
        epoch = self.processed - (between_epochs and done > 0)
        return DataPosition(epoch, done - done % self.window)

    @property
    def is_exact(self) -> bool:
        """Whether Lightning, resuming from these counters, would begin at `position` by itself, with its epoch's hooks."""
        at, done = self.position, self.batches_processed
        if self.is_finished:
            return self.processed == self.ready or self.batches_completed == done
        return at.batches == done == 0 or (at == (self.processed, done) and done == self.batches_ready)


def rewrite_counters(fit_loop: dict[str, Any], position: DataPosition) -> None:
    """Make the saved state of Lightning's fit loop begin at `position`, in place.

    Needed where Lightning's own counters say something else: in the middle of an accumulation window, whose gradients no
    checkpoint holds; after a run that stopped inside an epoch, which Lightning counts as a whole one; and after an epoch's
    last batch, where it would leave out the next epoch's start.
    """
    epochs, batches = fit_loop["epoch_progress"], fit_loop["epoch_loop.batch_progress"]
    if batches["is_last_batch"]:
        fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1  # done by Lightning after the hooks that save
    started = position.epoch + (position.batches > 0)
    wanted = {"ready": position.epoch + 1, "started": started, "processed": position.epoch, "completed": position.epoch}
    _set_counts(epochs, wanted)
    _set_counts(batches, dict.fromkeys(("ready", "started", "processed", "completed"), position.batches))
    batches["is_last_batch"] = False


def _set_counts(progress: dict[str, Any], wanted: Mapping[str, int]) -> None:
    """Totals run over all epochs: all four end where the last complete one ends, moved as far as its current count."""
    total, current = progress["total"], progress["current"]
    base = total["ready"] - current["ready"]
    for name, value in wanted.items():
        current[name], total[name] = value, base + value


class Resumable(ABC):
    """What loaders of every kind share: they can begin in the middle, and say where a checkpoint stands in them.

    Attributes:
        per_batch: units of the source in one loop batch.
        num_units: of the source; None where it has no length.
        num_readers: processes that read a stream, 0 for data that is read by index.
        leaves_out_rest: units that do not fill a loop batch are left out.
        keeps_number: a position is taken up under the number that it has in the running job, as newcomers do.
        progress: the position of the running job.
        on_resume: called with (loop batches in the checkpoint, their number here) before the first pass.
    """

    per_batch = 1
    num_units: int | None = None
    num_readers = 0
    leaves_out_rest = False
    keeps_number = False
    progress: Callable[[], DataPosition] = staticmethod(lambda: DataPosition(0, 0))
    on_resume: Callable[[int, int], None] = staticmethod(lambda old, new: None)
    _next = Start()
    _running = Start()
    _running_epoch = -1

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Which pass over the data the next `iter` starts."""

    @property
    @abstractmethod
    def epoch_of_next_pass(self) -> int:
        """What `set_epoch` was told."""

    def start_at(self, batch: int | Start) -> None:
        """Let the next `iter` begin at this loop batch of the epoch, in the order of an undisturbed run."""
        self._next = batch if isinstance(batch, Start) else Start(batch, batch * self.per_batch)

    def length_of_next_pass(self) -> int:
        """Loop batches of the next pass, with those before its start, whatever size they had.

        Raises:
            TypeError: the source has no length.
        """
        if self.num_units is None:
            raise TypeError("the training data has no length")
        left = self.num_units - self._next.unit
        return self._next.batch + (left // self.per_batch if self.leaves_out_rest else -(-left // self.per_batch))

    def start_of(self, batch: int) -> Start:
        """Where loop batch `batch` of the running pass lies in the source: what a rebuilt loader is told to start at."""
        begun = self._next if self._next.batch else self._running  # one that is about to go on counts as running
        return Start(batch, begun.unit + (batch - begun.batch) * self.per_batch)

    def continue_from(self, old: Resumable, batch: int) -> None:
        """Let the next `iter` begin at loop batch `batch` of the pass that `old`, a loader of the same data, is running."""
        self.start_at(old.start_of(batch) if batch else 0)

    def begin_pass(self) -> Start:
        """Where the pass that begins now starts; the one after it is whole again."""
        self._running, self._next, self._running_epoch = self._next, Start(), self.epoch_of_next_pass
        return self._running

    def is_regular(self, start: Start) -> bool:
        """Whether loop batches before `start` were all of this loader's size."""
        return start.unit == start.batch * self.per_batch

    def state_dict(self) -> dict[str, Any]:
        """The position of the running job in units of the source. Called by Lightning on every worker."""
        at = self.progress()
        begun_epoch = self.epoch_of_next_pass if self._next.batch else self._running_epoch
        start = self.start_of(at.batches) if at.epoch == begun_epoch else Start(at.batches, at.batches * self.per_batch)
        return {
            "epoch": at.epoch,
            "batches": start.batch,
            "units": start.unit,
            "num_units": self.num_units,
            "per_batch": self.per_batch,
            "num_readers": self.num_readers,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin where a checkpoint stands. Called by Lightning before the first pass.

        Raises:
            ConfigError: inside an epoch, and the data has another length or is read in another order.
        """
        self.set_epoch(state["epoch"])
        batches, units = state["batches"], state["units"]
        if batches == 0:
            self.start_at(0)
            return
        where = f"the checkpoint stands inside epoch {state['epoch']}, behind {units} units of its data"
        way_out = "load a checkpoint from the end of an epoch to change the data"
        if state["num_units"] != self.num_units:
            raise ConfigError(
                f"{where}: {state['num_units']} in all, and this run's data has {self.num_units}; {way_out}"
            )
        if state["num_readers"] != self.num_readers:
            raise ConfigError(
                f"{where}, a stream read by {state['num_readers']} process(es); this run reads it with {self.num_readers}, in "
                f"another order. Give the DataLoader num_workers={state['num_readers']}, or {way_out}"
            )
        start = Start(batches if self.keeps_number else self._number_of(units), units)
        if self.num_readers > 1 and not self.is_regular(start):
            raise ConfigError(
                f"{where} in global batches of {state['per_batch']}; this run has {self.per_batch}, and {self.num_readers} reading "
                f"processes take turns by global batches. Keep batch_size x data rows, use one worker, or {way_out}"
            )
        self.start_at(start)
        self.on_resume(batches, start.batch)

    def _number_of(self, units: int) -> int:
        """The number of the loop batch behind so many units, chosen so that the epoch has as many as every other."""
        if self.num_units is None:
            return units // self.per_batch
        return -(-self.num_units // self.per_batch) - -(-(self.num_units - units) // self.per_batch)
