"""benchmarks/gpu_acceptance.py runs on CPU processes as it would on GPUs, and says what is missing where there are none."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu_acceptance
from tests.pool import WorkerPool


@pytest.mark.parametrize("world", range(1, 17))
def test_the_topologies_fit_the_devices(world: int) -> None:
    for shapes in gpu_acceptance.topologies(world).values():
        assert 0 < sum(fsdp * tp for fsdp, tp in shapes) <= world
        assert all(fsdp >= 1 and tp >= 1 for fsdp, tp in shapes)


def test_all_checks_pass_on_three_processes(pool: WorkerPool) -> None:
    setting = gpu_acceptance.Setting("cpu", world=3, small=True, steps=2)
    report = pool.run(gpu_acceptance.run_checks, 3, setting, timeout=120)[0]
    assert json.loads(json.dumps(report))["parity"].keys() == {"one replica", "fsdp only", "even", "ragged"}
    assert max(case["worst_gradient_error"] for case in report["parity"].values()) < 1e-5
    assert report["bf16_mixed"]["bf16"] != report["bf16_mixed"]["float32"]
    assert all(case["median_ms"] > 0 and case["peak_mib"] > 0 for case in report["speed"].values())
    assert gpu_acceptance.passed(report)
    report["parity"]["ragged"]["passed"] = False
    assert not gpu_acceptance.passed(report)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_without_gpus_it_says_how_to_try_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_acceptance.main([])
    assert "found 0; --device cpu --world 3 tries it on CPU" in capsys.readouterr().err
