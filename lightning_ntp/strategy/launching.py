"""``ntp launch``: one supervisor per node, from options, the environment and SLURM. Also ``ntp drain``.

first node   Supervisor  hosts the store, decides        others   NodeAgent  follow
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy import rendezvous
from lightning_ntp.strategy.config import MAX_RESTARTS
from lightning_ntp.strategy.coordinator import Patience
from lightning_ntp.strategy.gpus import visible_gpus
from lightning_ntp.strategy.job_log import JOB_FILE, LOG_ROOT, new_run_folder
from lightning_ntp.strategy.node_agent import NodeAgent
from lightning_ntp.strategy.respawn import RespawnConfig
from lightning_ntp.strategy.restart import Restart, with_restarts
from lightning_ntp.strategy.slurm import HIDDEN, SlurmTask
from lightning_ntp.strategy.supervisor import Supervisor
from lightning_ntp.strategy.supervisor_config import ENV_RESOLVER, RESOLVER, SupervisorConfig
from lightning_ntp.strategy.worker_process import write_stderr


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What the user said; None: to be found out.

    num_workers: on this node; default: one per visible GPU. endpoint: HOST:PORT of the store, on the first node.
    join: this node or worker is added to a job that runs. max_respawns: replacements of lost workers, over the job.
    max_restarts: lives of the job from its last checkpoint, where it cannot go on in place.
    exit_file: the first node writes the job's exit code there: srun's own is that of a node that was lost.
    """

    num_workers: int | None = None
    num_nodes: int | None = None
    node_rank: int | None = None
    endpoint: str | None = None
    join: bool = False
    recovery: bool = True
    max_respawns: int = 8
    hang_seconds: float = 60.0
    log_folder: Path | None = None
    exit_file: Path | None = None
    max_restarts: int = MAX_RESTARTS


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What this process shall be: the first node (0), another of the start, or a newcomer (None)."""

    node: int | None
    num_workers: int
    config: SupervisorConfig
    recovery: bool
    exit_file: Path | None = None
    max_restarts: int = 0

    def run(self, command: Sequence[str]) -> int:
        """Supervises until the job has ended; the exit code."""
        os.environ.setdefault(ENV_RESOLVER, RESOLVER)

        def live(resume: Restart | None) -> tuple[int, Restart | None]:
            if self.node != 0:
                return NodeAgent(command, self.num_workers, node=self.node, config=self.config).run(), None
            config = replace(self.config, resume=resume)
            supervisor = Supervisor(command, self.num_workers, recovery=self.recovery, config=config)
            return supervisor.run(), supervisor.restart

        code = with_restarts(live, self.max_restarts, write_stderr)
        if self.node == 0 and self.exit_file is not None:
            self.exit_file.write_text(f"{code}\n")
        return code


def script_command(script: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """``train.py`` with its arguments, under this interpreter; ``-m module`` works as well."""
    if script != "-m" and not Path(script).is_file():
        raise ConfigError(f"ntp launch: there is no script {script!r} here ({os.getcwd()})")
    return (sys.executable, script, *arguments)


def plan_launch(options: LaunchOptions, environ: Mapping[str, str]) -> LaunchPlan:
    """`ConfigError` names what is missing: the number of workers without GPUs, endpoint and token with several nodes."""
    task = SlurmTask.from_env(environ)
    if options.join:
        return _plan_join(options, environ)
    recovery = options.recovery and environ.get(rendezvous.ENV_RECOVERY) != "off"
    num_nodes = options.num_nodes or (task.num_tasks if task else 1)
    node = options.node_rank if options.node_rank is not None else (task.number if task else 0)
    if not 0 <= node < num_nodes:
        raise ConfigError(f"--node-rank {node}: wanted a number below --nodes {num_nodes}")
    gpus = visible_gpus(environ)
    if task is not None and task.is_per_gpu:
        num_workers, gpus = 1, gpus if len(gpus) == 1 else ()
    else:
        num_workers = _num_workers(options, gpus)
    token, endpoint = environ.get(rendezvous.ENV_JOB_TOKEN), options.endpoint or rendezvous.LOOPBACK
    if num_nodes > 1:
        endpoint = options.endpoint or (str(task.endpoint()) if task else "")
        if not endpoint:
            raise ConfigError(
                "several nodes need --endpoint HOST:PORT, an address of the first node that all can reach"
            )
        if token is None:
            raise ConfigError(
                f"several nodes need one secret: set {rendezvous.ENV_JOB_TOKEN} to the same value on all of them, for "
                f"example {rendezvous.ENV_JOB_TOKEN}=$(openssl rand -hex 16) in the batch script"
            )
    config = SupervisorConfig(
        listen=endpoint,
        token=token,
        patience=Patience(progress_floor_seconds=options.hang_seconds),
        respawn=RespawnConfig(max_respawns=options.max_respawns if recovery else 0),
        members_expected=False,
        num_nodes=num_nodes,
        log_folder=options.log_folder or new_run_folder(environ),
        gpus=gpus[:num_workers],
        identity=task.identity if task else {},
        hidden=HIDDEN if task else (),
    )
    return LaunchPlan(node, num_workers, config, recovery, options.exit_file, options.max_restarts if recovery else 0)


def _plan_join(options: LaunchOptions, environ: Mapping[str, str]) -> LaunchPlan:
    endpoint, token = find_job(options.log_folder, options.endpoint, environ)
    gpus = visible_gpus(environ)
    num_workers = _num_workers(options, gpus)
    config = SupervisorConfig(listen=str(endpoint), token=token, gpus=gpus[:num_workers])
    return LaunchPlan(None, num_workers, replace(config, patience=Patience(start_seconds=60.0)), recovery=True)


def _num_workers(options: LaunchOptions, gpus: Sequence[str]) -> int:
    number = len(gpus) if options.num_workers is None else options.num_workers
    if number < 1:
        raise ConfigError("ntp launch: no GPU is visible here, so say how many workers: --workers N")
    if gpus and number > len(gpus):
        raise ConfigError(f"ntp launch: --workers {number}, but {len(gpus)} GPUs are visible")
    return number


def find_job(
    folder: Path | None, endpoint: str | None, environ: Mapping[str, str], root: Path = LOG_ROOT
) -> tuple[rendezvous.Endpoint, str]:
    """Store and token of a running job: from the options, the environment, or job.json of its (or the newest) log folder."""
    endpoint = endpoint or environ.get(rendezvous.ENV_STORE_ENDPOINT)
    token = environ.get(rendezvous.ENV_JOB_TOKEN)
    if folder is None and endpoint and token:
        return rendezvous.Endpoint.parse(endpoint), token
    files = [folder / JOB_FILE] if folder else sorted(root.glob(f"*/{JOB_FILE}"), key=lambda file: file.stat().st_mtime)
    try:
        job = json.loads(files[-1].read_text())
    except (IndexError, OSError) as error:
        raise ConfigError(
            f"no running job found: wanted {files[-1] if files else root / '*' / JOB_FILE}, which a job's first node keeps "
            f"while it runs; give --logs FOLDER, or --endpoint with {rendezvous.ENV_JOB_TOKEN} set"
        ) from error
    return rendezvous.Endpoint.parse(endpoint or job["endpoint"]), token or str(job["token"])


def drain(target: str, endpoint: rendezvous.Endpoint, token: str) -> list[int]:
    """Asks a worker (``"3"``) or all workers of a node (``"node1"``) to leave at the next step boundary; returns them.

    `ConfigError` if there is no such worker or node.
    """
    store = rendezvous.connect_store(endpoint, token)
    places = {int(worker): tuple(place) for worker, place in rendezvous.get_json(store, "places").items()}
    if target.startswith("node") and target[4:].isdigit():
        workers = sorted(worker for worker, (node, _) in places.items() if node == int(target[4:]))
    else:
        workers = [int(target)] if target.isdigit() and int(target) in places else []
    if not workers:
        known = sorted({f"node{node}" for node, _ in places.values()})
        raise ConfigError(
            f"nobody to drain: {target!r} is none of the workers {sorted(places)} and nodes {known} of this job"
        )
    for worker in workers:
        rendezvous.put_json(store, f"leave/{worker}", "drain")
    store.add("leaves", 1)
    return workers
