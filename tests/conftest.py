"""What every test gets: quiet threads, no network, the shared worker pool, and a check that nothing leaks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

# Before torch, tokenizers or W&B are imported, and inherited by the workers of the pool.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    GLOO_SOCKET_IFNAME="lo",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    MPLBACKEND="Agg",
    RES_OPTIONS="timeout:1 attempts:1",
)

import hypothesis
import pytest

from tests.pool import WorkerPool

# Two busy cores: no deadline per example, and the same examples in every run.
hypothesis.settings.register_profile("ours", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ours")


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Eight persistent workers: ``pool.run(fn, world, *args)`` gives the results of ``fn(rank, world, *args)`` by rank."""
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    """Environment variables are put back; a process group left open in the test process fails the test."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    dist = sys.modules.get("torch.distributed")  # the core's tests do not pay for importing torch
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("this test left the default process group open")
