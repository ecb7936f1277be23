"""A training script whose every worker writes down what happens to it: the work of `bench_recovery` and `chaos`.

    python -m benchmarks.recovery_job --out FOLDER [--replicas 3 3] [--steps 40] [--float64] ...

`FOLDER/<worker>-<pid>.jsonl` gets one line per event, with `seconds` of the machine's monotonic clock; the leader leaves
`FOLDER/weights` at the end. Samples are a function of (seed, index).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.leaks import usage
from benchmarks.small_llama import Progressions, small_llama
from lightning_ntp import NTPStrategy
from lightning_ntp.strategy.config import RecoveryConfig
from lightning_ntp.strategy.events import CommitEvent, LossEvent, RecoveryEvent

SIZES = {"vocab": 4608, "hidden": 384, "inter": 1152, "layers": 4, "heads": 12, "kv_heads": 12}
"""11 million parameters: the model of the peers' programs."""


class EventLog:
    """An observer of the strategy; each line is flushed, so that a kill loses none."""

    def __init__(self, folder: Path, worker: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"{worker}-{os.getpid()}.jsonl").open("a")
        self.worker = worker
        self.seen: list[int] = []  # samples of the open window

    def write(self, kind: str, **values: Any) -> None:
        """One line."""
        line = {"kind": kind, "worker": self.worker, "seconds": time.monotonic(), **values}
        print(json.dumps(line), file=self.file, flush=True)

    def on_phase(self, name: str) -> None:
        if name == "regrouping":
            self.seen = []  # the window runs again from its start

    def on_loss(self, event: LossEvent) -> None:
        self.write("loss", step=event.step, lost=event.workers, heard=event.seconds, phase=event.phase)

    def on_recovery(self, event: RecoveryEvent) -> None:
        values = {"step": event.step, "lost": event.lost, "joined": event.joined, "parts": dict(event.seconds)}
        self.write("recovery", generation=event.generation, bytes=event.bytes_moved, degrees=event.degrees, **values)

    def on_commit(self, event: CommitEvent) -> None:
        self.write("commit", step=event.step, samples=event.num_samples, attempts=event.attempts, seen=self.seen, usage=usage())
        self.seen = []


class Job(L.LightningModule):
    """Fine-tunes a llama from a config."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        sizes = {name: getattr(options, name) for name in SIZES}
        self.model = small_llama(sizes, options.length, options.seed, options.dropout)
        self.log_file: EventLog | None = None

    def training_step(self, samples: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        assert self.log_file is not None
        self.log_file.seen += samples["index"].tolist()
        loss: torch.Tensor = self.model(input_ids=samples["input_ids"], labels=samples["input_ids"]).loss
        self.log("loss", loss, on_step=True, sync_dist=True)
        if self.options.pace:
            time.sleep(self.options.pace)
        return loss

    def on_train_start(self) -> None:
        """From here on workers have ids."""
        worker = int(os.environ.get("NTP_WORKER_ID", os.environ.get("RANK", "0")))
        self.log_file = EventLog(self.options.out, worker)
        endpoint = os.environ.get("NTP_STORE_ENDPOINT", "")
        self.log_file.write("start", pid=os.getpid(), step=self.global_step, endpoint=endpoint)
        self.trainer.strategy.observers.add(self.log_file)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.log_file is not None
        loss = self.trainer.callback_metrics.get("loss")
        self.log_file.write("step", step=self.global_step - 1, batch=batch_idx, loss=None if loss is None else loss.item())

    def on_train_end(self) -> None:
        """Whoever has come so far was hit by nothing."""
        assert self.log_file is not None
        self.log_file.write("end")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.options.lr)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--replicas", nargs="+", default=["3", "3"], help="degrees, or FSDPxTP")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=6, help="samples of a data row of the healthy job")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds of sleep in each micro-batch: a GPU that does not share its core")
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--no-recovery", action="store_true")
    parser.add_argument("--max-respawns", type=int, default=8)
    parser.add_argument("--neighbours", choices=("keep", "renew"), default="keep")
    parser.add_argument("--checkpoint-every", type=int, default=0)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return parser.parse_args(arguments)


def shapes_of(words: list[str]) -> list[tuple[int, int]]:
    """``["3", "2x3"]`` -> ``[(1, 3), (2, 3)]``."""
    return [(1, int(word)) if "x" not in word else (int(word.split("x")[0]), int(word.split("x")[1])) for word in words]


def main() -> None:
    options = parsed()
    shapes = shapes_of(options.replicas)
    recovery = RecoveryConfig(enabled=not options.no_recovery, max_respawns=options.max_respawns, neighbours=options.neighbours)
    strategy = NTPStrategy(replica_sizes=shapes, seed=options.seed, recovery=recovery)
    callbacks: list[Any] = []
    if options.checkpoint_every:
        from lightning.pytorch.callbacks import ModelCheckpoint

        every = options.checkpoint_every
        callbacks.append(ModelCheckpoint(options.out / "checkpoints", every_n_train_steps=every, save_top_k=1, save_last=True))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=sum(fsdp * tp for fsdp, tp in shapes),
        precision="64-true" if options.float64 else "32-true",
        max_steps=options.steps,
        max_epochs=-1,
        accumulate_grad_batches=options.accumulate,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        callbacks=callbacks,
    )
    data = Progressions(4096, options.length, options.vocab)
    last = "last" if options.checkpoint_every and (options.out / "checkpoints").exists() else None
    trainer.fit(Job(options), DataLoader(data, options.batch, shuffle=True), ckpt_path=last)
    trainer.strategy.save_pretrained(options.out / "weights")


if __name__ == "__main__":
    main()
