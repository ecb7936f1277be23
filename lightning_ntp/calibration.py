"""The simulator against a run that took place: fed with its failures, step times and recovery costs, what would it have said?

    record of a run --predict--> Outcome --compare--> error of the predicted goodput

A record is what `make goodput` writes per policy. Goodput is work that is kept in units of the healthy job: committed steps times
the healthy step's seconds over the wall time.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from lightning_ntp.cluster import Cluster, Policy
from lightning_ntp.errors import ConfigError
from lightning_ntp.reliability import SECONDS_PER_DAY, require_positive
from lightning_ntp.simulator import Floats, Outcome, Trace, goodput, trace_of


@dataclass(frozen=True, slots=True)
class Change:
    """A GPU that was lost or came back, `seconds` after the first step began."""

    seconds: float
    gpu: int
    kind: str


@dataclass(frozen=True)
class RunRecord:
    """One run with failures, from the start of its first step to the end of its last.

    Args:
        step_seconds: seconds of a committed step by the degrees of the live replicas, ascending and joined by commas (``"2,3"``);
            a dropped replica has no entry among them.
        recovery_seconds: of each loss, from the failure to the start of the next step; `rejoin_seconds` of each return.
        checkpoint_seconds: cost of one save; 0 where the policy needs none. `checkpoint_every_steps`: steps between two.
    """

    policy: str
    num_gpus: int
    domain_size: int
    global_batch: int
    wall_seconds: float
    committed_steps: int
    lost_steps: int
    step_seconds: Mapping[str, float]
    recovery_seconds: Sequence[float]
    rejoin_seconds: Sequence[float]
    changes: tuple[Change, ...]
    checkpoint_seconds: float = 0.0
    checkpoint_every_steps: int = 0

    def __post_init__(self) -> None:
        require_positive(wall_seconds=self.wall_seconds, committed_steps=self.committed_steps, num_gpus=self.num_gpus)
        if self.healthy not in self.step_seconds:
            raise ConfigError(
                f"{self.policy}: step_seconds has no entry for the healthy job {self.healthy!r}, only {sorted(self.step_seconds)}; "
                "let the run do some steps before its first failure"
            )

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> RunRecord:
        """From JSON; keys that are not known are left out.

        Raises:
            ConfigError: a key is missing.
        """
        names = {field.name for field in fields(cls)}
        known = {key: value for key, value in record.items() if key in names}
        try:
            known["changes"] = tuple(Change(c["seconds"], c["gpu"], c["kind"]) for c in record["changes"])
            return cls(**known)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"this is no record of a run, {error}; `make goodput` writes them") from error

    @property
    def healthy(self) -> str:
        """Key of the healthy job in `step_seconds`."""
        return ",".join([str(self.domain_size)] * (self.num_gpus // self.domain_size))

    @property
    def goodput(self) -> float:
        """What the run achieved."""
        return self.committed_steps * self.step_seconds[self.healthy] / self.wall_seconds

    @property
    def trace(self) -> Trace:
        """The failures as the simulator sees them; a domain is a replica."""
        strikes = []
        for change in self.changes:
            if change.kind == "loss":
                back = [c.seconds for c in self.changes if (c.gpu, c.kind) == (change.gpu, "return") and c.seconds > change.seconds]
                repair = min(back, default=np.inf) - change.seconds
                strikes.append((change.seconds / SECONDS_PER_DAY, change.gpu, 1, repair / SECONDS_PER_DAY))
        return trace_of(Cluster(self.num_gpus, self.domain_size), sorted(strikes), self.wall_seconds / SECONDS_PER_DAY)

    def capacities(self, trace: Trace) -> Floats:
        """Throughput in each interval relative to the healthy job: the measured step times.

        Raises:
            ConfigError: the run never stepped in a state that the trace has.
        """
        return np.array([self.step_seconds[self.healthy] / self._seconds_of(failed.tolist()) for failed in trace.failed])

    def _seconds_of(self, failed: Sequence[int]) -> float:
        degrees = sorted(self.domain_size - down for down in failed)
        shrunk = ",".join(str(degree) for degree in degrees if degree)
        whole = ",".join(str(degree) for degree in degrees if degree == self.domain_size)
        # who restarts may come back either way; the others say by their name what they do with a hurt replica
        wanted = {"ntp": [shrunk], "drop": [whole], "torchft": [whole]}.get(self.policy, [shrunk, whole])
        for key in wanted:
            if key in self.step_seconds:
                return self.step_seconds[key]
        if not wanted[-1]:
            return math.inf  # nobody is left: nothing is done until somebody returns
        raise ConfigError(f"{self.policy}: no step was committed with replicas of degrees {wanted[0]!r}, so its time is not known")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Predicted beside measured."""

    policy: str
    measured: float
    predicted: Outcome

    @property
    def error(self) -> float:
        """Of the predicted goodput, relative to the measured one."""
        return self.predicted.goodput / self.measured - 1


def predict(record: RunRecord) -> Calibration:
    """Play the record's failures through the simulator, with its mean costs."""
    trace = record.trace
    healthy_step = record.step_seconds[record.healthy]
    policy = Policy(
        record.policy,
        shrink=True,
        recovery_seconds=statistics.fmean(record.recovery_seconds) if record.recovery_seconds else 0.0,
        rejoin_seconds=statistics.fmean(record.rejoin_seconds) if record.rejoin_seconds else 0.0,
        checkpoint_seconds=record.checkpoint_seconds,
        interval_seconds=record.checkpoint_every_steps * healthy_step,
        # what a live policy loses is within a step, on average half of one; a record's recovery starts at the failure
        step_seconds=0.0 if record.checkpoint_seconds else healthy_step / 2,
    )
    return Calibration(record.policy, record.goodput, goodput(trace, record.capacities(trace), policy))


def read_records(path: Path) -> list[RunRecord]:
    """All records of a file that `make goodput` wrote.

    Raises:
        ConfigError: not JSON, or no records.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as the records of `make goodput`: {error}") from error
    records = content["runs"] if isinstance(content, dict) and "runs" in content else content
    if not isinstance(records, list) or not records:
        raise ConfigError(f"{path}: wanted a list of records of runs, got {type(records).__name__}")
    return [RunRecord.from_dict(record) for record in records]
