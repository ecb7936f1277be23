"""Weights out: what `ntp export` and `save_pretrained` stream to the disk is what plain transformers loads, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer
from typer.testing import CliRunner

from lightning_ntp.cli import app
from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.pretrained import Entry, file_names, split, write_weights
from tests import lightning_jobs as jobs
from tests.models import float64_norms


class WithTokenizer(jobs.TinyLlama):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.tokenizer = ByT5Tokenizer(extra_ids=0)


def _fit(rank: int, world: int, kind: str, folder: str) -> Any:
    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=[2, 1])
        trainer = jobs.trainer(strategy, world, max_steps=2)
        trainer.fit(WithTokenizer(kind), jobs.loader(16, 4))
        trainer.save_checkpoint(f"{folder}/c.ckpt")
        strategy.save_pretrained(f"{folder}/saved")
        return jobs.whole_state(strategy)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_exported_weights_load_bit_equal_with_config_and_tokenizer(pool, tmp_path, kind):
    state = pool.run(_fit, 3, kind, str(tmp_path))[0]
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "c.ckpt"), str(out), "--shard-gb", "0.00003"])
    assert done.exit_code == 0, done.output
    assert "tensors" in done.output
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 8 for tensor in state.values())
    for folder in (out, tmp_path / "saved"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        named = {f"model.{name}": tensor for name, tensor in model.named_parameters()}
        assert named.keys() == state.keys()
        assert all(torch.equal(named[name], tensor) for name, tensor in state.items())
        assert AutoTokenizer.from_pretrained(folder)("ab")["input_ids"][:2] == [100, 101]
        with float64_norms():
            assert model.generate(torch.tensor([[5, 7]]), max_new_tokens=3, do_sample=False)[0, :2].tolist() == [5, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.ckpt", "out", "saved"]


def test_what_cannot_be_exported_says_why(tmp_path):
    (tmp_path / "empty").mkdir()
    for path, words in ((tmp_path / "none", "no ntp.json"), (tmp_path / "empty", "no ntp.json")):
        done = CliRunner().invoke(app, ["export", str(path), str(tmp_path / "out")])
        assert done.exit_code == 2 and words in done.output
    assert not (tmp_path / "out").exists()


def test_files_are_what_safetensors_reads(tmp_path):
    tensors = {
        "a": torch.randn(3, 5), "b": torch.arange(7, dtype=torch.int64), "c": torch.randn(2, 3).bfloat16(),
        "flag": torch.tensor([True, False, True]), "scalar": torch.tensor(2.5, dtype=torch.float64), "none": torch.empty(0, 4),
    }  # fmt: skip
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_weights(entries, iter(tensors.values()), tmp_path, 10**9)
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in tensors.items())
    (tmp_path / "cut").mkdir()
    write_weights(entries, iter(tensors.values()), tmp_path / "cut", 60)
    parts = sorted(Path(tmp_path / "cut").glob("*.safetensors"))
    assert len(parts) == len(split(entries, 60)) > 1 and [p.name for p in parts] == file_names(len(parts))
    assert {name for part in parts for name in safetensors.torch.load_file(part)} == set(tensors)


def test_a_dtype_without_a_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"x: safetensors has no dtype for torch.complex64"):
        write_weights([Entry("x", torch.complex64, (1,))], iter(()), tmp_path, 10)
    assert list(tmp_path.iterdir()) == []
