"""A job of six forked workers that trains through Lightning under faults, and the one process that it must equal.

    run = Run(tmp_path, faults=FaultScript(...), **settings);  run.check()  # ids, losses, parameters, moments

Every worker writes what it has applied: per optimizer step the ids of its data row's samples, the loss, and at the end its state.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import RandomSampler

from lightning_ntp.next_topology import WorkerCount
from lightning_ntp.stragglers import SlowConfig
from lightning_ntp.strategy.config import RecoveryConfig
from lightning_ntp.strategy.coordinator import Patience
from lightning_ntp.strategy.events import CommitEvent, DamageEvent, LossEvent, Observer, RecoveryEvent, SlowEvent
from lightning_ntp.strategy.fsdp import local_of
from lightning_ntp.strategy.rendezvous import JobAddress
from lightning_ntp.strategy.sampler import global_order
from lightning_ntp.strategy.whole import whole_tensors
from lightning_ntp.testing import FaultScript
from tests import lightning_jobs as jobs
from tests.forked import ForkedJob, Log

SIZE, BATCH, SEED = 29, 4, 5
PATIENT = Patience(hang_seconds=30.0, join_seconds=40.0, start_seconds=60.0)
NEVER, WAIT_SECONDS = 1_000_000, 0.25


class Recorder(Observer):
    """Writes what happens to the test's log."""

    def __init__(self, log: Log, module: Recorded, strategy: Any, settings: dict[str, Any]) -> None:
        self.log, self.module, self.strategy = log, module, strategy
        self.terminate = [tuple(one) for one in settings["terminate"]]
        self.end = [tuple(one) for one in settings["end"]]
        self.wait_from, self.wait_for = settings["wait_until_whole"], settings["whole"]

    def on_commit(self, event: CommitEvent) -> None:
        if (event.step, self.strategy.recovery.member.worker) in self.terminate:
            os.kill(os.getpid(), signal.SIGTERM)
        if event.step >= self.wait_from and len(self.strategy.topology.workers) < self.wait_for:
            time.sleep(WAIT_SECONDS)  # a job whose steps are long beside the start of a worker
        ids, self.module.ids = self.module.ids, []
        self.log(
            step=event.step,
            row=self.strategy.control.row,
            ids=ids,
            attempts=event.attempts,
            updated=event.updated,
            samples=event.num_samples,
            waited=event.straggler_seconds,
        )
        if (event.step, self.strategy.recovery.member.worker) in self.end:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_slow(self, event: SlowEvent) -> None:
        self.log(slow=event.kind, workers=event.workers, at=event.step, factor=event.factor, words=event.words)

    def on_loss(self, event: LossEvent) -> None:
        self.module.ids = []
        self.log(lost=event.workers, at=event.step, phase=event.phase, why=event.why)

    def on_damage(self, event: DamageEvent) -> None:
        self.log(damaged=event.workers, at=event.step, since=event.since_step, places=event.places, repaired=event.num_repaired)

    def on_recovery(self, event: RecoveryEvent) -> None:
        self.log(
            recovered=event.generation,
            at=event.step,
            times=dict(event.seconds),
            topology=event.topology,
            leader=event.leader,
            moved=event.bytes_moved,
            gone=event.lost,
            joined=event.joined,
            left=event.left,
        )


@dataclass(frozen=True)
class Narrow(WorkerCount):
    """No replica may have more than so many rows, as if memory or the network forbade it."""

    max_rows: int = 1

    def fits(self, degree: int, fsdp_size: int = 1, micro_batch: int = 1) -> bool:
        return fsdp_size <= self.max_rows


