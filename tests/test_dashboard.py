"""`ntp dashboard`: every panel shows something that is logged, and W&B's own client hands the view over, without a network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lightning_ntp.cli import app
from lightning_ntp.errors import ConfigError
from lightning_ntp.goodput import Ledger
from lightning_ntp.goodput_dashboard import SECTIONS, parse_project, view_spec
from lightning_ntp.strategy.run_log import scalars
from lightning_ntp.strategy.throughput import Meter, Work
from lightning_ntp.strategy.wandb_log import PICTURE, TABLE
from lightning_ntp.topology import Topology
from tests.wandb_server import WandbServer

KEY = "0" * 40
SAVE = "import sys\nfrom lightning_ntp.cli import main\nsys.argv[1:] = ['dashboard', 'ent/proj', '--title', 'Ours']\nmain()"


def logged() -> set[str]:
    """Everything that a run logs."""
    totals = Ledger([0, 1], lambda: 10**9).totals()
    meter = Meter("lightning.pytorch", False, 1e12)
    meter.work = Work(16.0, 1e9)
    for second in range(30):
        meter.commit(float(second), 8.0)
    names = set(scalars(totals, totals, Topology.from_shapes([(1, 2)]), 1)) | set(meter.rates(2, 2))
    return names | {"ntp/num_losses", TABLE, PICTURE}


def test_every_panel_shows_what_is_logged_and_all_kinds_of_it_are_shown() -> None:
    shown = {metric for _, panels in SECTIONS for panel in panels for metric in panel.metrics}
    assert shown - logged() == set()
    assert logged() - shown <= {"goodput/productive_gpu_s", "ntp/wall_s"} | {n for n in logged() if n.startswith("throughput/")}


def test_panels_do_not_overlap_and_have_names_of_their_own() -> None:
    sections = view_spec()["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == ["Goodput", "Throughput", "What happened"]
    for section in sections:
        places = {(panel["layout"]["x"], panel["layout"]["y"]) for panel in section["panels"]}
        assert len(places) == len(section["panels"])
    names = [panel["__id__"] for section in sections for panel in section["panels"]]
    assert len(set(names)) == len(names) == 12


def test_wandb_workspaces_reads_it_to_the_last_field() -> None:
    internal: Any = pytest.importorskip("wandb_workspaces.workspaces.internal")
    read = internal.WorkspaceViewspec.model_validate(view_spec())
    assert json.loads(read.model_dump_json(by_alias=True, exclude_none=True)) == view_spec()


@pytest.mark.parametrize("text", ["", "proj", "/proj", "ent/", "ent/proj/run"])
def test_what_is_no_project(text: str) -> None:
    with pytest.raises(ConfigError, match="a W&B project is ENTITY/PROJECT"):
        parse_project(text)


def test_without_a_network_the_specification_is_written_down(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["dashboard", "ent/proj", "--out", str(tmp_path / "view.json")])
    assert done.exit_code == 0 and "the specification; `ntp dashboard ent/proj` puts it into the project" in done.output
    assert json.loads((tmp_path / "view.json").read_text()) == view_spec()


def ask(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environ |= {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(Path(__file__).parent.parent), "WANDB_HTTP_TIMEOUT": "2"}
    return subprocess.run([sys.executable, "-c", SAVE], env=environ, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_the_view_is_handed_to_the_server_and_its_address_is_said(tmp_path: Path) -> None:
    with WandbServer() as server:
        done = ask(tmp_path, WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)
        assert done.returncode == 0, done.stderr[-2000:]
        [view] = server.views
    assert (view["entityName"], view["projectName"], view["type"], view["displayName"]) == ("ent", "proj", "project-view", "Ours")
    assert json.loads(view["spec"]) == view_spec()
    found = re.search(r"the dashboard is at \S+/ent/proj\?nw=([a-z0-9]{11})$", done.stdout.strip())
    assert found is not None and view["name"] == f"nw-{found[1]}-v"


@pytest.mark.full
def test_a_wrong_key_and_none_at_all_are_said_with_the_way_out(tmp_path: Path) -> None:
    with WandbServer(accepts_key=False) as server:
        for environ in ({"WANDB_API_KEY": KEY}, {}):
            done = ask(tmp_path, WANDB_BASE_URL=server.url, **environ)
            assert done.returncode == 2 and "Traceback" not in done.stderr
            assert "W&B did not take the dashboard for ent/proj: " in done.stderr and "`--out FILE` writes" in done.stderr
    assert server.views == []
