"""From phases, losses and commits to a ledger, a report, a page and alerts: without a process or a torch group."""

from __future__ import annotations

import http.server
import json
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lightning_ntp.cli import app
from lightning_ntp.errors import ConfigError
from lightning_ntp.goodput_bins import COLORS, bins_of
from lightning_ntp.goodput_html import duration, num_bytes, render_html
from lightning_ntp.goodput_merge import read_run
from lightning_ntp.goodput_totals import BUCKETS, IDLE
from lightning_ntp.plots import draw_goodput
from lightning_ntp.strategy.alerts import Alert, AlertConfig, Alerts
from lightning_ntp.strategy.ledger_observer import process_start_ns
from lightning_ntp.strategy.ledger_resume import adopt, job_id_of
from tests.goodput_runs import MS, START_NS, Job, eventful


def _seconds(totals: dict[str, int]) -> dict[str, float]:
    return {bucket: ns / 1e9 for bucket, ns in totals.items() if ns}


def test_six_losses_and_two_returns_add_up_to_the_nanosecond(tmp_path: Path) -> None:
    job = eventful(tmp_path)
    totals = job.ledger.totals()
    assert sum(totals.gpu_ns.values()) == 6 * (job.clock.now - START_NS)
    assert sum(totals.job_ns.values()) == job.clock.now - START_NS
    of_job = _seconds(totals.job_ns)
    assert of_job["lost_step"] == pytest.approx(6 * 0.25)
    assert of_job["detection"] == pytest.approx(4 * 0.05 + 2 * 0.9 + 2 * 0.01)
    assert of_job["regroup"] == pytest.approx(6 * 0.18 + 2 * 0.2)
    assert of_job["reshard"] == pytest.approx(8 * 0.32)
    assert of_job["eval"] == 3 and of_job["checkpoint_save"] == 2 and of_job["init"] == 8
    assert totals.num_owned == 6 and totals.num_live == 2
    history = read_run(tmp_path)
    assert history.gpu_ns() == totals.gpu_ns and history.job == totals.job_ns
    assert [event["event"] for event in history.events].count("loss") == 6
    assert [event["event"] for event in history.events].count("rejoin") == 2
    assert history.step == job.step


def test_a_returning_worker_sits_on_a_lost_gpu_and_owns_nothing_new() -> None:
    job = Job()
    job.train(5)
    job.lose(4, job.topology.without(4))
    job.rejoin(9, job.topology.with_worker(1, 9))
    assert job.observer.gpus[9] == 4 and 4 not in job.observer.gpus
    assert job.ledger.totals().num_owned == job.ledger.totals().num_live == 6
    assert job.observer.placed()["4"] == [1, 0, 1, 3]


def test_waiting_for_a_hang_to_be_noticed_is_detection_not_a_lost_step() -> None:
    job = Job()
    job.train(10, ms=400)
    before = job.ledger.totals()
    job.ledger.enter("productive")
    job.pass_ms(10_000)
    job.lose(3, job.topology.without(3))
    passed = job.ledger.totals().since(before).job_ns
    assert passed["lost_step"] == 400 * MS
    assert passed["detection"] == (10_000 + 250 - 400 + 50) * MS


def test_the_first_step_is_compiling_as_far_as_it_takes_longer_than_the_next_ones() -> None:
    job = Job()
    job.train(1, ms=5_000)
    job.train(3, ms=400)
    assert job.ledger.totals().job_ns["compile"] == 4_600 * MS
    job.train(3, ms=400)
    job.lose(3, job.topology.without(3))
    job.train(1, ms=900)
    job.train(3, ms=500)
    assert job.ledger.totals().job_ns["compile"] == 5_000 * MS


