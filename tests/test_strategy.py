"""The strategy end to end: a Trainer on ragged replicas equals a Trainer in one process."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, RandomSampler
from torchmetrics import MeanMetric
from transformers import AutoModelForCausalLM

from lightning_ntp.strategy.sampler import global_order
from tests import lightning_jobs as jobs
from tests.lives import resources
from tests.models import float64_norms

SIZE, BATCH = 29, 4


def _order(epochs: int = 1) -> list[list[int]]:
    """The global batches of 8 that two data rows at batch_size 4 must see."""
    order = [global_order(RandomSampler(range(SIZE)), 5, epoch) for epoch in range(epochs)]
    return [ids[i : i + 8] for ids in order for i in range(0, len(ids), 8)]


def _fit(rank: int, world: int, sizes: Any, kind: str, options: dict[str, Any], settings: dict[str, Any]) -> Any:
    with jobs.as_worker(rank, world):
        module = getattr(jobs, kind)()
        strategy = jobs.ntp(replica_sizes=sizes, **settings)
        trainer = jobs.trainer(strategy, world, **options)
        trainer.fit(module, jobs.loader(SIZE, BATCH, shuffle=True))
        return {
            "state": jobs.whole_state(strategy),
            "seen": module.seen,
            "history": module.history,
            "step": trainer.global_step,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
        }


def test_five_steps_equal_one_process_and_log_what_it_logs(pool):
    options = {"gradient_clip_val": 0.5}
    results = pool.run(_fit, 5, [3, 2], "TinyLlama", options | {"max_epochs": 2, "max_steps": 5}, {})
    twin = jobs.in_one_process(jobs.TinyLlama, _order(2)[:5], **options)
    assert jobs.worst(results[0]["state"], twin) < 1e-9
    assert {r["step"] for r in results} == {5}
    assert len({r["lr"] for r in results}) == 1
    for ours, theirs in zip(results[4]["history"][:4], twin.history[:4], strict=True):
        for name in ("train_step", "samples", "highest"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-9), name
    losses = [entry["train_step"] for entry in twin.history[:4]]
    sizes = [len(batch) for batch in _order()]
    wanted = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / SIZE
    assert results[3]["history"][4]["train_epoch"] == pytest.approx(wanted, abs=1e-9)


def test_accumulation_syncs_once_and_the_short_last_window_steps(pool):
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
    results = pool.run(_fit, 5, [(1, 3), (2, 1)], "TokenLlama", options, {"batch_weight": "tokens"})
    order = global_order(RandomSampler(range(SIZE)), 5, 0)  # three data rows: loop batches of 12, windows of 36
    windows = [order]
    twin = jobs.in_one_process(jobs.TokenLlama, windows, gradient_clip_val=0.05, gradient_clip_algorithm="value")
    assert jobs.worst(results[0]["state"], twin) < 1e-9
    assert {r["step"] for r in results} == {1}


def test_roles_see_the_same_samples_and_each_sample_once(pool):
    results = pool.run(_fit, 5, [3, 2], "TinyLlama", {}, {})
    assert results[0]["seen"] == results[1]["seen"] == results[2]["seen"]
    assert results[3]["seen"] == results[4]["seen"]
    assert all(len(micro) <= BATCH for r in results for micro in r["seen"])


class Evaluated(jobs.TinyLlama):
    """Also feeds a torchmetrics metric and predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_index = MeanMetric()
        self.modes: list[bool] = []

    def validation_step(self, samples: jobs.Sample, batch_idx: int) -> None:
        super().validation_step(samples, batch_idx)
        self.mean_index.update(samples["index"])
        self.log("mean_index", self.mean_index, on_epoch=True)
        self.modes.append(self.model.training)

    def predict_step(self, samples: jobs.Sample, batch_idx: int) -> list[int]:
        return samples["index"].tolist()


