"""Tiny Hugging Face models in float64 that all tests share, and what makes float64 mean float64 in them.

The default sizes are ragged on purpose: 6 query heads over 3 KV heads, 97 feed-forward columns, 101 vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.loss import loss_utils
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.llama import modeling_llama
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.mistral import modeling_mistral
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.phi3 import modeling_phi3
from transformers.models.phi3.configuration_phi3 import Phi3Config
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

IGNORED = -100
"""Label that the loss does not count."""

KINDS = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2")

_CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "phi3": partial(Phi3Config, pad_token_id=None, bos_token_id=1, eos_token_id=2),
    "gpt2": GPT2Config,
}

_SIZES = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 97,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}

_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}

_RMS_NORMS: tuple[type[nn.Module], ...] = (
    modeling_llama.LlamaRMSNorm,
    modeling_mistral.MistralRMSNorm,
    modeling_qwen2.Qwen2RMSNorm,
    modeling_qwen3.Qwen3RMSNorm,
    modeling_phi3.Phi3RMSNorm,
)


def tiny(kind: str, **overrides: Any) -> PreTrainedModel:
    """A causal LM of `kind` (see `KINDS`): float64, eager attention, no dropout, training mode, equal weights in every call.

    Args:
        overrides: fields of the config under llama's names for all kinds, e.g. ``num_attention_heads=14`` (heads of 4),
            ``tie_word_embeddings=True`` (gpt2 is tied by default), ``attn_implementation="sdpa"``, or the kind's own
            (gpt2: ``resid_pdrop=0.1``).
    """
    attention = overrides.pop("attn_implementation", "eager")
    model = AutoModelForCausalLM.from_config(
        _config(kind, overrides), attn_implementation=attention, dtype=torch.float64
    )
    randomize(model)
    return model.train()


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Every distinct parameter, norms and biases too, gets values of its own: no gradient is zero by accident."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_norm_weight = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_norm_weight else 0.3 * noise)


def batch(vocab: int, n: int, s: int, seed: int = 0) -> dict[str, Tensor]:
    """`n` samples of `s` tokens: ``input_ids`` and ``labels`` (int64, n x s), about 30 % of the labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(vocab, (n, s), generator=generator)
    ignored = torch.rand((n, s), generator=generator) < 0.3
    ignored[:, 1] = False  # at least one token of each sample counts
    return {"input_ids": input_ids, "labels": input_ids.masked_fill(ignored, IGNORED)}


@contextmanager
def float64_norms() -> Iterator[None]:
    """Inside, float64 models are float64 throughout, forward and backward.

    Hugging Face norms, the eager attention's softmax and the causal-LM loss compute in float32 whatever the dtype;
    uneven layouts change the order of sums, so that rounding would hide errors below 1e-7.
    """
    with ExitStack() as patches:
        for norm in _RMS_NORMS:
            patches.enter_context(mock.patch.object(norm, "forward", _rms_norm))
        patches.enter_context(mock.patch.object(F, "softmax", _softmax_like(F.softmax)))
        patches.enter_context(mock.patch.dict(loss_utils.LOSS_MAPPING, ForCausalLM=causal_lm_loss))
        yield


def causal_lm_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | int | None = None, **_: Any
) -> Tensor:
    """The loss of Hugging Face's causal LMs in the logits' own dtype: the reference for ours."""
    shifted = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].reshape(-1)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits.reshape(-1, vocab_size), shifted, ignore_index=IGNORED, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def _config(kind: str, overrides: dict[str, Any]) -> Any:
    fields = _SIZES | {"hidden_size": 4 * overrides.get("num_attention_heads", 6)} | overrides
    if kind == "gpt2":
        sizes = {name: fields[name] for name in _GPT2_NAMES}
        others = {name: value for name, value in overrides.items() if name not in _SIZES}
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        renamed = {_GPT2_NAMES[name]: value for name, value in sizes.items()}
        tied = overrides.get("tie_word_embeddings", True)
        special = {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "vocab_size": fields["vocab_size"],
            "tie_word_embeddings": tied,
        }
        return GPT2Config(**renamed, **(no_dropout | special | others))
    if kind not in _CONFIGS:
        raise ValueError(f"no tiny model of kind {kind!r}; there are {KINDS}")
    if kind == "phi3":  # its config has no head_dim
        fields.pop("head_dim")
    return _CONFIGS[kind](**fields)


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * (hidden_states * scale)


def _softmax_like(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def softmax(source: Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:  # torch.compile asks for its name
        return original(source, *args, dtype=None if source.dtype == torch.float64 else dtype, **kwargs)

    return softmax
