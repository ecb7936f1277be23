"""On an even topology: the loss curve of Lightning's own ModelParallelStrategy, FSDP2 + TP written by hand, on the same data."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from tests import lightning_jobs as jobs

NUM_STEPS, ROWS, BATCH = 20, 2, 3
COLUMN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROW = ("self_attn.o_proj", "mlp.down_proj")


class FloatLlama(L.LightningModule):
    """A float32 llama whose sizes divide by two; keeps the loss of every step, averaged over data rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=jobs.VOCAB + 1, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=False, attn_implementation="sdpa",
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        self.curve: list[float] = []

    def training_step(self, samples: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        ids = samples["input_ids"]
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.curve.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class HandMadeLlama(FloatLlama):
    """The parallel code that a user of ModelParallelStrategy writes."""

    def configure_model(self) -> None:
        plan: dict[str, Any] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        plan |= {f"model.layers.*.{name}": ColwiseParallel() for name in COLUMN}
        plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ROW}
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def _curve(rank: int, world: int, ours: bool) -> list[float]:
    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=[(2, 2)]) if ours else ModelParallelStrategy(ROWS, 2)
        module = FloatLlama() if ours else HandMadeLlama()
        trainer = jobs.trainer(strategy, world, precision="32-true", max_epochs=-1, max_steps=NUM_STEPS)
        samples = jobs.Samples(NUM_STEPS * ROWS * BATCH // 2)
        # Lightning's own injected sampler shuffles a training loader even where it does not.
        sampler = None if ours else DistributedSampler(samples, ROWS, rank // 2, shuffle=False)
        loader = DataLoader(samples, batch_size=BATCH, shuffle=False, sampler=sampler)
        trainer.fit(module, loader)
        return module.curve


def test_twenty_steps_of_an_even_job_equal_model_parallel_strategy(pool):
    ours = pool.run(_curve, 4, True, timeout=120)[0]
    theirs = pool.run(_curve, 4, False, timeout=120)[0]
    assert len(ours) == len(theirs) == NUM_STEPS
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-6
    assert theirs[-1] < theirs[0]
