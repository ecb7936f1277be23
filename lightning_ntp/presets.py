"""Named GPUs, models, clusters and failure records. Each number names its source."""

from __future__ import annotations

from lightning_ntp.cost_model import GpuSpec, ModelShape
from lightning_ntp.errors import ConfigError

GPUS = {
    "a100": GpuSpec("a100", 312e12, 80e9, 300e9, 25e9),
    "h100": GpuSpec("h100", 989e12, 80e9, 450e9, 50e9),
    "h200": GpuSpec("h200", 989e12, 141e9, 450e9, 50e9),
    "b200": GpuSpec("b200", 2250e12, 189e9, 900e9, 100e9),
}
"""Vendor data sheets: dense bf16, NVLink per direction, one network card per GPU; b200's memory and card as in the paper."""

PAPER_MODEL = ModelShape(
    hidden_size=20480,
    num_heads=128,
    num_kv_heads=128,
    ffn_size=4 * 20480,
    num_layers=100,
    vocab_size=128_000,
    sequence_length=16_384,
    gated=False,
)
"""arXiv 2504.06095, section 6; it says 480B, these sizes make 503B without and 509B with a vocabulary of 128,000 (assumed)."""

LLAMA3_405B = ModelShape(
    hidden_size=16_384,
    num_heads=128,
    num_kv_heads=8,
    ffn_size=53_248,
    num_layers=126,
    vocab_size=128_256,
    sequence_length=8_192,
)
"""The Llama 3 Herd of Models, table 3."""

LLAMA3_INTERRUPTIONS, LLAMA3_DAYS, LLAMA3_GPUS = 419, 54, 16_384
"""Unexpected interruptions, days and GPUs of the record (The Llama 3 Herd of Models, table 5)."""
LLAMA3_HARDWARE_SHARE = 0.78
HARDWARE_REPAIR_DAYS, SOFTWARE_REPAIR_DAYS = (3.0, 5.0), (3.0 / 24.0,)
"""As arXiv 2504.06095 replays the record (figure 4); figure 7 takes 5 days only."""


def gpu_spec(name: str) -> GpuSpec:
    """A GPU by name; ConfigError lists the known ones."""
    if name.lower() not in GPUS:
        raise ConfigError(f"unknown GPU {name!r}; known: {', '.join(GPUS)}")
    return GPUS[name.lower()]
