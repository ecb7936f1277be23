"""Cells in and out of ``torch.distributed.checkpoint``: saved under any topology, loaded under any other.

    save: own cells --stage--> chunks in host memory --write_part--> one file per worker --commit (leader)--> folder in place
    load: each worker reads exactly the rectangles of its cells, whoever wrote them

Nothing here talks to another worker: who writes what is known to all, and the leader sees on the disk which parts are done.
So a save may run beside training, and a worker that is lost can only keep a save from being finished.

A checkpoint holds every parameter under its plain name and whole shape, so that tools without this package read it as well.
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from lightning_ntp.dtensor._torch_private import StorageInfo
from lightning_ntp.dtensor.checkpoint_files import (
    MANIFEST,
    Manifest,
    SafeReader,
    checksum,
    put_in_place,
    sync_folder,
    write_synced,
)
from lightning_ntp.errors import ConfigError
from lightning_ntp.model_spec import Cell, ParamSpec, Piece

VALUES = "values.pt"


@dataclass(frozen=True)
class CellTensor:
    """One worker's cell of a tensor of a parameter's shape.

    Args:
        spec: of the parameter.
        cell: what `local` holds.
        local: storage of the cell, any shape of ``cell.numel`` elements whose rows and columns are strided.
        written: the disjoint parts of it that this worker writes.
    """

    spec: ParamSpec
    cell: Cell
    local: torch.Tensor
    written: tuple[Cell, ...] = ()

    def size(self) -> torch.Size:
        """Whole shape."""
        return torch.Size(self.spec.shape)

    def stage(self, name: str) -> Iterator[Chunk]:
        """Copies of the written parts in host memory. Local."""
        for part in self.written:
            for piece in self.cell.pieces(part):
                box = self._box(piece)
                values = torch.empty(box.sizes, dtype=self.local.dtype)
                yield Chunk(name, self.size(), box, values.copy_(self._view(piece, box)))

    def boxes(self) -> list[tuple[ChunkStorageMetadata, torch.Tensor]]:
        """The rectangles of the cell and their storage, to be filled."""
        pieces = [(piece, self._box(piece)) for piece in self.cell.pieces(self.cell)]
        return [(box, self._view(piece, box)) for piece, box in pieces]

    def _view(self, piece: Piece, box: ChunkStorageMetadata) -> torch.Tensor:
        row, column = piece.source_row, piece.source_column
        matrix = self.local.view(self.cell.shape)
        part = matrix[row : row + len(piece.rows), column : column + len(piece.columns)]
        return part if len(self.spec.shape) == 2 else part.view(box.sizes)

    def _box(self, piece: Piece) -> ChunkStorageMetadata:
        """A rectangle in the tensor's own dims; tensors of other than 2 dims are cut by rows only."""
        shape = self.spec.shape
        if len(shape) == 2:
            return ChunkStorageMetadata(
                torch.Size((piece.rows.start, piece.columns.start)), torch.Size((len(piece.rows), len(piece.columns)))
            )
        offsets = (piece.rows.start, *(0 for _ in shape[1:]))[: len(shape)]
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size((len(piece.rows), *shape[1:])[: len(shape)]))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangle of a tensor, copied to host memory."""

    name: str
    size: torch.Size
    box: ChunkStorageMetadata
    values: torch.Tensor

    @property
    def index(self) -> MetadataIndex:
        """DCP's key of it."""
        return MetadataIndex(self.name, self.box.offsets)


def stage(tensors: Mapping[str, CellTensor | torch.Tensor], leads: bool) -> list[Chunk]:
    """Copies of what this worker writes: its parts of cells, and plain tensors where it is the leader. Local."""
    chunks: list[Chunk] = []
    for name, tensor in tensors.items():
        if isinstance(tensor, CellTensor):
            chunks += tensor.stage(name)
        elif leads:
            values = tensor.detach().to("cpu", copy=True).contiguous()
            box = ChunkStorageMetadata(torch.Size([0] * values.dim()), values.size())
            chunks.append(Chunk(name, values.size(), box, values))
    return chunks


class _ChunkPlanner(DefaultSavePlanner):
    """Hands staged chunks to DCP's writer."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        super().__init__()
        self.values = {chunk.index: chunk.values for chunk in chunks}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.values[write_item.index]


def part_file(aside: Path, part: int) -> Path:
    """The record that a worker's part of a save is on the disk."""
    return aside / f"__{part}.part.json"


