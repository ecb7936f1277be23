"""Pretrains torchtitan's llama3 under the strategy: its model, its data source, its FLOP formula, and one dictionary as the plan.

    python examples/pretrain_torchtitan.py --replica-sizes 3 2                          # the debug model, 5 processes, offline
    python examples/pretrain_torchtitan.py --flavor 8B --dataset c4 --precision bf16-mixed --tokenizer path/to/llama3

Needs the extra "titan". Without --dataset it reads the sources of Python's own standard library.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import datasets
import lightning as L
import torch
from finetune_hf import VOCAB_SIZE, Report, standard_library
from tokenizers import ByteLevelBPETokenizer
from torch.utils.data import DataLoader
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset
from torchtitan.models.llama3 import Transformer, TransformerModelArgs, llama3_args

from lightning_ntp import NTPStrategy, ReshardOnGPULoss

PLAN = {
    "model.tok_embeddings": "vocab_embedding",
    "model.layers.*.attention.w*": "column",
    "model.layers.*.attention.wo": "row",
    "model.layers.*.feed_forward.w*": "column",
    "model.layers.*.feed_forward.w2": "row",
    "model.output": "vocab_head",
}
"""How any llama of torchtitan is cut over roles; the last glob that matches counts."""

SPECIAL = ["<|begin|>", "<|end|>"]


class Pretraining(L.LightningModule):
    """torchtitan's transformer and loss; nothing here knows about parallelism."""

    def __init__(self, args: TransformerModelArgs, learning_rate: float) -> None:
        super().__init__()
        self.model, self.learning_rate = Transformer(args), learning_rate
        with torch.no_grad():
            self.model.init_weights()

    def training_step(self, batch: tuple[dict[str, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        inputs, labels = batch
        loss = cross_entropy_loss(self.model(inputs["input"]), labels)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)


class TitanData(L.LightningDataModule):
    """torchtitan's stream of packed blocks. Every worker reads the whole stream; the strategy takes each one's share."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.dataset, self.path, self.seq_len, self.batch_size = args.dataset, args.dataset_path, args.seq_len, args.batch_size
        self.folder = Path(args.tokenizer or args.out / "tokenizer")

    def prepare_data(self) -> None:
        """Runs in one process per node."""
        if (self.folder / "tokenizer.json").exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(standard_library(), vocab_size=VOCAB_SIZE // 2, special_tokens=SPECIAL, show_progress=False)
        names = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
        (self.folder / "tokenizer_config.json").write_text(json.dumps(names))
        bpe.save(str(self.folder / "tokenizer.json"))

    def setup(self, stage: str) -> None:
        tokenizer = HuggingFaceTokenizer(str(self.folder))
        self.stream = HuggingFaceTextDataset(self.dataset, self.path, tokenizer, self.seq_len, infinite=True)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.stream, batch_size=self.batch_size)


DATASETS["standard_library"] = DatasetConfig(
    path="",
    loader=lambda path: datasets.Dataset.from_dict({"text": list(standard_library())}),
    sample_processor=lambda sample: sample["text"],
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="debugmodel", choices=sorted(llama3_args))
    parser.add_argument("--dataset", default="standard_library", help="a name of torchtitan's DATASETS, such as c4")
    parser.add_argument("--dataset-path", help="where it lies, if not where torchtitan looks")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json (default: a small one of our own)")
    parser.add_argument("--replica-sizes", type=int, nargs="+", help="tensor-parallel degree of each replica, e.g. 3 2")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=4, help="blocks per data rank")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=8e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("ntp_logs/torchtitan"))
    return parser.parse_args()


def main() -> None:
    args = parse()
    L.seed_everything(args.seed, verbose=False)
    model_args = llama3_args[args.flavor]
    model_args.max_seq_len = args.seq_len
    module = Pretraining(model_args, args.learning_rate)
    num_parameters, flops_per_token = model_args.get_nparams_and_flops(module.model, args.seq_len)
    print(f"{args.flavor}: {num_parameters:,} parameters, {flops_per_token:,} FLOPs per token", flush=True)
    trainer = L.Trainer(
        strategy=NTPStrategy(replica_sizes=args.replica_sizes, plan=PLAN),
        devices=sum(args.replica_sizes) if args.replica_sizes else args.devices,
        accelerator=args.accelerator,
        precision=args.precision,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[
            Report(every=10, tokens_per_rank=args.batch_size * args.seq_len),
            ReshardOnGPULoss(tokens_per_sample=args.seq_len, flops_per_sample=flops_per_token * args.seq_len),
        ],
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=args.out,
    )
    trainer.fit(module, TitanData(args))


if __name__ == "__main__":
    main()
