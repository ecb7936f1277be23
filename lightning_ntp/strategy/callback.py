"""`ReshardOnGPULoss`: the goodput ledger of a job inside Lightning, its logs and alerts, and hooks for users.

    strategy.observers --phases, losses, commits--> LedgerObserver --> Ledger --> ledger-W.jsonl of every worker
    Lightning's hooks  --data, evaluation, ends-->        |
                                                     RunLog, WandbRun, Alerts: the leader only

``strategy="ntp"`` brings it with its defaults; it comes into the callbacks of the Trainer to configure it.
"""

from __future__ import annotations

import importlib
import os
import secrets
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ntp.errors import ConfigError, UnrecoverableError
from lightning_ntp.goodput import Ledger, steady_clock
from lightning_ntp.goodput_file import LedgerFile
from lightning_ntp.strategy import rendezvous, supervisor_config, throughput
from lightning_ntp.strategy.alerts import Alert, AlertConfig, Alerts, recovery_alerts, slow_alerts
from lightning_ntp.strategy.events import CommitEvent, DamageEvent, RecoveryEvent, SlowEvent
from lightning_ntp.strategy.hooks import JobObserver, UserHooks
from lightning_ntp.strategy.job_facts import describe_job
from lightning_ntp.strategy.ledger_observer import LedgerObserver, process_start_ns
from lightning_ntp.strategy.ledger_resume import adopt, job_id_of
from lightning_ntp.strategy.run_log import RunLog, scalars
from lightning_ntp.strategy.wandb_log import WandbRun, is_wandb

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object  # `callback_class` puts a Callback of one of the two Lightnings behind it

LOGS = "ntp_logs"


