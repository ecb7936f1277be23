"""Fine-tunes any Hugging Face causal LM on replicas of unequal tensor-parallel degree.

    python examples/finetune_hf.py --replica-sizes 3 2                   # a new 10M-parameter llama, 5 processes, offline
    python examples/finetune_hf.py --model Qwen/Qwen3-0.6B --data wikitext:wikitext-2-raw-v1 --precision bf16-mixed

Without --model and --data it trains a small llama on the sources of Python's own standard library, so it needs no network.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import datasets
import lightning as L
import torch
import transformers
from lightning.pytorch.loggers import WandbLogger
from tokenizers import ByteLevelBPETokenizer
from torch.utils.data import DataLoader

VOCAB_SIZE = 4096
END = "<|end|>"
Encoder = Callable[[list[str]], list[list[int]]]


class CausalLM(L.LightningModule):
    """A Hugging Face model as it comes; nothing here knows about parallelism."""

    def __init__(self, model: transformers.PreTrainedModel, learning_rate: float) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.01)


class PackedText(L.LightningDataModule):
    """Text from a hub data set, a local file or the standard library, tokenised and packed into blocks of equal length."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.model, self.source = args.model, (args.data, args.column)
        self.block_size, self.batch_size = args.block_size, args.batch_size
        key = repr((self.model, self.source, self.block_size))
        self.folder = args.out / "data" / hashlib.sha256(key.encode()).hexdigest()[:12]

    def prepare_data(self) -> None:
        """Runs in one process per node."""
        if (self.folder / "dataset_info.json").exists():
            return
        text = load_text(*self.source)
        encode = hub_encoder(self.model) if self.model else train_encoder(text["text"])
        size = self.block_size

        def pack(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
            ids = list(chain.from_iterable(encode(rows["text"])))
            return {"input_ids": [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]}

        text.map(pack, batched=True, remove_columns=text.column_names, desc="packing").save_to_disk(self.folder)

    def setup(self, stage: str) -> None:
        self.blocks = datasets.load_from_disk(str(self.folder)).with_format("torch")

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.blocks, batch_size=self.batch_size, shuffle=True, drop_last=True)


def load_text(data: str | None, column: str) -> datasets.Dataset:
    """A column "text", from a hub id (``name`` or ``name:config``), a .jsonl or .txt file, or the standard library."""
    if data is None:
        return datasets.Dataset.from_dict({"text": list(standard_library())})
    if Path(data).exists():
        kind = "text" if data.endswith(".txt") else "json"
        rows = datasets.load_dataset(kind, data_files=data, split="train")
    else:
        rows = datasets.load_dataset(*data.split(":"), split="train")
    return rows.select_columns([column]).rename_columns({} if column == "text" else {column: "text"})


def standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not {"test", "tests", "site-packages", "dist-packages", "lib2to3", "idlelib"} & set(path.parts):
            yield path.read_text(encoding="utf-8", errors="ignore")


def train_encoder(text: Iterable[str]) -> Encoder:
    """A small BPE of our own; returns texts -> lists of token ids, each ended by END."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(text, vocab_size=VOCAB_SIZE, special_tokens=[END], show_progress=False)
    return lambda texts: [item.ids + [0] for item in bpe.encode_batch(list(texts))]


def hub_encoder(model: str) -> Encoder:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return lambda texts: [ids + end for ids in tokenizer(list(texts))["input_ids"]]


def build_model(name: str | None) -> transformers.PreTrainedModel:
    if name is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(name).train()
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=288,
        intermediate_size=1024,
        num_hidden_layers=7,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=1024,
    )
    return transformers.LlamaForCausalLM(config)


class Report(L.Callback):
    """One line on the screen every few steps: the mean loss and the speed since the last line."""

    def __init__(self, every: int, tokens_per_rank: int) -> None:
        self.every, self.tokens_per_rank = every, tokens_per_rank

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.losses: list[torch.Tensor] = []
        self.since = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        self.losses.append(trainer.callback_metrics["train/loss"])
        if len(self.losses) < self.every:
            return
        loss = torch.stack(self.losses).mean().item()
        data_ranks = getattr(trainer.strategy, "distributed_sampler_kwargs", {}).get("num_replicas", 1)
        rate = len(self.losses) * self.tokens_per_rank * data_ranks / (time.perf_counter() - self.since)
        if trainer.is_global_zero:
            print(f"step {trainer.global_step:5d}   loss {loss:7.4f}   {rate:9,.0f} tokens/s", flush=True)
        self.on_train_start(trainer, trainer.lightning_module)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or local folder (default: a new llama of 10M parameters)")
    parser.add_argument("--data", help="hub id, hub id:config, .jsonl or .txt (default: the Python standard library)")
    parser.add_argument("--column", default="text", help="the column of --data that holds the text")
    parser.add_argument("--replica-sizes", type=int, nargs="+", help="tensor-parallel degree of each replica, e.g. 3 2")
    parser.add_argument("--strategy", default="ntp", help="any Lightning strategy, used without --replica-sizes")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=4, help="blocks per data rank")
    parser.add_argument("--block-size", type=int, default=128, help="tokens per block")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("ntp_logs/finetune"), help="folder for data, logs and weights")
    return parser.parse_args()


def main() -> None:
    args = parse()
    L.seed_everything(args.seed, verbose=False)
    strategy, devices = args.strategy, args.devices
    if args.replica_sizes:
        from lightning_ntp import NTPStrategy

        strategy, devices = NTPStrategy(replica_sizes=args.replica_sizes), sum(args.replica_sizes)
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        accelerator=args.accelerator,
        precision=args.precision,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        logger=WandbLogger(project="lightning_ntp", save_dir=args.out, offline=not os.environ.get("WANDB_API_KEY")),
        callbacks=[Report(every=10, tokens_per_rank=args.batch_size * args.block_size)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
    )
    trainer.fit(CausalLM(build_model(args.model), args.learning_rate), PackedText(args))


if __name__ == "__main__":
    main()