def _evaluate(rank: int, world: int, sizes: Any) -> Any:
    with jobs.as_worker(rank, world):
        module = Evaluated()
        trainer = jobs.trainer(jobs.ntp(replica_sizes=sizes), world)
        metrics = trainer.validate(module, jobs.loader(9, BATCH), verbose=False)[0]
        predicted = trainer.predict(module, jobs.loader(9, BATCH))
        trainer.fit(module, jobs.loader(8, BATCH), jobs.loader(9, BATCH))
        return metrics, predicted, module.modes, {k: v.item() for k, v in trainer.callback_metrics.items()}


def test_evaluation_is_exact_with_an_uneven_tail_and_ghosts(pool):
    results = pool.run(_evaluate, 3, [2, 1])
    with float64_norms(), torch.no_grad():
        module = jobs.TinyLlama()
        wanted = module.loss(jobs.batch_of(range(9))).item()
    for metrics, _, modes, after_fit in results:
        assert metrics["val_epoch"] == pytest.approx(wanted, abs=1e-9)
        assert metrics["mean_index"] == 4
        assert after_fit["mean_index"] == 4
        assert not any(modes)
    rows = [results[0][1], results[2][1]]
    assert sorted(i for row in rows for batch in row if batch is not None for i in batch) == list(range(9))
    assert results[0][1] == results[1][1]


def _train_and_save(rank: int, world: int, folder: str) -> Any:
    with jobs.as_worker(rank, world):
        module = jobs.TinyLlama()
        saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        stopper = EarlyStopping("val_epoch", patience=1, min_delta=100.0)
        strategy = jobs.ntp(replica_sizes=[3, 2])
        trainer = jobs.trainer(strategy, world, max_epochs=5, callbacks=[saver, stopper], enable_checkpointing=True)
        trainer.fit(module, jobs.loader(SIZE, BATCH, shuffle=True), jobs.loader(5, BATCH))
        strategy.save_pretrained(f"{folder}/pretrained")
        strategy.barrier()
        return trainer.current_epoch, jobs.whole_state(strategy)


def _resume(rank: int, world: int, sizes: Any, checkpoint: str) -> Any:
    with jobs.as_worker(rank, world):
        module = jobs.TinyLlama()
        torch.nn.init.zeros_(module.model.model.norm.weight)
        strategy = jobs.ntp(replica_sizes=sizes)
        trainer = jobs.trainer(strategy, world, max_epochs=2)
        trainer.fit(module, jobs.loader(SIZE, BATCH, shuffle=True), ckpt_path=checkpoint)
        return trainer.global_step, jobs.whole_state(strategy)


def test_checkpoint_folder_resumes_under_another_topology(pool, tmp_path):
    saved = pool.run(_train_and_save, 5, str(tmp_path))
    assert [epochs for epochs, _ in saved] == [2] * 5, "EarlyStopping must stop all workers in the same epoch"
    assert (tmp_path / "epoch=0.ckpt").is_dir()
    twin = jobs.in_one_process(jobs.TinyLlama, _order(2))
    for sizes, world in (([(2, 1), (1, 2)], 4), ([3, 2], 5)):
        step, state = pool.run(_resume, world, sizes, str(tmp_path / "epoch=0.ckpt"))[0]
        if len(sizes) == 2 and sizes[0] == 3:
            assert step == 8
            assert jobs.worst(state, twin) < 1e-9
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained")
    named = {f"model.{name}": tensor for name, tensor in loaded.named_parameters()}
    assert named.keys() == saved[0][1].keys()
    assert all(torch.equal(named[name], tensor) for name, tensor in saved[0][1].items())


def _messages(rank: int, world: int) -> Any:
    with jobs.as_worker(rank, world):
        strategy = jobs.ntp(replica_sizes=[(1, 2), (2, 1)])
        trainer = jobs.trainer(strategy, world)
        trainer.validate(jobs.TinyLlama(), jobs.loader(3, 1), verbose=False)
        row = strategy.control.row
        return {
            "row": row,
            "mean": strategy.reduce(torch.tensor(float(row))).item(),
            "int mean": strategy.reduce(torch.tensor(row + 1)).item(),
            "sum": strategy.reduce(torch.tensor(row), reduce_op="sum").item(),
            "max": strategy.reduce(torch.tensor(-row), reduce_op=torch.distributed.ReduceOp.MAX).item(),
            "product": strategy.reduce(torch.tensor(row + 1), reduce_op="product").item(),
            "gathered": strategy.all_gather(torch.tensor([row, row])).tolist(),
            "uneven": [len(part) for part in strategy.control.gather_rows(torch.zeros(row))],
            "broadcast": strategy.broadcast({"from": rank}, src=1),
            "all": strategy.reduce_boolean_decision(rank != 2),
            "any": strategy.reduce_boolean_decision(rank == 2, all=False),
            "text": strategy.reduce("as it is"),
        }


