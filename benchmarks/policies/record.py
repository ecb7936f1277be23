"""Committed steps and a drill become what the simulator needs: step times by state, the cost of every loss and return.

All of it comes from when steps were committed. The interval in which a loss or a return fell and the next one (its first step is slower
than the others) are changes; the rest, by who worked, are step times. What a change took beyond the steps in it is its cost.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.policies.drill import SAVE_EVERY, Drill
from lightning_ntp.errors import ConfigError

WARM_UP_STEPS = SAVE_EVERY
"""The record begins at the end of so many first steps: where who restarts has a fresh checkpoint, as the simulator takes it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A committed step.

    Args:
        seconds: when it was done.
        step: its number; smaller than the one before where a restart does steps again.
        degrees: of the replicas that did it.
        samples: that counted.
        life: number of the process that did it, where the job was restarted.
    """

    seconds: float
    step: int
    degrees: tuple[int, ...]
    samples: float
    life: int = 0

    @property
    def key(self) -> str:
        """As in `RunRecord.step_seconds`."""
        return ",".join(map(str, sorted(self.degrees)))


@dataclass(frozen=True, slots=True)
class Struck:
    """A loss that hit a working GPU: when, and the step in which it was."""

    seconds: float
    gpu: int


class Account:
    """One run of a policy.

    Args:
        policy: its name.
        drill: what happened to it.
        marks: in time.
        struck: losses that hit GPUs at work.
        global_batch: samples of a step of the healthy job.
    """

    def __init__(self, policy: str, drill: Drill, marks: Sequence[Mark], struck: Sequence[Struck], global_batch: int) -> None:
        self.policy, self.drill, self.global_batch = policy, drill, global_batch
        self.marks, self.struck = list(marks), sorted(struck, key=lambda loss: loss.seconds)
        self.start = WARM_UP_STEPS - 1
        self.by_restart = policy == "restart"
        self.losses = self._losses()
        self.joins = self._joins()
        self.changing = {i + after for i in (*self.losses, *self.joins) for after in (0, 1)} - {len(marks)}
        self.step_seconds = self._step_seconds()

    def seconds_of(self, index: int) -> float:
        """Of the interval that ends with a mark."""
        return self.marks[index].seconds - self.marks[index - 1].seconds

    def _losses(self) -> list[int]:
        """Marks whose interval a loss is in, one per interruption."""
        found: list[int] = []
        for loss in self.struck:
            index = next((i for i, mark in enumerate(self.marks) if mark.seconds > loss.seconds), None)
            if index is None:
                raise ConfigError(f"{self.policy}: no step was committed after the loss of GPU {loss.gpu}: the job did not go on")
            if index not in found:
                found.append(index)
        return found

    def _joins(self) -> list[int]:
        """Marks of the first step with more GPUs than before."""
        pairs = [(i, sum(self.marks[i].degrees) - sum(self.marks[i - 1].degrees)) for i in range(1, len(self.marks))]
        lost = set(self.losses)
        return [i for i, more in pairs if more > 0 and i not in lost]

    def _step_seconds(self) -> dict[str, float]:
        times: defaultdict[str, list[float]] = defaultdict(list)
        for i in range(self.start + 1, len(self.marks)):
            if i not in self.changing and not self._saves(i):
                times[self.marks[i].key].append(self.seconds_of(i))
        return {key: statistics.fmean(values) for key, values in times.items()}

    def _saves(self, index: int) -> bool:
        """Whether a checkpoint is begun in the interval: it is, after the step before has been committed."""
        return self.by_restart and (self.marks[index - 1].step + 1) % SAVE_EVERY == 0

    def _checkpoint_seconds(self) -> float:
        """Beyond the step that it delays; at least a millisecond, as 0 would say that there are none."""
        extra = [
            self.seconds_of(i) - self.step_seconds[self.marks[i].key]
            for i in range(self.start + 1, len(self.marks))
            if i not in self.changing and self._saves(i)
        ]
        return max(1e-3, statistics.fmean(extra)) if extra else 1e-3

    def _cost(self, index: int) -> float:
        """Of the change whose interval ends with this mark; the time in the step that a loss broke off is not in it."""
        window = [i for i in (index, index + 1) if i < len(self.marks)]
        if index + 1 in (*self.losses, *self.joins):
            window = [index]
        cost = sum(self.seconds_of(i) - self._typical(i) for i in window)
        broken_off = [loss.seconds for loss in self.struck if self.marks[index - 1].seconds < loss.seconds <= self.marks[index].seconds]
        if broken_off:
            cost -= min(broken_off) - self.marks[index - 1].seconds
        return max(0.0, cost)

    def _typical(self, index: int) -> float:
        key = self.marks[index].key
        if key not in self.step_seconds:
            raise ConfigError(f"{self.policy}: no undisturbed step with replicas of degrees {key}; stretch the drill")
        return self.step_seconds[key]

    def _changes(self) -> list[dict[str, Any]]:
        """Every loss and return of the drill, also of GPUs that idled; seconds from the record's start."""
        origin = self.marks[self.start].seconds
        changes = []
        for fault in self.drill.losses:
            at = [loss.seconds for loss in self.struck if loss.gpu == fault.worker and self._in_step(loss.seconds, fault.step or 0)]
            seconds = at[0] if at else self._before(fault.step or 0) + fault.delay_seconds
            changes.append({"seconds": seconds - origin, "gpu": fault.worker, "kind": "loss"})
        changes += [{"seconds": self._before(back.step) - origin, "gpu": back.gpu, "kind": "return"} for back in self.drill.returns]
        return sorted(changes, key=lambda change: change["seconds"])

    def _in_step(self, seconds: float, step: int) -> bool:
        done = [mark.step for mark in self.marks if mark.seconds <= seconds]
        return bool(done) and done[-1] == step - 1

    def _before(self, step: int) -> float:
        """When the step before was done for the first time."""
        return next(mark.seconds for mark in self.marks if mark.step >= step - 1)

    def _start_seconds(self) -> list[float]:
        """From a GPU's being back to the boundary at which the others took it in."""
        returns = [back for back in self.drill.returns if self.policy == "ntp" or not self.drill.down(back.step) & set(self.drill.mates(back.gpu))]
        boundaries: list[float] = []
        whole = (self.drill.degree,) * self.drill.replicas
        for i in self.joins:
            more = sum(self.marks[i].degrees) - sum(self.marks[i - 1].degrees)
            taken = more if self.policy == "ntp" else int(self.marks[i].degrees == whole)
            boundaries += [self.marks[i - 1].seconds] * taken
        if len(boundaries) < len(returns):
            raise ConfigError(
                f"{self.policy}: {len(returns)} returns, but only {len(boundaries)} were taken in before the run ended; stretch the drill"
            )
        backs = sorted(self._before(back.step) for back in returns)
        return [max(0.0, boundary - back) for boundary, back in zip(boundaries, backs, strict=True)]

    def record(self) -> dict[str, Any]:
        """In the form of `RunRecord`."""
        kept = self.marks[self.start + 1 :]
        newest = {mark.step: mark for mark in kept}
        batches: dict[str, float] = {}
        for key in self.step_seconds:
            counted = [self.marks[i].samples for i in range(self.start + 1, len(self.marks)) if i not in self.changing and self.marks[i].key == key]
            batches[key] = statistics.fmean(counted)
        return {
            "policy": self.policy,
            "num_gpus": self.drill.num_gpus,
            "domain_size": self.drill.degree,
            "global_batch": self.global_batch,
            "wall_seconds": self.marks[-1].seconds - self.marks[self.start].seconds,
            "committed_steps": len(newest),
            "committed_samples": sum(mark.samples for mark in newest.values()),
            "lost_steps": len(self.losses) + len(kept) - len(newest),
            "step_seconds": self.step_seconds,
            "step_samples": batches,
            "recovery_seconds": [self._cost(i) for i in self.losses],
            "rejoin_seconds": [self._cost(i) for i in self.joins],
            "start_seconds": self._start_seconds(),
            "checkpoint_seconds": self._checkpoint_seconds() if self.by_restart else 0.0,
            "checkpoint_every_steps": SAVE_EVERY if self.by_restart else 0,
            "changes": self._changes(),
        }
