"""Losses inside the running ``trainer.fit``: whatever is killed wherever, the run equals the one that nothing happened to."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_ntp.testing import Fault, FaultScript
from tests.survival import Run


def test_a_run_without_losses_equals_one_process(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.check(set(range(6)))


@pytest.mark.parametrize("phase", ["backward"])
def test_one_killed(phase: str, tmp_path: Path) -> None:
    run = Run(tmp_path, FaultScript(Fault("kill", 4, phase, 2)))
    run.check({0, 1, 2, 3, 5})
