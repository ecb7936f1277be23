"""Checkpoints in object stores, by the fsspec of ``torch.distributed.checkpoint``.

    every worker: own part in a local folder --upload--> URL/TOKEN/...                 its record last
    leader:       all records are there --> metadata --> URL/ntp.json, which names TOKEN --> folders of other tokens go

Object stores have no rename, but an object is there whole or not at all. So the manifest is the commit: a save that is cut off leaves a
folder that nothing names, and the checkpoint before it stays until the manifest is another one.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_ntp.dtensor._torch_private import FsspecFiles
from lightning_ntp.dtensor.checkpoint import complete, part_file
from lightning_ntp.dtensor.checkpoint_files import BLOCK_BYTES, MANIFEST, METADATA, Manifest
from lightning_ntp.errors import ConfigError

LOCAL_SCHEMES = ("file", "local")


def place_of(path: str | os.PathLike[str]) -> Path | Bucket:
    """A checkpoint's path: local, also as ``file:///folder``, or a place in an object store. Local.

    Raises:
        ConfigError: see `Bucket.files`.
    """
    scheme, mark, rest = str(path).partition("://")
    if not mark:
        return Path(path)
    if scheme in LOCAL_SCHEMES:
        return Path(rest)
    bucket = Bucket(str(path).rstrip("/"))
    bucket.files  # noqa: B018  a missing driver is said before anything is written
    return bucket


@dataclass(frozen=True)
class Bucket:
    """A checkpoint's place in an object store.

    Args:
        url: of a scheme that fsspec knows, without a slash at its end.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @cached_property
    def files(self) -> Any:
        """DCP's view of the store, for reading tensors.

        Raises:
            ConfigError: a scheme that fsspec does not know, or whose driver is not installed.
        """
        files = FsspecFiles()
        try:
            files.init_path(self.url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{self.url!r} cannot be reached: {error}; install what fsspec asks for, or give a local path") from error
        return files

    @property
    def _fs(self) -> Any:
        return self.files.fs

    def aside(self, token: str) -> Path:
        """The local folder of this process in which it makes its part of a save."""
        return Path(tempfile.gettempdir()) / f"ntp-save-{token}-{os.getpid()}"

    def upload(self, aside: Path, token: str, part: int) -> None:
        """A worker's files; whoever sees its record sees all of them. Local."""
        record = part_file(aside, part)
        for file in sorted(path for path in aside.rglob("*") if path.is_file() and path != record):
            self._fs.put_file(str(file), f"{self.url}/{token}/{file.relative_to(aside).as_posix()}")
        self._fs.pipe_file(f"{self.url}/{token}/{record.name}", record.read_bytes())

    def missing_parts(self, token: str, parts: Iterable[int]) -> list[int]:
        """Workers whose part has not come yet."""
        self._fs.invalidate_cache()
        return [part for part in parts if not self._fs.exists(self._record(token, part))]

    def _record(self, token: str, part: int) -> str:
        return f"{self.url}/{token}/{part_file(Path(), part).name}"

    def commit(self, aside: Path, token: str, parts: Sequence[int]) -> None:
        """Make the uploaded parts the checkpoint. By the leader, whose own part is still in `aside`; local."""
        for part in parts:
            part_file(aside, part).write_bytes(self._fs.cat_file(self._record(token, part)))
        complete(aside, parts)
        self._fs.put_file(str(aside / METADATA), f"{self.url}/{token}/{METADATA}")
        manifest = replace(Manifest.read(aside), data=token)
        self._fs.pipe_file(f"{self.url}/{MANIFEST}", manifest.to_bytes())
        with suppress(OSError):  # it is saved; what stays behind goes before the next save
            self.remove_leftovers(token)

    def remove_leftovers(self, keep: str) -> None:
        """Delete what other saves than `keep` have left, except the checkpoint."""
        self._fs.invalidate_cache()
        kept = {MANIFEST, keep, self._token()}
        with suppress(FileNotFoundError):
            for path in self._fs.ls(self.url, detail=False):
                if path.rstrip("/").rpartition("/")[2] not in kept:
                    self._fs.rm(path, recursive=True)

    def discard(self, token: str) -> None:
        """Delete what a save that is given up has uploaded; not if its manifest came through in spite of an error."""
        self._fs.invalidate_cache()
        if self._token() != token:
            self._remove(f"{self.url}/{token}")

    def delete(self) -> None:
        """Delete the checkpoint; its manifest first, so that no half of it is one."""
        self._remove(f"{self.url}/{MANIFEST}")
        self._remove(self.url)

    def _remove(self, path: str) -> None:
        self._fs.invalidate_cache()
        with suppress(FileNotFoundError):
            self._fs.rm(path, recursive=True)

    def _token(self) -> str | None:
        """Name of the folder that is the checkpoint; None where there is none."""
        try:
            token = json.loads(self._fs.cat_file(f"{self.url}/{MANIFEST}"))["data"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        return token if isinstance(token, str) and token.isalnum() else None

    def fetch(self, names: Iterable[str], folder: Path) -> str:
        """Download the manifest and small files into a local folder; returns the URL of the checkpoint's data. Local.

        Raises:
            ConfigError: there is no complete checkpoint.
        """
        self._fs.invalidate_cache()
        token = self._token()
        if token is None:
            raise ConfigError(f"there is no complete checkpoint at {self.url}: it has no {MANIFEST} of this package")
        (folder / token).mkdir()
        for name in (MANIFEST, *(f"{token}/{name}" for name in names)):
            try:
                (folder / name).write_bytes(self._fs.cat_file(f"{self.url}/{name}"))
            except FileNotFoundError:
                raise ConfigError(f"{self.url} is incomplete: {name} is missing; load another checkpoint") from None
        return f"{self.url}/{token}"

    def check(self, manifest: Manifest, part: int, num_parts: int) -> None:
        """Read one part of the files and compare, as `Manifest.check` does.

        Raises:
            ConfigError: a file is missing or not what was written.
        """
        for name in manifest.share(part, num_parts):
            try:
                found = self._checksum(f"{self.url}/{manifest.data}/{name}")
            except FileNotFoundError:
                raise ConfigError(f"{self.url} is incomplete: {name} is missing; load another checkpoint") from None
            if found != manifest.files[name]:
                raise ConfigError(f"{self.url} is damaged: the checksum or size of {name} differs; load another checkpoint")

    def _checksum(self, path: str) -> tuple[int, int]:
        size = crc = 0
        with self._fs.open(path, "rb") as stream:
            while block := stream.read(BLOCK_BYTES):
                size, crc = size + len(block), zlib.crc32(block, crc)
        return size, crc


def forget_aside(aside: Path) -> None:
    """Delete the local folder of a save. Local."""
    shutil.rmtree(aside, ignore_errors=True)
