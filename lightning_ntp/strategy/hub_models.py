"""Hugging Face models from a folder or the hub without their weights: those are read once the strategy has cut the model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.weight_files import INDEX, WeightSource, checkpoint_sources, remember

logger = logging.getLogger(__name__)


def from_pretrained(
    name_or_folder: str | os.PathLike[str], model_class: Any = AutoModelForCausalLM, *, dtype: Any = "auto", **options: Any
) -> PreTrainedModel:
    """A Hugging Face model whose weights the strategy reads, each worker its own part of them.

    Call it where the LightningModule is built, or in its ``configure_model``. Nothing of the weights is in memory until
    ``fit``, ``validate``, ``test`` or ``predict`` has cut the model; only strategy ``"ntp"`` does that.

    Args:
        name_or_folder: a local folder with ``config.json`` and safetensors (one file or several), or a hub id.
        model_class: an Auto class or a model class.
        dtype: of the parameters; ``"auto"``: that of the config. Files of other dtypes are cast when they are read.
        options: fields of the config that are to differ, and ``attn_implementation``.

    Raises:
        ConfigError: no such folder, no safetensors in it, tensors of other shapes than the model's (named), or nothing of the
            model in them. Missing and superfluous tensors are named in a warning; what is missing starts as the model
            initialises it.
    """
    folder = _local_folder(name_or_folder)
    attention = {k: options.pop(k) for k in ("attn_implementation",) if k in options}
    config = AutoConfig.from_pretrained(folder, **options)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{folder} holds quantised weights, which cannot be cut; use a checkpoint in bf16")
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        model = _build(model_class, config, dtype=dtype, **attention)
    stored = checkpoint_sources(folder)
    sources = _match(model, stored, folder)
    _check_shapes(model, sources, folder)
    _materialise_buffers(model, sources)
    _initialise(model, [name for name, p in model.named_parameters() if name not in sources])
    if model.can_generate() and (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    remember(model, sources)
    return model.train()


def _local_folder(name_or_folder: str | os.PathLike[str]) -> Path:
    if Path(name_or_folder).is_dir():
        return Path(name_or_folder)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(str(name_or_folder), allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"]))
    except (HFValidationError, OSError, ValueError) as error:  # the hub's errors of every kind derive from these
        raise ConfigError(f"{str(name_or_folder)!r} is no local folder, and the hub does not give it: {error}") from error


def _build(model_class: Any, config: Any, **options: Any) -> PreTrainedModel:
    make = getattr(model_class, "from_config", None) or model_class._from_config
    model: PreTrainedModel = make(config, **options)
    model.tie_weights()
    return model


def _match(model: PreTrainedModel, stored: Mapping[str, WeightSource], folder: Path) -> dict[str, WeightSource]:
    """Which stored tensor belongs to which parameter or buffer; a base model's prefix may stand on either side only."""
    prefix = model.base_model_prefix
    names = _names(model)
    found: dict[str, WeightSource] = {}
    for name, aliases in names.items():
        candidates = [c for alias in aliases for c in (alias, alias.removeprefix(f"{prefix}."), f"{prefix}.{alias}")]
        key = next((c for c in candidates if c in stored), None)
        if key is not None:
            found[name] = stored[key]
    if not found:
        raise ConfigError(
            f"none of the {len(stored)} tensors in {folder} (such as {', '.join(sorted(stored)[:2])}) belongs to {type(model).__name__} "
            f"(such as {', '.join(list(names)[:2])}); is it another model's folder?"
        )
    used = {source.key for source in found.values()}
    aliases_used = {c for many in names.values() for a in many for c in (a, a.removeprefix(f"{prefix}."), f"{prefix}.{a}")}
    missing, superfluous = [name for name in names if name not in found], sorted(stored.keys() - used - aliases_used)
    if missing:
        logger.warning("%s has no values for %s: they start as the model initialises them", folder, _listed(missing))
    if superfluous:
        logger.warning("%s holds tensors that %s does not have: %s", folder, type(model).__name__, _listed(superfluous))
    return found


def _names(model: nn.Module) -> dict[str, list[str]]:
    """Every parameter and persistent buffer by its first name, with all its names (tied weights have several)."""
    persistent = model.state_dict().keys()
    aliases: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(tensor), []).append(name)
    names = {many[0]: many for many in aliases.values()}
    return names | {name: [name] for name, _ in model.named_buffers() if name in persistent}


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _check_shapes(model: nn.Module, sources: Mapping[str, WeightSource], folder: Path) -> None:
    wanted = {name: tuple(t.shape) for name, t in (*model.named_parameters(), *model.named_buffers())}
    stored = {name: source.shape() for name, source in sources.items()}
    wrong = [f"{name}: {stored[name]} in the file, {wanted[name]} in the model" for name in sources if stored[name] != wanted[name]]
    if wrong:
        raise ConfigError(
            f"tensors of other shapes in {folder} ({INDEX} or the file): {'; '.join(wrong[:8])}; give the config that they were saved with"
        )


@torch.no_grad()
def _materialise_buffers(model: PreTrainedModel, sources: Mapping[str, WeightSource]) -> None:
    """Buffers are small and whole everywhere: those that are saved are read, the others computed by the model's own code."""
    for prefix, module in model.named_modules():
        empty = {name: b for name, b in module.named_buffers(recurse=False) if b.is_meta}
        for name, buffer in empty.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        if not empty:
            continue
        model._init_weights(module)  # transformers computes rotary frequencies and the like in it
        for name in empty:
            source = sources.get(f"{prefix}.{name}" if prefix else name)
            if source is not None:
                module.get_buffer(name).copy_(source.whole())


@torch.no_grad()
def _initialise(model: PreTrainedModel, missing: Iterable[str]) -> None:
    """Parameters that no file holds, such as a new head. The strategy gives all workers the leader's values."""
    for owner_name in dict.fromkeys(name.rpartition(".")[0] for name in missing):
        owner = model.get_submodule(owner_name)
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if f"{owner_name}.{name}".lstrip(".") in missing:
                real = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                setattr(owner, name, real)
        model._init_weights(owner)
