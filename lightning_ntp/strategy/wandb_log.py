"""What W&B gets beside the scalars: axes, configuration, events, alerts, a picture, the ledger. None of it can stop training.

[Note: who writes] The leader writes, through Lightning's WandbLogger. All workers know the run's id from the start, so that after the
loss of the leader the next one opens the same run: online the server goes on with it (``resume="allow"``), offline there are
two folders with one id, which ``wandb sync`` puts into one run. W&B writes its offline file in blocks of 32 KiB, and SIGKILL loses the
last one: therefore the new leader writes the table of events again, in full, and the ledger on disk holds every number.

[Note: what blocks] Scalars and the summary only hand over to W&B's own process. Tables, pictures and files ask the server first, for
minutes while it is down: they go through a thread, and so does the opening of the run by a new leader.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning_ntp.strategy._wandb_private import (
    open_wandb,
    set_wandb_id,
    set_wandb_offline,
    set_wandb_run,
    wandb_options,
    wandb_run_of,
)
from lightning_ntp.strategy.background import Background

_log = logging.getLogger(__name__)

INIT_SECONDS, LOGIN_SECONDS = 20.0, 10.0
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


class LateRun:
    """Stands for a W&B run until somebody needs it. False, so that Lightning takes the logger's own id for its version."""

    def __init__(self, open_run: Callable[[], Any]) -> None:
        self.__dict__["_open_run"] = open_run

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._open_run(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._open_run(), name, value)


class WandbRun:
    """One WandbLogger's run.

    Args:
        logger: Lightning's.
        run_id: the id that all workers use, unless the user gave one.
        leads: whether this worker writes, now.
    """

    def __init__(self, logger: Any, run_id: str, leads: Callable[[], bool] = lambda: True) -> None:
        self.logger, self._leads = logger, leads
        self.num_failed = 0
        self._held: list[tuple[str, tuple[Any, ...], dict[str, Any]]] | None = None
        self._lock = threading.RLock()
        self._described = False
        self._background = Background("ntp-wandb")
        self.is_ours = wandb_run_of(logger) is None and not wandb_options(logger).get("id")
        if self.is_ours:
            set_wandb_id(logger, run_id)
        if wandb_run_of(logger) is None:
            set_wandb_run(logger, LateRun(self.open))

    @property
    def id(self) -> str | None:
        """The run's id."""
        return wandb_options(self.logger).get("id")

    @property
    def is_open(self) -> bool:
        """Whether W&B knows of the run."""
        return not isinstance(wandb_run_of(self.logger), LateRun)

    def go_on_with(self, run_id: str) -> None:
        """Use the run of the job that a checkpoint comes from, unless the user chose an id or the run is open."""
        if self.is_ours and not self.is_open:
            set_wandb_id(self.logger, run_id)

    def hold(self) -> None:
        """Keep what is logged until `release`: a checkpoint may still say which run it belongs to, or W&B is slow to answer."""
        with self._lock:
            if not self.is_open and self._held is None:
                self._held = []
                for name in ("log_hyperparams", "log_metrics"):
                    self.logger.__dict__[name] = partial(self._keep, name)

    def _keep(self, name: str, *args: Any, **kwargs: Any) -> None:
        with self._lock:
            if self._held is not None:
                if self._leads():
                    self._held.append((name, args, kwargs))
                return
        getattr(self.logger, name)(*args, **kwargs)

    def release(self) -> None:
        """Open the run and log what was held."""
        self.open()
        with self._lock:
            held, self._held = self._held or [], None
            for name in ("log_hyperparams", "log_metrics"):
                self.logger.__dict__.pop(name, None)
            for name, args, kwargs in held:
                self._safely(name, partial(getattr(self.logger, name), *args, **kwargs))

    def take_over(self, config: Mapping[str, Any]) -> None:
        """This worker leads from now on: open the run while training goes on."""
        if self.is_open:
            return
        self.hold()

        def begin() -> None:
            self.release()
            self.describe(config)

        self._background.submit("open", begin)

    def open(self) -> Any:
        """The run; offline if W&B does not answer or does not take the key."""
        with self._lock:
            if not self.is_open:
                self._safely("open the run", self._open)
            return wandb_run_of(self.logger) if self.is_open else None

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

        self._background.submit(TABLE, partial(self._safely, "log the events", log))

    def log_picture(self, draw: Callable[[Path], None]) -> None:
        """A PNG that `draw` makes."""

        def log() -> None:
            import wandb

            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "timeline.png"
                draw(path)
                self.logger.experiment.log({PICTURE: wandb.Image(str(path))})

        self._background.submit(PICTURE, partial(self._safely, "log the picture", log))

    def summarize(self, values: Mapping[str, Any]) -> None:
        """The run's summary."""
        self._safely("write the summary", lambda: self.logger.experiment.summary.update(dict(values)))

    def keep(self, folder: Path) -> None:
        """Put the ledgers into the run's folder."""

        def save() -> None:
            self.logger.experiment.save(str(folder / "ledger-*.jsonl"), base_path=str(folder), policy="end")

        self._background.submit("keep", partial(self._safely, "keep the ledger", save))

    def close(self) -> None:
        """Wait for what is on its way, a while."""
        if not self._background.wait(FINISH_SECONDS):
            _log.warning("W&B does not answer: the table of events or the picture may be missing; `ntp report` has them")

    def alert(self, title: str, text: str) -> None:
        """``wandb.alert``; W&B mails it, or posts it to Slack."""

        def alert() -> None:
            self.logger.experiment.alert(title=title, text=text, wait_duration=0)

        self._background.submit(("alert", title), partial(self._safely, "alert", alert))

    def _open(self) -> None:
        import wandb

        options = wandb_options(self.logger)
        if "settings" not in options:
            options["settings"] = wandb.Settings(
                init_timeout=INIT_SECONDS, login_timeout=LOGIN_SECONDS, finish_timeout=FINISH_SECONDS
            )
        began = time.monotonic()
        try:
            open_wandb(self.logger)
        except Exception as error:  # noqa: BLE001  wandb raises many kinds, all of them mean: not online
            _log.warning(
                "W&B could not start a run (%s, after %.0f s): it is written to disk instead; `wandb sync` uploads it later",
                str(error).splitlines()[0] if str(error) else type(error).__name__,
                time.monotonic() - began,
            )
            if wandb.run is None:
                wandb.teardown()  # its service still holds the id of the run that failed
            set_wandb_offline(self.logger)
            try:
                open_wandb(self.logger)
            except Exception:
                wandb_options(self.logger)["mode"] = "disabled"  # not even the disk takes it: train without
                open_wandb(self.logger)
                raise

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
