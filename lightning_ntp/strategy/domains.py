"""Which workers share a scale-up domain: GPUs of one NVLink fabric where NVML knows it, else those of one machine."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker is.

    Args:
        host: name of its machine.
        fabric: id of its NVLink fabric, which may span machines; None where there is none or nobody knows.
    """

    host: str
    fabric: str | None = None


@dataclass(frozen=True, slots=True)
class Domains:
    """The scale-up domains of a job.

    Args:
        sizes: workers of each; domains are runs of consecutive global ranks.
        kind: ``"NVLink fabric"`` or ``"node"``.
    """

    sizes: tuple[int, ...]
    kind: str


def find_domains(places: Sequence[Place]) -> Domains:
    """Domains of the workers at `places`, by global rank.

    Machines where some worker has no fabric, and also where ranks of several fabrics are mixed; every worker its own domain where
    even the machines are mixed, as then no consecutive ranks are sure to be close. Local.
    """
    for keys, kind in (([place.fabric for place in places], "NVLink fabric"), ([place.host for place in places], "node")):
        runs = [(key, len(list(run))) for key, run in itertools.groupby(keys)]
        if None not in keys and len({key for key, _ in runs}) == len(runs):
            return Domains(tuple(size for _, size in runs), kind)
    return Domains((1,) * len(places), "node")


def own_place(device: torch.device, nvml: Any = None) -> Place:
    """Where this worker is. Local.

    Args:
        device: that it computes on.
        nvml: the module of nvidia-ml-py; imported where it is installed.
    """
    host = socket.gethostname()
    if device.type != "cuda":
        return Place(host)
    if nvml is None and importlib.util.find_spec("pynvml") is None:
        return Place(host)
    module = nvml or importlib.import_module("pynvml")
    return Place(host, fabric_id(module, str(torch.cuda.get_device_properties(device).uuid)))


def fabric_id(nvml: Any, uuid: str) -> str | None:
    """Cluster and clique of a GPU's NVLink fabric; None without one, before it is registered, or where NVML cannot say.

    Args:
        nvml: the module of nvidia-ml-py, or one that looks like it.
        uuid: of the GPU, as torch knows it: visible devices are renumbered, UUIDs are not.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        info = nvml.c_nvmlGpuFabricInfoV_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    except nvml.NVMLError:  # an older driver, or a GPU without NVSwitch
        return None
    finally:
        nvml.nvmlShutdown()
    cluster = bytes(info.clusterUuid)
    if info.state != nvml.NVML_GPU_FABRIC_STATE_COMPLETED or info.status != nvml.NVML_SUCCESS or not any(cluster):
        return None
    return f"{cluster.hex()}/{info.cliqueId}"
