"""A job of our own policies: this process imports everything once, forks the workers, and supervises them.

    python -m benchmarks.policies.job --out FOLDER --drill JSON --policy ntp|drop|restart|undisturbed ...

On one machine, processes that import torch at the same time take each other's cores for longer than the whole drill; on machines of
their own they would not. So one import stands for all, and replacements are forked beforehand: they wait for their GPU to be back.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.policies.drill import Drill, last_step
from benchmarks.policies.training import train
from lightning_ntp.strategy.config import RecoveryConfig
from lightning_ntp.strategy.joining import is_late
from lightning_ntp.strategy.rendezvous import JobAddress
from lightning_ntp.strategy.respawn import RespawnConfig
from lightning_ntp.strategy.supervisor import Supervisor
from lightning_ntp.strategy.supervisor_config import SupervisorConfig
from tests.forked import ForkedProcess, Log

POLICIES = ("undisturbed", "ntp", "drop", "restart")
LOOK_SECONDS = 0.1


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="event logs, weights, ledger")
    parser.add_argument("--drill", type=Drill.from_json, required=True)
    parser.add_argument("--policy", choices=POLICIES, required=True)
    parser.add_argument("--gpus", type=int, nargs="+", help="those that this life of the job uses: whole replicas")
    parser.add_argument("--until", type=int, help="the step before which it ends")
    parser.add_argument("--checkpoints", type=Path, help="folder to save to and to go on from")
    parser.add_argument("--batch", type=int, default=6, help="samples of a replica of the healthy job")
    parser.add_argument("--pace", type=float, default=0.1, help="least seconds of a whole replica for a sample")
    options = parser.parse_args(arguments)
    options.gpus = options.gpus or list(range(options.drill.num_gpus))
    options.until = options.until or options.drill.steps
    return options


def wait_for_gpu(drill: Drill, gpu: int, whole: bool, out: Path) -> None:
    """Until a replacement at this GPU may join; for ever if it never comes back. The supervisor ends whoever waits with the job."""
    wanted = drill.back_at(gpu, last_step(out) + 1, whole)
    while wanted is None or last_step(out) < wanted - 1:
        time.sleep(LOOK_SECONDS)


def work(options: argparse.Namespace, address: JobAddress, log: Log) -> None:
    """The script of a worker."""
    torch.set_num_threads(1)
    if is_late(os.environ):
        gpu = options.gpus[int(os.environ["LOCAL_RANK"])]
        wait_for_gpu(options.drill, gpu, options.policy == "drop", options.out)
    train(options)


def replacements(options: argparse.Namespace) -> int:
    """How many may be started: one for each process that the drill kills."""
    return len(options.drill.script(options.policy == "drop").faults) if options.policy in ("ntp", "drop") else 0


def main() -> None:
    options = parsed()
    recovers, spare = options.policy != "restart", replacements(options)
    ready = [ForkedProcess(partial(work, options), options.out / "unused.log") for _ in range(len(options.gpus) + spare)]

    def start(command: Sequence[str], environ: Mapping[str, str]) -> ForkedProcess:
        process = ready.pop(0)
        process.begin(environ)
        return process

    config = SupervisorConfig(
        patience=RecoveryConfig().patience, respawn=RespawnConfig(max_respawns=spare, cool_down_seconds=0.0)
    )
    code = Supervisor(["forked"], len(options.gpus), recovery=recovers, config=config, start=start).run()
    for process in ready:
        process.dismiss()
    sys.exit(code)


if __name__ == "__main__":
    main()
