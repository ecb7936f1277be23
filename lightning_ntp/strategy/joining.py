"""How a process becomes a worker of its job: as a member that survives losses, or by torch's own rendezvous."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_ntp.strategy import nccl, rendezvous
from lightning_ntp.strategy.config import RecoveryConfig
from lightning_ntp.strategy.environment import WorkerEnvironment
from lightning_ntp.strategy.generation import MemberConfig
from lightning_ntp.strategy.launcher import why_no_recovery
from lightning_ntp.strategy.membership import Member
from lightning_ntp.strategy.supervisor_config import ENV_LOG_FOLDER
from lightning_ntp.testing import FaultScript

_log = logging.getLogger(__name__)

_MEMBER: list[Member] = []
"""This process's member; a second Trainer in the same script goes on with it."""


def is_late(environ: Mapping[str, str]) -> bool:
    """Whether this worker was started after its job: its id is none of those that the job began with."""
    return int(environ.get(rendezvous.ENV_WORKER_ID, 0)) >= int(environ.get("WORLD_SIZE", 1))


def enter(environment: WorkerEnvironment, device: torch.device, config: RecoveryConfig) -> Member | None:
    """Makes this process part of its job, once. None where losses end the job: recovery is off, or another launcher is at work.

    Collective over all processes.
    """
    if _MEMBER:
        return _MEMBER[0]
    if dist.is_initialized():
        return None
    backend = "nccl" if device.type == "cuda" else "gloo"
    if environment.world_size() == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return None
    if rendezvous.ENV_STORE_ENDPOINT in os.environ:
        address = rendezvous.JobAddress.from_env(os.environ)
        if address.recovery:
            if backend == "nccl":
                _prepare_nccl()
            _MEMBER.append(_join(address, backend, device, config))
            return _MEMBER[0]
    if config.is_on(os.environ) and environment.global_rank() == 0 and (why := why_no_recovery(os.environ)):
        _log.warning("recovery is off: %s", why)
    os.environ.setdefault("MASTER_ADDR", environment.main_address)  # SLURM: known to Lightning's environment only
    os.environ.setdefault("MASTER_PORT", str(environment.main_port))
    rank, world = environment.global_rank(), environment.world_size()
    dist.init_process_group(backend, init_method="env://", rank=rank, world_size=world)
    return None


def _prepare_nccl() -> None:
    folder = os.environ.get(ENV_LOG_FOLDER)
    nccl.prepare_environ(os.environ, Path(folder) if folder else None)
    nccl.check_version(tuple(torch.cuda.nccl.version()))


def _join(address: rendezvous.JobAddress, backend: str, device: torch.device, config: RecoveryConfig) -> Member:
    member = Member(
        address,
        MemberConfig(backend=backend, group_timeout_seconds=config.group_timeout_seconds),
        device=device if backend == "nccl" else None,
        faults=FaultScript.from_env(os.environ),
    )
    if not is_late(os.environ):  # else it joins when its script has come to the fit that the others are in
        member.join({"step": None, "error": "", "phase": "start", "setups": 0, "host": socket.gethostname()})
    return member
