"""What the goodput ledger and its callback cost: time inside their code, summed over 10,000 steps of one process.

    python -m benchmarks.bench_goodput [--steps 10000] [--gpus 1024]

Lightning's hooks and the strategy's events are called as a training step calls them, with a ledger on disk and a CSV logger every
50 steps; nothing else runs, so all the time measured is ours.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_ntp.goodput_merge import read_run
from lightning_ntp.strategy.callback import callback_class
from lightning_ntp.strategy.events import CommitEvent, Observers
from lightning_ntp.topology import Topology

LIMIT_MS = 0.25


def _trainer(folder: str, num_gpus: int) -> Any:
    topology = Topology.from_shapes([(1, 8)] * (num_gpus // 8) if num_gpus >= 8 else [(1, num_gpus)])
    strategy = SimpleNamespace(
        observers=Observers(),
        topology=topology,
        _runner=object(),
        world_size=num_gpus,
        global_rank=0,
        is_global_zero=True,
        root_device=torch.device("cpu"),
        config=SimpleNamespace(batch_weight="samples"),
        broadcast=lambda value: value,
        sharded=SimpleNamespace(parameters=list),
    )
    return SimpleNamespace(
        strategy=strategy,
        loggers=[CSVLogger(folder)],
        default_root_dir=folder,
        fast_dev_run=False,
        precision="32-true",
        log_every_n_steps=50,
        global_step=0,
        ckpt_path=None,
    )


def measure(steps: int, num_gpus: int) -> dict[str, float]:
    """Milliseconds a step, and what the ledger on disk sums to."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, module = _trainer(folder, num_gpus), torch.nn.Linear(1, 1)
        callback: Any = callback_class()()
        callback.name_job(trainer)
        callback.setup(trainer, module, "fit")
        callback.on_fit_start(trainer, module)
        callback.on_train_start(trainer, module)
        observers = trainer.strategy.observers
        batch = {"input_ids": torch.zeros(2, 64, dtype=torch.long)}
        began = time.perf_counter()
        for step in range(steps):
            callback.on_train_batch_start(trainer, module, batch, step)
            observers.enter("step")
            observers.commit(CommitEvent(step, 16.0, True, 1, 1, time.monotonic()))
            observers.enter("commit")
            trainer.global_step = step + 1
            callback.on_train_batch_end(trainer, module, None, batch, step)
        seconds = time.perf_counter() - began
        callback.on_train_end(trainer, module)
        callback.teardown(trainer, module, "fit")
        history = read_run(Path(folder) / "ntp_logs" / callback.job)
        drift = sum(history.gpu_ns().values()) - num_gpus * (history.at_ns - history.start_ns)
        return {"ms_per_step": seconds / steps * 1e3, "drift_ns": float(drift), "file_kib": _size(folder) / 1024}


def _size(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("ledger-*.jsonl"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 1024])
    arguments = parser.parse_args()
    for num_gpus in arguments.gpus:
        result = measure(arguments.steps, num_gpus)
        verdict = "within" if result["ms_per_step"] < LIMIT_MS else "OVER"
        print(json.dumps({"gpus": num_gpus, "steps": arguments.steps, **{k: round(v, 4) for k, v in result.items()}, "load": os.getloadavg()[0]}))
        print(f"{num_gpus} GPUs: {result['ms_per_step']:.4f} ms a step, {verdict} {LIMIT_MS} ms")


if __name__ == "__main__":
    main()
