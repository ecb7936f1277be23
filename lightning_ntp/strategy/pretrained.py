"""Hugging Face weights out: streamed to safetensors tensor by tensor, so that no worker ever holds the model.

    strategy.save_pretrained(dir)   cells of the first replica --one whole tensor at a time--> leader -> file
    ntp export CKPT dir             checkpoint folder          --one whole tensor at a time--> file

The header of a safetensors file says where each tensor lies, and shapes are known before any value, so the file is written
front to back.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_ntp.dtensor.checkpoint import SavedTensors, load_values
from lightning_ntp.dtensor.checkpoint_files import (
    MANIFEST,
    Manifest,
    aside_of,
    delete,
    put_in_place,
    remove_leftovers,
    sync_folder,
    write_synced,
)
from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.adapters import is_adapted, is_adapter
from lightning_ntp.strategy.fsdp import ShardedModel
from lightning_ntp.strategy.sources import MODEL
from lightning_ntp.strategy.whole import takes_part, whole_tensor

SHARD_BYTES = 5 * 10**9
"""Size above which a model is written to several files, as on the hub."""

DESCRIPTION = "huggingface"
"""Subfolder of a checkpoint with config and tokenizer: what `export` needs beside weights."""

JOB = "ntp"
PREFIX = "huggingface_prefix"
"""Key of the strategy's own values in a checkpoint, and in them the name of the Hugging Face model inside the module."""

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return prod(self.shape) * self.dtype.itemsize


def find_model(module: nn.Module) -> tuple[str, Any]:
    """The outermost Hugging Face model of a module: its name and itself.

    Raises:
        ConfigError: there is not exactly one.
    """
    found = [(name, part) for name, part in module.named_modules() if hasattr(part, "save_pretrained")]
    outermost = [(name, part) for name, part in found if not any(_below(name, other) for other, _ in found)]
    if len(outermost) != 1:
        names = [name for name, _ in outermost]
        raise ConfigError(f"needs one Hugging Face model in {type(module).__name__}, found {names}")
    if is_adapted(outermost[0][1]):
        raise ConfigError(f"{outermost[0][0]} is a peft model; strategy.save_pretrained(folder) writes its adapters")
    return outermost[0]


def describe(module: nn.Module, folder: Path) -> None:
    """Write config, generation config and tokenizer (where the module keeps one) into a folder. Local."""
    _, model = find_model(module)
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [_original(type(model)).__name__]
    model.config.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)
    for owner in (module, model):
        for name in ("tokenizer", "processor", "processing_class"):
            part = getattr(owner, name, None)
            if part is not None and hasattr(part, "save_pretrained") and not isinstance(part, nn.Module):
                part.save_pretrained(folder)


def _original(kind: type) -> type:
    """A cut module's class before the swap."""
    return getattr(kind, "original_class", kind)


def _below(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def split(entries: Iterable[Entry], shard_bytes: int = SHARD_BYTES) -> list[list[Entry]]:
    """Entries of each file, in order; a tensor is never cut."""
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(each.num_bytes for each in shards[-1]) + entry.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    return shards


def file_names(num_shards: int) -> list[str]:
    """As transformers names them."""
    if num_shards == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)]


