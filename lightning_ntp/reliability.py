"""Closed forms of failure: what a simulation must agree with, and what a plan may use without one."""

from __future__ import annotations

import math

from lightning_ntp.errors import ConfigError

SECONDS_PER_DAY = 86_400.0


def require_positive(**values: float) -> None:
    """ConfigError for the first of `values` that is not a finite number above 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be a finite number above 0, got {value!r}")


def availability(failed_fraction: float, domain_size: int) -> float:
    """Share of domains without a failed GPU when every GPU is down with probability `failed_fraction`: ``(1 - f) ** T``.

    With uniform tensor parallelism over whole domains it is also the share of GPUs that can still work (arXiv 2504.06095,
    figure 3).
    """
    if not 0 <= failed_fraction <= 1:
        raise ConfigError(f"failed_fraction is a share between 0 and 1, got {failed_fraction!r}")
    require_positive(domain_size=domain_size)
    return float((1.0 - failed_fraction) ** domain_size)


def job_mttf_seconds(gpu_mttf_seconds: float, num_gpus: int) -> float:
    """Mean time to the first failure among `num_gpus` independent GPUs: one GPU's divided by their number."""
    require_positive(gpu_mttf_seconds=gpu_mttf_seconds, num_gpus=num_gpus)
    return gpu_mttf_seconds / num_gpus


def young_daly_seconds(checkpoint_seconds: float, mttf_seconds: float) -> float:
    """Work between two checkpoints that wastes least, to first order: ``sqrt(2 * C * M)`` (Young 1974, Daly 2006)."""
    require_positive(checkpoint_seconds=checkpoint_seconds, mttf_seconds=mttf_seconds)
    return math.sqrt(2.0 * checkpoint_seconds * mttf_seconds)


def checkpoint_efficiency(
    interval_seconds: float, checkpoint_seconds: float, mttf_seconds: float, restart_seconds: float
) -> float:
    """Share of wall time that a job under checkpoint and restart spends on work that it keeps.

    Exact for exponential failures that may also strike while a checkpoint is written (a restart is not interrupted): a segment
    of ``I + C`` seconds succeeds with probability ``exp(-(I + C) / M)`` and each try that fails costs the time up to the
    failure and a restart.
    """
    require_positive(interval_seconds=interval_seconds, checkpoint_seconds=checkpoint_seconds, mttf_seconds=mttf_seconds)
    if restart_seconds < 0:
        raise ConfigError(f"restart_seconds may not be negative, got {restart_seconds!r}")
    failures = math.expm1((interval_seconds + checkpoint_seconds) / mttf_seconds)
    return interval_seconds / (failures * (mttf_seconds + restart_seconds))


def expected_hurt_domains(num_failed: int, num_domains: int, domain_size: int) -> float:
    """Mean number of domains with at least one of `num_failed` GPUs that are drawn without replacement."""
    num_gpus = num_domains * domain_size
    if not 0 <= num_failed <= num_gpus:
        raise ConfigError(f"{num_failed} failed GPUs do not fit into {num_gpus}: lower the failed fraction")
    whole = 1.0
    for taken in range(domain_size):
        whole *= max(num_gpus - num_failed - taken, 0) / (num_gpus - taken)
    return num_domains * (1.0 - whole)
