"""The layers: lower never imports higher, and what must stay in one place stays there.

    strategy/  >  dtensor/  >  kernels/  >  core (lightning_ntp/*.py, standard library only)

Read by ast, so that nothing is imported and a violation names its file and line.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "lightning_ntp"
ROOT = Path(__file__).parent.parent / PACKAGE

LAYERS = ("core", "kernels", "dtensor", "strategy")
FACES = {"__init__.py", "__main__.py"}
"""Files at the top that put the layers together; they may import every layer, but no third party."""

THIRD_PARTY = {
    "core": set(),
    "kernels": {"torch", "triton"},
    "dtensor": {"torch"},
    "strategy": {
        "torch", "lightning", "pytorch_lightning", "lightning_utilities", "transformers", "huggingface_hub", "safetensors",
        "numpy", "wandb", "rich", "pynvml",
    },
}  # fmt: skip
EDGES = {
    "simulator.py": {"numpy"},
    "calibration.py": {"numpy"},
    "cli.py": {"typer", "rich", "matplotlib"},
    "plots.py": {"matplotlib"},
    "report_cli.py": {"typer", "rich"},
    "testing.py": set(),
}
"""Core files with a wider reach: third parties by name, and upper layers inside functions."""

PRIVATE_HOME = "_torch_private.py"
COLLECTIVE_HOMES = {"dtensor/collectives.py", "strategy/state.py", "strategy/control.py"}
CONTROL_HOMES = COLLECTIVE_HOMES | {"strategy/groups.py", "dtensor/checkpoint.py"}
"""Where barriers and objects may be exchanged as well; tensors move in COLLECTIVE_HOMES only."""

CONTROL = {
    "all_gather_object", "barrier", "broadcast_object_list", "gather_object", "monitored_barrier", "scatter_object_list",
}  # fmt: skip
COLLECTIVES = CONTROL | {
    "all_gather", "all_gather_into_tensor", "all_gather_tensor", "all_gather_tensor_autograd", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "all_to_all_single_autograd", "batch_isend_irecv",
    "broadcast", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd", "scatter", "send",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module path, e.g. ``torch.distributed`` or ``lightning_ntp.layout``."""

    path: str
    names: tuple[str, ...]
    line: int
    in_function: bool

    @property
    def top(self) -> str:
        return self.path.split(".")[0]


def violations(root: Path) -> list[str]:
    """Every broken rule under `root` (the package's folder) as ``file:line: what``."""
    found = []
    for file in sorted(root.rglob("*.py")):
        where = file.relative_to(root).as_posix()
        tree = ast.parse(file.read_text())
        imports = list(_imports(tree, where))
        for line, what in [
            *_upward_imports(where, imports),
            *_foreign_imports(where, imports),
            *_private_torch(where, tree, imports),
            *_stray_collectives(where, tree, imports),
        ]:
            found.append(f"{where}:{line}: {what}")
    return found


def _layer(where: str) -> str:
    return where.split("/")[0] if "/" in where else "core"


def _imports(tree: ast.Module, where: str) -> Iterator[Import]:
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), node.lineno, id(node) in inside)
        elif isinstance(node, ast.ImportFrom):
            path = _absolute(node, where)
            names = tuple(alias.name for alias in node.names)
            yield Import(path, names, node.lineno, id(node) in inside)
            if path == PACKAGE:
                yield from (Import(f"{path}.{name}", (), node.lineno, id(node) in inside) for name in names)


def _absolute(node: ast.ImportFrom, where: str) -> str:
    if node.level == 0:
        return node.module or ""
    package = [PACKAGE, *where.split("/")[:-1]]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def _upward_imports(where: str, imports: list[Import]) -> Iterator[tuple[int, str]]:
    if where in FACES:
        return
    rank = LAYERS.index(_layer(where))
    for imported in imports:
        part = (imported.path.split(".") + [""])[1] if imported.top == PACKAGE else ""
        if part in LAYERS and LAYERS.index(part) > rank and not (imported.in_function and where in EDGES):
            yield imported.line, f"{_layer(where)} imports {imported.path}, a higher layer"


def _foreign_imports(where: str, imports: list[Import]) -> Iterator[tuple[int, str]]:
    allowed = THIRD_PARTY[_layer(where)] | EDGES.get(where, set())
    for imported in imports:
        if imported.top not in sys.stdlib_module_names | allowed | {PACKAGE}:
            yield imported.line, f"{_layer(where)} imports {imported.top}, which this layer does not know"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Local name -> the torch path it stands for."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and node.level == 0:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return known


