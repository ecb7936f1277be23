"""Input that cannot work gets one clear error that says what to do, before any process waits for another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import lightning_ntp
from lightning_ntp.errors import ConfigError, NTPError, UnsupportedModelError
from lightning_ntp.planner_start import Machine, ModelSize, Wanted, plan_start
from lightning_ntp.strategy import checks
from lightning_ntp.strategy.config import RecoveryConfig, StrategyConfig
from lightning_ntp.strategy.environment import WorkerEnvironment
from lightning_ntp.strategy.launcher import WorkerLauncher
from tests import lightning_jobs as jobs

GIB = 2**30
BILLION = 10**9


def _sizes(num_parameters: int) -> ModelSize:
    return ModelSize.of(num_parameters, "32-true", weight_bytes=4 * num_parameters)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"replica_sizes": [4, 3]}, r"replica_sizes=\[4, 3\] needs 7 devices, the Trainer has 8 .*devices=7"),
        ({"num_replicas": 3, "tensor_parallel_size": 2, "fsdp_size": 2}, r"does not make the 8 devices"),
        ({"fsdp_size": 3}, r"fsdp_size=3 .* does not make the 8 devices"),
        ({"num_replicas": 9}, r"does not make the 8 devices"),
    ],
)
def test_sizes_that_do_not_add_up(options, match):
    with pytest.raises(ConfigError, match=match):
        plan_start(StrategyConfig(**options).wanted, Machine(1, 8, 80 * GIB), _sizes(BILLION))


def test_a_model_that_fits_nowhere():
    with pytest.raises(ConfigError, match=r"takes 1490\.1 GiB .* use more devices"):
        plan_start(Wanted(), Machine(1, 8, 80 * GIB), _sizes(100 * BILLION))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_replicas": 0}, r'num_replicas is a number of at least 1 or "auto", got 0'),
        ({"fsdp_size": True}, r"fsdp_size is a number"),
        ({"replica_sizes": []}, r"list of degrees such as \[4, 3\]"),
        ({"replica_sizes": [3, 0]}, r"numbers from 1 on, got 0"),
        ({"replica_sizes": [(2, 2, 2)]}, r"an \(fsdp, tp\) pair"),
        ({"replica_sizes": [3, 2], "fsdp_size": 1}, r"remove fsdp_size or replica_sizes"),
        ({"batch_weight": "words"}, r'batch_weight is "samples", "tokens" or a function'),
        ({"recovery": "on"}, r"recovery is a RecoveryConfig, got str"),
        ({"cpu_offload": True}, r"no option 'cpu_offload'"),
        ({"tensor_paralel_size": 2}, r"no option 'tensor_paralel_size'; did you mean tensor_parallel_size\?"),
    ],
)
def test_options(options, match):
    with pytest.raises(ConfigError, match=match):
        lightning_ntp.NTPStrategy(**options)


def test_recovery_options():
    with pytest.raises(ConfigError, match=r'batch_policy is "keep" or "shrink", got'):
        RecoveryConfig(batch_policy="drop")
    with pytest.raises(ConfigError, match='neighbours is "keep" or "renew", got'):
        RecoveryConfig(neighbours="kill")
    with pytest.raises(ConfigError, match=r"hang_seconds must be above 0"):
        RecoveryConfig(hang_seconds=0)
    with pytest.raises(ConfigError, match="min_workers must be 1 or more, got 0"):
        RecoveryConfig(min_workers=0)
    few = StrategyConfig(replica_sizes=[2, 2], recovery=RecoveryConfig(min_workers=5))
    with pytest.raises(ConfigError, match=r"RecoveryConfig\(min_workers=5\): the job has 4 devices; lower it or use more"):
        plan_start(few.wanted, Machine(1, 4), ModelSize(0, 0))


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "transformer-engine"])
def test_precision(precision, monkeypatch):
    class Plugin:
        pass

    plugin = Plugin()
    plugin.precision = precision
    with pytest.raises(ConfigError, match=rf'does not support precision=\'{precision}\'; use one of "32-true"'):
        lightning_ntp.NTPStrategy().precision_plugin = plugin


def test_devices_are_checked_before_anything_starts():
    with pytest.raises(ConfigError, match=r"replica_sizes=\[3, 2\] needs 5 devices, the Trainer has 4"):
        jobs.trainer(jobs.ntp(replica_sizes=[3, 2]), 4)


def test_torchrun_with_another_number_of_processes(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"devices=2, num_nodes=1\) makes 2 workers, but WORLD_SIZE=3"):
        jobs.trainer("ntp", 2)


@pytest.mark.parametrize(
    ("environ", "match"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK=2 must be below WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, r"RANK='x' is no number"),
    ],
)
def test_environment(environ, match):
    with pytest.raises(ConfigError, match=match):
        WorkerEnvironment.read(environ)


def test_a_notebook_is_told_to_run_a_script(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(ConfigError, match=r"put the training into train\.py and run `python train\.py`"):
        WorkerLauncher.for_job(4, 1, RecoveryConfig())
    assert WorkerLauncher.for_job(1, 1, RecoveryConfig()) is None


def test_several_nodes_need_an_outer_launcher():
    with pytest.raises(ConfigError, match=r"`ntp launch --nodes 2 --node-rank K .* --workers 8`"):
        WorkerLauncher.for_job(8, 2, RecoveryConfig())


def test_optimizers_that_are_wrong_on_cells():
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ConfigError, match=r"LBFGS calls its closure again"):
        checks.check_optimizers([torch.optim.LBFGS([parameter])], torch.nn.Linear(1, 1))
    muon = torch.optim.Muon([parameter])
    with pytest.raises(ConfigError, match=r"Muon looks at whole tensors"):
        checks.check_optimizers([muon], torch.nn.Linear(1, 1))
    muon.ntp_elementwise = True
    checks.check_optimizers([muon], torch.nn.Linear(1, 1))


def test_a_fused_optimizer_on_mixed_devices():
    group = {"params": [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, device="meta"))]}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    optimizer.param_groups[0] |= group | {"fused": True}
    with pytest.raises(ConfigError, match=r"fused=True\) has parameters on cpu and meta"):
        checks.check_optimizers([optimizer], torch.nn.Linear(1, 1))


class BareParameter(jobs.TinyLlama):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))


class NoPlan(jobs.TinyLlama):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(4, 4)


class Asks(jobs.TinyLlama):
    """Talks to the other rows in the middle of a step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.metric = how, MeanMetric()

    def training_step(self, samples: jobs.Sample, batch_idx: int) -> torch.Tensor:
        strategy, one = self.trainer.strategy, torch.ones(1)
        if self.how == "metric":
            self.metric.update(one)
            assert self.metric.compute() == 1
        else:
            calls = {"all_gather": lambda: self.all_gather(one), "reduce": lambda: strategy.reduce(one), "barrier": strategy.barrier}
            calls[self.how]()
        return super().training_step(samples, batch_idx)