def test_a_restart_from_a_checkpoint_goes_on_with_the_ledger_of_the_job(tmp_path: Path) -> None:
    first = Job(tmp_path)
    first.train(10)
    state = {
        "ledger": first.ledger.state_dict(), "gpus": {"0": 0}, "events": list(first.observer.events), "job": "demo", "folder": str(tmp_path),
    }  # fmt: skip
    first.train(4)
    first.observer.note("exception", why="RuntimeError: out of luck")
    second = Job(start_ns=first.clock.now + 12_000 * MS)
    adopt(second.observer, json.loads(json.dumps(state)), newcomer=False)
    totals = second.ledger.totals()
    assert totals.job_ns["lost_step"] == 4 * 400 * MS
    assert totals.job_ns[IDLE] == 12_000 * MS  # the second process' own first 8 s are its initialisation
    assert totals.job_ns["init"] == 16_000 * MS
    assert sum(totals.gpu_ns.values()) == 6 * (first.clock.now + 20_000 * MS - START_NS)
    assert second.ledger.step == 10
    assert next(iter(second.observer.events))["event"] == "start"


def test_a_newcomer_takes_the_ledger_over_as_it_is() -> None:
    job = Job()
    job.train(10)
    job.lose(4, job.topology.without(4))
    state = {"ledger": job.ledger.state_dict(), "gpus": {str(w): g for w, g in job.observer.gpus.items()}, "events": [], "job": "x"}
    newcomer = Job()
    newcomer.clock.now = job.clock.now + 100 * MS
    newcomer.topology = job.topology.with_worker(1, 9)
    newcomer.observer.gpus = {9: 9}
    adopt(newcomer.observer, state, newcomer=True)
    assert sum(newcomer.ledger.totals().gpu_ns.values()) == sum(job.ledger.totals().gpu_ns.values()) + 6 * 100 * MS
    job.rejoin(9, newcomer.topology)
    assert newcomer.observer.gpus == job.observer.gpus
    assert newcomer.ledger.live == job.ledger.live == frozenset(range(6))