def test_messages_count_each_data_row_once(pool):
    results = pool.run(_messages, 4)
    assert [r.pop("row") for r in results] == [0, 0, 1, 2]
    assert all(r == results[0] for r in results)
    wanted = {"mean": 1.0, "int mean": 2.0, "sum": 3, "max": 0, "product": 6, "uneven": [0, 1, 2], "text": "as it is"}
    assert wanted.items() <= results[0].items()
    assert results[0]["gathered"] == [[0, 0], [1, 1], [2, 2]]
    assert (results[0]["broadcast"], results[0]["all"], results[0]["any"]) == ({"from": 1}, False, True)


def _fit_precision(rank: int, world: int, precision: str) -> Any:
    with jobs.as_worker(rank, world):
        module = jobs.TinyLlama().float()
        strategy = jobs.ntp(replica_sizes=[(2, 2), (1, 1)])
        trainer = jobs.trainer(strategy, world, precision=precision, max_steps=2, gradient_clip_val=1.0)
        trainer.fit(module, jobs.loader(SIZE, BATCH, shuffle=True))
        dtypes = {parameter.dtype for parameter in module.parameters()}
        return dtypes, trainer.precision, trainer.callback_metrics["train_step"].item()


def test_precisions(pool):
    losses = {}
    for precision, dtype in (
        ("32-true", torch.float32),
        ("bf16-mixed", torch.float32),
        ("bf16-true", torch.bfloat16),
    ):
        results = pool.run(_fit_precision, 5, precision)
        assert all(r[0] == {dtype} and r[1] == precision for r in results)
        assert len({r[2] for r in results}) == 1
        losses[precision] = results[0][2]
    assert losses["bf16-mixed"] == pytest.approx(losses["32-true"], rel=0.02)
    assert losses["bf16-true"] == pytest.approx(losses["32-true"], rel=0.05)


