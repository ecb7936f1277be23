"""Where weights of a model on the meta device come from: each worker reads the rectangles of its own cells, nothing else.

    from_pretrained(folder)   model on meta + `WeightSource` per parameter       (no byte of a weight is read)
    strategy: cut, FSDP2      cells without storage
    read_cells                file --slices of the cell--> cell, one parameter at a time
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from lightning_ntp.errors import ConfigError
from lightning_ntp.model_spec import Cell, ParamSpec
from lightning_ntp.strategy.adapters import BASE
from lightning_ntp.strategy.fsdp import ShardedModel, fill, local_of, local_shape

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One tensor in a safetensors file."""

    file: Path
    key: str

    def shape(self) -> tuple[int, ...]:
        """As it is stored."""
        with _opened(self.file) as opened:
            return tuple(opened.get_slice(self.key).get_shape())

    def whole(self) -> torch.Tensor:
        """All of it: for what is not cut."""
        with _opened(self.file) as opened:
            return opened.get_tensor(self.key)

    def read_into(self, destination: torch.Tensor, cell: Cell) -> None:
        """Copy the rows and columns of a cell, cast to the destination's dtype. The mapping of the file ends with the call.

        Args:
            destination: contiguous, ``cell.numel`` elements.
        """
        if not cell.numel:
            return
        with _opened(self.file) as opened:
            stored = opened.get_slice(self.key)
            if len(stored.get_shape()) != 2:
                matrix = stored[:].reshape(-1, 1) if len(stored.get_shape()) <= 1 else stored[:].flatten(1)
                _copy(matrix, destination.view(cell.shape), cell)
            else:
                _copy(stored, destination.view(cell.shape), cell)


def _copy(stored: Any, destination: torch.Tensor, cell: Cell) -> None:
    at_row = 0
    for rows in cell.rows:
        at_column = 0
        for columns in cell.columns:
            piece = stored[rows.start : rows.stop, columns.start : columns.stop]
            destination[at_row : at_row + len(rows), at_column : at_column + len(columns)] = piece
            at_column += len(columns)
        at_row += len(rows)


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read as safetensors: {error}; is it complete?") from error


def checkpoint_sources(folder: Path) -> dict[str, WeightSource]:
    """Every tensor of a folder as ``save_pretrained`` or the hub lays it out, one file or several.

    Raises:
        ConfigError: no safetensors, an index that names a file that is missing or lies elsewhere, or a broken file.
    """
    if (folder / INDEX).exists():
        named = json.loads((folder / INDEX).read_text())["weight_map"]
        for name in sorted(set(named.values())):
            if Path(name).name != name or not (folder / name).is_file():
                raise ConfigError(f"{folder / INDEX} names {name!r}, which is not in {folder}; the download is not complete")
        files = {folder / name for name in named.values()}
    elif (folder / SINGLE).exists():
        files = {folder / SINGLE}
    else:
        present = ", ".join(sorted(path.name for path in folder.glob("*"))[:10]) or "nothing"
        raise ConfigError(
            f"{folder} has neither {SINGLE} nor {INDEX} (there: {present}); weights in other formats must be saved as safetensors first"
        )
    found: dict[str, WeightSource] = {}
    for file in sorted(files):
        with _opened(file) as opened:
            found |= {key: WeightSource(file, key) for key in opened.keys()}  # noqa: SIM118  it is no dict
    return found


_KNOWN: weakref.WeakKeyDictionary[nn.Module, Mapping[str, WeightSource]] = weakref.WeakKeyDictionary()
"""Models on meta, with the sources of their parameters by the names that they had when they were built."""


def remember(model: nn.Module, sources: Mapping[str, WeightSource]) -> None:
    """The parameters of `model` that are on meta are to be read from these sources."""
    _KNOWN[model] = dict(sources)


def sources_of(module: nn.Module) -> dict[str, WeightSource]:
    """Sources of the parameters on meta anywhere in `module`, by their names there; LoRA's wrappers are looked through. Local.

    Raises:
        ConfigError: a parameter on meta that nothing is known about.
    """
    found: dict[str, WeightSource] = {}
    for prefix, model in module.named_modules():
        for name, parameter in model.named_parameters(prefix) if model in _KNOWN else ():
            own = name.removeprefix(f"{prefix}.") if prefix else name
            plain = ".".join(part for part in own.split(".") if part != BASE)
            if parameter.is_meta and plain in _KNOWN[model]:
                found[name] = _KNOWN[model][plain]
    missing = [name for name, parameter in module.named_parameters() if parameter.is_meta and name not in found]
    if missing:
        raise ConfigError(
            f"{len(missing)} parameter(s) on the meta device have no values and no file to read them from: {', '.join(missing[:5])}; "
            "build them on the CPU, or the whole model with lightning_ntp.from_pretrained(folder)"
        )
    return found


@torch.no_grad()
def read_cells(sharded: ShardedModel, sources: Mapping[str, WeightSource]) -> None:
    """Give each parameter on meta its cell from the file. Local.

    Args:
        sources: from `sources_of`, asked before the model was cut.
    """
    if not sources:
        return
    device, at = torch.device(sharded.groups.device_type), sharded.coordinates
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())

    def read(spec: ParamSpec, parameter: torch.Tensor) -> torch.Tensor:
        if not local_of(parameter).is_meta:
            return local_of(parameter)
        cell = spec.cell(at)
        local = torch.empty(cell.numel, dtype=parameter.dtype)
        sources[spec.fqn].read_into(local, cell)
        return local.view(local_shape(spec, cell)).to(device)

    fill(sharded, dict(_named(sharded, read)))


def _named(sharded: ShardedModel, read: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for spec, parameter in sharded.parameters():
        yield spec.fqn, read(spec, parameter)
