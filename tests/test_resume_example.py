"""examples/resume_elsewhere.py and generate.py, as their first lines say, without the time that new processes take."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path
from unittest import mock

from typer.testing import CliRunner

from lightning_ntp.cli import app
from lightning_ntp.dtensor.checkpoint_files import Manifest
from tests import lightning_jobs as jobs

EXAMPLES = Path(__file__).parent.parent / "examples"


def _script(name: str, *arguments: str) -> str:
    """What it prints."""
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", [name, *arguments]), contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def _train(rank: int, world: int, *arguments: str) -> str:
    with jobs.as_worker(rank, world):
        return _script("resume_elsewhere.py", *arguments)


def test_stop_go_on_elsewhere_export_generate(pool, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "run")]
    first = pool.run(_train, 3, "--replica-sizes", "2", "1", "--steps", "20", *out)[0]
    assert "step 20, batch 20 of epoch" in first
    second = pool.run(_train, 1, "--replica-sizes", "1", "--steps", "30", *out)[0]
    assert "step 30, batch 30 of epoch" in second
    losses = [float(text.split("loss ")[1].split()[0]) for text in (first, second)]
    assert losses[1] < losses[0] < 5
    checkpoint = tmp_path / "run" / "last.ckpt"
    Manifest.read(checkpoint).check(checkpoint)
    done = CliRunner().invoke(app, ["export", str(checkpoint), str(tmp_path / "llama")])
    assert done.exit_code == 0, done.output
    assert _script("generate.py", str(tmp_path / "llama"), "def ", "--tokens", "8").startswith("def ")
