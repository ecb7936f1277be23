"""Train, stop inside an epoch, go on with another number of processes, export, and generate text with plain transformers.

    python examples/resume_elsewhere.py --replica-sizes 3 2 --steps 30        # 5 processes; stops in the middle of the epoch
    python examples/resume_elsewhere.py --replica-sizes 2 --steps 60          # 2 processes go on with the next sample
    ntp export ntp_logs/elsewhere/last.ckpt ntp_logs/elsewhere/llama          # safetensors, config, tokenizer
    python examples/generate.py ntp_logs/elsewhere/llama "def main("          # knows nothing of this package

The global batch and with it the run stays the same on any hardware: no sample is lost or repeated.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import lightning as L
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_ntp import NTPStrategy

GLOBAL_BATCH, BLOCK = 16, 64


class ByteLlama(L.LightningModule):
    """A small llama over bytes. A tokenizer that the module keeps goes into its checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
        config = transformers.LlamaConfig(
            vocab_size=len(self.tokenizer),
            hidden_size=144,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=3,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        self.model = transformers.LlamaForCausalLM(config)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class Text(L.LightningDataModule):
    """Python's own standard library, cut into blocks."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, batch_size: int) -> None:
        super().__init__()
        self.tokenizer, self.batch_size = tokenizer, batch_size

    def train_dataloader(self) -> DataLoader:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:12]
        text = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
        ids = torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        blocks = ids[: len(ids) // BLOCK * BLOCK].view(-1, BLOCK)
        return DataLoader(TensorDataset(blocks), batch_size=self.batch_size, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replica-sizes", type=int, nargs="+", default=[3, 2], help="tensor-parallel degree of each replica")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of all runs together")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("ntp_logs/elsewhere"), help="folder of the checkpoint")
    args = parser.parse_args()

    L.seed_everything(1, verbose=False)
    module = ByteLlama()
    rows = len(args.replica_sizes)  # one data row per replica: batch_size counts samples of one row
    trainer = L.Trainer(
        strategy=NTPStrategy(replica_sizes=args.replica_sizes),
        devices=sum(args.replica_sizes),
        accelerator=args.accelerator,
        max_steps=args.steps,
        callbacks=[ModelCheckpoint(args.out, save_last=True, save_top_k=0, every_n_train_steps=10)],
        logger=False,
        enable_progress_bar=False,
    )
    data = Text(module.tokenizer, GLOBAL_BATCH // rows)
    trainer.fit(module, data, ckpt_path="last", weights_only=True)
    if trainer.is_global_zero:
        print(f"step {trainer.global_step}, batch {trainer.fit_loop.batch_idx + 1} of epoch {trainer.current_epoch}")
        print(f"loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