def write_part(chunks: Sequence[Chunk], aside: Path, part: int) -> None:
    """One worker's file of a checkpoint, and the record that says what is in it.

    Args:
        chunks: from `stage`.
        aside: folder of this save; made where it is missing.
        part: this worker's number in the save.

    Local; may run in a thread.
    """
    aside.mkdir(parents=True, exist_ok=True)
    items = [
        WriteItem(
            index=chunk.index,
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk.box, TensorProperties(dtype=chunk.values.dtype), chunk.size),
        )
        for chunk in chunks
    ]
    writer = FileSystemWriter(aside, sync_files=True)
    # DCP names files by the number of a plan among all plans.
    plan = writer.prepare_global_plan([SavePlan([]) for _ in range(part)] + [SavePlan(items)])[part]
    by_index = {chunk.index: chunk for chunk in chunks}
    entries = []
    for result in writer.write_data(plan, _ChunkPlanner(chunks)).wait() if items else ():
        chunk, place = by_index[result.index], result.storage_data
        entries.append(
            [chunk.name, list(chunk.size), list(chunk.box.offsets), list(chunk.box.sizes), str(chunk.values.dtype),
             place.relative_path, place.offset, place.length]
        )  # fmt: skip
    files = {name: [(aside / name).stat().st_size, checksum(aside / name)] for name in {entry[5] for entry in entries}}
    record = part_file(aside, part)
    unfinished = record.with_suffix(".tmp")
    write_synced(unfinished, json.dumps({"chunks": entries, "files": files}).encode())
    unfinished.rename(record)


def write_values(content: bytes, aside: Path) -> None:
    """What is no tensor of the model, as ``torch.save`` writes it, loadable with ``weights_only``. Local, by the leader."""
    aside.mkdir(parents=True, exist_ok=True)
    write_synced(aside / VALUES, content)


def missing_parts(aside: Path, parts: Iterable[int]) -> list[int]:
    """Workers whose part is not on the disk yet."""
    return [part for part in parts if not part_file(aside, part).is_file()]


def commit(aside: Path, folder: Path, parts: Sequence[int]) -> None:
    """Make a folder of finished parts a checkpoint. By the leader, which has written its `values`; local.

    Raises:
        ConfigError: see `complete`.
    """
    complete(aside, parts)
    put_in_place(aside, folder)


def complete(aside: Path, parts: Sequence[int]) -> None:
    """Write metadata and manifest of a folder of parts. Only their records need be there beside what the leader has written. Local.

    Raises:
        ConfigError: the parts are not the whole model: a bug or a disk that loses files. `aside` stays.
    """
    files: dict[str, tuple[int, int]] = {}
    tensors: dict[str, TensorStorageMetadata] = {}
    results: list[WriteResult] = []
    covered: dict[str, int] = defaultdict(int)
    for part in parts:
        record = json.loads(part_file(aside, part).read_text())
        files |= {name: (size, crc) for name, (size, crc) in record["files"].items()}
        for name, shape, offsets, sizes, dtype, path, offset, length in record["chunks"]:
            box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            dtype_of = getattr(torch, dtype.removeprefix("torch."))
            entry = tensors.setdefault(name, TensorStorageMetadata(TensorProperties(dtype=dtype_of), torch.Size(shape), []))
            entry.chunks.append(box)
            covered[name] += prod(sizes)
            index = MetadataIndex(name, box.offsets)
            results.append(WriteResult(index, length, StorageInfo(path, offset, length)))
    torn = [name for name, entry in tensors.items() if covered[name] != prod(entry.size)]
    if torn:
        raise ConfigError(f"{aside}: the parts hold {covered[torn[0]]} elements of {torn[0]!r}, it has {prod(tensors[torn[0]].size)}")
    FileSystemWriter(aside, sync_files=True).finish(Metadata(dict(tensors)), [results])
    for part in parts:
        part_file(aside, part).unlink()
    # A leader that was killed before the renaming has left one, which must not be listed in the new one.
    (aside / MANIFEST).unlink(missing_ok=True)
    for file in aside.rglob("*"):
        name = file.relative_to(aside).as_posix()
        if file.is_file() and name not in files:
            files[name] = (file.stat().st_size, checksum(file))
    Manifest(files).write(aside)
    sync_folder(aside)


