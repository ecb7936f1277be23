"""The pool itself: fresh groups, results by rank, first error wins, and a pool that comes back after a hang or a death."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_ntp.errors import ConfigError
from tests.pool import PoolError, WorkerPool


def _sum_of_ranks(rank: int, world: int, offset: int) -> tuple[int, torch.Tensor, int]:
    value = torch.tensor([float(rank + offset)], dtype=torch.float64)
    dist.all_reduce(value)
    return rank, value, os.getpid()


def _redistribute(rank: int, world: int) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(12.0).reshape(6, 2)
    return distribute_tensor(full, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()


def _one_raises(rank: int, world: int) -> None:
    if rank == 1:
        raise ConfigError("heads: got 3, wanted at least 4")
    dist.barrier()


def _one_dies(rank: int, world: int) -> None:
    if rank == 2:
        os._exit(7)
    dist.barrier()


def _survives(rank: int, world: int) -> str:
    try:
        _one_dies(rank, world)
    except RuntimeError:
        return "lost a peer"
    return "noticed nothing"


def _one_hangs(rank: int, world: int) -> None:
    if rank == 0:
        time.sleep(60)


def test_results_come_by_rank_from_a_fresh_group_in_the_same_processes(pool: WorkerPool) -> None:
    first = pool.run(_sum_of_ranks, 4, 1)
    second = pool.run(_sum_of_ranks, 3, 1)
    assert [rank for rank, _, _ in first] == [0, 1, 2, 3]
    assert [value.item() for _, value, _ in first] == [10.0] * 4
    assert [value.item() for _, value, _ in second] == [6.0] * 3
    assert [pid for _, _, pid in second] == [pid for _, _, pid in first][:3]


def test_a_second_mesh_of_the_same_shape_does_not_meet_the_first(pool: WorkerPool) -> None:
    for _ in range(2):
        for full in pool.run(_redistribute, 3):
            assert torch.equal(full, torch.arange(12.0).reshape(6, 2))


def test_the_first_exception_is_raised_with_rank_and_traceback(pool: WorkerPool) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match="got 3, wanted at least 4") as caught:
        pool.run(_one_raises, 3)
    assert time.monotonic() - started < 20
    note = "\n".join(caught.value.__notes__)
    assert "raised by rank 1 of 3" in note and "_one_raises" in note
    assert pool.run(_sum_of_ranks, 2, 0)[0][1].item() == 1.0


def test_a_dead_worker_fails_its_test_only(pool: WorkerPool) -> None:
    with pytest.raises(PoolError, match="rank 2 of 3 died with exit code 7"):
        pool.run(_one_dies, 3)
    assert pool.run(_sum_of_ranks, 3, 0)[0][1].item() == 3.0


def test_a_death_on_purpose_leaves_the_results_of_the_others(pool: WorkerPool) -> None:
    assert pool.run(_survives, 3, deaths={2}) == ["lost a peer", "lost a peer", None]
    assert pool.run(_sum_of_ranks, 3, 0)[0][1].item() == 3.0


def test_a_hang_names_the_ranks_and_shows_where_they_stand(pool: WorkerPool) -> None:
    with pytest.raises(PoolError, match=r"ranks \[0\] of 2 not done after 1.0 s") as caught:
        pool.run(_one_hangs, 2, timeout=1.0)
    assert "_one_hangs" in str(caught.value)
    assert pool.run(_sum_of_ranks, 2, 0)[0][1].item() == 1.0


def test_the_world_must_fit_the_pool(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match=r"world 9 is not in 1\.\.8"):
        pool.run(_sum_of_ranks, 9, 0)


def test_workers_end_with_the_process_that_started_them() -> None:
    script = (
        "import os, signal\n"
        "from tests.pool import WorkerPool\n"
        "from tests.test_pool import _sum_of_ranks\n"
        "if __name__ == '__main__':\n"
        "    pool = WorkerPool(2)\n"
        "    print([pid for _, _, pid in pool.run(_sum_of_ranks, 2, 0)], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    pids = [int(pid) for pid in done.stdout.strip("[]\n ").split(",")]
    assert len(pids) == 2, done.stderr
    deadline = time.monotonic() + 10
    while (alive := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive == []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
