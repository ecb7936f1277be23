"""The scalars of a job, to every logger: goodput, where time went, who is alive, how fast it is."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_ntp.goodput_totals import BADPUT, PRODUCTIVE, GoodputWindow, Totals
from lightning_ntp.topology import Topology

_log = logging.getLogger(__name__)


def scalars(totals: Totals, window: Totals, topology: Topology | None, generation: int) -> dict[str, float]:
    """DESIGN 8's names. ``badput_s/*`` are seconds summed over all GPUs that the job owns; see docs/goodput.md."""
    values = {
        "goodput/cumulative": totals.goodput,
        "goodput/window": window.goodput,
        "goodput/capacity_weighted": totals.capacity_weighted,
    }
    values["goodput/productive_gpu_s"] = totals.gpu_ns[PRODUCTIVE] / 1e9
    values |= {f"badput_s/{bucket}": totals.gpu_ns[bucket] / 1e9 for bucket in BADPUT}
    values |= {
        "ntp/live_gpus": float(totals.num_live),
        "ntp/owned_gpus": float(totals.num_owned),
        "ntp/generation": float(generation),
        "ntp/wall_s": sum(totals.job_ns.values()) / 1e9,
    }
    if topology is not None:
        values["ntp/degree_min"] = float(min(replica.degree for replica in topology.replicas))
    return values


class RunLog:
    """Writes to all loggers of a Trainer; a logger that fails is named once and does not stop training.

    Args:
        window_seconds: of ``goodput/window``.
    """

    def __init__(self, window_seconds: float) -> None:
        self.window = GoodputWindow(window_seconds)
        self._named: set[str] = set()

    def write(self, loggers: Iterable[Any], values: Mapping[str, float], step: int) -> None:
        """Scalars at an optimizer step. Only where the process leads: Lightning's loggers ignore others."""
        for logger in loggers:
            try:
                logger.log_metrics(dict(values), step=step)
            except Exception as error:  # noqa: BLE001  an outage of a logging service must not stop training
                name = type(logger).__name__
                if name not in self._named:
                    self._named.add(name)
                    _log.warning("%s does not take goodput metrics: %s: %s", name, type(error).__name__, error)
