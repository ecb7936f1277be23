"""Cells through torch.distributed.checkpoint: any topology to any other; nothing half written, nothing run on load."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lightning_ntp.dtensor.checkpoint import CellTensor, load_cells, load_values, save_cells, saved_names
from lightning_ntp.errors import ConfigError
from lightning_ntp.model_spec import Cell
from lightning_ntp.topology import Topology
from tests.plan_cases import specs_for

NOTHING = Cell((), ())
SHAPES = [[(1, 3), (1, 2)], [(2, 2)], [(1, 4), (1, 1)], [(3, 1), (2, 1)], [(1, 1)]]


def whole(spec):
    return torch.arange(spec.numel, dtype=torch.float64).view(spec.shape) + len(spec.fqn)


def fill(cell, spec):
    rows = [i for s in cell.rows for i in range(s.start, s.stop)]
    columns = [i for s in cell.columns for i in range(s.start, s.stop)]
    return whole(spec).view(spec.matrix_shape)[rows][:, columns].contiguous()


def cells(topology, worker, value):
    at = topology.coordinates(worker)
    writes = topology.position(worker).replica == 0
    out = {}
    for spec in specs_for(topology):
        cell = spec.cell(at)
        owned = spec.owned_cell(at, topology.roles(at.degree)[0]) if writes else NOTHING
        out[spec.fqn] = CellTensor(spec, cell, value(cell, spec), owned)
    return out


def save(rank, world, shapes, folder):
    topology = Topology.from_shapes(shapes)
    save_cells(cells(topology, rank, fill), {"step": 3, "rng": torch.ones(2)}, Path(folder), dist.group.WORLD)


def load(rank, world, shapes, folder):
    topology = Topology.from_shapes(shapes)
    held = cells(topology, rank, lambda cell, spec: torch.full(cell.shape, -1.0, dtype=torch.float64))
    load_cells(held, Path(folder), dist.group.WORLD)
    return [name for name, t in held.items() if not torch.equal(t.local, fill(t.cell, t.spec))]


def size(shapes):
    return sum(f * t for f, t in shapes)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_what_any_topology_saved_loads_into_every_other_and_into_plain_tensors(pool, tmp_path, shapes):
    folder = tmp_path / "last.ckpt"
    pool.run(save, size(shapes), shapes, str(folder))
    pool.run(save, size(shapes), shapes, str(folder))  # over an older one
    for target in SHAPES:
        assert not any(pool.run(load, size(target), target, str(folder))), target
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt"]
    assert load_values(folder)["step"] == 3
    plain = {spec.fqn: torch.zeros(spec.shape, dtype=torch.float64) for spec in specs_for(Topology.from_shapes([(1, 1)]))}
    assert saved_names(folder) == set(plain)
    dcp.load(plain, checkpoint_id=folder, no_dist=True)
    for spec in specs_for(Topology.from_shapes([(1, 1)])):
        assert torch.equal(plain[spec.fqn], whole(spec))


class Bomb:
    def __reduce__(self):
        return print, ("boom",)


def test_a_damaged_foreign_or_doctored_checkpoint_is_refused(pool, tmp_path, capsys):
    folder = tmp_path / "c"
    pool.run(save, 1, [(1, 1)], str(folder))
    topology = Topology.from_shapes([(1, 1)])
    held = cells(topology, 0, lambda cell, spec: torch.zeros(cell.shape, dtype=torch.float64))
    with pytest.raises(ConfigError, match="no tensor 'other'"):
        load_cells({"other": held["norm.weight"]}, folder, None)
    with pytest.raises(ConfigError, match=r"'q.weight' has shape \(24, 6\) there, \(6,\) here"):
        load_cells({"q.weight": held["norm.weight"]}, folder, None)
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        load_cells(held, tmp_path, None)
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ConfigError, match=r"refers to builtins.print"):
        load_cells(held, folder, None)
    (folder / "values.pt").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(pickle.UnpicklingError):
        load_values(folder)
    assert "boom" not in capsys.readouterr().out