class Recorded(jobs.TinyLlama):
    """Notes the ids of the samples that count in the running window."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.ids: list[int] = []
        self.skip_from = self.wait_from = NEVER

    def training_step(self, samples: jobs.Sample, batch_idx: int) -> torch.Tensor:
        assert self.model.training
        if self.global_step >= self.skip_from:
            self.model.model.layers[-1].mlp.forward = lambda hidden: hidden
        if self.trainer.world_size > 1 and self.global_step >= self.wait_from:
            torch.distributed.barrier()
        if self.trainer.world_size > 1 and self.trainer.strategy.runner.loss_scale > 0:
            self.ids += samples["index"].tolist()
        return super().training_step(samples, batch_idx)


def train(address: JobAddress, log: Log) -> None:
    """The script of a worker."""
    torch.set_num_threads(1)
    settings = json.loads(os.environ["NTP_TEST"])
    with jobs.float64_norms():
        module = Recorded(**settings["model"])
        if settings["skip"]:
            what, worker, step = settings["skip"]
            module.skip_from = step if what == "module" and worker == address.worker else NEVER
            module.wait_from = step if what == "barrier" and worker != address.worker else NEVER
        slow = SlowConfig(**settings["slow"])
        recovery = RecoveryConfig(True, slow=slow, **settings["recovery"])
        strategy = jobs.ntp(recovery=recovery, **settings["strategy"])
        if settings["max_rows"]:
            strategy._costs = lambda: Narrow(settings["workers"], max_rows=settings["max_rows"])
        strategy.observers.add(Recorder(log, module, strategy, settings))
        options = settings["trainer"]
        if settings["log"]:
            options |= {"logger": CSVLogger(os.environ["NTP_TEST_FOLDER"], "logs"), "enable_progress_bar": True}
            options |= {"log_every_n_steps": 1}
        if settings["save_every"]:
            folder = os.environ["NTP_TEST_FOLDER"]
            saver = ModelCheckpoint(f"{folder}/saved", "{step}", save_top_k=-1, every_n_train_steps=settings["save_every"])
            options |= {"callbacks": [saver], "enable_checkpointing": True}
        trainer = jobs.trainer(strategy, settings["workers"], **options)
        loader = jobs.loader(SIZE, BATCH, shuffle=True)
        validation = jobs.loader(9, BATCH) if settings["validation"] else None
        trainer.fit(module, loader, validation)
        log(
            finished=trainer.global_step,
            history=module.history,
            lr=trainer.optimizers[0].param_groups[0]["lr"],
            rank=trainer.global_rank,
            fds=len(os.listdir("/proc/self/fd")),
        )
        folder = Path(os.environ["NTP_TEST_FOLDER"])
        if strategy.topology.position(address.worker).replica == 0:
            state = dict(whole_tensors(strategy.sharded))
            moments = whole_moments(strategy)
            if trainer.is_global_zero:
                torch.save({"state": state, "moments": moments}, folder / "state.pt")
        strategy.barrier()  # whoever ends first would cut the last exchange of the others short


def whole_moments(strategy: Any) -> dict[str, torch.Tensor]:
    """Adam's moments in one piece, on every worker of the first replica. Collective over it."""
    sharded = strategy.sharded
    found: dict[str, torch.Tensor] = {}
    optimizer = strategy.optimizers[0]
    for key in ("exp_avg", "exp_avg_sq"):
        kept = [(p, local_of(p).clone()) for _, p in sharded.parameters()]
        with torch.no_grad():
            for parameter, _ in kept:
                local_of(parameter).copy_(local_of(optimizer.state[parameter][key]))
        found |= {f"{name}/{key}": tensor.clone() for name, tensor in whole_tensors(sharded)}
        with torch.no_grad():
            for parameter, value in kept:
                local_of(parameter).copy_(value)
    return found


