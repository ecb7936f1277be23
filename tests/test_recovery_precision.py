"""A worker is killed inside a fit in low precision with an average of the weights, or in one that optimizes by itself.

Rounding depends on the shapes that compute, so no run on other shapes has these bits. One has: that which starts on the shapes after
the loss, from the checkpoint of the step that was lost.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from lightning_ntp.dtensor.checkpoint_files import Manifest
from lightning_ntp.strategy.config import CheckpointConfig, RecoveryConfig
from lightning_ntp.strategy.events import CommitEvent, Observer, RecoveryEvent
from lightning_ntp.strategy.manual import PROTECTED_BY_CHECKPOINTS, WHY
from lightning_ntp.strategy.rendezvous import EXIT_RESTART, JobAddress
from lightning_ntp.testing import Fault, FaultScript
from tests import lightning_jobs as jobs
from tests.forked import ForkedJob, Log
from tests.survival import PATIENT
from tests.test_manual_optimization import Alternating
from tests.test_precision import PRECISIONS, Single, same, whole

LOST_STEP, STEPS = 3, 6


class Recoveries(Observer):
    """Writes them to the test's log; after the lost step the job is slow until it is whole again, if it is to be."""

    def __init__(self, log: Log, strategy: Any, whole: int) -> None:
        self.log, self.strategy, self.whole = log, strategy, whole

    def on_commit(self, event: CommitEvent) -> None:
        if event.step >= LOST_STEP and len(self.strategy.topology.workers) < self.whole:
            time.sleep(0.3)

    def on_recovery(self, event: RecoveryEvent) -> None:
        self.log(recovered=event.topology, at=event.step, gone=event.lost, joined=event.joined)


def train(address: JobAddress, log: Log) -> None:
    """The script of a worker."""
    torch.set_num_threads(1)
    settings = json.loads(os.environ["NTP_TEST"])
    folder = Path(settings["folder"])
    recovery = RecoveryConfig(True, hang_seconds=40.0, checkpoint=CheckpointConfig(async_save=False))
    strategy = jobs.ntp(replica_sizes=settings["sizes"], recovery=recovery)
    strategy.observers.add(Recoveries(log, strategy, settings["whole"]))
    saver = ModelCheckpoint(folder / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    average = [] if settings["manual"] else [EMAWeightAveraging(decay=0.5)]
    trainer = jobs.trainer(
        strategy, sum(settings["sizes"]), precision=settings["precision"], max_steps=settings["steps"], max_epochs=None,
        callbacks=[saver, *average], enable_checkpointing=True,
    )  # fmt: skip
    module = Alternating() if settings["manual"] else Single()
    says = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    says.setLevel(logging.INFO)
    says.addHandler(logging.StreamHandler())
    trainer.fit(module, jobs.loader(32, 4), ckpt_path=settings["checkpoint"])
    bits = whole(strategy)
    if trainer.is_global_zero:
        torch.save(bits, folder / "bits.pt")
    strategy.barrier()  # whoever ends first would cut the last exchange of the others short


def run_job(
    folder: Path, sizes: list[int], faults: FaultScript | None = None, max_respawns: int = 0, **settings: Any
) -> tuple[ForkedJob, int]:
    folder.mkdir()
    defaults = {"checkpoint": None, "precision": "64-true", "manual": False, "steps": STEPS, "whole": 0}
    os.environ["NTP_TEST"] = json.dumps(defaults | {"folder": str(folder), "sizes": sizes} | settings)
    job = ForkedJob(train, sum(sizes), folder, faults=faults, patience=PATIENT, max_respawns=max_respawns)
    return job, job.run()


@pytest.mark.parametrize("precision", ["bf16-mixed", *(pytest.param(p, marks=pytest.mark.full) for p in ("32-true", "bf16-true"))])
def test_a_run_goes_on_with_the_bits_of_one_that_starts_there(tmp_path: Path, precision: str) -> None:
    faults = FaultScript(Fault("kill", 5, "sync", LOST_STEP))
    hit, code = run_job(tmp_path / "hit", [3, 3], faults, precision=precision)
    assert code == 0, hit.printed.decode()[-6000:]
    recoveries = [line for line in hit.lines if "recovered" in line]
    assert {(line["at"], *line["gone"]) for line in recoveries} == {(LOST_STEP, 5)} and len(recoveries) == 5
    checkpoint = str(tmp_path / "hit" / "saved" / f"step={LOST_STEP}.ckpt")
    twin, code = run_job(tmp_path / "twin", [3, 2], precision=precision, checkpoint=checkpoint)
    assert code == 0, twin.printed.decode()[-6000:]
    bits, wanted = (torch.load(tmp_path / name / "bits.pt") for name in ("hit", "twin"))
    assert {tensor.dtype for tensor in bits.values()} == {PRECISIONS[precision]}
    assert any(name.endswith("average") for name in bits) and any(name.endswith("exp_avg_sq") for name in bits)
    assert same(bits, wanted), [name for name in wanted if not torch.equal(bits[name], wanted[name])]


@pytest.mark.full
def test_a_replacement_gets_its_part_of_the_average(tmp_path: Path) -> None:
    """Worker 0 is lost, so that what the newcomer was given is in the bits that are compared."""
    steps = 24
    faults = FaultScript(Fault("kill", 0, "sync", LOST_STEP))
    hit, code = run_job(tmp_path / "hit", [2, 2], faults, max_respawns=1, steps=steps, whole=4)
    assert code == 0, hit.printed.decode()[-6000:]
    assert [4] in [line["joined"] for line in hit.lines if "recovered" in line]
    twin, code = run_job(tmp_path / "twin", [2, 2], steps=steps)
    assert code == 0, twin.printed.decode()[-6000:]
    bits, wanted = (torch.load(tmp_path / name / "bits.pt") for name in ("hit", "twin"))
    assert bits.keys() == wanted.keys() and any(name.endswith("average") for name in bits)
    apart = {name: float((bits[name] - wanted[name]).abs().max()) for name in wanted}
    assert max(apart.values()) < 1e-12, apart


def test_a_loss_in_manual_steps_of_two_optimizers_ends_this_life_of_the_job_and_the_checkpoint_stands(tmp_path: Path) -> None:
    faults = FaultScript(Fault("kill", 2, "forward", 2))
    hit, code = run_job(tmp_path / "hit", [2, 1], faults, manual=True)
    said = hit.printed.decode()
    assert code == EXIT_RESTART and PROTECTED_BY_CHECKPOINTS in said, said[-3000:]
    assert f"UnrecoverableError: a worker was lost: {WHY}" in said, said[-3000:]
    saved = sorted((tmp_path / "hit" / "saved").glob("*.ckpt"))
    assert saved
    for checkpoint in saved:
        Manifest.read(checkpoint).check(checkpoint)
