"""Where a checkpoint comes from: a folder of this package, a folder of stock DCP, or one file of plain Lightning.

All answer under the same names: ``model/NAME`` and ``optimizer0/NAME/STATE``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from lightning_ntp.dtensor.bucket import Bucket, place_of
from lightning_ntp.dtensor.checkpoint import VALUES, CellTensor, SavedTensors, load_safely, load_values
from lightning_ntp.dtensor.checkpoint_files import MANIFEST, METADATA, Manifest, restore_previous
from lightning_ntp.errors import ConfigError

MODEL = "model/"
OPTIMIZER = "optimizer{}/"
OPTIMIZERS = "ntp_optimizers"
"""Prefixes of tensor names, and the key of what optimizers keep beside tensors."""

META = "meta.pt"
"""Where Lightning's ModelParallelStrategy puts what is no tensor."""

Targets = Mapping[str, CellTensor | torch.Tensor]


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """What a checkpoint says of an optimizer beside its tensors.

    Args:
        groups: param groups; ``"params"`` are names of parameters.
        name: of its class, where it is known.
        scalars: name of a parameter -> state that is no tensor.
    """

    groups: Sequence[Mapping[str, Any]]
    name: str | None = None
    scalars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Source(Protocol):
    """A checkpoint that can be read. Everything is local."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""

    def check(self, part: int, num_parts: int) -> None:
        """Compare one part of the files with their checksums, where there are any; ConfigError where they differ."""

    def values(self) -> dict[str, Any]:
        """Lightning's checkpoint without tensors."""

    def optimizers(self, orders: Sequence[Sequence[str]]) -> list[SavedOptimizer]:
        """Of each optimizer, given the names of this run's parameters in the order of their groups."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor; ConfigError where there is none."""

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor."""

    def fill(self, targets: Targets) -> None:
        """Fill cells and plain tensors in place; ConfigError where one is missing or has another shape."""


def open_source(path: str, wanted: Iterable[str]) -> Source:
    """The checkpoint at `path`.

    Args:
        path: a folder or a file, or the URL of a folder of this package.
        wanted: names of the model's tensors, by which the naming of a foreign folder is recognised.

    Raises:
        ConfigError: nothing there, or nothing that is known.
    """
    place = place_of(path)
    if isinstance(place, Bucket):
        return BucketFolder(place)
    restore_previous(place)
    if place.is_file():
        return FileSource(place)
    if not place.is_dir():
        raise ConfigError(f"there is no checkpoint at {place}")
    if (place / MANIFEST).is_file():
        return OwnFolder(place)
    if (place / VALUES).is_file() or not (place / METADATA).is_file():
        Manifest.read(place)  # says what is missing
    return StockFolder(place, wanted)


class OwnFolder:
    """A folder that this package wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifest = Manifest.read(folder)
        self._tensors = SavedTensors(folder / self._manifest.data)
        self._values = load_values(folder / self._manifest.data)

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return self._tensors.names

    def check(self, part: int, num_parts: int) -> None:
        """See `Source`."""
        self._manifest.check(self.folder, part, num_parts)

    def values(self) -> dict[str, Any]:
        """See `Source`."""
        return {key: value for key, value in self._values.items() if key != OPTIMIZERS}

    def optimizers(self, orders: Sequence[Sequence[str]]) -> list[SavedOptimizer]:
        """See `Source`."""
        return [SavedOptimizer(**entry) for entry in self._values.get(OPTIMIZERS, ())]

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Source`."""
        return tuple(self._tensors.entry(name).size)

    def dtype(self, name: str) -> torch.dtype:
        """See `Source`."""
        return self._tensors.entry(name).properties.dtype

    def fill(self, targets: Targets) -> None:
        """See `Source`."""
        self._tensors.fill(targets)


class BucketFolder(OwnFolder):
    """A folder that this package put into an object store; each worker reads the rectangles of its own cells."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        with tempfile.TemporaryDirectory(prefix="ntp-load-") as folder:
            data = bucket.fetch((METADATA, VALUES), Path(folder))
            super().__init__(Path(folder))
        self._tensors.read_from(bucket.files, data)

    def check(self, part: int, num_parts: int) -> None:
        """See `Source`."""
        self.bucket.check(self._manifest, part, num_parts)


class StockFolder:
    """A folder of ``torch.distributed.checkpoint``: FSDP2 scripts, or Lightning's ModelParallelStrategy.

    Known forms: ``{"state_dict": model, "optimizer_0": ...}``, ``{"model": model, "optim": ...}`` and the bare model, with
    optimizer state by parameter name as torch's ``get_optimizer_state_dict`` gives it. No checksums.
    """

    _FORMS = (("state_dict.", "optimizer_{}."), ("model.", "optim."), ("", ""))

    def __init__(self, folder: Path, wanted: Iterable[str]) -> None:
        self.folder = folder
        self._tensors = SavedTensors(folder)
        stored = self._tensors.names
        plain = [name.removeprefix(MODEL) for name in wanted]
        found = [sum(prefix + name in stored for name in plain) for prefix, _ in self._FORMS]
        self._model, self._optimizer = self._FORMS[found.index(max(found))]
        if not max(found):
            raise ConfigError(
                f"{folder} is a DCP folder without any tensor of this model; it holds {sorted(stored)[:3]}, the model wants "
                f"{plain[:3]}"
            )
        self._theirs = {f"{MODEL}{name.removeprefix(self._model)}": name for name in stored if name.startswith(self._model)}
        for number in range(self._num_optimizers()):
            prefix = f"{self._optimizer.format(number)}state."
            for name in stored:
                if name.startswith(prefix):
                    fqn, _, key = name.removeprefix(prefix).rpartition(".")
                    self._theirs[f"{OPTIMIZER.format(number)}{fqn}/{key}"] = name

    def _num_optimizers(self) -> int:
        if not self._optimizer:
            return 0
        everything = self._tensors.names | self._tensors.other_names
        number = 0
        while any(name.startswith(f"{self._optimizer.format(number)}") for name in everything):
            number += 1
            if "{}" not in self._optimizer:
                break
        return number

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._theirs)

    def check(self, part: int, num_parts: int) -> None:
        """Nothing to compare with."""

    def values(self) -> dict[str, Any]:
        """What ModelParallelStrategy put beside the tensors."""
        meta = self.folder / META
        return load_safely(meta) if meta.is_file() else {}

    def optimizers(self, orders: Sequence[Sequence[str]]) -> list[SavedOptimizer]:
        """See `Source`."""
        found = []
        for number in range(self._num_optimizers()):
            prefix = f"{self._optimizer.format(number)}param_groups."
            groups: dict[int, dict[str, Any]] = {}
            for name in self._tensors.names | self._tensors.other_names:
                if name.startswith(prefix):
                    index, _, key = name.removeprefix(prefix).partition(".")
                    in_bytes = name in self._tensors.other_names
                    value = self._tensors.value(name) if in_bytes else self._tensors.whole(name)
                    groups.setdefault(int(index), {})[key] = value
            found.append(SavedOptimizer([groups[index] for index in sorted(groups)]))
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Source`."""
        return tuple(self._tensors.entry(self._their(name)).size)

    def dtype(self, name: str) -> torch.dtype:
        """See `Source`."""
        return self._tensors.entry(self._their(name)).properties.dtype

    def fill(self, targets: Targets) -> None:
        """See `Source`."""
        self._tensors.fill({self._their(name): target for name, target in targets.items()})

    def _their(self, name: str) -> str:
        return self._theirs.get(name, self._model + name.removeprefix(MODEL))


class FileSource:
    """One file of plain Lightning, or of a full save of this package. Read by mmap: each worker copies what it needs."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._checkpoint = load_safely(file, mmap=True)
        if not isinstance(self._checkpoint, dict) or "state_dict" not in self._checkpoint:
            raise ConfigError(f"{file} is no checkpoint of Lightning: it has no state_dict")
        self._tensors: dict[str, torch.Tensor] = {
            f"{MODEL}{name}": tensor for name, tensor in self._checkpoint["state_dict"].items()
        }
        self._optimizers: list[SavedOptimizer] | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors; those of optimizers once `optimizers` has named them."""
        return frozenset(self._tensors)

    def check(self, part: int, num_parts: int) -> None:
        """Nothing to compare with."""

    def values(self) -> dict[str, Any]:
        """See `Source`."""
        tensors = ("state_dict", "optimizer_states")
        return {key: value for key, value in self._checkpoint.items() if key not in tensors}

    def optimizers(self, orders: Sequence[Sequence[str]]) -> list[SavedOptimizer]:
        """See `Source`; plain Lightning numbers the parameters in the order of their groups.

        Raises:
            ConfigError: other numbers of optimizers or parameters.
        """
        states = self._checkpoint.get("optimizer_states", ())
        if orders and states and len(orders) != len(states):
            raise ConfigError(f"{self.file} holds {len(states)} optimizers, this run has {len(orders)}")
        return [self._named(number, *pair) for number, pair in enumerate(zip(states, orders, strict=False))]

    def _named(self, number: int, state: Mapping[str, Any], order: Sequence[str]) -> SavedOptimizer:
        ids = [one for group in state["param_groups"] for one in group["params"]]
        if len(ids) != len(order):
            raise ConfigError(
                f"{self.file}: optimizer {number} has {len(ids)} parameters there, {len(order)} here; make it in the same way"
            )
        names = dict(zip(ids, order, strict=True))
        scalars: dict[str, dict[str, Any]] = {}
        for one, entries in state["state"].items():
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    self._tensors[f"{OPTIMIZER.format(number)}{names[one]}/{key}"] = value
                else:
                    scalars.setdefault(names[one], {})[key] = value
        groups = [group | {"params": [names[one] for one in group["params"]]} for group in state["param_groups"]]
        return SavedOptimizer(groups, scalars=scalars)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Source`."""
        return tuple(self._tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """See `Source`."""
        return self._tensor(name).dtype

    def fill(self, targets: Targets) -> None:
        """See `Source`."""
        for name, target in targets.items():
            whole = self._tensor(name)
            if tuple(whole.shape) != tuple(target.size()):
                raise ConfigError(f"{self.file}: {name!r} has shape {tuple(whole.shape)} there, {tuple(target.size())} here")
            if not isinstance(target, CellTensor):
                target.copy_(whole)
                continue
            for box, storage in target.boxes():
                corner = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
                storage.copy_(whole[corner])

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise ConfigError(f"{self.file}: the checkpoint has no tensor {name!r}; was it made with another model or optimizer?")
        return self._tensors[name]