def _short(drop_last: bool = False) -> DataLoader:
    return jobs.loader(1, 4, drop_last=drop_last)


class Trainerlike:
    """As much of a Trainer as `check_trainer` looks at."""

    def __init__(self, *callbacks: Any, sync_batchnorm: bool = False) -> None:
        self.callbacks = callbacks
        self._accelerator_connector = SimpleNamespace(_layer_sync=object() if sync_batchnorm else None)


@pytest.mark.parametrize(
    ("callback", "advice"),
    [
        (StochasticWeightAveraging(swa_lrs=0.1), "use WeightAveraging"),
        (ModelPruning("l1_unstructured"), "prune before or after"),
        (BackboneFinetuning(), r"requires_grad_\(False\) before fit"),
        (BatchSizeFinder(), "give the batch_size"),
        (LearningRateFinder(), "give the learning rate"),
    ],
)
def test_callbacks_that_cannot_work_on_a_cut_model(callback, advice):
    with pytest.raises(ConfigError, match=rf"the callback {type(callback).__name__}: .*{advice}"):
        checks.check_trainer(Trainerlike(callback), torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("trainer", "module"),
    [
        (Trainerlike(sync_batchnorm=True), torch.nn.Linear(1, 1)),
        (Trainerlike(), torch.nn.Sequential(torch.nn.SyncBatchNorm(3))),
    ],
)
def test_sync_batch_norm(trainer, module):
    with pytest.raises(UnsupportedModelError, match="SyncBatchNorm needs equally many micro-batches"):
        checks.check_trainer(trainer, module)


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, Any], type[NTPError], str]] = {
    "bare": (BareParameter, _short, {}, ConfigError, "parameter scale belongs to the LightningModule itself"),
    "no plan": (NoPlan, _short, {}, UnsupportedModelError, "holds no Hugging Face model and no plan was given"),
    "heads": (
        jobs.TinyLlama,
        _short,
        {"replica_sizes": [7], "devices": 7},
        UnsupportedModelError,
        "6 query heads cannot be shared by 7 roles. Use tensor_parallel_size <= 6",
    ),
    "drop_last": (
        jobs.TinyLlama,
        lambda: _short(drop_last=True),
        {"replica_sizes": [1, 1]},
        ConfigError,
        "nothing would be trained",
    ),
    "loaders": (jobs.TinyLlama, lambda: [_short(), _short()], {}, ConfigError, "several training loaders"),
    **{
        how: (partial(Asks, how), _short, {"replica_sizes": [1, 1]}, ConfigError, f"{what} in training_step")
        for how, what in {
            "all_gather": "all_gather",
            "reduce": "strategy.reduce",
            "barrier": "strategy.barrier",
            "metric": "computing a metric over all data rows",
        }.items()
    },
    "tokens": (
        jobs.TinyLlama,
        lambda: DataLoader(torch.zeros(4, 1)),
        {"batch_weight": "tokens"},
        ConfigError,
        "has none",
    ),
}