def _path(node: ast.expr, aliases: dict[str, str]) -> str:
    """``dist.all_reduce`` -> ``torch.distributed.all_reduce``; "" where the chain does not start at torch."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = _path(node.value, aliases)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _private_torch(where: str, tree: ast.Module, imports: list[Import]) -> Iterator[tuple[int, str]]:
    if where.split("/")[-1] == PRIVATE_HOME:
        return
    for imported in imports:
        if imported.top == "torch":
            for name in (*imported.path.split("."), *imported.names):
                if _is_private(name):
                    yield imported.line, f"private torch name {name} outside {PRIVATE_HOME}"
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and _path(node.value, aliases):
            yield node.lineno, f"private torch name {_path(node, aliases)} outside {PRIVATE_HOME}"


def _stray_collectives(where: str, tree: ast.Module, imports: list[Import]) -> Iterator[tuple[int, str]]:
    if where in COLLECTIVE_HOMES:
        return
    strays = COLLECTIVES - CONTROL if where in CONTROL_HOMES else COLLECTIVES
    aliases = _aliases(tree)
    for imported in imports:
        for name in imported.names:
            if name == "funcol" or name == "_functional_collectives":
                aliases[name] = "torch.distributed._functional_collectives"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            path = _path(node.func, aliases)
            if path.startswith("torch.distributed") and path.split(".")[-1] in strays:
                yield node.lineno, f"collective {path} outside {sorted(COLLECTIVE_HOMES)}"


def test_the_package_keeps_its_layers() -> None:
    assert violations(ROOT) == []


BROKEN = {
    "layout.py": ("import torch\n", "core imports torch"),
    "topology.py": ("from lightning_ntp.dtensor import placement\n", "a higher layer"),
    "cli.py": ("from .strategy import config\n", "a higher layer"),
    "planner.py": ("def f():\n    from lightning_ntp import strategy\n", "a higher layer"),
    "kernels/pack.py": ("from ..dtensor.placement import UnevenShard\n", "a higher layer"),
    "dtensor/parallel.py": ("import lightning as L\n", "dtensor imports lightning"),
    "dtensor/dispatch.py": ("from torch.distributed.tensor._ops import x\n", "private torch name _ops"),
    "dtensor/placement.py": ("from torch.distributed.tensor import DTensor\nDTensor._op_dispatcher\n", "DTensor._op_dispatcher"),
    "strategy/fsdp.py": ("import torch.distributed as dist\ndist._world\n", "torch.distributed._world"),
    "strategy/sampler.py": ("import torch\ntorch.distributed.all_reduce(1)\n", "collective torch.distributed.all_reduce"),
    "dtensor/grad_sync.py": ("from torch.distributed import all_to_all_single as a\na(1, 2)\n", "all_to_all_single"),
    "strategy/groups.py": ("import torch.distributed as dist\ndist.broadcast(1)\n", "collective torch.distributed.broadcast"),
    "dtensor/redistribute.py": ("from ._torch_private import funcol\nfuncol.all_reduce(1)\n", "all_reduce"),
}


@pytest.mark.parametrize("where", BROKEN)
def test_a_broken_rule_is_found(tmp_path: Path, where: str) -> None:
    source, wanted = BROKEN[where]
    (tmp_path / where).parent.mkdir(exist_ok=True)
    (tmp_path / where).write_text(source)
    found = violations(tmp_path)
    assert len(found) >= 1 and found[0].startswith(f"{where}:") and wanted in found[0]


def test_what_the_rules_allow_is_not_reported(tmp_path: Path) -> None:
    allowed = {
        "layout.py": "from __future__ import annotations\nimport math\nfrom .errors import ConfigError\n",
        "cli.py": "import typer\ndef f():\n    from lightning_ntp.strategy import config\n",
        "dtensor/_torch_private.py": "from torch.distributed.tensor._ops import x\nimport torch\ntorch._C\n",
        "dtensor/collectives.py": "import torch.distributed as dist\ndist.all_reduce(1)\n",
        "strategy/groups.py": "import torch.distributed as dist\ndist.barrier()\n",
        "strategy/strategy.py": "import lightning\nfrom lightning_ntp.dtensor import y\nself._x = torch.__version__\n",
        "__init__.py": "from .strategy import NTPStrategy\n",
    }
    for where, source in allowed.items():
        (tmp_path / where).parent.mkdir(exist_ok=True)
        (tmp_path / where).write_text(source)
    assert violations(tmp_path) == []


@pytest.mark.parametrize("layer", ["dtensor", "strategy"])
def test_every_file_of_a_layer_stands_in_its_table(layer: str) -> None:
    table = (ROOT / layer / "README.md").read_text()
    files = {path.name for path in (ROOT / layer).glob("*.py")} - FACES
    assert {file for file in files if f"`{file}`" not in table} == set()
