"""Cells through torch.distributed.checkpoint: any topology to any other; nothing half written, nothing run on load."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_ntp.dtensor.checkpoint import (
    CellTensor,
    SavedTensors,
    commit,
    load_safely,
    load_values,
    missing_parts,
    stage,
    write_part,
    write_values,
)
from lightning_ntp.dtensor.checkpoint_files import (
    MANIFEST,
    Manifest,
    aside_of,
    delete,
    put_in_place,
    remove_leftovers,
    restore_previous,
)
from lightning_ntp.errors import ConfigError
from lightning_ntp.topology import Topology
from lightning_ntp.write_plan import written_cells
from tests.plan_cases import specs_for

SHAPES = [[(1, 3), (1, 2)], [(2, 2)], [(1, 4), (1, 1)], [(3, 1), (2, 1)], [(1, 1)]]


def whole(spec):
    return torch.arange(spec.numel, dtype=torch.float64).view(spec.shape) + len(spec.fqn)


def fill(cell, spec):
    rows = [i for s in cell.rows for i in range(s.start, s.stop)]
    columns = [i for s in cell.columns for i in range(s.start, s.stop)]
    return whole(spec).view(spec.matrix_shape)[rows][:, columns].contiguous()


def cells(topology, worker, value, small=0):
    at = topology.coordinates(worker)
    return {
        spec.fqn: CellTensor(
            spec, spec.cell(at), value(spec.cell(at), spec), written_cells(spec, index, topology, worker, small)
        )
        for index, spec in enumerate(specs_for(topology))
    }


def save(shapes, folder, token="t", small=0, finish=True):
    """All workers of a topology, one after the other in this process: none of it is collective."""
    topology, aside = Topology.from_shapes(shapes), aside_of(folder, token)
    content = io.BytesIO()
    torch.save({"step": 3, "rng": torch.ones(2)}, content)
    write_values(content.getvalue(), aside)
    for worker in topology.workers:
        assert worker in missing_parts(aside, topology.workers)
        write_part(stage(cells(topology, worker, fill, small), worker == topology.leader), aside, worker)
    if finish:
        commit(aside, folder, topology.workers)


def blank(shapes, worker):
    return cells(Topology.from_shapes(shapes), worker, lambda cell, spec: torch.full(cell.shape, -1.0, dtype=torch.float64))


@pytest.mark.parametrize("small", [0, 1 << 16])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_what_any_topology_saved_loads_into_every_other_and_into_plain_tensors(tmp_path, shapes, small):
    folder = tmp_path / "last.ckpt"
    save(shapes, folder, small=small)
    save(shapes, folder, "u", small)  # over an older one
    saved = SavedTensors(folder)
    Manifest.read(folder).check(folder)
    for target in SHAPES:
        for worker in Topology.from_shapes(target).workers:
            held = blank(target, worker)
            saved.fill(held)
            assert all(torch.equal(t.local, fill(t.cell, t.spec)) for t in held.values()), (target, worker)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt"]
    assert load_values(folder)["step"] == 3
    plain = {spec.fqn: torch.zeros(spec.shape, dtype=torch.float64) for spec in specs_for(Topology.from_shapes([(1, 1)]))}
    assert saved.names == set(plain)
    dcp.load(plain, checkpoint_id=folder, no_dist=True)  # as tools without this package would
    for spec in specs_for(Topology.from_shapes([(1, 1)])):
        assert torch.equal(plain[spec.fqn], whole(spec))
        assert torch.equal(saved.whole(spec.fqn), whole(spec))


def test_a_save_that_lost_a_part_is_no_checkpoint(tmp_path):
    folder = tmp_path / "c"
    save([(1, 2)], folder)
    old = (folder / MANIFEST).read_text()
    topology = Topology.from_shapes([(1, 3), (1, 2)])
    save([(1, 3), (1, 2)], folder, "lost", finish=False)
    aside = aside_of(folder, "lost")
    record = aside / "__4.part.json"
    content = json.loads(record.read_text())
    record.unlink()
    assert missing_parts(aside, topology.workers) == [4]
    content["chunks"].pop()
    record.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"the parts hold \d+ elements of"):
        commit(aside, folder, topology.workers)
    assert (folder / MANIFEST).read_text() == old
    remove_leftovers(folder, keep="new")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_commit_after_one_that_was_cut_off_does_not_list_its_own_manifest(tmp_path):
    folder, shapes = tmp_path / "c", [(1, 2)]
    save(shapes, folder, "cut off", finish=False)
    Manifest({}).write(aside_of(folder, "cut off"))
    commit(aside_of(folder, "cut off"), folder, Topology.from_shapes(shapes).workers)
    manifest = Manifest.read(folder)
    assert MANIFEST not in manifest.files
    manifest.check(folder)


class Bomb:
    def __reduce__(self):
        return print, ("boom",)


def _damage(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(bytes(content))


def test_a_damaged_foreign_or_doctored_checkpoint_is_refused(tmp_path, capsys):
    folder = tmp_path / "c"
    save([(1, 2)], folder)
    held = blank([(1, 1)], 0)
    with pytest.raises(ConfigError, match="no tensor 'other'"):
        SavedTensors(folder).fill({"other": held["norm.weight"]})
    with pytest.raises(ConfigError, match=r"'q.weight' has shape \(24, 6\) there, \(6,\) here"):
        SavedTensors(folder).fill({"q.weight": held["norm.weight"]})
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        SavedTensors(tmp_path)
    names = sorted(Manifest.read(folder).files)
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "values.pt"]
    for name in names:
        copy = shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True)
        _damage(copy, name)
        with pytest.raises(ConfigError, match=f"damaged: the checksum of {name} differs"):
            Manifest.read(copy).check(copy)
        (copy / name).write_bytes((copy / name).read_bytes()[:-1])
        with pytest.raises(ConfigError, match=f"{name} has .* bytes, .* were written"):
            Manifest.read(copy).check(copy)
        (copy / name).unlink()
        with pytest.raises(ConfigError, match=f"incomplete: {name} is missing"):
            Manifest.read(copy).check(copy)
        shutil.rmtree(copy)
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ConfigError, match=r"refers to builtins.print"):
        SavedTensors(folder)
    (folder / ".metadata").write_bytes(b"\x80\x04garbage")
    with pytest.raises(ConfigError, match=r"metadata is damaged"):
        SavedTensors(folder)
    (folder / "values.pt").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ConfigError, match="values.pt cannot be loaded"):
        load_values(folder)
    torch.save({"x": Bomb()}, folder / "values.pt")
    with pytest.raises(ConfigError, match="would run code"):
        load_safely(folder / "values.pt")
    assert "boom" not in capsys.readouterr().out


def test_files_outside_of_the_folder_are_not_read(tmp_path):
    folder = tmp_path / "c"
    save([(1, 1)], folder)
    content = (folder / ".metadata").read_bytes()
    assert content.count(b"__0_0.distcp") >= 1
    (folder / ".metadata").write_bytes(content.replace(b"__0_0.distcp", b"../0.distcp\0"[:11] + b"x"))
    with pytest.raises(ConfigError, match="lies outside of the folder"):
        SavedTensors(folder)
    Manifest({"../x": (1, 2)}).write(folder)
    with pytest.raises(ConfigError, match=r"names '../x', which lies outside"):
        Manifest.read(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1, "digest": 0, "files": {"a": [1, 2]}}', '{"files": 3}'])
def test_a_damaged_manifest_is_refused(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ConfigError, match="is damaged"):
        Manifest.read(tmp_path)


def test_a_manifest_of_a_newer_format_says_so(tmp_path):
    (tmp_path / MANIFEST).write_text('{"format": 99, "digest": 0, "files": {}}')
    with pytest.raises(ConfigError, match="format 99, this release reads up to 1"):
        Manifest.read(tmp_path)


def test_readers_share_the_files_by_bytes(tmp_path):
    manifest = Manifest({f"f{i}": (1000 + i, 0) for i in range(20)})
    shares = [list(manifest.share(part, 4)) for part in range(4)]
    assert sorted(name for share in shares for name in share) == sorted(manifest.files)
    sizes = [sum(manifest.files[name][0] for name in share) for share in shares]
    assert max(sizes) - min(sizes) < 50


@pytest.mark.parametrize("old", ["folder", "file", "link", "nothing"])
@pytest.mark.parametrize("atomic", [True, False])
def test_a_name_changes_hands_in_one_step(tmp_path, monkeypatch, old, atomic):
    target, aside = tmp_path / "c", tmp_path / ".c.t.tmp"
    if not atomic:
        monkeypatch.setattr("lightning_ntp.dtensor.checkpoint_files._exchange", lambda first, second: False)
    if old == "folder":
        target.mkdir()
        (target / "old").touch()
    elif old == "file":
        target.touch()
    elif old == "link":
        (tmp_path / "elsewhere").mkdir()
        os.symlink("elsewhere", target)
    aside.mkdir()
    (aside / "new").touch()
    put_in_place(aside, target)
    assert [p.name for p in target.iterdir()] == ["new"] and not target.is_symlink()
    assert sorted({p.name for p in tmp_path.iterdir()} - {"elsewhere"}) == ["c"]
    assert (tmp_path / "elsewhere").exists() == (old == "link")
    delete(target)
    assert not target.exists()


def test_a_replacement_that_was_cut_off_between_its_renames_is_undone(tmp_path):
    (tmp_path / ".c.previous").mkdir()
    (tmp_path / ".c.previous" / "good").touch()
    restore_previous(tmp_path / "c")
    restore_previous(tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