class Hooked(jobs.TinyLlama):
    """Counts hooks and checks that each sees a batch as the user's loader would make it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def _note(self, hook: str, samples: Any = None) -> None:
        self.calls[hook] += 1
        assert samples is None or (isinstance(samples, dict) and len(samples["index"]) <= BATCH)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._note("before transfer", batch)
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._note("after transfer", batch)
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._note("start", batch)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._note("zero")

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self._note("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._note("step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._note("end", batch)
        self.losses = [*getattr(self, "losses", []), outputs["loss"].item()]


class Data(L.LightningDataModule):
    """A stream of samples; says where `prepare_data` ran."""

    prepared = False

    def prepare_data(self) -> None:
        self.prepared = True

    def train_dataloader(self) -> Any:
        return DataLoader(jobs.SampleStream(SIZE), batch_size=BATCH)


def _hooks(rank: int, world: int) -> Any:
    with jobs.as_worker(rank, world):
        module, data = Hooked(), Data()
        strategy = jobs.ntp(replica_sizes=[3, 2], batch_weight=lambda samples: 2 * len(samples["index"]))
        trainer = jobs.trainer(strategy, world, accumulate_grad_batches=3)
        trainer.fit(module, data)
        return (
            dict(module.calls),
            data.prepared,
            module.seen,
            module.losses,
            trainer.global_step,
            jobs.whole_state(strategy),
        )


def test_hooks_see_the_users_batches_and_a_stream_is_shared_in_order(pool):
    results = pool.run(_hooks, 5)
    num_loop_batches, num_steps = 4, 2
    for calls, _, seen, losses, step, _ in results:
        micro = len(seen)
        assert step == calls["step"] == calls["zero"] == num_steps
        assert calls["start"] == calls["end"] == len(losses) == num_loop_batches
        assert calls["backward"] == calls["before transfer"] == calls["after transfer"] == micro
    assert [prepared for _, prepared, *_ in results] == [True, False, False, False, False]
    first_row, second_row = results[0][2], results[3][2]
    assert sorted(i for micro in (*first_row, *second_row) for i in micro) == list(range(SIZE))
    ids = list(range(SIZE))
    twin = jobs.in_one_process(jobs.TinyLlama, [ids[:24], ids[24:]])
    assert jobs.worst(results[0][5], twin) < 1e-9


def _single(rank: int, world: int) -> Any:
    with float64_norms():
        module = jobs.TinyLlama()
        trainer = jobs.trainer("ntp", 1, gradient_clip_val=0.5)
        trainer.fit(module, jobs.loader(8, BATCH))
        return jobs.whole_state(trainer.strategy), trainer.strategy.launcher is None


def test_one_device_is_plain_training(pool):
    state, no_launcher = pool.run(_single, 1)[0]
    twin = jobs.in_one_process(jobs.TinyLlama, [[0, 1, 2, 3], [4, 5, 6, 7]], gradient_clip_val=0.5)
    assert no_launcher
    assert jobs.worst(state, twin) < 1e-9


def _with_pytorch_lightning(rank: int, world: int) -> Any:
    import pytorch_lightning as pl

    class Line(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with jobs.as_worker(rank, world):
        trainer = pl.Trainer(
            strategy="ntp", accelerator="cpu", devices=world, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Line(), DataLoader(torch.ones(6, 2), batch_size=1))
        return isinstance(trainer.strategy, pl.strategies.ParallelStrategy), trainer.global_step


def test_the_other_lightning_knows_it_too(pool):
    assert pool.run(_with_pytorch_lightning, 2) == [(True, 3)] * 2


def _save(rank: int, world: int, kind: str, folder: str) -> Any:
    with jobs.as_worker(rank, world):
        module = jobs.TinyLlama(kind=kind)
        before = {name: parameter.detach().clone() for name, parameter in module.model.named_parameters()}
        strategy = jobs.ntp(replica_sizes=[2, 1])
        trainer = jobs.trainer(strategy, world)
        trainer.validate(module, jobs.loader(2, 1), verbose=False)
        strategy.save_pretrained(folder)
        strategy.barrier()
        return before


@pytest.mark.parametrize("kind", ["gpt2", "phi3", "qwen3"])
def test_save_pretrained_of_transposed_packed_and_normed_heads(pool, tmp_path, kind):
    before = pool.run(_save, 3, kind, str(tmp_path / kind))[0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / kind)
    named = dict(loaded.named_parameters())
    assert named.keys() == before.keys()
    assert all(torch.equal(named[name], tensor) for name, tensor in before.items())
    with float64_norms(), torch.no_grad():
        ids = jobs.batch_of(range(2))["input_ids"]
        assert torch.isfinite(loaded(input_ids=ids, labels=ids).loss)


def _fit_and_forget(rank: int, world: int) -> tuple[bool, dict[str, int]]:
    """Whether the module of a finished fit still lives, and what the process had open before that fit."""
    before = resources()
    with jobs.as_worker(rank, world):
        module, strategy = jobs.TinyLlama(), jobs.ntp(replica_sizes=[2, 1])
        jobs.trainer(strategy, world, max_steps=2).fit(module, jobs.loader(SIZE, BATCH))
        assert strategy.is_cut(module)
    remembered = weakref.ref(module)
    del module, strategy
    gc.collect()
    return remembered() is not None, before


def test_a_finished_fit_leaves_no_model_and_its_groups_end_with_the_default_one(pool):
    fits = [pool.run(_fit_and_forget, 3) for _ in range(4)]
    for worker in zip(*fits, strict=True):
        assert not any(alive for alive, _ in worker)
        early, late = worker[1][1], worker[-1][1]
        assert not {what: count - early[what] for what, count in late.items() if count > early[what]}
