"""Checkpoints that cannot be written or must not be loaded: one clear error, and nothing is lost."""

from __future__ import annotations

import logging
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ntp.dtensor.checkpoint_files import Manifest
from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.config import CheckpointConfig, RecoveryConfig
from tests import lightning_jobs as jobs


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Disk(L.Callback):
    """Saves after every batch; from the second batch to the fourth the kernel lets no file of this process grow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if 1 <= batch_idx <= 3 else hard, hard))
        trainer.save_checkpoint(self.folder / "last.ckpt")


def _fit_with_bad_disk(rank: int, world: int, folder: str, beside: bool) -> Any:
    lines = _Lines()
    logging.getLogger("lightning_ntp.strategy.saver").addHandler(lines)
    with jobs.as_worker(rank, world):
        recovery = RecoveryConfig(checkpoint=CheckpointConfig(async_save=beside))
        strategy = jobs.ntp(replica_sizes=[2, 1], recovery=recovery)
        trainer = jobs.trainer(strategy, world, callbacks=[Disk(Path(folder))])
        trainer.fit(jobs.TinyLlama(), jobs.loader(48, 4))
        return jobs.whole_state(strategy), lines.lines, trainer.global_step


@pytest.mark.parametrize("beside", [True, False])
def test_training_goes_on_while_the_disk_is_full(pool, tmp_path, beside):
    results = pool.run(_fit_with_bad_disk, 3, str(tmp_path), beside)
    assert [step for *_, step in results] == [6, 6, 6]
    lines = [line for _, lines, _ in results for line in lines]
    assert len(lines) == 1, lines
    assert "last.ckpt was not saved (OSError" in lines[0] or "File too large" in lines[0]
    assert "Training goes on with the checkpoint before it" in lines[0]
    Manifest.read(tmp_path / "last.ckpt").check(tmp_path / "last.ckpt")
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]
    twin = jobs.in_one_process(jobs.TinyLlama, [list(range(i, i + 8)) for i in range(0, 48, 8)])
    state = results[0][0]
    assert max(float((state[n] - p.detach()).abs().max()) for n, p in twin.named_parameters()) < 1e-9
    loaded = pool.run(_held, 2, str(tmp_path / "last.ckpt"))[0]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items()), "the save after the fault is the last state"


def _fit_without_a_place(rank: int, world: int, path: str) -> Any:
    lines = _Lines()
    logging.getLogger("lightning_ntp.strategy.saver").addHandler(lines)
    with jobs.as_worker(rank, world):
        saver = ModelCheckpoint(path, filename="{step}", every_n_train_steps=1)
        trainer = jobs.trainer(jobs.ntp(replica_sizes=[1, 1]), world, callbacks=[saver], enable_checkpointing=True)
        trainer.fit(jobs.TinyLlama(), jobs.loader(24, 4))
        return lines.lines, trainer.global_step


def test_training_goes_on_where_nobody_may_write(pool):
    """In /sys not even root makes a folder."""
    results = pool.run(_fit_without_a_place, 2, "/sys/ntp")
    assert [step for _, step in results] == [3, 3]
    (line,) = [line for lines, _ in results for line in lines]
    assert "/sys/ntp/step=1.ckpt was not saved (" in line and "Training goes on with the checkpoint before it" in line


def _held(rank: int, world: int, path: str) -> Any:
    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=[1, 1])
        trainer = jobs.trainer(strategy, world)
        trainer.validate(jobs.TinyLlama(), jobs.loader(2, 1), ckpt_path=path, verbose=False)
        return jobs.whole_state(strategy)


def _save_nowhere(rank: int, world: int, folder: str) -> str:
    with jobs.as_worker(rank, world):
        trainer = jobs.trainer(jobs.ntp(replica_sizes=[1, 1]), world)
        trainer.validate(jobs.TinyLlama(), jobs.loader(2, 1), verbose=False)
        with pytest.raises(ConfigError) as caught:
            trainer.save_checkpoint(f"{folder}/file/c.ckpt")
        return str(caught.value)


def test_outside_of_fit_a_save_that_fails_is_an_error_on_all_workers(pool, tmp_path):
    (tmp_path / "file").touch()
    messages = pool.run(_save_nowhere, 2, str(tmp_path))
    assert all("c.ckpt was not saved: NotADirectoryError" in message for message in messages)


class KeepsTwo(ModelCheckpoint):
    """Counts the complete checkpoints after each save."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, filename="{step}", save_top_k=1, monitor="step", mode="max", every_n_train_steps=1)
        self.folder, self.counts = folder, []

    def on_train_batch_start(self, *_: Any) -> None:
        if os.path.isdir(self.folder):
            self.counts.append(sum(path.suffix == ".ckpt" for path in Path(self.folder).iterdir()))


