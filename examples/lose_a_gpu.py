"""A worker of a running fit is killed: training goes on without it, its replacement joins, and nothing is lost.

    python examples/lose_a_gpu.py                  # 2 replicas x 3 on CPU; worker 4 is killed in the middle of a backward pass
    python examples/lose_a_gpu.py --undisturbed    # the same run without the kill: the same losses

The kill is an ordinary SIGKILL, asked for by NTP_FAULTS as in anybody's own drills; the training script knows nothing of it.
"""

from __future__ import annotations

import argparse
import os
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
    """One line per fifth step, and one for whatever happens to the job."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and trainer.global_step % 5 == 0:
            degrees = [replica.degree for replica in trainer.strategy.topology.replicas]
            print(f"step {trainer.global_step:3d}  loss {trainer.callback_metrics['loss']:.9f}  replicas {degrees}", flush=True)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--undisturbed", action="store_true", help="without the kill")
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    if not args.undisturbed and "NTP_WORKER_ID" not in os.environ:  # the launching process tells its workers
        os.environ[ENV_FAULTS] = FaultScript(Fault("kill", KILLED_WORKER, "sync", KILL_STEP)).to_json()
    L.seed_everything(1, verbose=False)
    strategy = lightning_ntp.NTPStrategy(replica_sizes=[3, 3])
    strategy.observers.add(Narrator(strategy))
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=6, max_epochs=args.epochs, callbacks=[Story()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(SmallLlama(), DataLoader(Bytes(), batch_size=8, shuffle=True))
    if trainer.is_global_zero:
        print(f"the end: {trainer.global_step} steps, loss {trainer.callback_metrics['loss']:.9f}", flush=True)


if __name__ == "__main__":
    main()
