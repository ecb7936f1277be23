"""LoRA layers of ``peft``: cut by the layout of the layer they adapt, so that adapters never move when their base does not.

    column layer  x -> A (whole) -> B (output features cut like the base's)
    row layer     x cut -> A (input features cut like the base's, summed over roles) -> B (whole)

Only the plain LoRA layer over a linear one is known; others are refused where a plan wants to cut them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_ntp.errors import ConfigError

BASE = "base_layer"
"""The name under which peft keeps the layer that an adapter was put on."""


def adapted_layer(module: nn.Module) -> nn.Module | None:
    """The layer inside a LoRA layer; None for any other module. peft need not be installed."""
    if (type(module).__module__, type(module).__name__) != ("peft.tuners.lora.layer", "Linear"):
        return None
    return module.get_submodule(BASE)


def adapter_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the adapters of a LoRA layer, in their order."""
    layers: Any = module.get_submodule("lora_A")
    return tuple(layers.keys())


def why_not(module: nn.Module) -> str | None:
    """Why a LoRA layer cannot be cut; None if it can."""
    layer: Any = module
    if layer.lora_variant:
        kinds = sorted({type(variant).__name__ for variant in layer.lora_variant.values()})
        return f"{', '.join(kinds)} looks at whole weights; plain LoRA is supported"
    if layer.merged:
        return "its adapter is merged into the base weights; unmerge it first"
    return None


def has_dropout(module: nn.Module, adapter: str) -> bool:
    """Whether an adapter of a LoRA layer drops inputs."""
    dropout = module.get_submodule(f"lora_dropout.{adapter}")
    return isinstance(dropout, nn.Dropout) and dropout.p > 0


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is the outer one of a peft model."""
    return any((cls.__module__, cls.__name__) == ("peft.peft_model", "PeftModel") for cls in type(module).__mro__)


def is_adapter(fqn: str) -> bool:
    """Whether a parameter of a peft model belongs to an adapter and is saved with it."""
    return any(part.startswith("lora_") or part == "modules_to_save" for part in fqn.split("."))


@torch.no_grad()
def initialise_adapters(module: nn.Module) -> None:
    """LoRA adapters that peft put on meta, beside base weights that are still in their file, get their first values. Local.

    Raises:
        ConfigError: they are to start from the base weights.
    """
    for model in (part for part in module.modules() if is_adapted(part)):
        configs: Any = model.peft_config
        for layer in (part for part in model.modules() if adapted_layer(part) is not None):
            for name in adapter_names(layer):
                parts = [layer.get_submodule(f"{kind}.{name}") for kind in ("lora_A", "lora_B")]
                if not any(p.is_meta for part in parts for p in part.parameters()):
                    continue
                start = getattr(configs[name], "init_lora_weights", True)
                if start not in (True, False, "gaussian"):
                    raise ConfigError(
                        f"init_lora_weights={start!r} looks at base weights, which lightning_ntp.from_pretrained leaves in their "
                        "file; use True or \"gaussian\", or transformers' own from_pretrained"
                    )
                for part in parts:
                    part.to_empty(device="cpu")
                reset: Any = layer
                reset.reset_lora_parameters(name, start)