def _top_one(rank: int, world: int, folder: str) -> list[int]:
    with jobs.as_worker(rank, world):
        keeper = KeepsTwo(folder)
        module = jobs.TinyLlama()
        trainer = jobs.trainer(jobs.ntp(replica_sizes=[1, 1]), world, callbacks=[keeper], enable_checkpointing=True)
        trainer.fit(module, jobs.loader(48, 4))
        return keeper.counts


def test_the_last_good_checkpoint_stays_until_the_next_is_complete(pool, tmp_path):
    counts = pool.run(_top_one, 2, str(tmp_path / "c"))[0]
    assert min(counts[2:]) >= 1
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step=6.ckpt"]


def _train_and_save(rank: int, world: int, path: str) -> None:
    with jobs.as_worker(rank, world):
        trainer = jobs.trainer(jobs.ntp(replica_sizes=[2, 1]), world, max_steps=2)
        trainer.fit(jobs.TinyLlama(), jobs.loader(16, 4))
        trainer.save_checkpoint(path)


class OtherOptimizer(jobs.TinyLlama):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class OtherGroups(jobs.TinyLlama):
    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        halves = [[p for _, p in named[:5]], [p for _, p in named[5:]]]
        return torch.optim.AdamW([{"params": half} for half in halves], lr=1e-2)


def _try_all(rank: int, world: int, cases: dict[str, tuple[str, str, dict[str, Any]]]) -> dict[str, tuple[str, bool]]:
    """Message of each attempt, and whether the model is as it was."""
    out = {}
    kinds = {"same": jobs.TinyLlama, "optimizer": OtherOptimizer, "groups": OtherGroups}
    with jobs.as_worker(rank, world):
        for name, (path, kind, config) in cases.items():
            module = kinds[kind](**config)
            start = {n: p.detach().clone() for n, p in module.named_parameters()}
            strategy = jobs.ntp(replica_sizes=[2, 1])
            with pytest.raises(ConfigError) as caught:
                jobs.trainer(strategy, world).fit(module, jobs.loader(16, 4), ckpt_path=path)
            held = jobs.whole_state(strategy)
            out[name] = str(caught.value), all(torch.equal(start[n], t) for n, t in held.items())
    return out


def test_what_must_not_be_loaded_is_refused_on_all_workers_and_changes_nothing(pool, tmp_path):
    good = tmp_path / "good.ckpt"
    pool.run(_train_and_save, 3, str(good))

    def damaged(name: str, change: Callable[[Path], None]) -> str:
        copy = shutil.copytree(good, tmp_path / name)
        change(copy)
        return str(copy)

    def flip(folder: Path) -> None:
        file = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(bytes(content))

    cases = {
        "half": (damaged("half", lambda f: next(f.glob("__2*.distcp")).unlink()), "same", {}),
        "flipped": (damaged("flipped", flip), "same", {}),
        "no manifest": (damaged("bare", lambda f: (f / "ntp.json").unlink()), "same", {}),
        "nothing": (str(tmp_path / "nothing"), "same", {}),
        "a bucket": ("nowhere://bucket/c.ckpt", "same", {}),
        "other sizes": (str(good), "same", {"intermediate_size": 61}),
        "other model": (str(good), "same", {"kind": "qwen3"}),
        "other optimizer": (str(good), "optimizer", {}),
        "other groups": (str(good), "groups", {}),
    }
    wanted = {
        "half": "is incomplete: __2_0.distcp is missing",
        "flipped": "is damaged: the checksum of",
        "no manifest": "no complete checkpoint: it has no ntp.json",
        "nothing": "there is no checkpoint at",
        "a bucket": "'nowhere://bucket/c.ckpt' cannot be reached: Protocol not known: nowhere; install what fsspec asks for",
        "other sizes": "'model/model.model.layers.0.mlp.down_proj.weight' has shape (24, 97) there, (24, 61) here",
        "other model": "was made with another model: it lacks model/model.model.layers.0.self_attn.k_norm.weight",
        "other optimizer": "holds the state of AdamW, this run uses SGD",
        "other groups": "the param groups of AdamW are not those of the checkpoint ([21] parameters there, [5, 16] here",
    }
    results = pool.run(_try_all, 3, cases)
    for result in results:
        for name, words in wanted.items():
            message, unchanged = result[name]
            assert words in message, (name, message)
            assert unchanged, name
