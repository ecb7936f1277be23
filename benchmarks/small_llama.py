"""The model and the data of the jobs that are broken on purpose: a llama from a config, samples that are a function of their index."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM


class Progressions(Dataset[dict[str, torch.Tensor]]):
    """Noisy arithmetic progressions, learnable."""

    def __init__(self, size: int, length: int, vocab: int) -> None:
        self.size, self.length, self.vocab = size, length, vocab

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        start, stride = (torch.randint(0, high, (1,), generator=draw) for high in (self.vocab, 8))
        tokens = (start + stride * torch.arange(self.length)) % self.vocab
        noise = torch.rand(self.length, generator=draw) < 0.05
        tokens = torch.where(noise, torch.randint(0, self.vocab, (self.length,), generator=draw), tokens)
        return {"input_ids": tokens, "index": torch.tensor(index)}


def small_llama(sizes: Mapping[str, int], length: int, seed: int, dropout: float = 0.0) -> LlamaForCausalLM:
    """The same weights for the same seed, in torch's default dtype.

    Args:
        sizes: vocab, hidden, inter, layers, heads, kv_heads.
        length: of the samples.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=sizes["vocab"],
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["inter"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        max_position_embeddings=max(128, length),
        tie_word_embeddings=False,
        use_cache=False,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config)
