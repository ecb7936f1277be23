"""Who this process is, read once from the environment, in the form that Lightning asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ntp.errors import ConfigError


@dataclass
class WorkerEnvironment:
    """A Lightning cluster environment for workers of our own launcher, of torchrun, and for a lone process.

    Args:
        world: processes of the job.
        rank: global rank of this one.
        local: its number on this node, which chooses the device.
        node: number of the node.
        started_by_launcher: RANK and WORLD_SIZE were set.
        main_address: host of the rendezvous.
        main_port: its port.
        local_world: processes on this node; 0 where the launcher does not say.
    """

    world: int = 1
    rank: int = 0
    local: int = 0
    node: int = 0
    started_by_launcher: bool = False
    main_address: str = "127.0.0.1"
    main_port: int = 0
    local_world: int = 0

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> WorkerEnvironment:
        """From RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK or NODE_RANK, MASTER_ADDR and MASTER_PORT.

        Raises:
            ConfigError: one of them is no number, or RANK is not below WORLD_SIZE.
        """
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return cls()
        number = {name: _number(environ, name) for name in ("RANK", "WORLD_SIZE")}
        if not number["RANK"] < number["WORLD_SIZE"]:
            raise ConfigError(f"RANK={number['RANK']} must be below WORLD_SIZE={number['WORLD_SIZE']}")
        local = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else number["RANK"]
        node = next((_number(environ, name) for name in ("GROUP_RANK", "NODE_RANK") if name in environ), 0)
        port = _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else 0
        address = environ.get("MASTER_ADDR", "127.0.0.1")
        local_world = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else 0
        return cls(number["WORLD_SIZE"], number["RANK"], local, node, True, address, port, local_world)

    @property
    def creates_processes_externally(self) -> bool:
        """Whether all workers are there already."""
        return self.started_by_launcher

    @staticmethod
    def detect() -> bool:
        """Lightning is told, it need not find out."""
        return False

    def world_size(self) -> int:
        """Processes of the job."""
        return self.world

    def set_world_size(self, size: int) -> None:
        """Lightning computes it; the environment knows better."""

    def global_rank(self) -> int:
        """Number of this process in the job."""
        return self.rank

    def set_global_rank(self, rank: int) -> None:
        """Lightning computes it; the environment knows better."""

    def local_rank(self) -> int:
        """Number of this process on its node."""
        return self.local

    def node_rank(self) -> int:
        """Number of the node."""
        return self.node

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """ConfigError where the Trainer's devices are not the processes that were started.

        Nodes may run unequally many: one that shows 7 of 8 GPUs, say.
        """
        if num_nodes > 1 and self.local_world == num_devices:
            return
        if self.started_by_launcher and num_devices * num_nodes != self.world:
            raise ConfigError(
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}) makes {num_devices * num_nodes} workers, but "
                f"WORLD_SIZE={self.world} were started; make both the same"
            )

    def teardown(self) -> None:
        """Nothing to undo."""


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not text.isdigit():
        raise ConfigError(f"{name}={text!r} is no number; it is set by torchrun or by our launcher")
    return int(text)