class ReshardOnGPULossLogic(UserHooks, _Base):
    """Keeps the goodput ledger, logs it, and tells of losses. Construct it as `lightning_ntp.ReshardOnGPULoss`.

    Args:
        log_every_n_steps: optimizer steps between two lines of scalars; None: the Trainer's ``log_every_n_steps``.
        window_seconds: what ``goodput/window`` looks back on.
        folder: where ledgers go, a folder per job in it; None: the supervisor's log folder (``ntp_logs/RUN``), or without one
            ``ntp_logs`` in the Trainer's ``default_root_dir``, if it has a logger.
        alerts: who is told of losses and low goodput.
        tokens_per_sample: for tokens per second; None: the length of ``input_ids``, if batches have them.
        flops_per_sample: forward and backward; None: by formula from the Hugging Face model in the module.
        peak_flops: of one GPU per second, for MFU; None: Lightning's table of GPUs.

    Users derive from it for ``on_gpu_lost(event)``, ``on_reshard(event)``, ``on_recovered(event)``, ``on_rejoined(event)``,
    ``on_damage(event)`` and ``on_slow(event)``. These run on every survivor and must not talk to other workers; an exception in them ends the job.
    """

    framework = "lightning.pytorch"

    def __init__(
        self,
        log_every_n_steps: int | None = None,
        window_seconds: float = 600.0,
        folder: str | os.PathLike[str] | None = None,
        alerts: AlertConfig = AlertConfig(),  # noqa: B008  frozen
        tokens_per_sample: float | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        super().__init__()
        if log_every_n_steps is not None and log_every_n_steps < 1:
            raise ConfigError(f"ReshardOnGPULoss: log_every_n_steps is 1 or more, got {log_every_n_steps}")
        if not window_seconds > 0:
            raise ConfigError(f"ReshardOnGPULoss: window_seconds is more than 0, got {window_seconds}")
        self.log_every_n_steps, self.window_seconds, self.folder = log_every_n_steps, window_seconds, folder
        self.alert_config = alerts
        self.work = throughput.Work(tokens_per_sample, flops_per_sample)
        self.peak_flops = peak_flops
        self.job = ""
        self.ledger_folder: Path | None = None
        self.observer: LedgerObserver | None = None
        self._trainer: Any = None
        self._module: Any = None
        self._runs: list[WandbRun] = []
        self._logged_step = -1
        self._started = False

    @property
    def ledger(self) -> Ledger:
        """The ledger; there is one from ``setup`` on."""
        if self.observer is None:
            raise ConfigError("the goodput ledger begins when the Trainer sets its callbacks up: call fit first")
        return self.observer.ledger

    def name_job(self, trainer: Any) -> None:
        """Before Lightning opens the loggers' runs: all workers agree on the job's name, and on W&B's id.

        Collective over all processes where no launcher has named the job.
        """
        self._trainer = trainer
        if not self.job:
            self.job = job_id_of(os.environ) or trainer.strategy.broadcast(secrets.token_hex(4))
            self._runs = [WandbRun(logger, f"ntp-{self.job}", self._leads) for logger in trainer.loggers if is_wandb(logger)]
            for run in self._runs:
                run.hold()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Lightning: the job is formed, the model not yet cut."""
        self._trainer, self._module = trainer, pl_module
        strategy = trainer.strategy
        if not hasattr(strategy, "observers"):
            raise ConfigError(f'ReshardOnGPULoss needs Trainer(strategy="ntp"), got {type(strategy).__name__}')
        if self.observer is not None:
            strategy.observers.add(self.observer)
            return
        worker, world = self._worker(), int(strategy.world_size)
        self._is_newcomer = worker >= int(os.environ.get("WORLD_SIZE", world))
        gpus = [worker] if self._is_newcomer else range(world)  # a newcomer learns from the others who else there is
        ledger = Ledger(gpus, steady_clock(), start_ns=process_start_ns())
        self.observer = JobObserver(ledger, {gpu: gpu for gpu in gpus}, self._topology)
        self.observer.callback = self
        strategy.observers.add(self.observer)
        self._log = RunLog(self.window_seconds)
        self._alerts = Alerts(self.alert_config, self._wandb_alert)
        self._meter = throughput.Meter(
            self.framework,
            strategy.config.batch_weight == "tokens",
            self.peak_flops
            or throughput.available_flops(self.framework, strategy.root_device, str(trainer.precision)),
        )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning: the model is cut, a checkpoint may follow."""
        self._observe.place()
        self._observe.enter("checkpoint_load" if getattr(trainer, "ckpt_path", None) else "init")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning: go on with the ledger of the job that a checkpoint is from."""
        if self.observer is None or self._started:
            return
        adopt(self._observe, state_dict, self._is_newcomer)
        self.job = state_dict["job"]
        if self.folder is None and state_dict.get("folder") and Path(state_dict["folder"]).is_dir():
            self.ledger_folder = Path(state_dict["folder"])
        self._log.window.restart(self.ledger.totals())
        for run, run_id in zip(self._runs, state_dict.get("wandb", ()), strict=False):
            run.go_on_with(run_id)

    def state_dict(self) -> dict[str, Any]:
        """Lightning: what a checkpoint keeps of the ledger."""
        if self.observer is None:
            return {}
        return {
            "job": self.job,
            "folder": "" if self.ledger_folder is None else str(self.ledger_folder),
            "ledger": self.ledger.state_dict(),
            "gpus": {str(worker): gpu for worker, gpu in self._observe.gpus.items()},
            "events": list(self._observe.events),
            "wandb": [run.id for run in self._runs],
        }

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning: everything is restored."""
        self._start()
        self._observe.enter("eval")

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        """Lightning: on to training."""
        self._observe.enter("other")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning: everything is restored."""
        self._start()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning: workers of the loader start."""
        self._wait_for("data_wait")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Lightning: a batch is there."""
        self._observe.between = "other"
        self.ledger.enter("productive")
        if self._meter.work.tokens is None and not self._meter.last:
            self._learn_work(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Lightning: the next batch is fetched."""
        step = trainer.global_step
        if step != self._logged_step and step % (self.log_every_n_steps or trainer.log_every_n_steps) == 0:
            self._write(step)
        self._wait_for("data_wait")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Lightning: hooks and checkpoints."""
        self._wait_for("other")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning: evaluation."""
        if self.observer is not None:
            self._observe.enter("eval")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Lightning: back to what was before."""
        if self.observer is not None:
            self._observe.enter(self._observe.between)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Lightning: training is over."""
        self._wait_for("other")
        self._observe.note("end", key=[self.job, trainer.global_step], step=trainer.global_step)
        self._write(trainer.global_step)
        self._conclude()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lightning: the run ends with an error."""
        if self.observer is None:
            return
        words = f"{type(exception).__name__}: {exception}".splitlines()[0][:300]
        self._observe.note("exception", step=self.ledger.step, why=words)
        if self._leads():
            if isinstance(exception, UnrecoverableError):
                self._alerts.send(Alert("unrecoverable", "training cannot go on", words, self.job))
            self._conclude()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Lightning: the loop is done."""
        if self.observer is not None:
            self.observer.flush()
            self._alerts.close()
            trainer.strategy.observers.remove(self.observer)

    @property
    def _observe(self) -> LedgerObserver:
        if self.observer is None:
            raise ConfigError("ReshardOnGPULoss has not been set up")
        return self.observer

    def _topology(self) -> Any:
        strategy = self._trainer.strategy
        return strategy.topology if strategy._runner is not None else None

    def _worker(self) -> int:
        if rendezvous.ENV_STORE_ENDPOINT in os.environ:
            return int(os.environ[rendezvous.ENV_WORKER_ID])
        return int(self._trainer.strategy.global_rank)

    def _leads(self) -> bool:
        return bool(self._trainer.strategy.is_global_zero)

    def _wait_for(self, bucket: str) -> None:
        self._observe.between = bucket
        self._observe.enter(bucket)

    def _start(self) -> None:
        """Once: the ledger's file, W&B's run, and the first event."""
        if self._started or self.observer is None:
            return
        self._started = True
        trainer, observer = self._trainer, self.observer
        observer.place()
        if self.ledger_folder is None and not trainer.fast_dev_run:
            self.ledger_folder = self._chosen_folder()
        if self.ledger_folder is not None:
            worker = self._worker()
            header = {"worker": worker, "own": [observer.gpus[worker]] if worker in observer.gpus else [], "job": self.job}
            file = LedgerFile(self.ledger_folder / f"ledger-{worker}.jsonl", header | {"t": self.ledger.now()})
            observer.ledger.attach(file.write)
        facts = describe_job(trainer, self._topology(), self.ledger_folder)
        observer.note("start", key=[self.ledger.generation, self.ledger.step], step=trainer.global_step, placed=observer.placed(), **facts)
        for run in self._runs if self._leads() else ():
            run.release()
            run.describe(facts)

    def _chosen_folder(self) -> Path | None:
        """Beside the supervisor's logs where it writes some, else a folder of the job; None: memory only."""
        if self.folder is not None:
            return Path(self.folder) / self.job
        if supervisor_config.ENV_LOG_FOLDER in os.environ:
            return Path(os.environ[supervisor_config.ENV_LOG_FOLDER])
        return Path(self._trainer.default_root_dir) / LOGS / self.job if self._trainer.loggers else None

    def _learn_work(self, batch: Any) -> None:
        size = sum(spec.numel for spec, _ in self._trainer.strategy.sharded.parameters())
        self._meter.work = self.work.completed(batch, self._module, size)
        self._meter.last = {"known": 1.0}

    def _on_commit(self, event: CommitEvent) -> None:
        self._meter.commit(event.seconds, event.num_samples if event.updated else 0.0)

    def _on_damage(self, event: DamageEvent) -> None:
        self._send([Alert("damage", f"copies differ after step {event.step}", "; ".join(event.shown), self.job)])
        self.on_damage(event)

    def _on_slow(self, event: SlowEvent) -> None:
        self._send(slow_alerts(event, self.job))
        self.on_slow(event)

    def _on_recovery(self, event: RecoveryEvent) -> None:
        """The leader of the new generation speaks for the job, also about what happened under the old one."""
        if self._leads():
            for run in self._runs:
                run.take_over(describe_job(self._trainer, self._topology(), self.ledger_folder))
            why = next((row["why"] for row in reversed(self._observe.events) if row["event"] == "loss"), "")
            self._send(recovery_alerts(event, why, self.job))
            self._write(self._trainer.global_step)
            for run in self._runs:
                run.log_events(self._observe.events, self.ledger.now())
        self.on_reshard(event)
        if event.joined:
            self.on_rejoined(event)
        if event.lost:
            self.on_recovered(event)

    def _send(self, alerts: list[Alert]) -> None:
        for alert in alerts if self._leads() else ():
            self._alerts.send(alert)

    def _wandb_alert(self, title: str, text: str) -> None:
        for run in self._runs:
            run.alert(title, text)

    def _write(self, step: int) -> None:
        """A line of scalars to all loggers, by the leader."""
        self._logged_step = step
        if not self._leads():
            return
        totals = self.ledger.totals()
        window = self._log.window.add(totals)
        values = scalars(totals, window, self._topology(), self.ledger.generation)
        values |= self._meter.rates(totals.num_live, totals.num_owned)
        self._log.write(self._trainer.loggers, values, max(0, step - 1))  # the number that Lightning gives its own lines
        self._alerts.watch(window.goodput, self.job)

    def _conclude(self) -> None:
        """What stays of the run: summary, table, picture, ledger."""
        self._observe.flush()
        if not self._leads() or not self._runs:
            return
        totals = self.ledger.totals()
        summary = scalars(totals, self._log.window.add(totals), self._topology(), self.ledger.generation)
        summary |= {"ntp/num_losses": float(sum(row["event"] == "loss" for row in self._observe.events))}
        for run in self._runs:
            run.log_events(self._observe.events, self.ledger.now())
            if self.ledger_folder is not None and self.ledger_folder.is_dir():
                run.log_picture(partial(_draw, self.ledger_folder))
                run.keep(self.ledger_folder)
            run.summarize(summary)
            run.close()


def _draw(folder: Path, path: Path) -> None:
    from lightning_ntp.goodput_merge import read_run
    from lightning_ntp.plots import draw_goodput  # matplotlib costs a second, and only the end of a run draws

    draw_goodput(read_run(folder), path)


@lru_cache
def callback_class(framework: str = "lightning.pytorch") -> type[ReshardOnGPULossLogic]:
    """`ReshardOnGPULossLogic` over the Callback of ``lightning.pytorch`` or ``pytorch_lightning``: two class trees."""
    base = importlib.import_module(f"{framework}.callbacks").Callback
    namespace = {"__doc__": ReshardOnGPULossLogic.__doc__, "__module__": __name__, "framework": framework}
    return type(base)("ReshardOnGPULoss", (ReshardOnGPULossLogic, base), namespace)


def ensure_callback(trainer: Any, framework: str) -> None:
    """The Trainer gets the callback with its defaults unless it has one; the job gets its name. Collective over all processes."""
    if trainer.barebones:
        return
    ours = next((callback for callback in trainer.callbacks if isinstance(callback, ReshardOnGPULossLogic)), None)
    if ours is None:
        ours = callback_class(framework)()
        trainer.callbacks.append(ours)
    ours.name_job(trainer)
