"""`ntp plan` and `ntp simulate`: what they print, write and draw, and how they refuse."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from lightning_ntp.cli import app
from lightning_ntp.errors import ConfigError
from lightning_ntp.hf_config import load_hf_config

QWEN = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "hidden_act": "silu",
}


def ntp(*args: str) -> Result:
    return CliRunner().invoke(app, args, env={"COLUMNS": "160"})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN))
    return path


class TestPlan:
    def test_json_tells_what_a_loss_costs(self, config: Path) -> None:
        args = ("--replicas", "2x1x8", "--lost", "3", "--gpu", "h200", "--no-refactor", "--json")
        result = ntp("plan", str(config.parent), *args)
        assert result.exit_code == 0, result.output
        plan = json.loads(result.output)
        assert plan["parameters"] == pytest.approx(8.2e9, rel=0.02)
        assert plan["before"]["shapes"] == {"1x8": 2} and plan["after"]["shapes"] == {"1x7": 1, "1x8": 1}
        assert sum(plan["after"]["shares"]) == 64 and plan["after"]["moved_bytes"] > 0
        rates = [row["tokens_per_second"] for row in (plan["before"], plan["after"], *plan["further_losses"])]
        assert rates == sorted(rates, reverse=True) and len(rates) == 5
        held = [row["memory_bytes"] for row in (plan["before"], plan["after"], *plan["further_losses"])]
        assert held == sorted(held) and held[0] < held[-1], "each further loss costs memory"
        assert {entry["degree"] for entry in plan["layouts"]} == {8, 7}, "before and after"
        assert plan["loss_order"][0] == 3
        heads = [entry["heads"] for entry in plan["layouts"] if entry["degree"] == 7]
        assert len(heads) == 7 and "[12:13)" in "".join(heads)

    def test_text_and_picture(self, config: Path, tmp_path: Path) -> None:
        picture = tmp_path / "new" / "plan.png"
        result = ntp("plan", str(config), "--lost", "3", "--gpu", "h200", "--no-refactor", "--png", str(picture))
        assert result.exit_code == 0, result.output
        for words in (
            "after the loss", "1 of 1x7", "drop role: 1x7", "query heads", "1 more lost", "3 more lost", "tokens/s", "GB a GPU", "GB moved",
            "samples each",
        ):  # fmt: skip
            assert words in result.output
        assert picture.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        ("args", "says"),
        [
            (["--replicas", "8"], "--replicas takes NUMBERxFSDPxTP"),
            (["--replicas", "2x0x8"], "--replicas takes"),
            (["--lost", "a"], "--lost takes numbers of workers"),
            (["--lost", "16"], "lost workers [16] are not in the topology of 16 workers"),
            (["--gpu", "z80"], "unknown GPU 'z80'; known: a100"),
            (["--replicas", "1x1x64"], "degree 64 is outside 1..32: every role needs a query head"),
            (["--batch", "0"], "global_batch must be a finite number above 0"),
            (["--replicas", "2x1x1", "--gpu", "h100"], "no replica can hold the model"),
        ],
    )
    def test_bad_input_is_a_sentence_and_status_2(self, config: Path, args: list[str], says: str) -> None:
        result = ntp("plan", str(config), *args)
        assert result.exit_code == 2 and says in result.output and "Traceback" not in result.output


class TestSimulate:
    def test_the_paper_as_one_json_object(self) -> None:
        result = ntp("simulate", "--preset", "ntp-paper", "--seeds", "2", "--samples", "20", "--json")
        assert result.exit_code == 0, result.output
        found = json.loads(result.output)
        assert {row["domain_size"] for row in found["availability"]} == {8, 16, 32, 64}
        assert {row["policy"] for row in found["loss"]} >= {"dp-drop", "ntp", "ntp-pw"}
        trace = found["trace"]
        assert 0.7 < trace["share_of_time_above_threshold"]["mean"] < 0.9
        assert 40 < trace["peak_failed_gpus"]["mean"] < 100
        assert set(trace["spare_domains_needed"]) == {"dp-drop", "ntp", "ntp-pw"}
        assert 0 < trace["boosted_domains_peak_share"]["mean"] < 0.12

    def test_same_seeds_same_object(self) -> None:
        args = ("simulate", "--seeds", "1", "--samples", "5", "--json")
        assert ntp(*args).output == ntp(*args).output

    def test_table_csv_and_plots(self, tmp_path: Path) -> None:
        folder = tmp_path / "out"
        result = ntp(
            "simulate", "--seeds", "1", "--samples", "5", "--csv", str(folder), "--plots", str(folder), "--restart-seconds", "60"
        )
        assert result.exit_code == 0, result.output
        for words in ("throughput lost", "spare domains for ntp-pw", "where the time goes", "ntp-pw-live"):
            assert words in result.output
        with (folder / "loss.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert {row["policy"] for row in rows} >= {"dp-drop", "ntp"} and float(rows[0]["mean"]) > 0
        pictures = sorted(path.name for path in folder.glob("*.png"))
        assert pictures == ["availability.png", "blast_radius.png", "goodput.png", "loss.png", "spares.png", "trace.png"]

    @pytest.mark.parametrize(
        ("args", "says"),
        [
            (["--preset", "x"], "unknown preset 'x'; known: ntp-paper, llama3-405b"),
            (["--seeds", "0"], "seeds must be a finite number above 0"),
            (["--rate-factor", "0"], "per_gpu_day must be a finite number above 0, got 0.0"),
            (["--repair-days", "-3"], "repair takes a time above 0 (math.inf: never), got (-3.0,) days"),
            (["--repair-days", "x"], "--repair-days takes numbers"),
            (["--fractions", "1.5"], "cannot draw 49152 failed of 32768 GPUs"),
            (["--restart-seconds", "-1"], "restart: recovery_seconds may not be negative, got -1.0"),
        ],
    )
    def test_bad_input_is_a_sentence_and_status_2(self, args: list[str], says: str) -> None:
        result = ntp("simulate", *(["--seeds", "1"] if "--seeds" not in args else []), "--samples", "2", *args)
        assert result.exit_code == 2 and says in result.output and "Traceback" not in result.output


def test_python_dash_m() -> None:
    run = subprocess.run([sys.executable, "-m", "lightning_ntp", "--help"], check=True, capture_output=True, text=True, timeout=60)
    assert "plan" in run.stdout and "simulate" in run.stdout


class TestConfig:
    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        class Hub(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path == "/owner/model/resolve/main/config.json"
                self.send_response(200 if found else 401)
                self.end_headers()
                self.wfile.write(json.dumps(QWEN).encode())

            def log_message(self, *_: Any) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Hub)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()
        server.server_close()
        thread.join()

    def test_hub_id(self, hub: None) -> None:
        assert load_hf_config("owner/model") == QWEN
        result = ntp("plan", "owner/model", "--lost", "3", "--gpu", "h200", "--json")
        assert result.exit_code == 0 and json.loads(result.output)["model"]["num_heads"] == 32

    def test_gated_or_missing(self, hub: None) -> None:
        with pytest.raises(ConfigError, match=r"no config at .*owner/gated.*401.*Give a local config.json"):
            load_hf_config("owner/gated")

    def test_no_file_and_no_id(self) -> None:
        with pytest.raises(ConfigError, match="is no config.json, no folder with one, and no hub id"):
            load_hf_config("nothing here")

    @pytest.mark.parametrize(("text", "says"), [("{", "is no JSON"), ("[]", "holds a list")])
    def test_broken_file(self, tmp_path: Path, text: str, says: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=says):
            load_hf_config(str(tmp_path))

    def test_no_decoder(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"hidden_size": 8, "num_attention_heads": 2}')
        result = ntp("plan", str(tmp_path))
        assert result.exit_code == 2 and "the config has none of num_hidden_layers, n_layer, num_layers" in result.output
