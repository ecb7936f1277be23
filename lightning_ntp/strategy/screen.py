"""The screen before step 1: what runs where, what it takes, and what it survives."""

from __future__ import annotations

import importlib
import io
import platform
import socket
from collections import Counter
from importlib.metadata import version
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lightning_ntp.planner_start import STATE_BYTES_PER_PARAMETER, StartPlan
from lightning_ntp.strategy.control import gather_everyone
from lightning_ntp.strategy.fsdp import ShardedModel
from lightning_ntp.strategy.outlook import Outlook, device_spec, look_ahead
from lightning_ntp.topology import Topology

WIDTH = 110


def first_screen(sharded: ShardedModel, choice: StartPlan, strategy: Any, module: torch.nn.Module) -> None:
    """Say it through Lightning's logger on the leader. Collective over all processes."""
    hosts = Counter(gather_everyone(socket.gethostname()))
    if not strategy.is_global_zero:
        return
    precision = strategy.precision_plugin.precision
    outlook = _outlook(sharded, strategy)
    rows = [
        ("layout", layout(sharded.groups.topology)),
        ("why", choice.reason),
        ("hosts", ", ".join(f"{host} x{count}" for host, count in hosts.items())),
        ("device", device_name(strategy.root_device)),
        *memory(outlook),
        ("batches", batches(sharded.groups.topology, module)),
        ("precision", precision),
        ("attention", attention(module)),
        ("versions", ", ".join(f"{n} {version(n)}" for n in ("torch", "lightning", "transformers"))),
        ("survives", survives(sharded.groups.topology, strategy.recovery.member is not None)),
    ]
    if choice.alternatives:
        rows.insert(2, ("other layouts", "; ".join(choice.alternatives)))
    if strategy.root_device.type == "cpu":
        rows.append(("note", "CPU and gloo: for trying things out; figures are CPU figures"))
    info = importlib.import_module(f"{strategy.framework}.utilities.rank_zero").rank_zero_info
    info(render(rows))


def _outlook(sharded: ShardedModel, strategy: Any) -> Outlook:
    per_node = strategy.world_size // strategy.num_nodes
    device = device_spec(strategy.root_device, per_node, strategy.num_nodes)
    each = STATE_BYTES_PER_PARAMETER[strategy.precision_plugin.precision]
    return look_ahead(sharded.plan, sharded.groups.topology, device, each, per_node)


def batch_line(batch_size: int, num_rows: int, accumulate: int) -> str:
    """The numbers behind the screen's ``batches``, said once the training loader is known."""
    return (
        f"[ntp] global batch {batch_size * num_rows * accumulate} = batch_size {batch_size} x {num_rows} data row(s) x "
        f"{accumulate} accumulated; micro-batches of at most {batch_size}"
    )


def say_batches(strategy: Any, batch_size: int | None, num_rows: int, accumulate: int) -> None:
    """`batch_line` through Lightning's logger on the leader; silent where the user's loader names no batch size. Local."""
    if batch_size is not None and strategy.is_global_zero:
        info = importlib.import_module(f"{strategy.framework}.utilities.rank_zero").rank_zero_info
        info(batch_line(batch_size, num_rows, accumulate))


def render(rows: list[tuple[str, str]]) -> str:
    """A two-column table as text."""
    table = Table(show_header=False, title="lightning_ntp", title_justify="left")
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None).print(table)
    return "\n" + text.getvalue()


def layout(topology: Topology) -> str:
    """``2 replicas (fsdp x tp): 1x3, 1x2; roles lost first 2, 1``."""
    shapes = ", ".join(f"{replica.fsdp_size}x{replica.degree}" for replica in topology.replicas)
    text = f"{len(topology.replicas)} replica(s) of fsdp x tp: {shapes}; {len(topology.data_rows)} data row(s)"
    lacking = [str(i) for i, replica in enumerate(topology.replicas) if replica.degree < topology.num_roles]
    if lacking:
        text += f"; replica {', '.join(lacking)} below {topology.num_roles} roles"
    relieved = [f"role {role} of replica {i}" for i, one in enumerate(topology.replicas) for role, _ in one.relief]
    return f"{text}; slow {', '.join(relieved)} relieved" if relieved else text


def memory(outlook: Outlook) -> list[tuple[str, str]]:
    """State of the fullest worker now and after further losses, and what they would cost."""
    rows = [("memory per worker", f"{_size(outlook.now.bytes)} of parameters, gradients and optimizer state")]
    for number, state in enumerate(outlook.after, start=1):
        rows.append((f"after {number} more loss{'es' if number > 1 else ''}", f"{_size(state.bytes)} with {state.shapes}"))
    return rows + [("mind", warning) for warning in outlook.warnings]


def batches(topology: Topology, module: Any) -> str:
    """Data rows and accumulation; the loader's batch size is not known yet."""
    accumulate = module.trainer.accumulate_grad_batches
    rows = len(topology.data_rows)
    return f"global batch = batch_size x {rows} data row(s) x {accumulate} accumulated; micro-batches of at most batch_size"


def attention(module: torch.nn.Module) -> str:
    """The attention kernels of the Hugging Face models inside."""
    configs = (getattr(part, "config", None) for part in module.modules())
    kernels = {getattr(config, "_attn_implementation", None) for config in configs} - {None}
    return ", ".join(sorted(map(str, kernels))) or "no Hugging Face model"


def device_name(device: torch.device) -> str:
    """``NVIDIA H100`` or the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"


def survives(topology: Topology, recovery: bool) -> str:
    """Which losses leave a job that can go on."""
    if not recovery:
        return "nothing: recovery is off, or another launcher ends the job itself; the first failure ends it"
    if len(topology.replicas) == 1:
        return "nothing: one replica, so nobody else holds what is lost; num_replicas=2 would survive any single loss"
    return "the loss of any one worker"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**27 else f"{num_bytes / 2**20:.2f} MiB"
