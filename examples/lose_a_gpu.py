"""A worker of a running fit is killed: training goes on without it, its replacement joins, and nothing is lost.

    python examples/lose_a_gpu.py --undisturbed    # 2 replicas x 3 on CPU, nothing happens
    python examples/lose_a_gpu.py                  # worker 4 is killed in the middle of a backward pass; compares with the run above

The kill is an ordinary SIGKILL, asked for by NTP_FAULTS as in anybody's own drills; the training script knows nothing of it.
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
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_ntp
from lightning_ntp.strategy.events import Observer
from lightning_ntp.testing import ENV_FAULTS, Fault, FaultScript

KILLED_WORKER, KILL_STEP = 4, 10
VOCABULARY, BLOCK = 257, 32
HURT_SECONDS = 0.3
"""Sleep after each step while a worker is missing: the start of a process takes as long as all steps of this small job."""


class Bytes(Dataset[torch.Tensor]):
    """This file's own text, byte by byte, in blocks."""

    def __init__(self) -> None:
        with open(__file__, "rb") as file:
            text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
        self.blocks = text.unfold(0, BLOCK, BLOCK // 2)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.blocks[index]


class SmallLlama(L.LightningModule):
    """A causal LM as anybody would write it."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, on_step=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Story(L.Callback):
    """One line per tenth step; remembers every loss."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        replicas = trainer.strategy.topology.replicas
        self.losses[trainer.global_step] = trainer.callback_metrics["loss"].item()
        if trainer.is_global_zero and trainer.global_step % 10 == 0:
            degrees = [replica.degree for replica in replicas]
            print(f"step {trainer.global_step:3d}  loss {self.losses[trainer.global_step]:.9f}  replicas {degrees}", flush=True)
        if sum(len(replica.workers) for replica in replicas) < trainer.num_devices:
            time.sleep(HURT_SECONDS)


class Narrator(Observer):
    """Says what the recovery says."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def on_loss(self, event: Any) -> None:
        if self.strategy.is_global_zero:
            print(f"--- lost in step {event.step}: {event.why}", flush=True)

    def on_recovery(self, event: Any) -> None:
        if self.strategy.is_global_zero:
            who = f"workers {list(event.joined)} joined" if event.joined else "going on without it"
            print(f"--- {who}: {event.topology}; {event.seconds['total']:.2f} s", flush=True)


def compare(losses: dict[int, float], undisturbed: Path, settings: list[Any]) -> None:
    """How far this run is from the one without a kill, if there was one with the same settings."""
    before = json.loads(undisturbed.read_text()) if undisturbed.exists() else {"settings": None}
    if before["settings"] != settings:
        print("run it with --undisturbed first, and this run will be compared with it", flush=True)
        return
    differences = [abs(loss - before["losses"][str(step)]) for step, loss in losses.items()]
    print(f"against the undisturbed run: {differences[-1]:.1e} at the end, {max(differences):.1e} at most", flush=True)


def draw_timeline(path: Path) -> None:
    """What the six places did over time, from the run's ledger."""
    from lightning_ntp.goodput_merge import read_run
    from lightning_ntp.plots import draw_goodput

    draw_goodput(read_run(Path(os.environ["NTP_LOG_FOLDER"])), path)
    print(f"what the workers did over time: {path}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--undisturbed", action="store_true", help="without the kill")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--precision", default="64-true")
    parser.add_argument("--replica-sizes", type=int, nargs="+", default=[3, 3])
    parser.add_argument("--out", type=Path, default=Path("ntp_logs/lose_a_gpu"), help="folder for losses and the picture")
    args = parser.parse_args()
    if not args.undisturbed and "NTP_WORKER_ID" not in os.environ:  # the launching process tells its workers
        os.environ[ENV_FAULTS] = FaultScript(Fault("kill", KILLED_WORKER, "sync", KILL_STEP)).to_json()
    L.seed_everything(1, verbose=False)
    strategy, story = lightning_ntp.NTPStrategy(replica_sizes=args.replica_sizes), Story()
    strategy.observers.add(Narrator(strategy))
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=sum(args.replica_sizes), precision=args.precision, max_epochs=args.epochs,
        callbacks=[story], logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(SmallLlama(), DataLoader(Bytes(), batch_size=8, shuffle=True))
    if not trainer.is_global_zero:
        return
    print(f"the end: {trainer.global_step} steps, loss {story.losses[trainer.global_step]:.9f}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    settings = [args.epochs, args.precision, len(args.replica_sizes)]
    if args.undisturbed:
        (args.out / "undisturbed.json").write_text(json.dumps({"settings": settings, "losses": story.losses}))
    else:
        compare(story.losses, args.out / "undisturbed.json", settings)
        draw_timeline(args.out / "timeline.png")


if __name__ == "__main__":
    main()
