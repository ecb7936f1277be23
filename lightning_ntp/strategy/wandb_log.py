"""What W&B gets beside the scalars: axes, configuration, events, alerts, a picture, the ledger. None of it can stop training.

[Note: who writes] The leader writes, through Lightning's WandbLogger. All workers know the run's id from the start, so that after the
loss of the leader the next one opens the same run: online the server goes on with it (``resume="allow"``), offline there are
two folders with one id, which ``wandb sync`` puts into one run. W&B writes its offline file in blocks of 32 KiB, and SIGKILL loses the
last one: therefore the new leader writes the table of events again, in full, and the ledger on disk holds every number.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning_ntp.strategy._lightning_private import (
    set_wandb_id,
    set_wandb_offline,
    wandb_is_open,
    wandb_options,
)

_log = logging.getLogger(__name__)

INIT_SECONDS = 30.0
"""How long the start of a run may wait for W&B; then it is kept on disk."""

FINISH_SECONDS = 30.0
"""How long the end of training may wait for uploads."""

EVENT_COLUMNS = (
    "time", "step", "event", "workers", "gpus", "roles", "why", "seconds", "detection_s", "regroup_s", "reshard_s", "bytes_moved",
    "generation", "topology",
)  # fmt: skip
TABLE = "ntp/events"
PICTURE = "ntp/timeline"
WALL = "ntp/wall_s"


def is_wandb(logger: Any) -> bool:
    """Whether this is Lightning's WandbLogger (of either Lightning)."""
    return any(kind.__name__ == "WandbLogger" for kind in type(logger).__mro__)


class WandbRun:
    """One WandbLogger's run.

    Args:
        logger: Lightning's.
        run_id: the id that all workers use, unless the user gave one.
    """

    def __init__(self, logger: Any, run_id: str) -> None:
        self.logger = logger
        self.num_failed = 0
        self._deferred: list[Any] | None = None
        self._described = False
        self.is_ours = not wandb_is_open(logger) and not wandb_options(logger).get("id")
        if self.is_ours:
            set_wandb_id(logger, run_id)

    @property
    def id(self) -> str | None:
        """The run's id."""
        return wandb_options(self.logger).get("id")

    def go_on_with(self, run_id: str) -> None:
        """Use the run of the job that a checkpoint comes from, unless the user chose an id or the run is open."""
        if self.is_ours and not wandb_is_open(self.logger):
            set_wandb_id(self.logger, run_id)

    def hold_hyperparameters(self) -> None:
        """Lightning logs hyperparameters, which opens the run, before a checkpoint can say which run it is. Keep them until `open`."""
        if wandb_is_open(self.logger) or self._deferred is not None:
            return
        held = self._deferred = []
        self.logger.log_hyperparams = lambda *args, **kwargs: held.append((args, kwargs))

    def open(self) -> None:
        """Open the run; offline if W&B does not answer or does not take the key."""
        if not wandb_is_open(self.logger):
            self._safely("open the run", self._open)
        if self._deferred is not None:
            held, self._deferred = self._deferred, None
            self.logger.__dict__.pop("log_hyperparams", None)
            for args, kwargs in held:
                self._safely("log hyperparameters", partial(self.logger.log_hyperparams, *args, **kwargs))

    def describe(self, config: Mapping[str, Any]) -> None:
        """Axes and configuration; once."""
        if self._described:
            return
        self._described = True
        self._safely("describe the run", lambda: self._describe(config))

    def log_events(self, rows: Iterable[Mapping[str, Any]], start_ns: int) -> None:
        """The table of all events so far."""
        data = [event_row(row) for row in rows]

        def log() -> None:
            import wandb

            self.logger.experiment.log({TABLE: wandb.Table(columns=list(EVENT_COLUMNS), data=data)})

        self._safely("log the events", log)

    def log_picture(self, draw: Callable[[Path], None]) -> None:
        """A PNG that `draw` makes."""

        def log() -> None:
            import wandb

            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "timeline.png"
                draw(path)
                self.logger.experiment.log({PICTURE: wandb.Image(str(path))})

        self._safely("log the picture", log)

    def summarize(self, values: Mapping[str, Any]) -> None:
        """The run's summary."""
        self._safely("write the summary", lambda: self.logger.experiment.summary.update(dict(values)))

    def keep(self, files: Iterable[Path]) -> None:
        """Put the ledgers into the run's folder."""

        def save() -> None:
            for file in files:
                self.logger.experiment.save(str(file), base_path=str(file.parent), policy="end")

        self._safely("keep the ledger", save)

    def alert(self, title: str, text: str) -> None:
        """``wandb.alert``; W&B mails it, or posts it to Slack."""
        self._safely("alert", lambda: self.logger.experiment.alert(title=title, text=text, wait_duration=0))

    def _open(self) -> None:
        import wandb

        options = wandb_options(self.logger)
        if "settings" not in options:
            options["settings"] = wandb.Settings(init_timeout=INIT_SECONDS, finish_timeout=FINISH_SECONDS)
        began = time.monotonic()
        try:
            _ = self.logger.experiment
        except Exception as error:  # noqa: BLE001  wandb raises many kinds, all of them mean: not online
            _log.warning(
                "W&B could not start a run (%s, after %.0f s): it is written to disk instead; `wandb sync` uploads it later",
                str(error).splitlines()[0] if str(error) else type(error).__name__,
                time.monotonic() - began,
            )
            set_wandb_offline(self.logger)
            _ = self.logger.experiment

    def _describe(self, config: Mapping[str, Any]) -> None:
        run = self.logger.experiment
        run.define_metric(WALL)
        run.define_metric("trainer/global_step")
        for name in ("goodput/*", "badput_s/*", "throughput/*", "ntp/*"):
            run.define_metric(name, step_metric=WALL)
        for name in ("goodput/cumulative", "goodput/capacity_weighted"):
            run.define_metric(name, step_metric=WALL, summary="last")
        run.define_metric("goodput/window", step_metric=WALL, summary="min")
        run.config.update({"ntp": dict(config)}, allow_val_change=True)

    def _safely(self, what: str, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # noqa: BLE001  an outage of W&B must not stop training
            self.num_failed += 1
            if self.num_failed <= 3:
                _log.warning("W&B: could not %s: %s: %s", what, type(error).__name__, error)


def event_row(row: Mapping[str, Any]) -> list[Any]:
    """An event as a row of the table, in the order of `EVENT_COLUMNS`."""
    seconds = row.get("seconds") or {}
    return [
        int(row["t"]) / 1e9,
        row.get("step"),
        row["event"],
        " ".join(map(str, row.get("workers", ()))),
        " ".join(map(str, row.get("gpus", ()))),
        " ".join(row.get("roles", ())),
        row.get("why", ""),
        seconds.get("total"),
        seconds.get("broken"),
        seconds.get("regrouping"),
        sum(seconds.get(name, 0.0) for name in ("planning", "moving")) if seconds else None,
        row.get("bytes_moved"),
        row.get("generation"),
        row.get("topology", ""),
    ]