def write_weights(entries: Sequence[Entry], tensors: Iterator[torch.Tensor], folder: Path, shard_bytes: int) -> None:
    """Write files and index front to back, taking one tensor at a time in the order of `entries`. Local.

    Raises:
        ConfigError: a dtype that safetensors does not know.
    """
    unknown = [entry for entry in entries if entry.dtype not in _DTYPES]
    if unknown:
        raise ConfigError(f"{unknown[0].name}: safetensors has no dtype for {unknown[0].dtype}")
    shards = split(entries, shard_bytes)
    names = file_names(len(shards))
    for name, shard in zip(names, shards, strict=True):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for entry in shard:
            offsets = [at, at + entry.num_bytes]
            header[entry.name] = {"dtype": _DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
            at += entry.num_bytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _ in shard:
                values = next(tensors).detach().cpu().contiguous().reshape(-1)
                file.write(values.view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        index = {"metadata": {"total_size": sum(entry.num_bytes for entry in entries)}, "weight_map": weight_map}
        write_synced(folder / "model.safetensors.index.json", json.dumps(index, indent=2).encode())


def save_pretrained(
    sharded: ShardedModel, module: nn.Module, folder: str | os.PathLike[str], shard_bytes: int = SHARD_BYTES
) -> None:
    """See `NTPStrategy.save_pretrained`; of a peft model its adapters.

    Raises:
        ConfigError: not exactly one Hugging Face model in the module.

    Collective over the first replica; other workers return at once.
    """
    if not takes_part(sharded):
        return
    target = Path(folder)
    aside = aside_of(target, secrets.token_hex(4))
    for name, part in module.named_modules():
        if is_adapted(part):
            _save_adapters(sharded, part, name, aside, target)
            return
    prefix, _ = find_model(module)
    persistent = module.state_dict().keys()
    buffers = [(name, b) for name, b in module.named_buffers() if name in persistent and _below(name, prefix)]
    chosen = [(spec, parameter) for spec, parameter in sharded.parameters() if _below(spec.fqn, prefix)]
    entries = [Entry(_inside(spec.fqn, prefix), parameter.dtype, tuple(spec.shape)) for spec, parameter in chosen]
    entries += [Entry(_inside(name, prefix), buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers]

    def tensors() -> Iterator[torch.Tensor]:
        for spec, parameter in chosen:
            yield whole_tensor(sharded, spec, parameter)
        for _, buffer in buffers:
            yield buffer

    if sharded.groups.worker != sharded.groups.leader:
        for _ in tensors():
            pass
        return
    aside.mkdir(parents=True)
    try:
        describe(module, aside)
        write_weights(entries, tensors(), aside, shard_bytes)
        _finish(aside, target)
    finally:
        delete(aside)


def _save_adapters(sharded: ShardedModel, model: Any, prefix: str, aside: Path, target: Path) -> None:
    """What peft keeps of its models: adapters and their config. Collective over the first replica."""
    kept: dict[str, torch.Tensor] = {}
    for spec, parameter in sharded.parameters():
        if _below(spec.fqn, prefix) and (parameter.requires_grad or is_adapter(spec.fqn)):
            kept[_inside(spec.fqn, prefix)] = whole_tensor(sharded, spec, parameter).cpu()
    if sharded.groups.worker == sharded.groups.leader:
        aside.mkdir(parents=True)
        try:
            model.save_pretrained(aside, state_dict=kept)
            _finish(aside, target)
        finally:
            delete(aside)


def _inside(name: str, prefix: str) -> str:
    return name.removeprefix(f"{prefix}.") if prefix else name


def _finish(aside: Path, target: Path) -> None:
    sync_folder(aside)
    remove_leftovers(target, keep=aside.name.split(".")[-2])
    put_in_place(aside, target)


def export(checkpoint: Path, folder: Path, shard_bytes: int = SHARD_BYTES) -> list[Entry]:
    """Write a checkpoint folder's Hugging Face model for ``from_pretrained``, in one process, one tensor in memory at a time.

    Returns:
        what was written.

    Raises:
        ConfigError: no complete checkpoint of this package, or one without a Hugging Face model.
    """
    manifest = Manifest.read(checkpoint)
    manifest.check(checkpoint)
    checkpoint = checkpoint / manifest.data
    job = load_values(checkpoint).get(JOB, {})
    described = checkpoint / DESCRIPTION
    if PREFIX not in job or not described.is_dir():
        raise ConfigError(f"{checkpoint} holds no description of a Hugging Face model; it was saved from another kind of module")
    saved, prefix = SavedTensors(checkpoint), job[PREFIX]
    inside = {name: name.removeprefix(MODEL) for name in sorted(saved.names) if name.startswith(MODEL)}
    chosen = {name: _inside(plain, prefix) for name, plain in inside.items() if _below(plain, prefix)}
    entries = [
        Entry(plain, saved.entry(name).properties.dtype, tuple(saved.entry(name).size)) for name, plain in chosen.items()
    ]
    aside = aside_of(folder, secrets.token_hex(4))
    aside.mkdir(parents=True)
    try:
        for file in sorted(described.rglob("*")):
            if file.is_file() and file.name != MANIFEST:
                copy = aside / file.relative_to(described)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(file.read_bytes())
        write_weights(entries, (saved.whole(name) for name in chosen), aside, shard_bytes)
        _finish(aside, folder)
    finally:
        delete(aside)
    return entries
