"""Checkpoint folders on disk: complete or absent, checksummed, and read without running anything that they contain.

    aside (.NAME.TOKEN.tmp) --parts of all workers, metadata, manifest--> fsync --one rename--> NAME

A folder under its own name is complete: it got that name when everything was written. The manifest lists size and CRC-32 of
every file, so that a copy that was cut off, or a damaged disk, is found before anything is loaded.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from lightning_ntp.errors import ConfigError

MANIFEST = "ntp.json"
METADATA = ".metadata"
FORMAT = 1
BLOCK_BYTES = 1 << 23
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a complete checkpoint consists of.

    Args:
        files: path inside the folder of the data -> (bytes, CRC-32).
        data: name of that folder in the checkpoint's; empty where it is the same. Object stores have one for each save.
    """

    files: Mapping[str, tuple[int, int]]
    data: str = ""

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder.

        Raises:
            ConfigError: there is none, it is damaged, or of a newer format.
        """
        try:
            data = json.loads((folder / MANIFEST).read_text())
            files = {str(name): (int(size), int(crc)) for name, (size, crc) in data["files"].items()}
            version, digest, inside = data["format"], data["digest"], str(data.get("data", ""))
        except FileNotFoundError:
            raise ConfigError(f"{folder} is no complete checkpoint: it has no {MANIFEST}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{folder / MANIFEST} is damaged ({error}); load another checkpoint") from error
        if version > FORMAT:
            raise ConfigError(f"{folder} has format {version}, this release reads up to {FORMAT}; install a newer one")
        if digest != _digest(files):
            raise ConfigError(f"{folder / MANIFEST} is damaged (its checksum differs); load another checkpoint")
        for name in (*files, inside):
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ConfigError(f"{folder / MANIFEST} names {name!r}, which lies outside of the folder; do not load it")
        return cls(files, inside)

    def write(self, folder: Path) -> None:
        """Local."""
        write_synced(folder / MANIFEST, self.to_bytes())

    def to_bytes(self) -> bytes:
        """What `read` reads."""
        data = {"format": FORMAT, "digest": _digest(self.files), "files": dict(self.files)}
        return json.dumps(data | ({"data": self.data} if self.data else {}), indent=1).encode()

    def share(self, part: int, num_parts: int) -> Iterator[str]:
        """Files that one of `num_parts` readers checks: about as many bytes for each."""
        loads = [0] * num_parts
        for name, (size, _) in sorted(self.files.items(), key=lambda item: (-item[1][0], item[0])):
            lightest = loads.index(min(loads))
            loads[lightest] += size + 1
            if lightest == part:
                yield name

    def check(self, folder: Path, part: int = 0, num_parts: int = 1) -> None:
        """Read one part of the files and compare.

        Raises:
            ConfigError: a file is missing or not what was written.
        """
        for name in self.share(part, num_parts):
            size, crc = self.files[name]
            file = folder / self.data / name
            if not file.is_file():
                raise ConfigError(f"{folder} is incomplete: {name} is missing; load another checkpoint")
            found = file.stat().st_size
            if found != size:
                raise ConfigError(f"{folder} is damaged: {name} has {found} bytes, {size} were written; load another checkpoint")
            if checksum(file) != crc:
                raise ConfigError(f"{folder} is damaged: the checksum of {name} differs; load another checkpoint")


def _digest(files: Mapping[str, tuple[int, int]]) -> int:
    return zlib.crc32(json.dumps(sorted((name, *entry) for name, entry in files.items())).encode())


def checksum(file: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with file.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


def write_synced(file: Path, content: bytes) -> None:
    """Write a small file and have it on the disk."""
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def aside_of(target: Path, token: str) -> Path:
    """Where a checkpoint is written before it gets its name. Every save has its own token."""
    return target.with_name(f".{target.name}.{token}.tmp")


def remove_leftovers(target: Path, keep: str = "") -> None:
    """Delete what saves of `target` that were cut off have left behind."""
    if not target.parent.is_dir():
        return
    for path in target.parent.iterdir():
        cut_off = path.name.startswith(f".{target.name}.") and path.name.endswith((".tmp", ".removed"))
        if cut_off and path != aside_of(target, keep):
            delete(path)


def put_in_place(aside: Path, target: Path) -> None:
    """Give a finished folder (or file) its name; whatever had the name is deleted afterwards.

    One atomic step on Linux file systems with RENAME_EXCHANGE (ext4, xfs, btrfs, tmpfs). Elsewhere two: if the process dies
    between them, `restore_previous` finds the old one.
    """
    previous = _previous(target)
    delete(previous)
    if not os.path.lexists(target):
        aside.rename(target)
    elif _exchange(aside, target):
        delete(aside)
    else:
        target.rename(previous)
        aside.rename(target)
        delete(previous)
    sync_folder(target.parent)


def restore_previous(target: Path) -> None:
    """Undo a replacement that was cut off between its two renames."""
    if not os.path.lexists(target) and _previous(target).exists():
        _previous(target).rename(target)


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _exchange(first: Path, second: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    done = libc.renameat2(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE)
    )
    if done == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(second))


def delete(path: Path) -> None:
    """Delete a file, link or folder, if it is there; a folder loses its name first, so that no half of it keeps it."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.is_dir():
        gone = path if path.name.startswith(".") else path.with_name(f".{path.name}.removed")
        if gone != path:
            shutil.rmtree(gone, ignore_errors=True)
            path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


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
            ("pathlib._local", "PosixPath"),
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


class SafeReader(FileSystemReader):
    """DCP's reader, except that metadata cannot run code and is read once."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the folder.

        Raises:
            ConfigError: none there, or a file that is not DCP's metadata.
        """
        if self._metadata is None:
            self._metadata = self._unpickled()
        return self._metadata

    def _unpickled(self) -> Metadata:
        file = Path(self.path) / METADATA
        try:
            with file.open("rb") as stream:
                metadata = _MetadataUnpickler(stream).load()
        except FileNotFoundError:
            raise ConfigError(f"{self.path} is no complete checkpoint: it has no {METADATA}") from None
        except ConfigError:
            raise
        except Exception as error:  # whatever a damaged pickle makes of itself
            raise ConfigError(f"{file} is damaged ({type(error).__name__}: {error}); load another checkpoint") from error
        if not isinstance(metadata, Metadata) or metadata.storage_meta is None or metadata.storage_data is None:
            raise ConfigError(f"{file} holds no checkpoint metadata; load another checkpoint")
        for info in metadata.storage_data.values():
            path = Path(info.relative_path)
            if path.is_absolute() or ".." in path.parts:
                raise ConfigError(f"{file} names {info.relative_path!r}, which lies outside of the folder; do not load it")
        metadata.storage_meta.load_id = self.load_id
        return metadata