def test_stretches_and_the_picture(tmp_path: Path) -> None:
    eventful(tmp_path)
    history = read_run(tmp_path)
    bins = bins_of(history, sorted(history.segments), 100)
    assert sum(sum(each.values()) for each in bins.spent) == pytest.approx(sum(history.gpu_ns().values()))
    assert all(sum(bins.gpus(bucket)[index] for bucket in BUCKETS) == pytest.approx(6) for index in range(100))
    assert bins.most()[0] == "init"
    draw_goodput(history, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert COLORS.keys() == set(BUCKETS)


def test_the_page_is_one_file_and_says_it_all(tmp_path: Path) -> None:
    job = eventful(tmp_path)
    job.observer.note("loss", step=1, why='<script>alert("x")</script>')
    page = render_html(read_run(tmp_path), "run <demo>", job.clock.now + 3 * 10**9)
    assert not re.search(r"<script|https?://|<link|@import|url\(", page)
    assert "run &lt;demo&gt;" in page and "last record 3.0 s ago" in page
    assert page.count("killed by SIGKILL") == 2 * 6  # in the timeline and in the table
    for words in ("GPU 5", "r0·tp1/3", "degree 2", "degraded_capacity", 'name="viewport"', "7 / 2"):
        assert words in page, words


def test_report_in_the_terminal_and_as_a_page(tmp_path: Path) -> None:
    eventful(tmp_path / "demo")
    page = tmp_path / "out" / "page.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "demo"), "--html", str(page)])
    assert result.exit_code == 0, result.output
    for words in ("215 steps", "degraded_capacity", "rejoin", "worker 4: killed by SIGKILL", "replica 0 role 0 of"):
        assert words in result.output, words
    assert page.read_text().startswith("<!doctype html>")
    one_file = CliRunner().invoke(app, ["report", str(tmp_path / "demo" / "ledger-0.jsonl")])
    assert one_file.exit_code == 0 and "215 steps" in one_file.output


def test_report_on_a_run_that_is_alive_shows_what_is_written_so_far(tmp_path: Path) -> None:
    job, told = Job(tmp_path), []
    for _ in range(3):
        job.train(30)
        job.observer.flush()
        (tmp_path / "ledger-1.jsonl").write_bytes(b"")  # its worker has just made it
        (tmp_path / "ledger-2.jsonl").write_bytes(b'{"kind":"op')  # its worker died in its first write
        result = CliRunner().invoke(app, ["report", str(tmp_path)])
        assert result.exit_code == 0, result.output
        told.append(re.search(r"(\d+) steps in (\S+)", result.output).groups())  # type: ignore[union-attr]
    assert [steps for steps, _ in told] == ["30", "60", "90"] and len({seconds for _, seconds in told}) == 3


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_report_on_nothing_says_what_it_wants(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["report", str(tmp_path / name)])
    assert result.exit_code == 2
    assert "neither" in result.output


def test_words_for_numbers() -> None:
    assert [duration(s) for s in (0.25, 59.0, 61, 3700, 90_000)] == ["0.2 s", "59.0 s", "1 min 1 s", "1 h 1 min", "1 d 1 h"]
    assert [num_bytes(n) for n in (12, 2048, 3 << 30)] == ["12 B", "2.0 KiB", "3.0 GiB"]


class Receiver(http.server.BaseHTTPRequestHandler):
    """A webhook that keeps what it gets."""

    got: list[dict[str, Any]]

    def do_POST(self) -> None:
        self.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Silent."""


def test_alerts_go_out_by_command_webhook_and_wandb_and_are_rate_limited(tmp_path: Path) -> None:
    got: list[dict[str, Any]] = []
    server = http.server.HTTPServer(("127.0.0.1", 0), type("R", (Receiver,), {"got": got}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    file = tmp_path / "alerts"
    command = (sys.executable, "-c", f"import sys; open({str(file)!r}, 'a').write(sys.stdin.read() + '\\n')")
    said: list[str] = []
    now = [0.0]
    config = AlertConfig(command=command, webhook=f"http://127.0.0.1:{server.server_port}/", every_seconds=60)
    alerts = Alerts(config, lambda title, text: said.append(title), lambda: now[0])
    try:
        assert alerts.send(Alert("loss", "lost worker 4", "killed", "job"))
        assert not alerts.send(Alert("loss", "lost worker 5", "killed", "job"))
        assert alerts.send(Alert("recovery", "training goes on", "2 x (1x2)", "job"))
        now[0] = 61.0
        assert alerts.send(Alert("loss", "lost worker 1", "killed", "job"))
        alerts.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert said == ["lost worker 4", "training goes on", "lost worker 1"]
    assert [each["title"] for each in got] == said
    assert [json.loads(line)["text"] for line in file.read_text().splitlines()][-1] == "[lost worker 1] killed (1 earlier ones were held back)"
    assert alerts.num_failed == 0


def test_alerts_that_cannot_be_delivered_hurt_nobody() -> None:
    alerts = Alerts(AlertConfig(command=("/does/not/exist",), webhook="http://127.0.0.1:9/"))
    assert alerts.send(Alert("loss", "x", "y"))
    alerts.close()
    assert alerts.num_failed == 2


def test_low_goodput_is_told_after_a_while() -> None:
    now = [0.0]
    alerts = Alerts(AlertConfig(goodput_below=0.9, for_seconds=100), clock=lambda: now[0])
    told = []
    for at, goodput in ((0, 0.5), (50, 0.5), (99, 0.95), (120, 0.5), (219, 0.5), (221, 0.5)):
        now[0] = at
        told.append(alerts.watch(goodput))
    assert told == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kinds": ("fire",)}, "no alerts of the kind"),
        ({"command": "mail me"}, "list of a program"),
        ({"webhook": "file:///etc/passwd"}, r"http\(s\) URL"),
        ({"goodput_below": 90}, "share from 0 to 1"),
    ],
)
def test_alert_options_that_cannot_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AlertConfig(**options)


def test_a_job_has_one_name_for_all_its_workers_whenever_they_start() -> None:
    token = {"NTP_JOB_TOKEN": "secret"}
    assert job_id_of(token) == job_id_of(dict(token)) != job_id_of({"NTP_JOB_TOKEN": "other"})
    assert "secret" not in str(job_id_of(token))
    assert job_id_of({}) is None
    start = process_start_ns()
    assert start is not None and 0 < start
    assert process_start_ns("0") is None
