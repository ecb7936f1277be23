"""Tokens, useful FLOPs and MFU of committed steps: for each live GPU, and for each GPU that the job owns.

Lightning's own `Throughput` keeps the window; work that was lost or thrown away is never in it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

WINDOW_STEPS = 20


@dataclass(frozen=True, slots=True)
class Work:
    """What one sample is.

    Args:
        tokens: of a sample, padding included; None where samples have none.
        flops: forward and backward of a sample; None where it is not known.
    """

    tokens: float | None = None
    flops: float | None = None

    def completed(self, batch: Any, module: torch.nn.Module, num_parameters: int) -> Work:
        """With what a batch and the Hugging Face model inside a module say of what is not known yet."""
        tokens, flops, config = self.tokens or tokens_of(batch), self.flops, hf_config(module)
        if flops is None and tokens and config is not None:
            each = flops_per_token(config, num_parameters, int(tokens))
            flops = None if each is None else each * tokens
        return Work(tokens, flops)


def flops_per_token(config: Any, num_parameters: int, sequence_length: int) -> float | None:
    """FLOPs of forward and backward for one token of a Hugging Face model, as torchtitan counts them.

        6 * (parameters - embedding) + 12 * layers * heads * head size * sequence

    As is the convention the empty half of causal attention counts as well, and recomputation does not. Other than
    torchtitan, the output layer counts also where its weights are the embedding's. None where the config does not say
    what is needed.
    """
    config = getattr(config, "text_config", None) or config
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
    layers, heads, hidden, vocab = (getattr(config, name, None) for name in names)
    if not (layers and heads and hidden and vocab):
        return None
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    tied = bool(getattr(config, "tie_word_embeddings", False))
    dense = num_parameters if tied else num_parameters - vocab * hidden
    return float(6 * dense + 12 * layers * heads * head_dim * sequence_length)


def tokens_of(batch: Any) -> int | None:
    """Tokens of one sample of a batch in the usual form: a mapping with ``input_ids`` of (samples, tokens)."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return int(ids.shape[-1]) if isinstance(ids, torch.Tensor) and ids.dim() >= 2 else None


def hf_config(module: torch.nn.Module) -> Any:
    """The config of the first Hugging Face model inside a module; None without one."""
    return next((part.config for part in module.modules() if hasattr(part, "config") and hasattr(part, "save_pretrained")), None)


def available_flops(framework: str, device: torch.device, precision: str) -> float | None:
    """Peak FLOPs per second of a device by Lightning's table; None where it knows none, as on CPU."""
    if device.type != "cuda":
        return None
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32
    fabric = "lightning.fabric" if framework == "lightning.pytorch" else "lightning_fabric"
    known = importlib.import_module(f"{fabric}.utilities.throughput").get_available_flops(device, dtype)
    return None if known is None else float(known)


class Meter:
    """Rates over the last `WINDOW_STEPS` commits, with the time between them, whatever it went to.

    Args:
        framework: whose `Throughput` to use.
        counts_tokens: committed counts are tokens, not samples.
        peak_flops: of one GPU per second; None: no MFU.
    """

    def __init__(self, framework: str, counts_tokens: bool, peak_flops: float | None) -> None:
        fabric = "lightning.fabric" if framework == "lightning.pytorch" else "lightning_fabric"
        self._throughput = importlib.import_module(f"{fabric}.utilities.throughput").Throughput(window_size=WINDOW_STEPS)
        self.counts_tokens, self.peak_flops = counts_tokens, peak_flops
        self.work = Work()
        self._samples = self._tokens = 0.0
        self._steps = 0
        self._seconds = 0.0
        self.last: dict[str, float] = {}

    def commit(self, seconds: float, count: float) -> None:
        """A step with so many samples (or tokens) stands. `seconds` is a monotonic clock's."""
        if not count or seconds <= self._seconds:
            return
        self._seconds = seconds
        per_sample = self.work.tokens
        samples = count if not self.counts_tokens else count / (per_sample or count)
        tokens = count if self.counts_tokens else count * (per_sample or 0)
        self._steps += 1
        self._samples += samples
        self._tokens += tokens
        self._throughput.update(
            time=seconds,
            batches=self._steps,
            samples=max(self._samples, self._steps),
            lengths=max(self._tokens, self._samples, self._steps) if tokens else None,
            flops=None if self.work.flops is None else samples * self.work.flops,
        )

    def rates(self, num_live: int, num_owned: int) -> dict[str, float]:
        """What the loggers get; empty until the window is full."""
        computed = self._throughput.compute() if self._steps >= WINDOW_STEPS else {}
        rates: dict[str, float] = {}
        for key, name in (("samples", "samples_per_s"), ("items", "tokens_per_s"), ("flops", "useful_flops_per_s")):
            value = computed.get(f"device/{key}_per_sec")
            if value is None:
                continue
            rates[f"throughput/{name}"] = value
            if key != "samples":
                rates[f"throughput/{name}_per_live_gpu"] = value / num_live if num_live else 0.0
                rates[f"throughput/{name}_per_owned_gpu"] = value / num_owned if num_owned else 0.0
        flops = rates.get("throughput/useful_flops_per_s")
        if flops is not None and self.peak_flops:
            rates["throughput/mfu_live"] = flops / (num_live * self.peak_flops)
            rates["throughput/mfu_owned"] = flops / (num_owned * self.peak_flops)
        return rates
