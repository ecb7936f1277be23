"""Scale-up domains: NVML's fabric where it knows one, nodes otherwise."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pynvml
import pytest
import torch

from lightning_ntp.strategy.domains import Domains, Place, fabric_id, find_domains, own_place
from lightning_ntp.strategy.environment import WorkerEnvironment


class FakeNvml:
    """The part of nvidia-ml-py that is used, with its own structures and constants."""

    NVMLError = pynvml.NVMLError
    NVML_SUCCESS = pynvml.NVML_SUCCESS
    NVML_GPU_FABRIC_STATE_COMPLETED = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
    c_nvmlGpuFabricInfoV_t = pynvml.c_nvmlGpuFabricInfoV_t

    def __init__(self, cluster: int = 7, clique: int = 3, state: int = NVML_GPU_FABRIC_STATE_COMPLETED, error: str = "") -> None:
        self.cluster, self.clique, self.state, self.error = cluster, clique, state, error
        self.asked: list[str] = []
        self.open = 0

    def _fail(self, where: str) -> None:
        if self.error == where:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlInit(self) -> None:
        self._fail("init")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return "handle"

    def nvmlDeviceGetGpuFabricInfoV(self, handle: str, pointer: Any) -> None:
        self._fail("fabric")
        info = ctypes.cast(pointer, ctypes.POINTER(pynvml.c_nvmlGpuFabricInfoV_t)).contents
        info.clusterUuid[:] = [self.cluster] * 16
        info.cliqueId, info.state, info.status = self.clique, self.state, pynvml.NVML_SUCCESS


def test_a_registered_gpu_has_cluster_and_clique():
    nvml = FakeNvml()
    assert fabric_id(nvml, "ab-cd") == "07" * 16 + "/3"
    assert nvml.asked == ["GPU-ab-cd"]
    assert nvml.open == 0


@pytest.mark.parametrize(
    "nvml",
    [
        FakeNvml(error="init"),
        FakeNvml(error="fabric"),
        FakeNvml(cluster=0),
        FakeNvml(state=pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS),
    ],
)
def test_without_a_registered_fabric_there_is_none(nvml):
    assert fabric_id(nvml, "GPU-1") is None
    assert nvml.open == 0


def test_a_place_on_gpu_and_cpu():
    properties = SimpleNamespace(uuid="ab")
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=properties):
        assert own_place(torch.device("cuda", 0), FakeNvml()).fabric == "07" * 16 + "/3"
    place = own_place(torch.device("cpu"))
    assert place.host and place.fabric is None


@pytest.mark.parametrize(
    ("places", "wanted"),
    [
        ("a a b b", Domains((2, 2), "node")),
        ("a a a b b", Domains((3, 2), "node")),
        ("a:x b:x c:y d:y", Domains((2, 2), "NVLink fabric")),
        ("a:x b c:y d:y", Domains((1, 1, 1, 1), "node")),
        ("a:x a:y a:x a:y", Domains((4,), "node")),
        ("a b a b", Domains((1, 1, 1, 1), "node")),
    ],
)
def test_domains_are_runs_of_ranks(places, wanted):
    found = find_domains([Place(*(text.split(":") if ":" in text else (text,))) for text in places.split()])
    assert found == wanted


def test_nodes_may_run_unequally_many_processes():
    environ = {"RANK": "14", "WORLD_SIZE": "15", "LOCAL_RANK": "6", "LOCAL_WORLD_SIZE": "7", "GROUP_RANK": "1"}
    WorkerEnvironment.read(environ).validate_settings(num_devices=7, num_nodes=2)
    with pytest.raises(ValueError, match="WORLD_SIZE=15 were started"):
        WorkerEnvironment.read(environ).validate_settings(num_devices=8, num_nodes=2)
