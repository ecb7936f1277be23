"""A writer that is killed at any moment leaves complete checkpoints only, and the newest of them loads."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_ntp.dtensor.checkpoint import (
    CellTensor,
    SavedTensors,
    commit,
    load_values,
    part_file,
    stage,
    write_part,
    write_values,
)
from lightning_ntp.dtensor.checkpoint_files import Manifest, restore_previous
from lightning_ntp.layout import nested_layouts
from lightning_ntp.model_spec import ParamSpec
from lightning_ntp.strategy.saver import Save, Saver
from lightning_ntp.topology import Topology
from lightning_ntp.write_plan import written_cells
from tests.pool import PRELOAD

TOPOLOGY = Topology.from_shapes([(1, 2), (1, 1)])
SPECS = (ParamSpec("up", (64, 48), 0, nested_layouts(64, 2, TOPOLOGY.loss_order)), ParamSpec("norm", (48,)), ParamSpec("deep", (9, 8, 7)))
START_SECONDS = 60.0


def cells_of(worker: int, step: int) -> dict[str, CellTensor]:
    """A worker's cells, full of the number of the step."""
    cells = {}
    for index, spec in enumerate(SPECS):
        cell = spec.cell(TOPOLOGY.coordinates(worker))
        local = torch.full(cell.shape, float(step))
        cells[spec.fqn] = CellTensor(spec, cell, local, written_cells(spec, index, TOPOLOGY, worker, 0))
    return cells


def _save(folder: Path, name: str, step: int, token: str) -> Save:
    """One process writes for all three workers, as fast as it can."""
    target, content = folder / name, io.BytesIO()
    torch.save({"step": step}, content)

    def write(aside: Path) -> None:
        write_values(content.getvalue(), aside)
        for worker in TOPOLOGY.workers:
            write_part(stage(cells_of(worker, step), leads=worker == 0), aside, worker)

    return Save(target, token, 0, TOPOLOGY.workers, write, lambda aside: commit(aside, target, TOPOLOGY.workers))


def _write_for_ever(folder: str, first: int) -> None:
    saver = Saver(lambda message: message, lambda: TOPOLOGY.workers)
    for step in itertools.count(first):
        for name in (f"step={step}.ckpt", "last.ckpt"):
            assert saver.settle() is None
            saver.start(_save(Path(folder), name, step, f"{step}"))
        saver.remove(Path(folder) / f"step={step - 2}.ckpt")


def _step_of(folder: Path) -> int:
    """Checks everything in a checkpoint and says of which step it is."""
    Manifest.read(folder).check(folder)
    saved, step = SavedTensors(folder), load_values(folder)["step"]
    assert saved.names == {spec.fqn for spec in SPECS}
    for name in saved.names:
        assert bool((saved.whole(name) == step).all()), (folder, name)
    return step


def _wait_for_changes(folder: Path, number: int) -> None:
    """Until so many changes of files were seen: a moment that does not depend on how fast the machine is."""
    deadline, before = time.monotonic() + START_SECONDS, None
    while number > 0 and time.monotonic() < deadline:
        now = list(os.walk(folder))
        number -= now != before
        before = now
        time.sleep(0.0005)


def _kill_at_random_moments(folder: Path, rounds: int) -> tuple[int, int]:
    """Kills a writer again and again; how many kills hit a save, and the last step that was saved whole."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    generator, newest, last, left_aside = random.Random(7), 0, 0, 0
    for _ in range(rounds):
        writer = context.Process(target=_write_for_ever, args=(str(folder), newest + 1), daemon=True)
        writer.start()
        deadline = time.monotonic() + START_SECONDS
        while not (folder / f"step={newest + 1}.ckpt").exists():
            assert writer.is_alive() and time.monotonic() < deadline
            time.sleep(0.001)
        _wait_for_changes(folder, generator.randrange(25))
        writer.kill()
        writer.join()
        restore_previous(folder / "last.ckpt")
        named = [path for path in folder.iterdir() if not path.name.startswith(".")]
        left_aside += len(list(folder.iterdir())) > len(named)
        steps = {path.name: _step_of(path) for path in named}
        assert all(name == "last.ckpt" or name == f"step={step}.ckpt" for name, step in steps.items())
        assert max(steps.values()) > newest
        assert steps.get("last.ckpt", 0) >= last, "an older checkpoint has taken the place of a newer one"
        newest, last = max(steps.values()), steps.get("last.ckpt", last)
    named = {path.name for path in folder.iterdir()}
    assert sum(name.endswith(".tmp") for name in named) <= 3 + rounds
    return left_aside, last


def test_a_part_whose_worker_is_gone_gives_the_save_up_at_once(tmp_path, caplog):
    saver = Saver(lambda message: message, lambda: (0, 1))
    saver.start(_save(tmp_path, "last.ckpt", 1, "a"))
    assert saver.settle() is None

    def all_but_two(aside: Path) -> None:
        _save(tmp_path, "last.ckpt", 2, "b").write(aside)
        part_file(aside, 2).unlink()

    lost = _save(tmp_path, "last.ckpt", 2, "b")
    lost.write = all_but_two
    saver.start(lost)
    saver.remove(tmp_path / "last.ckpt")
    error = saver.settle()
    assert error == "the parts of workers [2] never came; a worker was lost while it saved"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert _step_of(tmp_path / "last.ckpt") == 1
    saver.start(_save(tmp_path, "last.ckpt", 3, "c"))
    saver.abandon()
    assert _step_of(tmp_path / "last.ckpt") == 3
    saver.start(_save(tmp_path, "last.ckpt", 4, "d"))
    saver.drop()
    assert _step_of(tmp_path / "last.ckpt") in (3, 4)
    assert not any(thread.name.startswith("save") for thread in threading.enumerate())


def test_kills_leave_complete_checkpoints(tmp_path):
    num_hits, last = _kill_at_random_moments(tmp_path, 6)
    assert num_hits > 0, "no kill hit a save: the moments are badly chosen"
    assert last > 0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_fifty_kills_leave_complete_checkpoints(tmp_path):
    num_hits, last = _kill_at_random_moments(tmp_path, 50)
    assert num_hits > 0, "no kill hit a save: the moments are badly chosen"
    assert last > 0
