"""A pool of worker processes that distributed tests share, because a fresh spawn with gloo costs tens of seconds.

    pool.run(fn, world, *args)  ->  first `world` workers: form a gloo group -> fn(rank, world, *args) -> tear it down
                                ->  [result of rank 0, result of rank 1, ...]

The workers are forked from a server that has imported torch once, so a pool that had to be killed (a hang, a dead worker)
is back within a second. Arguments and results travel by pickle: plain data and CPU tensors.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

NUM_WORKERS = 8
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "lightning.pytorch",
    "lightning_ntp",
    "tests.engine",
    "tests.lightning_jobs",
    "tests.pool",
)
"""Modules that the fork server imports once for all workers."""

GRACE_SECONDS = 5.0
"""How long the peers of a worker that raised may take to fail as well, before the pool is killed."""

START_SECONDS = 120.0
_PR_SET_PDEATHSIG = 1


class PoolError(AssertionError):
    """A case that did not end by itself: a worker died, or the time was up. The pool has been started anew."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call of `run`, as a worker gets it."""

    number: int
    fn: Callable[..., Any]
    rank: int
    world: int
    args: tuple[Any, ...]
    timeout_seconds: float


@dataclass(slots=True)
class Worker:
    process: BaseProcess
    pipe: Connection
    stack_file: Path

    def stack(self) -> str:
        """What the worker is doing now; asks it through SIGUSR1."""
        if self.process.pid is None or not self.process.is_alive():
            return f"(worker is dead, exit code {self.process.exitcode})"
        self.stack_file.write_text("")
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while not (text := self.stack_file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return text or "(worker did not answer)"


class WorkerPool:
    """Persistent workers; see the module docstring. Not safe to use from several threads."""

    def __init__(self, num_workers: int = NUM_WORKERS) -> None:
        import torch.distributed as dist

        self.num_workers = num_workers
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="ntp-pool-")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOAD))
        self._num_cases = 0
        self._workers: list[Worker] = []

    def run(
        self, fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0, deaths: Collection[int] = ()
    ) -> list[Any]:
        """Results of ``fn(rank, world, *args)`` in the order of ranks, from `world` workers that share a fresh gloo group.

        `fn` must be importable (module level). The exception of the worker that raised first is raised here, with its
        rank and traceback as a note. `PoolError` if a worker dies or `timeout` seconds pass. Ranks in `deaths` die on
        purpose: their result is None, and the pool starts anew afterwards.
        """
        if not 1 <= world <= self.num_workers:
            raise ValueError(f"pool.run: world {world} is not in 1..{self.num_workers}")
        if not self._workers:
            self._start()
        self._num_cases += 1
        workers = self._workers[:world]
        for rank, worker in enumerate(workers):
            worker.pipe.send_bytes(pickle.dumps(Case(self._num_cases, fn, rank, world, args, timeout)))
        results = self._collect(workers, getattr(fn, "__qualname__", repr(fn)), timeout, deaths)
        if deaths:
            self._kill()
        return results

    def close(self) -> None:
        """Ends all workers."""
        self._kill()
        self._folder.cleanup()

    def _collect(self, workers: list[Worker], name: str, timeout: float, deaths: Collection[int]) -> list[Any]:
        results: dict[int, Any] = {}
        first_error: BaseException | None = None
        first_at = float("inf")
        deadline = time.monotonic() + timeout
        pending = dict(enumerate(workers))
        while pending:
            by_handle = {w.pipe: rank for rank, w in pending.items()} | {w.process.sentinel: r for r, w in pending.items()}
            ready = wait(list(by_handle), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in {by_handle[handle] for handle in ready}:
                worker = pending.pop(rank)
                try:
                    results[rank], error, raised_at = pickle.loads(worker.pipe.recv_bytes())
                except (EOFError, OSError):
                    worker.process.join(GRACE_SECONDS)
                    if rank in deaths:
                        results[rank] = None
                        continue
                    self._kill()
                    raise PoolError(
                        f"{name}: rank {rank} of {len(workers)} died with exit code {worker.process.exitcode}"
                    ) from first_error
                if error is not None and raised_at < first_at:  # peers fail in its wake, and may report sooner
                    first_error, first_at = error, raised_at
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if pending:
            stacks = "" if first_error else "".join(f"\n--- rank {r}\n{w.stack()}" for r, w in pending.items())
            self._kill()
            if first_error is None:
                raise PoolError(f"{name}: ranks {sorted(pending)} of {len(workers)} not done after {timeout} s{stacks}")
        if first_error is not None:
            raise first_error
        return [results[rank] for rank in range(len(workers))]

    def _start(self) -> None:
        for number in range(self.num_workers):
            ours, theirs = self._context.Pipe()
            stack_file = Path(self._folder.name) / f"stack-{number}.txt"
            process = self._context.Process(
                target=_serve, args=(theirs, os.getpid(), self._store.port, str(stack_file)), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append(Worker(process, ours, stack_file))
        for worker in self._workers:
            if not worker.pipe.poll(START_SECONDS):
                self._kill()
                raise PoolError(f"a worker of the test pool was not up after {START_SECONDS} s")
            worker.pipe.recv_bytes()

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []


def _serve(pipe: Connection, parent_pid: int, store_port: int, stack_file: str) -> None:
    """A worker's life: cases from the pipe until it closes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch
    import torch.distributed as dist

    stacks = open(stack_file, "a")  # noqa: SIM115  faulthandler needs it open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    gc.freeze()
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    pipe.send_bytes(b"up")
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        pipe.send_bytes(_answer(message, store))


def _answer(message: bytes, store: Any) -> bytes:
    """Runs one case; the pickled triple (result, exception or None, when it was raised)."""
    rank, where = "?", ""
    try:
        case: Case = pickle.loads(message)
        rank, where = str(case.rank), f" of {case.world}"
        return pickle.dumps((_run_case(case, store), None, 0.0))
    except BaseException as error:  # noqa: BLE001  the worker serves the next case; the error is raised in the test
        note = f"raised by rank {rank}{where}:\n{traceback.format_exc()}"
        return _pickled_error(error, note)


def _pickled_error(error: BaseException, note: str) -> bytes:
    """The exception itself where it survives pickling, else a RuntimeError with its words."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is not type(error) or str(copy) != str(error):
            raise TypeError("lossy pickle")
    except Exception:  # noqa: BLE001  whatever a foreign exception's __reduce__ does, the test must get its words
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(note)
    return pickle.dumps((None, copy, getattr(error, "raised_at", time.monotonic())))


def _run_case(case: Case, store: Any) -> Any:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"case{case.number}", store),
        rank=case.rank,
        world_size=case.world,
        timeout=timedelta(seconds=case.timeout_seconds),
    )
    try:
        return case.fn(case.rank, case.world, *case.args)
    except BaseException as error:
        error.raised_at = time.monotonic()  # type: ignore[attr-defined]  before peers see our groups close
        raise
    finally:
        _tidy()


def _tidy() -> None:
    """Leaves no trace of a case: groups, caches that would hand a dead mesh to the next one, global settings of torch."""
    import torch
    import torch.distributed as dist

    from lightning_ntp.dtensor.dispatch import forget_meshes

    if dist.is_initialized():
        dist.destroy_process_group()
    forget_meshes()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    gc.collect()
