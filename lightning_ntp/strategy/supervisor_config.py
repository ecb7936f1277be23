"""How patient a supervisor is, what it is part of, and what a worker's environment tells it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy import rendezvous
from lightning_ntp.strategy.coordinator import Patience
from lightning_ntp.strategy.respawn import Place, RespawnConfig
from lightning_ntp.strategy.restart import Restart

ENV_RESOLVER, RESOLVER = "RES_OPTIONS", "timeout:1 attempts:2"
"""torch looks up the name of every peer that it connects to, for its logs. With the resolver's usual patience one lost
datagram stops a recovery for 5 seconds."""

ENV_LOG_FOLDER = "NTP_LOG_FOLDER"
"""Where a worker may leave what helps to understand a hang (NCCL's flight recorder)."""


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """How patient a supervisor is, and what it is part of.

    listen: HOST:PORT of the store; loopback and any free port unless told otherwise.
    token: the job's secret; made up if None.
    settle_seconds: after a failure, how long to wait for the traceback of the worker that caused it.
    grace_seconds: between asking workers to end (SIGTERM, or SIGINT after Ctrl-C) and SIGKILL.
    abandon_seconds: after SIGKILL; a process that is stuck in the kernel by then is left behind and named.
    save_seconds: with recovery, what members have for saving their state when the whole job is asked to leave.
    patience: with recovery, when a living worker is taken for lost.
    respawn: with recovery, when a lost worker is replaced, and how many recoveries are too many.
    members_expected: with recovery, whether a worker that dies before anybody has joined is a loss as well; False for
    scripts that may know nothing of recovery.
    num_nodes: nodes that the job starts with; each runs `num_workers` workers.
    log_folder: where job_log.py writes; None: nowhere.
    gpus: UUIDs of this node's GPUs by slot; empty: workers see what the supervisor sees.
    identity: variables that the outer launcher knows better (LOCAL_RANK where it starts one supervisor per GPU).
    hidden: variables of the outer launcher that workers shall not see.
    resume: the job has lived before, and begins again there.
    """

    listen: str = rendezvous.LOOPBACK
    token: str | None = None
    settle_seconds: float = 1.0
    grace_seconds: float = 3.0
    abandon_seconds: float = 5.0
    save_seconds: float = 25.0
    patience: Patience = field(default_factory=Patience)
    respawn: RespawnConfig = field(default_factory=RespawnConfig)
    members_expected: bool = True
    num_nodes: int = 1
    log_folder: Path | None = None
    gpus: tuple[str, ...] = ()
    identity: Mapping[str, str] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    resume: Restart | None = None

    def __post_init__(self) -> None:
        rendezvous.Endpoint.parse(self.listen)
        if self.token is not None:
            rendezvous.check_token(self.token)
        for name in ("settle_seconds", "grace_seconds", "abandon_seconds", "save_seconds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"SupervisorConfig.{name} is {getattr(self, name)}: wanted 0 or more")
        if self.num_nodes < 1:
            raise ConfigError(f"SupervisorConfig.num_nodes is {self.num_nodes}: wanted 1 or more")

    def worker_environ(self, env: Mapping[str, str], worker: Mapping[str, str], slot: int) -> dict[str, str]:
        """The whole environment of a worker: this process's, the job's (`env`), its own, its GPU, the outer launcher's.

        GPUs are given by UUID, which stays what it is when a driver counts its devices anew. The worker's own stands at
        the place of its local rank, where everybody looks for it.
        """
        inherited = {name: value for name, value in os.environ.items() if name not in self.hidden}
        found = {}
        if self.log_folder is not None:
            found[ENV_LOG_FOLDER] = str(self.log_folder)
        if slot < len(self.gpus):
            found |= {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus), "NTP_GPU_UUID": self.gpus[slot]}
        return {ENV_RESOLVER: RESOLVER, **inherited, **env, **worker, **found, **self.identity}


def place_environ(address: rendezvous.JobAddress, place: Place, num_slots: int, world_size: int) -> dict[str, str]:
    """What the worker at `place` of a job with `num_slots` workers a node must know. Also what torch's env:// reads."""
    node, slot = place
    return address.to_env() | {
        "RANK": str((node * num_slots + slot) % world_size),
        "LOCAL_RANK": str(slot),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(num_slots),
        "NODE_RANK": str(node),
        "MASTER_ADDR": address.endpoint.host,
        "MASTER_PORT": str(address.endpoint.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # else torch's env:// lets rank 0 host a second store on this port
    }
