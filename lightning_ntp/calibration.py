"""The simulator against a run that took place: fed with its failures, step times and recovery costs, what would it have said?

    record of a run --predict--> Outcome --compare--> error of the predicted goodput

A record is what `make goodput` writes per policy. Goodput is work that is kept in units of the healthy job: committed steps (of the
global batch; where a hurt job runs a smaller one, samples count) times the healthy step's seconds over the wall time.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from lightning_ntp.cluster import Cluster, Policy
from lightning_ntp.errors import ConfigError
from lightning_ntp.reliability import SECONDS_PER_DAY, require_positive
from lightning_ntp.simulator import Floats, Outcome, Trace, goodput, trace_of

WHOLE_REPLICAS = ("drop", "restart", "torchft")
"""Policies of which a replica that lacks a GPU idles. All others run it at a smaller degree."""


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
        recovery_seconds: of each loss that interrupted the job, from the failure to the start of the next step, with what its first
            steps take longer than later ones; `rejoin_seconds` of each return.
        checkpoint_seconds: cost of one save; 0 where the policy needs none. `checkpoint_every_steps`: steps between two.
        start_seconds: of each return, from the GPU's being back to the pause for it: a process starts while the others go on.
        committed_samples: in all; None: `committed_steps` of the global batch.
        step_samples: samples of a step by the keys of `step_seconds`, where that is not the global batch.
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
    start_seconds: Sequence[float] = ()
    committed_samples: float | None = None
    step_samples: Mapping[str, float] = field(default_factory=dict)

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
        names = {each.name for each in fields(cls)}
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
        batches = self.committed_steps if self.committed_samples is None else self.committed_samples / self.global_batch
        return batches * self.step_seconds[self.healthy] / self.wall_seconds

    @property
    def shrinks(self) -> bool:
        """Whether hurt replicas work on."""
        return self.policy not in WHOLE_REPLICAS

    @property
    def trace(self) -> Trace:
        """The failures as the simulator sees them; a domain is a replica, and a GPU is back when it can work."""
        start = statistics.fmean(self.start_seconds) if self.start_seconds else 0.0
        strikes = []
        for change in self.changes:
            if change.kind == "loss":
                back = [c.seconds for c in self.changes if (c.gpu, c.kind) == (change.gpu, "return") and c.seconds > change.seconds]
                repair = min(back, default=np.inf) + start - change.seconds
                strikes.append((change.seconds / SECONDS_PER_DAY, change.gpu, 1, repair / SECONDS_PER_DAY))
        return trace_of(Cluster(self.num_gpus, self.domain_size), sorted(strikes), self.wall_seconds / SECONDS_PER_DAY)

    def capacities(self, trace: Trace) -> Floats:
        """Throughput in each interval relative to the healthy job, from the measured step times.

        Raises:
            ConfigError: the run never stepped in a state that the trace has.
        """
        return np.array([self._capacity(failed.tolist()) for failed in trace.failed])

    def _capacity(self, failed: Sequence[int]) -> float:
        degrees = sorted(self.domain_size - down for down in failed)
        live = [degree for degree in degrees if degree == self.domain_size or (degree and self.shrinks)]
        if not live:
            return 0.0  # nobody is left: nothing is done until somebody returns
        key = ",".join(map(str, live))
        if key not in self.step_seconds:
            raise ConfigError(f"{self.policy}: no step was committed with replicas of degrees {key!r}, so its time is not known")
        batch = self.step_samples.get(key, self.global_batch) / self.global_batch
        return batch * self.step_seconds[self.healthy] / self.step_seconds[key]


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
        shrink=record.shrinks,
        recovery_seconds=statistics.fmean(record.recovery_seconds) if record.recovery_seconds else 0.0,
        rejoin_seconds=statistics.fmean(record.rejoin_seconds) if record.rejoin_seconds else 0.0,
        checkpoint_seconds=record.checkpoint_seconds,
        interval_seconds=record.checkpoint_every_steps * healthy_step,
        # a live policy loses what it has done of the running step, on average half of it; a record's recovery starts at the failure
        step_seconds=0.0 if record.checkpoint_seconds else healthy_step / 2,
    )
    return Calibration(record.policy, record.goodput, goodput(trace, record.capacities(trace), policy))


def read_records(path: Path) -> list[RunRecord]:
    """All records of a file that `make goodput` wrote, or of a folder of them.

    Raises:
        ConfigError: not JSON, or no records.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path}: no *.json in this folder; `make goodput` writes one per policy")
    return [record for file in files for record in _read(file)]


def _read(path: Path) -> list[RunRecord]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as the records of `make goodput`: {error}") from error
    records = content["runs"] if isinstance(content, dict) and "runs" in content else content
    if not isinstance(records, list) or not records:
        raise ConfigError(f"{path}: wanted a list of records of runs, got {type(records).__name__}")
    return [RunRecord.from_dict(record) for record in records]
