"""Losing one of four CPU workers, without a model: medians over 10 kills, printed with the machine's load.

    python -m benchmarks.bench_membership [REPEATS]

detected: kill -> the supervisor has told the others; freed: kill -> the last survivor's blocked call may return;
regrouped: kill -> groups of the next generation stand on all survivors; agree, connect: parts of the last.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")  # as the supervisor sets it for its workers

import torch
import torch.distributed as dist

from lightning_ntp.strategy.generation import MemberConfig
from lightning_ntp.strategy.membership import Member
from lightning_ntp.strategy.rendezvous import JobAddress
from tests.forked import ForkedJob, Log

NUM_WORKERS = 4
VICTIM = 2


def worker(address: JobAddress, log: Log) -> None:
    """All-reduces until one of them is killed in between, then once more in the next generation."""
    member = Member(address, MemberConfig(heartbeat_seconds=0.25))
    member.join()
    for _ in range(5):
        dist.all_reduce(torch.ones(100_000))
    ended = time.monotonic() + 0.05
    while member.generation is not None:
        if address.worker == VICTIM and time.monotonic() > ended:
            log(killed=True)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(100_000))
        except RuntimeError as error:
            if not member.confirm_loss(error):
                raise
            break
    generation = member.join()
    log(freed=member.broken_at_seconds, agree=generation.agree_seconds, connect=generation.connect_seconds)
    dist.all_reduce(torch.ones(1))
    member.close()


def measure(folder: Path) -> dict[str, float]:
    """One job with one kill; seconds."""
    job = ForkedJob(worker, NUM_WORKERS, folder)
    if (code := job.run()) != 0:
        raise RuntimeError(f"the job ended with {code}: {job.printed.decode()}")
    killed = next(line["seconds"] for line in job.lines if "killed" in line)
    back = [line for line in job.lines if "freed" in line]
    return {
        "detected": next(event.seconds for event in job.events if event.kind == "broken") - killed,
        "freed": max(line["freed"] for line in back) - killed,
        "regrouped": max(line["seconds"] for line in back) - killed,
        "agree": max(line["agree"] for line in back),
        "connect": max(line["connect"] for line in back),
    }


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    results = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(Path(folder)))
    load = os.getloadavg()[0]
    print(f"{NUM_WORKERS} gloo workers on {os.cpu_count()} cores, load {load:.1f}; medians (max) of {repeats}, in ms")
    for name in results[0]:
        values = [1000 * result[name] for result in results]
        print(f"  {name:10} {statistics.median(values):8.1f}  ({max(values):.1f})")


if __name__ == "__main__":
    main()