def _fit_case(rank: int, world: int, name: str) -> str:
    kind, loader, options, expected, _ = CASES[name]
    settings = {"replica_sizes": [world]} | {k: v for k, v in options.items() if k != "devices"}
    with jobs.as_worker(rank, world):
        try:
            jobs.trainer(jobs.ntp(**settings), world).fit(kind(), loader())
        except expected as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("name", CASES)
def test_every_worker_gets_the_same_clear_error(pool, name):
    *_, options, _, match = CASES[name]
    messages = pool.run(_fit_case, options.get("devices", 2), name)
    assert len(set(messages)) == 1
    assert match in messages[0], messages[0]


def _ask_alone(rank: int, world: int) -> int:
    with jobs.as_worker(rank, world):
        for how in ("all_gather", "reduce", "barrier", "metric"):
            trainer = jobs.trainer(jobs.ntp(replica_sizes=[2]), world)
            trainer.fit(Asks(how), _short())
        return trainer.global_step


def test_one_data_row_may_ask_itself(pool):
    assert pool.run(_ask_alone, 2) == [1, 1]


def _fit_short(rank: int, world: int) -> tuple[int, float]:
    with jobs.as_worker(rank, world):
        module = jobs.TinyLlama()
        trainer = jobs.trainer(jobs.ntp(replica_sizes=[(2, 1), (1, 1)]), world)
        trainer.fit(module, jobs.loader(2, 1))
        return trainer.global_step, trainer.callback_metrics["train_epoch"].item()


def test_fewer_samples_than_data_rows_works(pool):
    results = pool.run(_fit_short, 3)
    twin = jobs.in_one_process(jobs.TinyLlama, [[0, 1]])
    assert results == [(1, pytest.approx(twin.history[-1]["train_epoch"], abs=1e-9))] * 3


SCRIPT = """
    import sys, time
    import lightning as L, torch
    import lightning_ntp

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            if sys.argv[1] == "raise" and self.trainer.global_step == 1 and self.trainer.global_rank == 1:
                raise ValueError("user code broke")
            if sys.argv[1] == "wait" and self.trainer.global_step == 1:
                print("waiting", flush=True)
                time.sleep(60)
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = L.Trainer(
        strategy="ntp", accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    print("before", flush=True)
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=1))
    sys.stdout.write(f"after {trainer.global_rank} {trainer.global_step}\\n")  # one write: two workers share the pipe
    sys.stdout.flush()
"""


# Starting an interpreter with torch and Lightning three times over takes minutes on a busy machine.
patient = pytest.mark.timeout(400)
PATIENCE_SECONDS = 350


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def _start(script: Path, mode: str) -> subprocess.Popen[str]:
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "NTP_TEST_MARK": str(script)}
    return subprocess.Popen(
        [sys.executable, str(script), mode],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _left_behind(script: Path) -> list[str]:
    """Processes that still carry this test's mark in their environment."""
    mark, found = f"NTP_TEST_MARK={script}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes():
                found.append(folder.name)
        except OSError:  # gone meanwhile, or another user's
            continue
    return found


@patient
def test_a_plain_script_launches_its_own_workers(script):
    process = _start(script, "run")
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err
    assert sorted(line for line in out.splitlines() if line.startswith("after")) == ["after 0 4", "after 1 4"]
    for said in (
        "2 replica(s) of fsdp x tp: 1x1, 1x1", "1 device(s) hold the model", "num_replicas=1: 1 of 2x1", " x2 ", "memory per worker", "after 1 more loss",
        "data row(s)", "[ntp] global batch 2 = batch_size 1 x 2", "32-true", "no Hugging Face model", "torch 2.", "CPU figures",
    ):  # fmt: skip
        assert said in err, (said, err)
    assert _left_behind(script) == []


@patient
def test_user_code_that_raises_ends_the_job_with_its_traceback_first(script):
    process = _start(script, "raise")
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    first = err[err.index("Traceback") :]
    assert "ValueError: user code broke" in first.split("[supervisor]")[0]
    assert _left_behind(script) == []


@patient
def test_ctrl_c_ends_all_processes(script):
    process = _start(script, "wait")
    assert process.stdout is not None
    while "waiting" not in process.stdout.readline():
        assert process.poll() is None
    since = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - since < 30
    assert _left_behind(script) == []