class Run:
    """A job under faults and what came of it. `options` are the Trainer's.

    terminate, end: (step, worker): the worker gets a SIGTERM or a SIGKILL after that step. skip: ("module" or "barrier", worker, step): from that step on
    the worker leaves out the last MLP, or a barrier that the others have. wait_until_whole: from this step on the job gives replacements time to
    come until it is whole, or has `whole` workers. recovery, patience: fields that differ.
    max_rows: no replica may have more, see `Narrow`. max_losses_per_place: 1: the place of a lost worker stays empty.
    """

    def __init__(
        self,
        folder: Path,
        faults: FaultScript | None = None,
        *,
        workers: int = 6,
        validation: bool = False,
        save_every: int = 0,
        log: bool = False,
        terminate: list[tuple[int, int]] | None = None,
        end: list[tuple[int, int]] | None = None,
        strategy: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        slow: dict[str, Any] | None = None,
        max_respawns: int = 0,
        max_restarts: int = 0,
        num_renewals: int = 0,
        wait_until_whole: int = NEVER,
        whole: int = 0,
        recovery: dict[str, Any] | None = None,
        patience: dict[str, float] | None = None,
        skip: tuple[str, int, int] | None = None,
        max_losses_per_place: int = 100,
        max_rows: int | None = None,
        code: int = 0,
        **options: Any,
    ) -> None:
        self.folder, self.workers, self.model = folder, workers, model or {}
        self.shrinks = (recovery or {}).get("batch_policy") == "shrink"
        self.options = {"max_epochs": 2, "gradient_clip_val": 0.5} | options
        self.accumulate = self.options.get("accumulate_grad_batches", 1)
        shapes = (strategy or {}).get("replica_sizes", [3, 3])
        self.num_rows = sum(1 if isinstance(shape, int) else shape[0] for shape in shapes)
        settings = {
            "workers": workers,
            "validation": validation,
            "save_every": save_every,
            "log": log,
            "terminate": terminate or [],
            "end": end or [],
            "wait_until_whole": wait_until_whole,
            "whole": whole or workers,
            "recovery": {"hang_seconds": 40.0} | (recovery or {}),
            "skip": skip,
            "max_rows": max_rows,
            "strategy": {"replica_sizes": [3, 3]} | (strategy or {}),
            "model": self.model,
            "slow": slow or {},
            "trainer": self.options,
        }
        os.environ["NTP_TEST"], os.environ["NTP_TEST_FOLDER"] = json.dumps(settings), str(folder)
        patient = replace(PATIENT, **(patience or {}))
        self.job = ForkedJob(
            train,
            workers,
            folder,
            faults=faults,
            patience=patient,
            max_respawns=max_respawns,
            max_losses_per_place=max_losses_per_place,
            num_renewals=num_renewals,
            max_restarts=max_restarts,
            log_folder=folder / "ntp",
        )
        self.code = self.job.run()
        (folder / "printed").write_bytes(self.job.printed)  # all of it: what is shown of a failure is its end
        assert self.code == code, self.job.printed.decode()[-6000:]

    @property
    def global_batches(self) -> list[list[int]]:
        """What an undisturbed run trains on, step by step; batches that may shrink have the sizes that this run has used."""
        return [batch for epoch in self.epochs for batch in epoch]

    @property
    def epochs(self) -> list[list[list[int]]]:
        """`global_batches` epoch by epoch."""
        whole = BATCH * self.num_rows * self.accumulate
        orders = [global_order(RandomSampler(range(SIZE)), SEED, epoch) for epoch in range(self.options["max_epochs"])]
        sizes = iter(map(len, self.applied) if self.shrinks else itertools.repeat(whole))
        epochs = []
        for order in orders:
            ids, batches = iter(order), list[list[int]]()
            while sum(map(len, batches)) < len(order):
                batches.append(list(itertools.islice(ids, next(sizes))))
            epochs.append(batches)
        return epochs

    @property
    def applied(self) -> list[list[int]]:
        """Ids of the samples of each update, in the order of data rows."""
        rows: dict[int, dict[int, list[int]]] = {}
        for line in self.job.lines:
            if "step" in line:
                seen = rows.setdefault(line["step"], {}).setdefault(line["row"], line["ids"])
                assert seen == line["ids"], f"roles of row {line['row']} saw other samples in step {line['step']}"
        return [[i for row in sorted(rows[step]) for i in rows[step][row]] for step in sorted(rows)]

    def lines(self, key: str) -> list[dict[str, Any]]:
        """What workers wrote under a key."""
        return [line for line in self.job.lines if key in line]

    def check(self, survivors: set[int]) -> None:
        """Everything equals the undisturbed run, on all survivors."""
        finished = self.lines("finished")
        assert {line["worker"] for line in finished} == survivors
        wanted = self.global_batches
        if self.accumulate == 1:
            assert self.applied == wanted
        assert [sorted(ids) for ids in self.applied] == [sorted(ids) for ids in wanted]
        for worker in survivors:
            steps = [line["step"] for line in self.lines("step") if line["worker"] == worker]
            first = steps[0] if worker >= self.workers else 0
            assert steps == list(range(first, len(wanted))), f"worker {worker}"
        twin, moments = self._twin()
        self._check_losses(finished, twin)
        self._check_state(twin, moments)

    def _twin(self) -> tuple[jobs.TinyLlama, dict[str, torch.Tensor]]:
        module = jobs.TinyLlama(**self.model)
        with jobs.float64_norms():
            options = {k: v for k, v in self.options.items() if k == "gradient_clip_val"}
            plain = jobs.trainer("auto", 1, **options)
            plain.fit(module, torch.utils.data.DataLoader(jobs.Samples(64), batch_sampler=self.global_batches))
        optimizer = plain.optimizers[0]
        names = {parameter: name for name, parameter in module.named_parameters()}
        moments = {
            f"{names[parameter]}/{key}": state[key]
            for parameter, state in optimizer.state.items()
            for key in ("exp_avg", "exp_avg_sq")
        }
        return module, moments

    def check_state(self) -> None:
        """Parameters and moments at the end are those of the undisturbed run."""
        self._check_state(*self._twin())

    def _check_losses(self, finished: list[dict[str, Any]], twin: jobs.TinyLlama) -> None:
        wanted = [entry["train_step"] for entry in twin.history]
        for line in finished:
            losses = [entry["train_step"] for entry in line["history"]]
            steps = [loss for i, loss in enumerate(losses) if i in self._batch_entries(len(losses))]
            if self.accumulate == 1 and line["worker"] < self.workers:
                error = max(abs(a - b) for a, b in zip(steps, wanted[: len(steps)], strict=True))
                assert error < 1e-9, f"worker {line['worker']}: losses differ by {error}"

    def _batch_entries(self, count: int) -> list[int]:
        """Positions in a module's history that stand for batches: an epoch's end is one entry more."""
        if self.accumulate > 1:
            return []
        ends = set(itertools.accumulate(len(epoch) + 1 for epoch in self.epochs))
        return [i for i in range(count) if i + 1 not in ends]

    def _check_state(self, twin: jobs.TinyLlama, moments: dict[str, torch.Tensor]) -> None:
        saved = torch.load(self.folder / "state.pt")
        named = dict(twin.named_parameters())
        assert saved["state"].keys() == named.keys() and saved["moments"].keys() == moments.keys()
        errors = {name: (tensor - named[name]).abs().max().item() for name, tensor in saved["state"].items()}
        errors |= {name: (tensor - moments[name]).abs().max().item() for name, tensor in saved["moments"].items()}
        assert max(errors.values()) < 1e-9, max(errors.items(), key=lambda item: item[1])
