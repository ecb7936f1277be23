"""LoRA layers of ``peft``: cut by the layout of the layer they adapt, so that adapters never move when their base does not.

    column layer  x -> A (whole) -> B (output features cut like the base's)
    row layer     x cut -> A (input features cut like the base's, summed over roles) -> B (whole)

Only the plain LoRA layer over a linear one is known; others are refused where a plan wants to cut them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

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
