"""Log files, events and the block that a loss prints; when a lost worker is replaced. No processes."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.job_log import JobLog, LossReport, last_lines, new_run_folder, read_events
from lightning_ntp.strategy.respawn import HOUR_SECONDS, RespawnBook, RespawnConfig


def test_a_file_per_worker_and_generation_and_events_that_survive_a_crash(tmp_path: Path) -> None:
    with JobLog(tmp_path / "run") as log:
        log.output(3, b"before\n")
        log.enter_generation(2, (3,))
        log.output(3, b"after\n")
        log.event("formed", generation=2, workers=(3, 4))
        log.note_job(token="secret")
        assert stat.S_IMODE((tmp_path / "run/job.json").stat().st_mode) == 0o600
    assert (tmp_path / "run/worker3.generation0.log").read_bytes() == b"before\n"
    assert (tmp_path / "run/worker3.generation2.log").read_bytes() == b"after\n"
    assert not (tmp_path / "run/job.json").exists()
    events = tmp_path / "run/events.jsonl"
    with events.open("ab") as file:
        file.write(b'{"time": 1, "kind": "bro')  # its writer dies here
    assert [event["kind"] for event in read_events(events)] == ["formed"]
    with JobLog(tmp_path / "run") as log:
        log.event("end")
    assert [event["kind"] for event in read_events(events)] == ["formed", "end"]
    assert json.loads(events.read_text().splitlines()[0])["workers"] == [3, 4]


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with JobLog(None) as log:
        log.output(0, b"x")
        log.event("end")
        log.note_job(token="secret")
    assert list(tmp_path.iterdir()) == []


def test_a_run_has_a_folder_of_its_own_and_slurm_nodes_share_it() -> None:
    assert new_run_folder({}) != Path("ntp_logs") and new_run_folder({}).parent == Path("ntp_logs")
    environ = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2", "SLURM_STEP_ID": "0"}
    assert new_run_folder(environ) == Path("ntp_logs/slurm-77.2.0")


def test_a_loss_is_one_block() -> None:
    report = LossReport(4)
    report.add("worker 2 (node 1 b, slot 0, GPU-1)", "killed by SIGSEGV", last_lines(b"epoch 3\n\nFatal error\n"))
    assert report.render((0, 1), 5, 0.1234).splitlines() == [
        "[ntp] generation 4 has ended:",
        "[ntp]   worker 2 (node 1 b, slot 0, GPU-1): killed by SIGSEGV",
        "[ntp]     | epoch 3",
        "[ntp]     | Fatal error",
        "[ntp]   generation 5 stands with 2 workers [0, 1], 0.12 s after the loss was noticed",
    ]
    assert report.render((), 5, None).endswith("[ntp]   nobody went on\n")


def test_a_place_is_filled_at_once_then_later_and_later_then_never() -> None:
    book = RespawnBook(RespawnConfig(max_respawns=9, cool_down_seconds=30, max_losses_per_place=4))
    place = (0, 1)
    waits = []
    now = 0.0
    for _ in range(3):
        book.lose(place, now)
        waits.append(book.empty[place] - now)
        now = book.empty[place]
        assert book.due(now - 0.5) == [] or waits[-1] == 0
        assert book.due(now) == [place]
        book.fill(place)
    assert waits == [0, 30, 60]
    assert book.lose(place, now) == "lost 4 workers within an hour and stays empty"
    assert book.due(now + 5 * HOUR_SECONDS) == []


def test_old_losses_are_forgotten_and_other_places_do_not_count() -> None:
    book = RespawnBook(RespawnConfig(max_respawns=9, cool_down_seconds=30))
    book.lose((0, 0), 0.0)
    book.fill((0, 0))
    book.lose((0, 1), 1.0)
    assert book.due(1.0) == [(0, 1)]
    assert book.lose((0, 0), HOUR_SECONDS + 1) == "may be filled again in 0 s"


def test_replacements_and_recoveries_have_a_budget() -> None:
    book = RespawnBook(RespawnConfig(max_respawns=1, max_recoveries_per_hour=2))
    book.lose((0, 0), 0.0)
    book.lose((0, 1), 0.0)
    assert book.due(0.0) == [(0, 0)]
    book.fill((0, 0))
    assert book.due(0.0) == []
    assert [book.recover(seconds) for seconds in (0.0, 1.0, 2.0)] == [True, True, False]
    assert book.recover(2 * HOUR_SECONDS)


def test_a_failed_probe_postpones() -> None:
    book = RespawnBook(RespawnConfig(max_respawns=1, cool_down_seconds=10))
    book.lose((0, 0), 0.0)
    book.postpone((0, 0), 5.0)
    assert book.due(14.0) == [] and book.due(15.0) == [(0, 0)]


def test_bad_numbers() -> None:
    with pytest.raises(ConfigError, match=r"RespawnConfig.max_losses_per_place is 0: wanted 1 or more"):
        RespawnConfig(max_losses_per_place=0)
