"""What a checkpoint costs: how long a step waits for it, how long it takes to the disk and back, and who writes how much.

    python -m benchmarks.bench_checkpoint --hidden 512 --layers 8 --replica-sizes 3 2

CPU processes over gloo; every figure is this machine's. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from torch.utils.data import DataLoader

from lightning_ntp import CheckpointConfig, NTPStrategy, RecoveryConfig
from lightning_ntp.dtensor.checkpoint_files import Manifest


class Model(L.LightningModule):
    """A llama that measures its steps, and saves at three of them."""

    def __init__(self, hidden: int, layers: int, folder: Path) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=2048, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
            num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64,
        )  # fmt: skip
        self.model, self.folder = transformers.LlamaForCausalLM(config), folder
        self.steps: list[float] = []
        self.saves: list[float] = []

    def training_step(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.since = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(time.perf_counter() - self.since)
        if batch_idx in (3, 6, 9):
            since = time.perf_counter()
            self.trainer.save_checkpoint(self.folder / "last.ckpt")
            self.saves.append(time.perf_counter() - since)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def measure(args: argparse.Namespace, beside: bool, folder: Path) -> tuple[dict[str, Any], bool]:
    """One run of 12 steps with three saves, and whether this process leads."""
    recovery = RecoveryConfig(checkpoint=CheckpointConfig(async_save=beside))
    strategy = NTPStrategy(replica_sizes=args.replica_sizes, recovery=recovery)
    trainer = L.Trainer(
        strategy=strategy, devices=sum(args.replica_sizes), accelerator="cpu", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Model(args.hidden, args.layers, folder)
    rows = len(args.replica_sizes)
    trainer.fit(module, DataLoader(torch.randint(2048, (24 * rows, 64)), batch_size=2))
    since = time.perf_counter()
    trainer.strategy.load_checkpoint(folder / "last.ckpt")
    load_seconds = time.perf_counter() - since
    files = Manifest.read(folder / "last.ckpt").files
    parts = [size for name, (size, _) in files.items() if name.endswith(".distcp")]
    return {
        "step_seconds": sorted(module.steps)[len(module.steps) // 2],
        "step_waits_seconds": [round(seconds, 3) for seconds in module.saves],
        "load_seconds": round(load_seconds, 3),
        "bytes": sum(parts),
        "largest_part_over_mean": round(max(parts) * len(parts) / sum(parts), 3),
    }, trainer.is_global_zero


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--replica-sizes", type=int, nargs="+", default=[3, 2])
    args = parser.parse_args()
    folder = Path(tempfile.gettempdir()) / "ntp-bench-checkpoint"
    beside, leads = measure(args, True, folder)
    waiting, _ = measure(args, False, folder)
    if leads:
        print(json.dumps({"beside training": beside, "waiting": waiting}, indent=2))


if __name__ == "__main__":
    main()
