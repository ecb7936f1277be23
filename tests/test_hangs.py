"""Workers of a running ``trainer.fit`` that hang, or that do something else than the others: found, named, and fenced if nothing helps."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from lightning_ntp.strategy.life_signs import show_stacks_on_request
from lightning_ntp.testing import Fault, FaultScript
from tests.survival import Run


def test_a_stopped_worker_is_fenced_and_the_run_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, FaultScript(Fault("stop", 4, "sync", 3)), patience={"hang_seconds": 3.0})
    run.check({0, 1, 2, 3, 5})
    lost = {line["why"] for line in run.lines("lost")}
    assert len(lost) == 1 and "worker 4 gave no sign of life for" in lost.pop()
    stacks = {worker: (tmp_path / "ntp" / f"worker{worker}.generation1.log").read_text() for worker in range(6)}
    waiting = stacks.pop(4)
    assert "as the kernel sees it" in waiting and "state T" in waiting
    assert all("Current thread 0x" in text and "in optimizer_step" in text for text in stacks.values())


def test_a_worker_that_skips_a_module_is_no_loss(tmp_path: Path) -> None:
    """Its peers get tensors of other sizes than they wait for; gloo ends whoever notices first."""
    run = Run(tmp_path, skip=("module", 4, 3), code=134)
    said = run.job.printed.decode()
    assert "killed by SIGABRT; gloo has ended it because a peer was in another collective, so the ranks do not do the same" in said
    assert not run.lines("lost") and max(line["step"] for line in run.lines("step")) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in run.job.pids.values())


@pytest.mark.full
def test_a_worker_that_skips_a_call_looks_dead_to_the_others_and_is_named_after_three_attempts(tmp_path: Path) -> None:
    run = Run(tmp_path, skip=("barrier", 4, 3), recovery={"hang_seconds": 4.0}, patience={"doubt_seconds": 0.5}, code=1)
    said = run.job.printed.decode()
    assert "PlanMismatchError: step of step 3 failed 3 times although all workers [0, 1, 2, 3, 4, 5] live" in said
    assert "so they do not do the same: worker 0: " in said and "a collective under `if rank == 0`" in said
    assert not run.lines("lost") and max(line["step"] for line in run.lines("step")) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in run.job.pids.values())


def test_a_request_for_stacks_ends_nobody_after_lightning_has_put_signals_back(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    try:
        for _ in range(2):
            show_stacks_on_request()
            os.kill(os.getpid(), signal.SIGUSR2)
            signal.signal(signal.SIGUSR2, signal.getsignal(signal.SIGUSR2))  # what the end of a fit does
            os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert capfd.readouterr().err.count("in test_a_request_for_stacks_ends_nobody") == 4
