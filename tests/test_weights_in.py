"""Hugging Face weights from a folder: built on meta, each worker reads its cells; what does not fit is named."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM, LlamaModel

import lightning_ntp
from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.fsdp import local_of, local_shape, shard_model, take_cell
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.huggingface import plan_model
from lightning_ntp.strategy.weight_files import WeightSource, read_cells, sources_of
from lightning_ntp.topology import Topology
from tests import lightning_jobs as jobs
from tests.models import float64_norms, tiny
from tests.test_trainer_features import BATCH, EXACT, SIZE


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder per kind; llama in many small files."""
    root = tmp_path_factory.mktemp("pretrained")
    for kind in ("llama", "gpt2", "phi3", "qwen3"):
        model = tiny(kind, **({"tie_word_embeddings": True} if kind == "qwen3" else {}))
        model.save_pretrained(root / kind, max_shard_size="20KB" if kind == "llama" else "1GB")
    return root


def cells_case(rank: int, world: int, folder: str, kind: str, dtype: Any) -> list[str]:
    """Parameters and buffers that differ from those of the whole model."""
    twin = tiny(kind, **({"tie_word_embeddings": True} if kind == "qwen3" else {}))
    twin = twin if dtype == "auto" else twin.to(dtype)
    model = lightning_ntp.from_pretrained(folder, dtype=dtype)
    assert all(parameter.is_meta for parameter in model.parameters())
    topology = Topology.from_shapes([(2, 2), (1, 1)])
    sources, groups = sources_of(model), Groups(topology, rank)
    sharded = shard_model(model, plan_model(model, topology.num_roles, topology.loss_order), groups)
    read_cells(sharded, sources)
    at, wrong = sharded.coordinates, []
    for spec, parameter in sharded.parameters():
        wanted = take_cell(twin.get_parameter(spec.fqn), spec, spec.cell(at)).view(local_shape(spec, spec.cell(at)))
        if parameter.dtype != wanted.dtype or not torch.equal(local_of(parameter), wanted):
            wrong.append(spec.fqn)
    for name, buffer in twin.named_buffers():
        if not torch.equal(model.get_buffer(name).to(buffer.dtype), buffer):
            wrong.append(name)
    model(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=False).logits.sum()
    return wrong


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", "auto"), ("llama", torch.bfloat16), ("gpt2", "auto"), ("phi3", "auto"), ("qwen3", "auto")]
)
def test_each_worker_holds_its_cells_of_the_file(pool, folders, kind, dtype):
    assert pool.run(cells_case, 5, str(folders / kind), kind, dtype) == [[]] * 5


class Pretrained(jobs.TinyLlama):
    """Reads its weights in configure_model; with adapters if asked for."""

    def __init__(self, folder: str, with_adapters: bool = False) -> None:
        L.LightningModule.__init__(self)
        self.folder, self.with_adapters = folder, with_adapters
        self.model: Any = None
        self.seen, self.history, self.hooks = [], [], []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build()
            if self.with_adapters:
                config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=True)
                self.model = peft.get_peft_model(self.model, config)

    def build(self) -> nn.Module:
        return lightning_ntp.from_pretrained(self.folder)


class Plain(Pretrained):
    """The same with everything in memory."""

    def build(self) -> nn.Module:
        return LlamaForCausalLM.from_pretrained(self.folder, attn_implementation="eager").train()


def fit_case(rank: int, world: int, folder: str, with_adapters: bool) -> dict[str, torch.Tensor]:
    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=[(1, 3), (2, 1)])
        module = Pretrained(folder, with_adapters)
        jobs.trainer(strategy, world, max_steps=2).fit(module, jobs.loader(SIZE, BATCH))
        return jobs.whole_state(strategy)


def test_configure_model_trains_as_one_process(pool, folders):
    state = pool.run(fit_case, 5, str(folders / "llama"), False)[0]
    twin = Plain(str(folders / "llama"))
    with float64_norms():
        jobs.trainer("auto", 1, max_steps=2).fit(twin, jobs.loader(SIZE, 3 * BATCH))
    assert jobs.worst(state, twin) < EXACT


def test_adapters_on_weights_that_are_still_in_their_file(pool, folders):
    state = pool.run(fit_case, 5, str(folders / "llama"), True)[0]
    stored = tiny("llama").state_dict()
    for name, tensor in state.items():
        plain = name.removeprefix("model.base_model.model.").replace(".base_layer", "")
        if "lora_" not in name:
            assert torch.equal(tensor, stored[plain]), name
        else:
            assert tensor.isfinite().all() and tensor.abs().max() > 0, name
    assert all(float(t.abs().max()) < 0.1 for n, t in state.items() if "lora_B" in n), "B starts at zero"


