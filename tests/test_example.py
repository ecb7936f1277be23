"""examples/finetune_hf.py: every kind of --data, packing, and a run of the script itself."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SCRIPT = Path(__file__).parent.parent / "examples" / "finetune_hf.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("finetune_hf", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _lines(folder: Path, num_lines: int = 200) -> Path:
    file = folder / "corpus.txt"
    file.write_text("".join(f"line {i}: the quick brown fox jumps over {i * i} lazy dogs\n" for i in range(num_lines)))
    return file


def test_text_comes_from_local_files_in_order(example: ModuleType, tmp_path: Path) -> None:
    json_lines = tmp_path / "rows.jsonl"
    json_lines.write_text("".join(json.dumps({"id": i, "body": f"row {i}"}) + "\n" for i in range(3)))
    assert example.load_text(str(json_lines), "body")["text"] == ["row 0", "row 1", "row 2"]
    assert example.load_text(str(_lines(tmp_path, 2)), "text")["text"][1].startswith("line 1: the quick")


def test_the_standard_library_is_real_input_of_some_megabytes(example: ModuleType) -> None:
    sources = list(example.standard_library())
    assert sum(map(len, sources)) > 3_000_000
    assert any("def namedtuple" in source for source in sources)


def test_packing_loses_only_the_rest_of_each_chunk(example: ModuleType, tmp_path: Path) -> None:
    args = argparse.Namespace(
        model=None, data=str(_lines(tmp_path)), column="text", block_size=16, batch_size=4, out=tmp_path
    )
    data = example.PackedText(args)
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))["input_ids"]
    assert batch.shape == (4, 16) and batch.dtype == torch.int64
    ids = torch.cat([block["input_ids"] for block in data.blocks])
    assert 0 <= ids.min() and ids.max() < example.VOCAB_SIZE
    assert (ids == 0).sum() >= 190, "each line ends with the end token"


def test_the_default_model_has_ten_million_parameters(example: ModuleType) -> None:
    model = example.build_model(None)
    assert 9e6 < sum(p.numel() for p in model.parameters()) < 11e6


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A local model folder with a tokenizer, as from a hub."""
    folder = tmp_path / "model"
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(_lines(tmp_path).read_text().splitlines(), vocab_size=400, show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=400, hidden_size=48, intermediate_size=97, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("layout", [["--strategy", "auto", "--devices", "1"], ["--replica-sizes", "2", "1"]])
def test_the_script_runs_and_the_loss_falls(tmp_path: Path, tiny_model: Path, layout: list[str]) -> None:
    command = [sys.executable, str(SCRIPT), *layout, "--model", str(tiny_model), "--accelerator", "cpu", "--steps", "20"]
    options = ["--data", str(_lines(tmp_path)), "--learning-rate", "1e-2", "--block-size", "16", "--batch-size", "2"]
    command += [*options, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
    losses = [float(row[3]) for row in rows]
    assert [int(row[1]) for row in rows] == [10, 20] and losses[1] < losses[0] - 0.5
