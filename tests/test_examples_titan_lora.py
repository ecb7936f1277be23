"""examples/pretrain_torchtitan.py and examples/finetune_lora.py: parity of torchtitan's model, and runs of the scripts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from lightning_ntp.strategy.checks import forward_roots
from lightning_ntp.strategy.fsdp import shard_model
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.huggingface import plan_model
from lightning_ntp.strategy.throughput import flops_per_token
from lightning_ntp.topology import Topology
from tests.models import randomize
from tests.test_example import _lines, tiny_model  # noqa: F401  a fixture
from tests.test_model_features import gradient_errors, relative

EXAMPLES = Path(__file__).parent.parent / "examples"

titan = pytest.importorskip("torchtitan.models.llama3", reason="needs the extra titan")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load("pretrain_torchtitan")


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(EXAMPLES))


def titan_case(rank: int, world: int, num_keys: int) -> dict[str, float]:
    """Largest relative errors of loss and gradients, one uneven replica against one process."""
    example = load("pretrain_torchtitan")
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": num_keys, "vocab_size": 101, "max_seq_len": 16}
    twin, module = (example.Pretraining(example.TransformerModelArgs(**sizes), 1e-3).double() for _ in range(2))
    randomize(twin)
    randomize(module)
    topology = Topology.from_shapes([(1, world)], tuple(range(world - 1, 0, -1)), world)
    plan = plan_model(module, world, topology.loss_order, example.PLAN)
    sharded = shard_model(module, plan, Groups(topology, rank), roots=forward_roots(module))
    assert len(sharded.units) == 3, "one FSDP unit per layer"
    tokens = torch.randint(101, (3, 17), generator=torch.Generator().manual_seed(1))
    losses = []
    for one in (twin, module):
        one.log = lambda *_, **__: None
        losses.append(one.training_step(({"input": tokens[:, :-1]}, tokens[:, 1:])))
        losses[-1].backward()
    return {"loss": relative(losses[1].detach(), losses[0].detach())} | gradient_errors(twin, sharded)


@pytest.mark.parametrize("num_keys", [8, 4])
def test_torchtitans_llama_on_an_uneven_replica_equals_one_process(pool, num_keys):
    """Its rotary embedding and loss compute in float32."""
    for found in pool.run(titan_case, 3, num_keys):
        assert {name: error for name, error in found.items() if error > 1e-4} == {}


def test_its_flop_formula_is_the_one_of_the_throughput(example: ModuleType) -> None:
    args = example.llama3_args["debugmodel"]
    model = example.Transformer(args)
    num_parameters, flops = args.get_nparams_and_flops(model, 128)

    class Config:
        num_hidden_layers, num_attention_heads, hidden_size, vocab_size = args.n_layers, args.n_heads, args.dim, args.vocab_size

    assert flops_per_token(Config(), num_parameters, 128) == flops


def losses_of(script: str, options: list[str], folder: Path) -> tuple[list[float], str]:
    command = [sys.executable, str(EXAMPLES / script), *options, "--accelerator", "cpu", "--steps", "20", "--out", str(folder / "out")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [int(row[1]) for row in rows] == [10, 20]
    return [float(row[3]) for row in rows], done.stdout


@pytest.mark.timeout(400)
def test_pretraining_runs_and_the_loss_falls(tmp_path: Path) -> None:
    losses, printed = losses_of(
        "pretrain_torchtitan.py", ["--replica-sizes", "2", "1", "--seq-len", "32", "--batch-size", "2"], tmp_path
    )
    assert losses[1] < losses[0] - 0.3
    assert "debugmodel: 6," in printed and "FLOPs per token" in printed


@pytest.mark.full
@pytest.mark.timeout(400)
def test_adapters_are_trained_and_plain_peft_loads_them(tmp_path: Path, tiny_model: Path) -> None:  # noqa: F811
    options = ["--replica-sizes", "2", "1", "--model", str(tiny_model), "--data", str(_lines(tmp_path))]
    options += ["--learning-rate", "1e-2", "--block-size", "16", "--batch-size", "2"]
    losses, _ = losses_of("finetune_lora.py", options, tmp_path)
    assert losses[1] < losses[0]
    loaded: Any = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tiny_model), str(tmp_path / "out" / "adapters"))
    trained = [p for name, p in loaded.named_parameters() if "lora_B" in name]
    assert trained and all(isinstance(p, nn.Parameter) and p.abs().max() > 0 for p in trained)
