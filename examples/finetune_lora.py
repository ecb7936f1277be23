"""Fine-tunes LoRA adapters of any Hugging Face causal LM on replicas of unequal degree; base weights are read cell by cell.

    python examples/finetune_lora.py --model Qwen/Qwen3-0.6B --replica-sizes 3 2
    python examples/finetune_lora.py --model path/to/folder --data my.jsonl --rank 16

The adapters end up in a folder that plain peft loads: PeftModel.from_pretrained(base, OUT/adapters).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning as L
import peft
import torch
from finetune_hf import PackedText, Report

import lightning_ntp


class Adapted(L.LightningModule):
    """A frozen base whose weights stay in their files until the strategy has cut it, and adapters on its linear layers."""

    def __init__(self, folder_or_id: str, rank: int, learning_rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: peft.PeftModel | None = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        base = lightning_ntp.from_pretrained(self.hparams["folder_or_id"])
        rank = self.hparams["rank"]
        config = peft.LoraConfig(
            r=rank, lora_alpha=2 * rank, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        self.model = peft.get_peft_model(base, config)

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams["learning_rate"], weight_decay=0.0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="hub id or local folder with config.json and safetensors")
    parser.add_argument("--data", help="hub id, hub id:config, .jsonl or .txt (default: the Python standard library)")
    parser.add_argument("--column", default="text", help="the column of --data that holds the text")
    parser.add_argument("--replica-sizes", type=int, nargs="+", help="tensor-parallel degree of each replica, e.g. 3 2")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--precision", default="32-true", help='with "bf16-true" base and adapters are bf16')
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=4, help="blocks per data rank")
    parser.add_argument("--block-size", type=int, default=128, help="tokens per block")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("ntp_logs/lora"), help="folder for data and adapters")
    return parser.parse_args()


def main() -> None:
    args = parse()
    L.seed_everything(args.seed, verbose=False)
    trainer = L.Trainer(
        strategy=lightning_ntp.NTPStrategy(replica_sizes=args.replica_sizes),
        devices=sum(args.replica_sizes) if args.replica_sizes else args.devices,
        accelerator=args.accelerator,
        precision=args.precision,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[Report(every=10, tokens_per_rank=args.batch_size * args.block_size)],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Adapted(args.model, args.rank, args.learning_rate), PackedText(args))
    trainer.strategy.save_pretrained(args.out / "adapters")
    if trainer.is_global_zero:
        print(f"adapters are in {args.out / 'adapters'}", flush=True)


if __name__ == "__main__":
    main()
