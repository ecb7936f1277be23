"""Cells in and out of ``torch.distributed.checkpoint``: saved under any topology, loaded under any other.

    save: cells owned by replica 0 -> files in a folder beside the target -> renamed by the leader once all of it is written
    load: each worker reads exactly the rectangles of its cells, whoever wrote them

A checkpoint holds every parameter under its plain name and whole shape, so that tools without this package read it as well.
Metadata goes through an unpickler that admits the few classes it consists of: loading a doctored file runs no code.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_ntp.errors import ConfigError
from lightning_ntp.model_spec import Cell, ParamSpec, Piece


@dataclass(frozen=True)
class CellTensor:
    """One worker's cell of a tensor of a parameter's shape, as DCP's protocol for sharded objects wants it.

    Args:
        spec: of the parameter.
        cell: what `local` holds.
        local: storage of the cell, any shape of ``cell.numel`` elements whose rows and columns are strided.
        written: the part that this worker writes; an empty cell for none.
    """

    spec: ParamSpec
    cell: Cell
    local: torch.Tensor
    written: Cell

    def size(self) -> torch.Size:
        """Whole shape."""
        return torch.Size(self.spec.shape)

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in map(self._chunk, self.cell.pieces(self.written))
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(piece) for piece in self.cell.pieces(self.cell)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for piece in (*self.cell.pieces(self.written), *self.cell.pieces(self.cell)):
            chunk = self._chunk(piece)
            if chunk.offsets == index.offset:
                row, column = piece.source_row, piece.source_column
                matrix = self.local.view(self.cell.shape)
                part = matrix[row : row + len(piece.rows), column : column + len(piece.columns)]
                return part if len(self.spec.shape) == 2 else part.view(chunk.sizes)
        raise ConfigError(f"{index.fqn}: no chunk at {index.offset} in this worker's cell {self.cell}")

    def _chunk(self, piece: Piece) -> ChunkStorageMetadata:
        """A rectangle in the tensor's own dims; tensors of other than 2 dims are cut by rows only."""
        shape = self.spec.shape
        if len(shape) == 2:
            return ChunkStorageMetadata(
                torch.Size((piece.rows.start, piece.columns.start)), torch.Size((len(piece.rows), len(piece.columns)))
            )
        offsets = (piece.rows.start, *(0 for _ in shape[1:]))[: len(shape)]
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size((len(piece.rows), *shape[1:])[: len(shape)]))


class _CellSavePlanner(DefaultSavePlanner):
    """DCP looks parts up in tensors only; ours know their own."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        tensor = self.state_dict[index.fqn]
        return tensor.__get_tensor_shard__(index) if isinstance(tensor, CellTensor) else super().lookup_object(index)


class _CellLoadPlanner(DefaultLoadPlanner):
    """Plans reads by chunk lists: DCP's own planner refuses what is not a tensor."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved, requests = self.metadata.state_dict_metadata, []
        for name, tensor in self.state_dict.items():
            if isinstance(tensor, CellTensor):
                chunks = tensor.__create_chunk_list__()
            else:
                chunks = [ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())]
            stored = saved[name]
            assert isinstance(stored, TensorStorageMetadata), "load_cells has checked this"
            requests += create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(requests)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        tensor = self.state_dict[index.fqn]
        return tensor.__get_tensor_shard__(index) if isinstance(tensor, CellTensor) else super().lookup_tensor(index)


class _MetadataUnpickler(pickle.Unpickler):
    """Admits what DCP's own metadata consists of and nothing else."""

    _ALLOWED = frozenset(
        {
            *(("torch.distributed.checkpoint.metadata", name) for name in (
                "Metadata", "MetadataIndex", "TensorProperties", "ChunkStorageMetadata", "TensorStorageMetadata",
                "BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
            )),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
            ("torch", "device"),
            ("pathlib", "PosixPath"),
            ("collections", "OrderedDict"),
        }
    )  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise ConfigError(
            f"checkpoint metadata refers to {module}.{name}, which no checkpoint of ours needs; the file is damaged or was "
            "made to run code. Load another checkpoint."
        )


class _SafeReader(FileSystemReader):
    """DCP's reader, except that metadata cannot run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if metadata.storage_meta is None:
            raise ConfigError(f"{self.path}: checkpoint metadata without storage information")
        metadata.storage_meta.load_id = self.load_id
        return metadata


def save_cells(
    tensors: Mapping[str, CellTensor | torch.Tensor], values: Mapping[str, Any], folder: Path, group: ProcessGroup
) -> None:
    """Write a checkpoint folder.

    Args:
        tensors: name -> this worker's cell; a plain tensor is written by the first worker of the group.
        values: what else must be kept (plain Python and tensors), from the first worker; loadable with ``weights_only``.
        folder: target; an older checkpoint there is replaced once the new one is complete.
        group: all live workers; its first one is the leader. The folder must be on storage that all of them see.

    A save cut off at any point leaves the old folder as it was. Collective over `group`.
    """
    leads = dist.get_group_rank(group, dist.get_rank()) == 0
    aside = folder.with_name(f".{folder.name}.incomplete")
    if leads:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        with (aside / "values.pt").open("wb") as file:
            torch.save(dict(values), file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier(group)
    mine = {name: tensor for name, tensor in tensors.items() if leads or isinstance(tensor, CellTensor)}
    writer = FileSystemWriter(aside, sync_files=True)
    dcp.save(mine, storage_writer=writer, planner=_CellSavePlanner(), process_group=group)
    if leads:
        _replace_folder(aside, folder)
    dist.barrier(group)


def _replace_folder(aside: Path, folder: Path) -> None:
    """Renames are atomic; between the two of a replacement the old checkpoint still stands under another name."""
    old = folder.with_name(f".{folder.name}.previous")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def load_values(folder: Path) -> dict[str, Any]:
    """The `values` of `save_cells`. Local."""
    file = folder / "values.pt"
    if not file.is_file():
        raise ConfigError(f"{folder} is no checkpoint of this package: it has no values.pt")
    return torch.load(file, map_location="cpu", weights_only=True)


def load_cells(tensors: Mapping[str, CellTensor | torch.Tensor], folder: Path, group: ProcessGroup | None) -> None:
    """Fill each cell in place from a checkpoint made under any topology.

    Raises:
        ConfigError: the folder is no complete checkpoint, lacks a tensor, or holds it in another shape.

    Collective over `group` (None: one process without groups).
    """
    if not (folder / ".metadata").is_file():
        raise ConfigError(f"{folder} is no complete checkpoint: it has no .metadata")
    reader = _SafeReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        size = getattr(saved.get(name), "size", None)
        if size is None:
            raise ConfigError(f"{folder}: the checkpoint has no tensor {name!r}; was it made with another model or optimizer?")
        if tuple(size) != tuple(tensor.size()):
            raise ConfigError(f"{folder}: {name!r} has shape {tuple(size)} there, {tuple(tensor.size())} here")
    dcp.load(
        dict(tensors), storage_reader=reader, planner=_CellLoadPlanner(flatten_state_dict=False), process_group=group, no_dist=group is None
    )


def saved_names(folder: Path) -> frozenset[str]:
    """Names of all tensors in a checkpoint. Local."""
    if not (folder / ".metadata").is_file():
        raise ConfigError(f"{folder} is no complete checkpoint: it has no .metadata")
    return frozenset(_SafeReader(folder).read_metadata().state_dict_metadata)
