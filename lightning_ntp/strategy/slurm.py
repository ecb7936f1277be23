"""A SLURM task as a node of ours: ``srun ntp launch train.py`` starts one supervisor per task.

One task per node: the supervisor starts a worker per GPU. One task per GPU: it starts one, which keeps SLURM's local rank.
Needed of SLURM: that the loss of a task or node ends nothing else (``srun --no-kill --kill-on-bad-exit=0``).
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.rendezvous import Endpoint

PORTS = range(20000, 40000)

HIDDEN = ("SLURM_NTASKS",)
"""What makes Lightning take a worker for an srun task of its own."""


@dataclass(frozen=True, slots=True)
class SlurmTask:
    """Where this process stands among the tasks of its step."""

    number: int
    num_tasks: int
    local: int
    tasks_here: int
    node: int
    job: int
    step: int
    node_list: str

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> SlurmTask | None:
        """None outside of srun. `ConfigError` names the variable that is missing or no number."""
        if "SLURM_PROCID" not in environ or "SLURM_STEP_NODELIST" not in environ:
            return None
        tasks_here = environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split(",")[0].split("(")[0]
        return cls(
            number=_number(environ, "SLURM_PROCID"),
            num_tasks=_number(environ, "SLURM_STEP_NUM_TASKS"),
            local=_number(environ, "SLURM_LOCALID"),
            tasks_here=_number({"SLURM_STEP_TASKS_PER_NODE": tasks_here}, "SLURM_STEP_TASKS_PER_NODE"),
            node=_number(environ, "SLURM_NODEID"),
            job=_number(environ, "SLURM_JOB_ID"),
            step=_number(environ, "SLURM_STEP_ID"),
            node_list=environ["SLURM_STEP_NODELIST"],
        )

    def endpoint(self, expand: Callable[[str], str] | None = None) -> Endpoint:
        """The store: on the first host, at a port that no other step of this user's jobs is likely to have."""
        hosts = (expand or expand_hosts)(self.node_list).split()
        if not hosts:
            raise ConfigError(f"scontrol show hostnames {self.node_list}: no answer; give --endpoint HOST:PORT")
        return Endpoint(hosts[0], PORTS[(self.job * 7 + self.step) % len(PORTS)])

    @property
    def is_per_gpu(self) -> bool:
        """Whether several tasks share a node: then each holds one worker."""
        return self.tasks_here > 1

    @property
    def identity(self) -> dict[str, str]:
        """What a worker of a per-GPU task must be told: its place on the machine, not in our counting of nodes."""
        if not self.is_per_gpu:
            return {}
        return {
            "LOCAL_RANK": str(self.local),
            "LOCAL_WORLD_SIZE": str(self.tasks_here),
            "NODE_RANK": str(self.node),
        }


def expand_hosts(node_list: str) -> str:
    """``n[1-3]`` -> one host a line, by SLURM's own tool."""
    try:
        answer = subprocess.run(
            ("scontrol", "show", "hostnames", node_list), capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"scontrol show hostnames {node_list} failed ({error}); give --endpoint HOST:PORT") from error
    return answer.stdout


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdigit():
        raise ConfigError(
            f"{name}={text!r}: srun sets it to a number; start this with srun, or give --node-rank and --nodes"
        )
    return int(text)
