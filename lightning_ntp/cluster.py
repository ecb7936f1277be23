"""What is simulated: how GPUs fail, how they are grouped, and what a job does about it. Values only; `simulator` plays them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_ntp.errors import ConfigError
from lightning_ntp.reliability import require_positive


@dataclass(frozen=True, slots=True)
class FailureKind:
    """One way to fail.

    Args:
        per_gpu_day: failures per GPU and day, each GPU on its own (exponential).
        repair_days: equally likely times until the GPUs are back; ``math.inf`` for never.
        blast_radius: GPUs of the domain that go down together (an aligned group around the failed one).
    """

    name: str
    per_gpu_day: float
    repair_days: tuple[float, ...]
    blast_radius: int = 1

    def __post_init__(self) -> None:
        require_positive(per_gpu_day=self.per_gpu_day, blast_radius=self.blast_radius)
        if not self.repair_days or any(not days > 0 for days in self.repair_days):
            raise ConfigError(f"{self.name}: repair takes a time above 0 (math.inf: never), got {self.repair_days} days")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Domains of GPUs: those that the job needs and spare ones. A replica spans `domains_per_replica` domains."""

    num_gpus: int
    domain_size: int
    domains_per_replica: int = 1
    spare_domains: int = 0

    def __post_init__(self) -> None:
        require_positive(num_gpus=self.num_gpus, domain_size=self.domain_size, domains_per_replica=self.domains_per_replica)
        if self.spare_domains < 0 or self.num_gpus % (self.domain_size * self.domains_per_replica):
            raise ConfigError(
                f"{self.num_gpus} GPUs are no whole number of replicas of {self.domains_per_replica} x {self.domain_size}, or "
                f"the spare domains ({self.spare_domains}) are negative"
            )

    @property
    def num_domains(self) -> int:
        """Domains that the healthy job needs."""
        return self.num_gpus // self.domain_size

    @property
    def all_domains(self) -> int:
        """Spare domains included."""
        return self.num_domains + self.spare_domains

    @property
    def num_replicas(self) -> int:
        """Replicas of the healthy job."""
        return self.num_domains // self.domains_per_replica


@dataclass(frozen=True, slots=True)
class Policy:
    """What the job does about a failure.

    Args:
        shrink: hurt domains go on at a lower degree (NTP); otherwise they cannot be used at all.
        boost: hurt domains get as much power as they need and the rack allows (NTP-PW).
        packed: hurt domains are gathered in as few replicas as possible; otherwise domain i stays in replica i // k.
        recovery_seconds: nothing is computed for so long after a failure that hits a domain in use; `rejoin_seconds`: after a
            repair that brings one into use. A job with checkpoints that stops for a repair has written one before.
        checkpoint_seconds: cost of a checkpoint; work since the last one is lost at a failure. 0: state survives in the
            live replicas and `step_seconds` of work, at most one step, is lost instead.
        interval_seconds: work between checkpoints; 0: Young/Daly for the trace's own mean time between failures. Work is
            counted in seconds of the healthy job, as steps are: a hurt one takes longer for the same.
    """

    name: str
    shrink: bool
    boost: bool = False
    packed: bool = True
    recovery_seconds: float = 0.0
    rejoin_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    interval_seconds: float = 0.0
    step_seconds: float = 0.0

    def __post_init__(self) -> None:
        names = ("recovery_seconds", "rejoin_seconds", "checkpoint_seconds", "interval_seconds", "step_seconds")
        for name in names:
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{self.name}: {name} may not be negative, got {getattr(self, name)!r}")
        if self.boost and not self.shrink:
            raise ConfigError(f"{self.name}: power is boosted in shrunk domains only; set shrink=True")
