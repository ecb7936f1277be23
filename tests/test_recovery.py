"""Losses inside the running ``trainer.fit``: whatever is killed wherever, the run equals the one that nothing happened to."""

from __future__ import annotations

from pathlib import Path

from tests.survival import Run


def test_a_run_without_losses_equals_one_process(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.check(set(range(6)))