class _BoxPlanner(DefaultLoadPlanner):
    """Plans reads by rectangles: DCP's own planner refuses what is not a tensor."""

    def __init__(self, targets: Mapping[str, CellTensor | torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self.requests: dict[str, list[ChunkStorageMetadata]] = {}
        self.storage: dict[MetadataIndex, torch.Tensor] = {}
        for name, target in targets.items():
            if isinstance(target, CellTensor):
                boxes = target.boxes()
            else:
                boxes = [(ChunkStorageMetadata(torch.Size([0] * target.dim()), target.size()), target)]
            self.requests[name] = [box for box, _ in boxes]
            self.storage |= {MetadataIndex(name, box.offsets): storage for box, storage in boxes}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        requests = []
        for name, boxes in self.requests.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata), "SavedTensors.fill has checked this"
            requests += create_read_items_for_chunk_list(name, stored, boxes)
        return LoadPlan(requests)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.storage[index]


class SavedTensors:
    """The tensors of a checkpoint folder, by name; of this package, or any other folder of DCP.

    Raises:
        ConfigError: no DCP folder, or metadata that is damaged or would run code.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = SafeReader(folder)
        self._saved = self._reader.read_metadata().state_dict_metadata

    def read_from(self, files: Any, url: str) -> None:
        """Take tensors from another place than the metadata.

        Args:
            files: DCP's view of an object store.
            url: of the folder in it.
        """
        self._reader.fs, self._reader.path = files, url

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(name for name, entry in self._saved.items() if isinstance(entry, TensorStorageMetadata))

    @property
    def other_names(self) -> frozenset[str]:
        """Names of what other programs have saved beside tensors."""
        return frozenset(self._saved) - self.names

    def entry(self, name: str) -> TensorStorageMetadata:
        """Shape and dtype of a tensor.

        Raises:
            ConfigError: there is no such tensor.
        """
        entry = self._saved.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise ConfigError(
                f"{self._reader.path}: the checkpoint has no tensor {name!r}; was it made with another model or optimizer?"
            )
        return entry

    def check(self, targets: Mapping[str, CellTensor | torch.Tensor]) -> None:
        """Compare names and shapes before anything is read.

        Raises:
            ConfigError: a tensor is missing or has another shape.
        """
        for name, target in targets.items():
            size = self.entry(name).size
            if tuple(size) != tuple(target.size()):
                raise ConfigError(f"{self._reader.path}: {name!r} has shape {tuple(size)} there, {tuple(target.size())} here")

    def fill(self, targets: Mapping[str, CellTensor | torch.Tensor]) -> None:
        """Fill cells and plain tensors in place. Local.

        Raises:
            ConfigError: as `check`, or a file that cannot be read.
        """
        self.check(targets)
        if not targets:
            return
        metadata, planner = self._reader.read_metadata(), _BoxPlanner(targets)
        # What dcp.load does in one process, without its warning that it is one.
        planner.set_up_planner(dict(targets), metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:  # torch.load of a damaged file fails in many ways
            raise ConfigError(f"{self._reader.path} cannot be read: {type(error).__name__}: {error}") from error

    def value(self, name: str) -> Any:
        """What another program saved under a name beside tensors, if it is plain. Local.

        Raises:
            ConfigError: its loading would run code.
        """
        place = self._reader.read_metadata().storage_data[MetadataIndex(name)]
        with (self.folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            return load_safely(io.BytesIO(file.read(place.length)), where=f"{self.folder}: {name!r}")

    def whole(self, name: str) -> torch.Tensor:
        """One tensor in one piece. Local."""
        entry = self.entry(name)
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        self.fill({name: tensor})
        return tensor


def load_values(folder: Path) -> dict[str, Any]:
    """What `write_values` wrote. Local.

    Raises:
        ConfigError: no checkpoint of this package, or a file that would run code.
    """
    file = folder / VALUES
    if not file.is_file():
        raise ConfigError(f"{folder} is no checkpoint of this package: it has no {VALUES}")
    return load_safely(file)


def load_safely(file: Path | io.BytesIO, mmap: bool = False, where: str = "") -> Any:
    """A file of ``torch.save`` that holds nothing but plain values and tensors. Local.

    Raises:
        ConfigError: it is damaged, or its loading would run code.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # pickles fail in many ways
        raise ConfigError(
            f"{where or file} cannot be loaded: it is damaged, or holds objects whose loading would run code "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error