def changed(folders: Path, target: Path, **tensors: torch.Tensor | None) -> Path:
    """The gpt2 folder with tensors put in, changed or (None) taken out."""
    shutil.copytree(folders / "gpt2", target)
    stored = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_missing_and_superfluous_tensors_are_named(folders, tmp_path, caplog):
    folder = changed(folders, tmp_path / "changed", **{"transformer.ln_f.weight": None, "extra.weight": torch.ones(2)})
    with caplog.at_level(logging.WARNING):
        model = lightning_ntp.from_pretrained(folder)
    assert "no values for transformer.ln_f.weight: they start" in caplog.text
    assert "does not have: extra.weight" in caplog.text
    assert torch.equal(model.transformer.ln_f.weight, torch.ones_like(model.transformer.ln_f.weight))
    assert not model.transformer.ln_f.weight.is_meta and sources_of(model).keys() == {
        name for name, parameter in model.named_parameters() if parameter.is_meta
    }


def test_a_new_head_and_a_base_models_prefix(folders, caplog):
    with caplog.at_level(logging.WARNING):
        headed = lightning_ntp.from_pretrained(folders / "llama", AutoModelForSequenceClassification, num_labels=3)
    assert headed.score.weight.shape == (3, 24) and not headed.score.weight.is_meta
    assert "score.weight" in caplog.text and "lm_head.weight" in caplog.text
    base = lightning_ntp.from_pretrained(folders / "llama", LlamaModel)
    assert sources_of(base)["layers.0.mlp.up_proj.weight"].key == "model.layers.0.mlp.up_proj.weight"


def broken(folders: Path, target: Path, how: str) -> Path:
    if how == "shape":
        return changed(folders, target, **{"transformer.ln_f.weight": torch.ones(7, dtype=torch.float64)})
    if how == "other model":
        shutil.copytree(folders / "gpt2", target)
        shutil.copy(folders / "phi3" / "config.json", target)
        return target
    shutil.copytree(folders / "llama", target)
    first = min(target.glob("*.safetensors"))
    if how == "lost file":
        first.unlink()
    elif how == "half a file":
        first.write_bytes(first.read_bytes()[: first.stat().st_size // 2])
    elif how == "outside":
        index = json.loads((target / "model.safetensors.index.json").read_text())
        index["weight_map"] |= {name: "../gpt2/model.safetensors" for name in list(index["weight_map"])[:1]}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        for file in target.glob("*.safetensors*"):
            file.unlink()
        (target / "pytorch_model.bin").touch()
    return target


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("shape", r"transformer.ln_f.weight: \(7,\) in the file, \(24,\) in the model"),
        ("other model", r"none of the \d+ tensors .* belongs to Phi3ForCausalLM"),
        ("lost file", r"names 'model-00001-of-\d+.safetensors', which is not in .*not complete"),
        ("half a file", r"model-00001-of-\d+.safetensors cannot be read as safetensors: .*is it complete\?"),
        ("outside", r"names '../gpt2/model.safetensors', which is not in"),
        ("no safetensors", r"neither model.safetensors nor .*there: .*pytorch_model.bin"),
    ],
)
def test_folders_that_cannot_be_read(folders, tmp_path, how, match):
    with pytest.raises(ConfigError, match=match):
        lightning_ntp.from_pretrained(broken(folders, tmp_path / "broken", how))


def test_a_hub_id_that_is_not_there():
    with pytest.raises(ConfigError, match="'nobody/nothing' is no local folder, and the hub does not give it"):
        lightning_ntp.from_pretrained("nobody/nothing")


def test_a_parameter_on_meta_without_a_file():
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="2 parameter.s. on the meta device have no values .*weight, bias"):
        sources_of(module)


def test_adapters_that_start_from_base_weights_are_refused(folders):
    from lightning_ntp.strategy.adapters import initialise_adapters

    model = peft.get_peft_model(
        lightning_ntp.from_pretrained(folders / "llama"), peft.LoraConfig(r=2, target_modules=["q_proj"])
    )
    model.peft_config["default"].init_lora_weights = "pissa"
    with pytest.raises(ConfigError, match="init_lora_weights='pissa' looks at base weights"):
        initialise_adapters(model)


def test_reading_a_cell_touches_only_its_slices(folders, monkeypatch):
    taken: list[int] = []

    class Slice:
        def __init__(self, stored: Any) -> None:
            self.stored = stored

        def get_shape(self) -> list[int]:
            return self.stored.get_shape()

        def __getitem__(self, index: Any) -> torch.Tensor:
            piece = self.stored[index]
            taken.append(piece.numel())
            return piece

    model = lightning_ntp.from_pretrained(folders / "llama")
    plan = plan_model(model, 2, (1,))
    spec = plan.by_fqn["model.layers.0.mlp.down_proj.weight"]
    source: WeightSource = sources_of(model)[spec.fqn]
    from lightning_ntp.strategy import weight_files

    original = weight_files._copy
    monkeypatch.setattr(weight_files, "_copy", lambda stored, *rest: original(Slice(stored), *rest))
    cell = spec.role_cell(2, 1)
    source.read_into(torch.empty(cell.numel, dtype=torch.float64), cell)
    assert sum(taken) == cell.numel < spec.numel
