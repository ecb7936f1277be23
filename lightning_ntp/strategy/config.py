"""Settings of the strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_ntp.errors import ConfigError
from lightning_ntp.planner_start import Shape, Size, Wanted
from lightning_ntp.stragglers import SlowConfig
from lightning_ntp.strategy.coordinator import Patience

MAX_RESTARTS = 3
"""Lives of a job from its last checkpoint, unless told otherwise."""


@dataclass(frozen=True)  # no slots: LightningCLI reads a default through vars()
class CheckpointConfig:
    """How checkpoints are written and read.

    Args:
        async_save: write beside training; the step waits only while its part is copied to host memory.
        full: one file in plain Lightning's form instead of a folder; the leader needs host memory for all of it.
        verify: read every file once before loading and compare checksums.
    """

    async_save: bool = True
    full: bool = False
    verify: bool = True


@dataclass(frozen=True)  # no slots: LightningCLI reads a default through vars()
class RecoveryConfig:
    """What happens when a worker is lost.

    Args:
        enabled: survivors go on without it; False ends the job with the first failure, as DDP does. So does the environment
            variable ``NTP_RECOVERY=off``.
        advise: after a loss only say what the recovery would do, then end the job as without it.
        batch_policy: ``"keep"``: the global batch stays after a loss, survivors run more. ``"shrink"``: it shrinks in proportion to
            the GPUs at work, so that survivors run what they did before; every sample is still used once per epoch and in the same
            order, over more steps, and the learning rate stays what the scheduler says. Back to the whole batch when all are back.
        hang_seconds: a worker that makes no progress for this long counts as lost; more than the longest stretch of a run in
            which workers wait for one that computes or writes alone.
        min_workers: with fewer of them at work the fit is saved at the next step boundary and the job ends, with exit code 78.
        max_respawns: replacements that are started for lost workers over the whole job; they join the running fit.
            Hot spares do not count; with 0 there are none, as no process is ever started.
        max_restarts: how often a job that cannot go on in place, as the last holder of some state is lost or a step with manual
            optimization was hit, starts again by itself from its last complete checkpoint, all workers anew.
        integrity_every_n_steps: how often replicas compare the bits of their state, beside the comparison after each recovery;
            None: never. With three or more copies the one that differs is named and overwritten, with two the job ends.
        neighbours: what the other workers of a hurt replica do. ``"keep"``: they go on in place. ``"renew"``, for boards on which a
            lost GPU takes links and CUDA contexts of its neighbours with it: they end and are started again from fresh processes, which
            get the replica's state from another one at the smaller degree; the others go on meanwhile. Where no other replica is
            whole they go on in place.
        checkpoint: how the last resort is written.
        slow: what happens about slow GPUs.
    """

    enabled: bool = True
    advise: bool = False
    batch_policy: Literal["keep", "shrink"] = "keep"
    hang_seconds: float = 600.0
    min_workers: int = 1
    max_respawns: int = 8
    max_restarts: int = MAX_RESTARTS
    integrity_every_n_steps: int | None = None
    neighbours: Literal["keep", "renew"] = "keep"
    checkpoint: CheckpointConfig = CheckpointConfig()
    slow: SlowConfig = SlowConfig()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        if self.batch_policy not in ("keep", "shrink"):
            raise ConfigError(f'RecoveryConfig: batch_policy is "keep" or "shrink", got {self.batch_policy!r}')
        if not isinstance(self.checkpoint, CheckpointConfig):
            raise ConfigError(f"RecoveryConfig: checkpoint is a CheckpointConfig, got {type(self.checkpoint).__name__}")
        if not isinstance(self.slow, SlowConfig):
            raise ConfigError(f"RecoveryConfig: slow is a SlowConfig, got {type(self.slow).__name__}")
        if not self.hang_seconds > 0:
            raise ConfigError(f"RecoveryConfig: hang_seconds must be above 0, got {self.hang_seconds}")
        if self.min_workers < 1:
            raise ConfigError(f"RecoveryConfig: min_workers must be 1 or more, got {self.min_workers}")
        if self.neighbours not in ("keep", "renew"):
            raise ConfigError(f'RecoveryConfig: neighbours is "keep" or "renew", got {self.neighbours!r}')
        if self.max_respawns < 0:
            raise ConfigError(f"RecoveryConfig: max_respawns must be 0 or more, got {self.max_respawns}")
        if self.max_restarts < 0:
            raise ConfigError(f"RecoveryConfig: max_restarts must be 0 or more, got {self.max_restarts}")
        if self.integrity_every_n_steps is not None and self.integrity_every_n_steps < 1:
            raise ConfigError(
                f"RecoveryConfig: integrity_every_n_steps is 1 or more, or None, got {self.integrity_every_n_steps}"
            )

    def is_on(self, environ: Mapping[str, str]) -> bool:
        """Whether the job recovers, with ``NTP_RECOVERY`` of the environment considered."""
        return self.enabled and environ.get("NTP_RECOVERY", "on") != "off"

    @property
    def patience(self) -> Patience:
        """When the supervisor takes a living worker for lost."""
        return Patience(join_seconds=self.hang_seconds, progress_floor_seconds=self.hang_seconds)

    @property
    def group_timeout_seconds(self) -> float:
        """Of collectives: below the patience, so that one that nobody completes fails before its workers are given up."""
        return 0.75 * self.hang_seconds


@dataclass(frozen=True, slots=True)
class StrategyConfig:
    """The keyword arguments of `NTPStrategy`, checked. See there."""

    num_replicas: Size = "auto"
    fsdp_size: Size = "auto"
    tensor_parallel_size: Size = "auto"
    replica_sizes: tuple[Shape, ...] | None = None
    plan: Any = "auto"
    batch_weight: str | Callable[[Any], float] = "samples"
    recovery: RecoveryConfig = RecoveryConfig()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.recovery, RecoveryConfig):
            raise ConfigError(f"recovery is a RecoveryConfig, got {type(self.recovery).__name__}")
        object.__setattr__(self, "replica_sizes", self.wanted.replica_sizes)
        if self.batch_weight not in ("samples", "tokens") and not callable(self.batch_weight):
            raise ConfigError(
                f'batch_weight is "samples", "tokens" or a function of the batch, got {self.batch_weight!r}'
            )

    @property
    def wanted(self) -> Wanted:
        """The sizes among them, for `planner_start.plan_start`."""
        return Wanted(self.num_replicas, self.fsdp_size, self.tensor_parallel_size, self.replica_sizes, self.recovery.min_workers)
