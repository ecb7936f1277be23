"""``python train.py`` starts its own workers: this process becomes their supervisor and runs the script once per device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.config import RecoveryConfig
from lightning_ntp.strategy.supervisor import Supervisor
from lightning_ntp.strategy.supervisor_config import SupervisorConfig


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
                f"num_nodes={num_nodes}: start the script on each node with torchrun (--nnodes={num_nodes} "
                f"--nproc-per-node={num_devices}) or srun; a plain `python` starts workers on one node only"
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
        supervisor = Supervisor(
            worker_command(),
            self.num_workers,
            recovery=self.recovery.is_on(os.environ),
            config=SupervisorConfig(patience=self.recovery.patience),
        )
        code = supervisor.run()
        if trainer is not None:
            trainer.callbacks = []  # they have never been set up here, and Lightning tells them of the SystemExit
        raise SystemExit(code)

    def kill(self, signum: Any) -> None:
        """The supervisor passes signals on by itself."""


def worker_command() -> tuple[str, ...]:
    """The command line of this process, to the letter: interpreter options, ``-m`` and ``-c`` as well."""
    return (sys.executable, *sys.orig_argv[1:])
