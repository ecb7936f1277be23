"""Losses inside the running ``trainer.fit``: whatever is killed wherever, the run equals the one that nothing happened to."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import pytest
import torch

from lightning_ntp.dtensor.checkpoint_files import Manifest
from lightning_ntp.goodput_merge import read_run
from lightning_ntp.goodput_totals import IDLE
from lightning_ntp.strategy.rendezvous import EXIT_RESTART, EXIT_SAVED
from lightning_ntp.testing import Fault, FaultScript
from tests import lightning_jobs as jobs
from tests.survival import Run


def test_a_run_without_losses_equals_one_process(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.check(set(range(6)))
    assert run.lines("recovered") == []


def kill(worker: int, phase: str, step: int | None = None) -> Fault:
    return Fault("kill", worker, phase, step)


ALL_PARTS = "in every part of a step, down to one worker per replica"

LOSSES = {
    ALL_PARTS: (
        [kill(5, "forward", 1), kill(1, "sync", 2), kill(4, "vote", 4), kill(0, "after_commit", 5)],
        {2, 3},
    ),
    "a whole replica, role by role": (
        [kill(4, "backward", 1), kill(5, "forward", 3), kill(3, "vote", 4)],
        {0, 1, 2},
    ),
    "two at once, of both replicas": ([kill(1, "after_commit", 2), kill(5, "after_commit", 2)], {0, 2, 3, 4}),
    "while the loss of another is made good": (
        [kill(5, "sync", 1), kill(0, "broken", 1), kill(3, "forward", 4), kill(1, "moving", 4)],
        {2, 4},
    ),
    "while the members regroup and plan": (
        [kill(5, "sync", 1), kill(0, "connect"), kill(3, "forward", 4), kill(1, "planning", 4)],
        {2, 4},
    ),
}


def test_a_batch_that_shrinks_with_the_job_uses_every_sample_once_and_grows_back(tmp_path: Path) -> None:
    faults = FaultScript(kill(5, "sync", 2))
    options = {"recovery": {"batch_policy": "shrink"}, "validation": True, "val_check_interval": 1.0}
    run = Run(tmp_path, faults, max_respawns=1, wait_until_whole=7, max_epochs=4, **options)
    run.check({0, 1, 2, 3, 4, 6})
    sizes = [list(map(len, epoch)) for epoch in run.epochs]
    assert sizes[0][:3] == [8, 8, 6] and sizes[-1] == [8, 8, 8, 5]
    assert all(set(epoch[:-1]) <= {8, 6} for epoch in sizes)
    turns = [(line["gone"], line["joined"]) for line in run.lines("recovered") if line["worker"] == 0]
    assert turns == [([5], []), ([], [6])], "all validate together, whoever has come when"
    [history] = [line["history"] for line in run.lines("finished") if line["worker"] == 0]
    values = [entry.get("val_epoch") for entry in history]
    validated = [i for i, (before, after) in enumerate(itertools.pairwise([None, *values])) if after != before]
    assert validated == [end - 1 for end in itertools.accumulate(len(epoch) + 1 for epoch in sizes)], "at the end of each epoch"


def test_an_epoch_gains_steps_when_its_last_batch_shrinks(tmp_path: Path) -> None:
    faults = FaultScript(kill(3, "sync", 1), kill(4, "sync", 1), kill(5, "sync", 1))
    run = Run(tmp_path, faults, recovery={"batch_policy": "shrink"}, accumulate_grad_batches=2)
    run.check({0, 1, 2})
    assert [list(map(len, epoch)) for epoch in run.epochs] == [[16, 8, 5], [8, 8, 8, 5]]


@pytest.mark.parametrize(
    "name", [name if name in (ALL_PARTS, "while the loss of another is made good") else pytest.param(name, marks=pytest.mark.full) for name in LOSSES]
)
def test_the_run_equals_one_that_nothing_happened_to(name: str, tmp_path: Path) -> None:
    faults, survivors = LOSSES[name]
    run = Run(tmp_path, FaultScript(*faults), log=True)
    run.check(survivors)
    rows = list(csv.DictReader((tmp_path / "logs" / "version_0" / "metrics.csv").open()))
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["version_0"]
    assert max(int(row["step"]) for row in rows) >= 7


def test_losses_in_control_calls_validation_and_checkpoints(tmp_path: Path) -> None:
    faults = FaultScript(kill(5, "checkpoint", 2), kill(0, "validation", 4), kill(1, "control", 8))
    run = Run(tmp_path, faults, validation=True, save_every=2)
    run.check({2, 3, 4})
    saved = {path.name for path in (tmp_path / "saved").glob("*.ckpt")}
    for name in saved:
        Manifest.read(tmp_path / "saved" / name).check(tmp_path / "saved" / name)
    assert saved | {"step=4.ckpt"} == {f"step={step}.ckpt" for step in (2, 4, 6, 8)}  # its writer died right after step 4


def test_accumulation_windows_are_replayed_whole(tmp_path: Path) -> None:
    faults = FaultScript(kill(4, "forward", 1), kill(1, "sync", 2))
    run = Run(tmp_path, faults, accumulate_grad_batches=2, max_epochs=2)
    run.check({0, 2, 3, 5})
    assert {line["at"] for line in run.lines("recovered")} == {1, 2}


def test_a_step_that_kills_one_worker_after_the_other_stops_the_job(tmp_path: Path) -> None:
    run = Run(tmp_path, FaultScript(kill(5, "forward", 3), kill(3, "backward", 3)), code=1)
    said = run.job.printed.decode()
    assert "PoisonBatchError: step 3 has cost a second worker in the same way (killed by SIGKILL; now [3])" in said
    assert "Look at loop batches 3 to 3 of epoch 0" in said
    assert max(line["step"] for line in run.lines("step")) == 2


def test_state_that_nobody_else_holds_is_lost_and_named_with_the_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    strategy = {"replica_sizes": [3]}
    run = Run(tmp_path, FaultScript(kill(1, "sync", 3)), workers=3, strategy=strategy, save_every=2, code=EXIT_RESTART)
    printed = run.job.printed.decode()
    assert "UnrecoverableError: model.model.embed_tokens.weight: no live worker holds" in printed
    checkpoint = tmp_path / "saved" / "step=2.ckpt"
    assert f"start again with Trainer.fit(..., ckpt_path={str(checkpoint)!r})" in printed
    Manifest.read(checkpoint).check(checkpoint)


def test_a_job_that_cannot_go_on_in_place_begins_again_from_its_last_checkpoint(tmp_path: Path) -> None:
    """Also in the midst of an epoch; only the steps since the checkpoint are run again, and no sample counts twice in the end."""
    run = Run(tmp_path, FaultScript(kill(1, "sync", 3)), workers=3, strategy={"replica_sizes": [3]}, save_every=2, max_restarts=2)
    printed = run.job.printed.decode()
    checkpoint = tmp_path / "saved" / "step=2.ckpt"
    assert f"[ntp] the job cannot go on in place: it starts again from {checkpoint} (restart 1 of 2)" in printed
    assert "restart 2" not in printed
    assert [line["step"] for line in run.lines("step") if line["worker"] == 0] == [0, 1, 2, *range(2, 2 * 8)]
    assert run.applied == run.global_batches
    run.check_state()


def test_a_replacement_is_taken_in_at_a_step_boundary(tmp_path: Path) -> None:
    faults = FaultScript(kill(4, "sync", 1))
    run = Run(tmp_path, faults, max_respawns=1, max_epochs=8, log=True)
    run.check({0, 1, 2, 3, 5, 6})
    back = next(line for line in run.lines("recovered") if line["joined"] == [6])
    assert "1x3, 1x3" in back["topology"] and not back["gone"]
    _check_ledger(tmp_path / "ntp")


def _check_ledger(folder: Path) -> None:
    """GPU 4 idles from its loss to its return, all others and before and after never, and all buckets sum."""
    history = read_run(folder)
    (loss,) = [event for event in history.events if event["event"] == "loss"]
    (rejoin,) = [event for event in history.events if event["event"] == "rejoin"]
    assert loss["gpus"] == rejoin["gpus"] == [4]
    assert sum(history.gpu_ns().values()) == 6 * (history.at_ns - history.start_ns)
    idle = {gpu: sum(each.spent.get(IDLE, 0) for each in segments) for gpu, segments in history.segments.items()}
    assert {gpu for gpu, ns in idle.items() if ns} == {4}
    assert idle[4] == pytest.approx(rejoin["t"] - loss["t"], rel=0.05)


def test_a_worker_without_a_role_waits_and_replaces_the_next_loss_in_its_replica(tmp_path: Path) -> None:
    """2x2 -> 2x1 and a hot spare, which holds nothing and disturbs nobody until it is needed."""
    options = {"workers": 6, "strategy": {"replica_sizes": [[2, 2], [1, 2]]}, "max_rows": 2, "max_epochs": 7}
    run = Run(tmp_path, FaultScript(kill(1, "sync", 1), kill(2, "sync", 5)), max_respawns=1, max_losses_per_place=1, **options)
    told = {line["recovered"]: line for line in run.lines("recovered") if line["worker"] == 4}
    first, second, back = (told[generation] for generation in sorted(told))
    assert first["gone"] == [1] and len(first["left"]) == 1 and not first["joined"]
    assert second["gone"] == [2] and not second["left"] and not second["joined"]
    assert back["joined"] == [6] and not back["gone"] and not back["left"]
    run.check({0, 3, 4, 5, 6} - set(first["left"]))
    assert [event.workers for event in run.job.events if event.kind == "broken"] == [(1,), (2,)]


@pytest.mark.full
def test_a_spare_and_a_replacement_make_a_replica_whole_again(tmp_path: Path) -> None:
    """2x2 -> 2x1, for which one newcomer is too few -> 2x2."""
    options = {"workers": 6, "strategy": {"replica_sizes": [[2, 2], [1, 2]]}, "max_rows": 2, "max_epochs": 14}
    run = Run(tmp_path, FaultScript(kill(1, "sync", 1)), max_respawns=4, wait_until_whole=2, **options)
    told = [line for line in run.lines("recovered") if line["worker"] == 4]
    shapes = [(line["topology"].split(";")[0].split(": ")[1], line["joined"], line["left"]) for line in told]
    assert shapes[0][0] in ("2x1, 1x2", "1x2, 1x2") and shapes[-1][0] == "2x2, 1x2", shapes
    joined = told[-1]["joined"]
    run.check({0, 2, 3, 4, 5, *joined} - set(told[0]["left"]))
    assert len(joined) == 2


def test_a_whole_replica_that_was_lost_comes_back(tmp_path: Path) -> None:
    run = Run(tmp_path, end=[(1, 3), (1, 4), (1, 5)], max_respawns=3, wait_until_whole=2, max_epochs=8)
    run.check({0, 1, 2, 6, 7, 8})
    seen = [line for line in run.lines("recovered") if line["worker"] == 0]
    assert "1 replica(s) of fsdp x tp: 1x3;" in seen[0]["topology"] and not seen[0]["joined"]
    assert "2 replica(s) of fsdp x tp: 1x3, 1x3;" in seen[-1]["topology"]
    assert sorted(worker for line in seen for worker in line["joined"]) == [6, 7, 8]


def test_neighbours_of_a_lost_worker_start_again_from_fresh_processes(tmp_path: Path) -> None:
    """The healthy replica goes on meanwhile, in the processes that it has; nothing moves in it."""
    renew = {"neighbours": "renew", "hang_seconds": 40.0}
    run = Run(tmp_path, FaultScript(kill(4, "sync", 1)), recovery=renew, num_renewals=2, wait_until_whole=1, whole=5, max_epochs=8)
    run.check({0, 1, 2, 6, 7})
    seen = [line for line in run.lines("recovered") if line["worker"] == 0]
    assert seen[0]["gone"] == [3, 4, 5] and "1 replica(s) of fsdp x tp: 1x3;" in seen[0]["topology"]
    assert sorted(worker for line in seen for worker in line["joined"]) == [6, 7]
    assert "2 replica(s) of fsdp x tp: 1x3, 1x2;" in seen[-1]["topology"]
    assert {line["moved"] for line in run.lines("recovered") if line["worker"] < 3} == {0}
    assert "worker 3: starts again, a neighbour was lost" in run.job.printed.decode()


@pytest.mark.full
def test_with_dropout_the_same_faults_twice_give_the_same_run(tmp_path: Path) -> None:
    """A step that is run again draws what it drew before; dropout follows the data rows, so it is not that of an undisturbed run."""
    faults = [kill(4, "sync", 1), kill(1, "vote", 3), kill(0, "after_commit", 5)]
    histories, states = [], []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        run = Run(folder, FaultScript(*faults), model={"attention_dropout": 0.3})
        assert run.applied == run.global_batches
        histories.append([line["history"] for line in run.lines("finished") if line["worker"] == 2])
        states.append(torch.load(folder / "state.pt"))
    assert histories[0] == histories[1]
    for kind, tensors in states[0].items():
        assert all(torch.equal(tensor, states[1][kind][name]) for name, tensor in tensors.items()), kind
    plain = jobs.in_one_process(jobs.TinyLlama, run.global_batches[:1])
    assert abs(histories[0][0][0]["train_step"] - plain.history[0]["train_step"]) > 1e-3, "nothing was dropped"


def test_a_worker_that_is_asked_to_leave_costs_no_step(tmp_path: Path) -> None:
    run = Run(tmp_path, terminate=[(1, 4), (4, 0)])
    run.check({1, 2, 3, 5})
    assert not run.lines("lost") and {line["attempts"] for line in run.lines("step")} == {1}


def test_a_job_that_has_to_go_as_a_whole_is_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, terminate=[(2, worker) for worker in range(6)], code=EXIT_SAVED, default_root_dir=str(tmp_path))
    assert (tmp_path / "saved-before-leaving.ckpt").is_dir()
    assert max(line["step"] for line in run.lines("step")) < len(run.global_batches) - 1


def test_fewer_workers_than_the_minimum_end_with_the_state_saved(tmp_path: Path) -> None:
    recovery, faults = {"min_workers": 3}, FaultScript(kill(2, "sync", 1), kill(0, "sync", 4))
    run = Run(tmp_path, faults, workers=4, strategy={"replica_sizes": [2, 2]}, recovery=recovery, code=EXIT_SAVED, default_root_dir=str(tmp_path))
    saved = tmp_path / "saved-before-leaving.ckpt"
    Manifest.read(saved).check(saved)
    assert max(line["step"] for line in run.lines("step")) == 4  # with three it went on; the step that cost the next one was done first
    said = run.job.printed.decode()
    assert f"[ntp] 2 workers are left, and min_workers is 3: the fit is saved in {saved}; go on with ckpt_path=" in said
    assert "[supervisor] all members have ended; the job of 4 workers has ended." in said


def test_advice_says_what_would_follow_and_ends_the_job(tmp_path: Path) -> None:
    run = Run(tmp_path, FaultScript(kill(1, "sync", 2)), workers=4, strategy={"replica_sizes": [2, 2]}, recovery={"advise": True}, code=1)
    assert max(line["step"] for line in run.lines("step")) == 1 and not run.lines("recovered")
    said = run.job.printed.decode()
    assert "[ntp] advise=True: workers [1] are lost. step 2 would run again on 2 replica(s) of fsdp x tp: 1x1, 1x2" in said
    assert "UnrecoverableError: advise=True" in said
