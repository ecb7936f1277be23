"""Checkpoints in object stores: complete or not there, whatever is cut off; read by the rectangles of each worker's cells."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from lightning_ntp.dtensor.bucket import Bucket, place_of
from lightning_ntp.dtensor.checkpoint import stage, write_part, write_values
from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.saver import Save, Saver
from lightning_ntp.strategy.sources import open_source
from tests.test_kills import SPECS, TOPOLOGY, cells_of
from tests.test_resume import OTHER, SAME, assert_same_end, run_and_save

URL = "cut://bucket/last.ckpt"


class CutOff(OSError):
    """What a process that is gone would have done next."""


class Cut(MemoryFileSystem):
    """A store in memory that takes so many more changes; then it fails once, or for ever."""

    protocol = "cut"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    changes_left, num_changes, is_gone = 10**6, 0, True

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("cut://", "memory://"))

    def _change(self) -> None:
        if Cut.changes_left == 0:
            Cut.changes_left = 0 if Cut.is_gone else 10**6
            raise CutOff("the writer is gone")
        Cut.changes_left, Cut.num_changes = Cut.changes_left - 1, Cut.num_changes + 1

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._change()
        super().pipe_file(path, value, **options)

    def put_file(self, local: str, path: str, **options: Any) -> None:
        self._change()
        super().pipe_file(path, Path(local).read_bytes())

    def rm_file(self, path: str) -> None:
        self._change()
        super().rm_file(path)

    def rm(self, path: str, **options: Any) -> None:
        for file in self.find(path):
            self.rm_file(file)


class Shelf(LocalFileSystem):
    """A store that several processes see."""

    protocol = "shelf"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"auto_mkdir": True})

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("shelf://"))


fsspec.register_implementation("cut", Cut, clobber=True)
fsspec.register_implementation("shelf", Shelf, clobber=True)


@pytest.fixture(autouse=True)
def _empty() -> None:
    Cut.store.clear()
    Cut.changes_left = 10**6


def save_of(worker: int, step: int) -> Save:
    bucket, token, content = Bucket(URL), f"token{step}", io.BytesIO()
    torch.save({"step": step}, content)

    def write(aside: Path) -> None:
        write_part(stage(cells_of(worker, step), leads=worker == 0), aside, worker)
        if worker == 0:
            write_values(content.getvalue(), aside)

    def finish(aside: Path) -> None:
        bucket.commit(aside, token, TOPOLOGY.workers)

    return Save(bucket, token, worker, TOPOLOGY.workers, write, finish if worker == 0 else None)


def save(step: int) -> str | None:
    """One process for all workers, the leader last; what went wrong."""
    saver = Saver(lambda message: message, lambda: TOPOLOGY.workers)
    for worker in (*TOPOLOGY.workers[1:], 0):
        saver.start(save_of(worker, step))
        if (error := saver.settle()) is not None:
            return error
    return None


def step_of(url: str) -> int:
    """Checks everything in a checkpoint and says of which step it is."""
    source = open_source(url, ())
    source.check(0, 2)
    source.check(1, 2)
    step = source.values()["step"]
    assert source.names == {spec.fqn for spec in SPECS}
    for name in source.names:
        whole = torch.empty(source.shape(name), dtype=source.dtype(name))
        source.fill({name: whole})
        assert bool((whole == step).all()), name
    return step


@pytest.mark.parametrize("is_gone", [True, pytest.param(False, marks=pytest.mark.full)], ids=["killed", "failed once"])
def test_a_save_that_is_cut_off_anywhere_leaves_the_one_before(is_gone: bool) -> None:
    Cut.is_gone = is_gone
    assert save(1) is None and step_of(URL) == 1
    before = Cut.num_changes
    assert save(2) is None and step_of(URL) == 2
    num_changes, found = Cut.num_changes - before, []
    for cut in range(num_changes):
        Cut.store.clear()
        assert save(1) is None
        Cut.changes_left = cut
        error = save(2)
        Cut.changes_left = 10**6
        found.append(step_of(URL))
        assert found[-1] == (2 if error is None else 1)
        assert save(3) is None and step_of(URL) == 3
        folders = {path.split("/")[3] for path in Cut.store}
        assert folders == {"ntp.json", "token3"}, "what was cut off is not left behind"
    assert found == sorted(found) and set(found) == {1, 2}


def test_damage_is_found_and_another_place_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no complete checkpoint at cut://bucket/last\.ckpt: it has no ntp\.json"):
        open_source(URL, ())
    save(1)
    largest = max(Cut.store, key=lambda path: Cut.store[path].size)
    content = bytearray(Cut.store[largest].getvalue())
    content[len(content) // 2] ^= 1
    Cut().pipe_file(largest, bytes(content))
    with pytest.raises(ConfigError, match=r"cut://bucket/last\.ckpt is damaged: the checksum or size of __\d_0\.distcp differs"):
        open_source(URL, ()).check(0, 1)
    Cut().rm_file(largest)
    with pytest.raises(ConfigError, match=r"is incomplete: __\d_0\.distcp is missing"):
        open_source(URL, ()).check(0, 1)
    manifest = json.loads(Cut().cat_file(f"{URL}/ntp.json"))
    Cut().pipe_file(f"{URL}/ntp.json", json.dumps(manifest | {"data": "../other"}).encode())
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        open_source(URL, ())
    with pytest.raises(ConfigError, match="'nowhere://c.ckpt' cannot be reached: Protocol not known: nowhere"):
        place_of("nowhere://c.ckpt")


def test_a_downloaded_copy_is_a_checkpoint(tmp_path: Path) -> None:
    save(1)
    for path, file in Cut.store.items():
        copy = tmp_path / path.removeprefix("/bucket/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.getvalue())
    assert step_of(str(tmp_path / "last.ckpt")) == 1


def test_a_checkpoint_goes_as_a_whole() -> None:
    save(1)
    Saver(lambda message: message, lambda: TOPOLOGY.workers).remove(Bucket(URL))
    assert not Cut.store


def test_local_paths_stay_what_they_are() -> None:
    for path in ("/a/b.ckpt", Path("/a/b.ckpt"), "file:///a/b.ckpt", "local:///a/b.ckpt"):
        assert place_of(path) == Path("/a/b.ckpt")


def run_on_shelf(rank: int, world: int, *case: Any) -> Any:
    """Where this module is imported the store is known."""
    return run_and_save(rank, world, *case)


def test_a_run_goes_on_from_a_store_under_another_topology(pool, tmp_path):
    options, folder = {"max_epochs": 1}, f"shelf://{tmp_path}"
    whole = pool.run(run_on_shelf, *SAME, "map", options, folder, ("batch-0-0", "batch-0-1"), None)
    assert {path.name for path in tmp_path.iterdir()} == {"batch-0-0.ckpt", "batch-0-1.ckpt"}
    resumed = pool.run(run_on_shelf, *OTHER, "map", options, "", (), f"{folder}/batch-0-1.ckpt")
    assert resumed[0]["record"][0][:2] == [0, 2]
    assert_same_end(resumed, whole, "shelf")
