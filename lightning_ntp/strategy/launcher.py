"""``python train.py`` starts its own workers: this process becomes their supervisor and runs the script once per device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.config import RecoveryConfig
from lightning_ntp.strategy.gpus import visible_gpus
from lightning_ntp.strategy.job_log import new_run_folder
from lightning_ntp.strategy.rendezvous import ENV_RECOVERY, ENV_STORE_ENDPOINT
from lightning_ntp.strategy.respawn import RespawnConfig
from lightning_ntp.strategy.restart import Restart, with_restarts
from lightning_ntp.strategy.supervisor import Supervisor
from lightning_ntp.strategy.supervisor_config import ENV_RESOLVER, RESOLVER, SupervisorConfig
from lightning_ntp.strategy.worker_process import write_stderr


class WorkerLauncher:
    """A Lightning launcher. The process that launches is no worker, so any worker may fail or be lost.

    Args:
        num_workers: on this node.
        recovery: whether and how the job survives their loss.
    """

    is_interactive_compatible = False

    def __init__(self, num_workers: int, recovery: RecoveryConfig) -> None:
        self.num_workers, self.recovery = num_workers, recovery

    @classmethod
    def for_job(cls, num_devices: int, num_nodes: int, recovery: RecoveryConfig) -> WorkerLauncher | None:
        """A launcher where one is needed: not for a single device.

        Raises:
            ConfigError: in a notebook or at a prompt there is no script to start again; several nodes need an outer launcher.
        """
        if num_devices * num_nodes == 1:
            return None
        if num_nodes > 1:
            raise ConfigError(
                f"num_nodes={num_nodes}: start the script on each node with `ntp launch --nodes {num_nodes} --node-rank K "
                f"--endpoint HOST:PORT --workers {num_devices}`, or `srun ntp launch`; torchrun works as well, without "
                f"recovery; a plain `python` starts workers on one node only"
            )
        if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
            raise ConfigError(
                f"{num_devices} workers need a script to start, and this is a notebook or a prompt: put the training into "
                "train.py and run `python train.py`, or use Trainer(devices=1) here"
            )
        return cls(num_devices, recovery)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Runs the script once per worker, waits for all, and ends this process with their exit code.

        What follows in the script runs in the workers.
        """
        os.environ.setdefault(ENV_RESOLVER, RESOLVER)  # this process is nothing but a supervisor from here on
        recovery, gpus = self.recovery.is_on(os.environ), visible_gpus(os.environ)
        num_respawns = self.recovery.max_respawns if recovery and not self.recovery.advise else 0
        config = SupervisorConfig(
            patience=self.recovery.patience,
            respawn=RespawnConfig(max_respawns=num_respawns),
            log_folder=new_run_folder(os.environ) if recovery else None,
            gpus=gpus if len(gpus) == self.num_workers else (),  # else only the Trainer knows which ones it wants
        )

        def live(resume: Restart | None) -> tuple[int, Restart | None]:
            supervisor = Supervisor(worker_command(), self.num_workers, recovery=recovery, config=replace(config, resume=resume))
            return supervisor.run(), supervisor.restart

        code = with_restarts(live, self.recovery.max_restarts if recovery else 0, write_stderr)
        if trainer is not None:
            trainer.callbacks = []  # they have never been set up here, and Lightning tells them of the SystemExit
        raise SystemExit(code)

    def kill(self, signum: Any) -> None:
        """The supervisor passes signals on by itself."""


def why_no_recovery(environ: Mapping[str, str]) -> str:
    """Why a job that wants to survive losses cannot under the launcher that started it; "" under our own or none."""
    if ENV_STORE_ENDPOINT in environ:
        return "" if environ.get(ENV_RECOVERY) == "on" else f"{ENV_RECOVERY} is off"
    if "TORCHELASTIC_RUN_ID" in environ:
        return (
            "torchrun ends all workers as soon as one dies: a loss restarts the job from its last checkpoint. "
            "Start it with `ntp launch` to go on in place"
        )
    if "SLURM_PROCID" in environ:
        return "srun started the workers without a supervisor: start them with `srun ntp launch` to go on after a loss"
    return ""


def worker_command() -> tuple[str, ...]:
    """The command line of this process, to the letter: interpreter options, ``-m`` and ``-c`` as well."""
    return (sys.executable, *sys.orig_argv[1:])
