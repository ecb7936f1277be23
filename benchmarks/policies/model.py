"""What all policies train, and how the result is judged."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.small_llama import Progressions, small_llama

SIZES = {"vocab": 96, "hidden": 48, "inter": 96, "layers": 2, "heads": 6, "kv_heads": 3}
LENGTH, SEED, LEARNING_RATE = 16, 0, 1e-3
NUM_TRAINING, NUM_HELD_OUT = 8192, 256


def training_data() -> Progressions:
    """In the order in which they are trained on."""
    return Progressions(NUM_TRAINING, LENGTH, SIZES["vocab"])


def held_out_loss(weights: Mapping[str, torch.Tensor]) -> float:
    """Mean loss in float64 on samples that no policy trains on.

    Args:
        weights: by the model's own names.
    """
    model = small_llama(SIZES, LENGTH, SEED).double().eval()
    model.load_state_dict(dict(weights))
    data = Progressions(NUM_TRAINING + NUM_HELD_OUT, LENGTH, SIZES["vocab"])
    ids = torch.stack([data[NUM_TRAINING + index]["input_ids"] for index in range(NUM_HELD_OUT)])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits  # transformers' own loss would be float32
        return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten()))
