"""What README and CONTRIBUTING say is tried: code blocks run, links and make targets exist, the picture can be drawn."""

from __future__ import annotations

import importlib.util
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
HUB_ID = "Qwen/Qwen3-0.6B"


def _scripts() -> list[str]:
    return [block for block in BLOCKS if "Trainer(" in block]


def _snippets() -> list[str]:
    return [block for block in BLOCKS if "Trainer(" not in block]


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands in for the hub model: the same architecture, tiny, in a local folder."""
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("index", range(len(_snippets())))
def test_a_snippet_holds_what_it_asserts(index: int) -> None:
    snippet = _snippets()[index]
    assert "assert " in snippet
    exec(compile(snippet, f"README snippet {index}", "exec"), {})  # noqa: S102  our own text


@pytest.mark.parametrize("index", range(len(_scripts())))
def test_a_script_runs_as_written(index: int, tmp_path: Path, tiny_checkpoint: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_scripts()[index].replace(HUB_ID, str(tiny_checkpoint)))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "max_steps=5` reached" in done.stderr + done.stdout


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_and_make_targets_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    used = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE))
    assert used and used <= targets


def test_the_picture_is_drawn_from_the_layouts_in_use(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs" / "make_pictures.py")
    assert spec is not None and spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    nested = list(pictures.nested_layouts(32, 8, (7, 6)))
    recut = [pictures.contiguous_recut(layout.roles) for layout in nested]
    assert [len(pictures.moved(a, b)) for a, b in itertools.pairwise(nested)] == [4, 4]
    assert [len(pictures.moved(a, b)) for a, b in itertools.pairwise(recut)] == [22, 14]
    pictures.nested_layouts_picture(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
