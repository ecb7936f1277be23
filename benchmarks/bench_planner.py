"""Planning and simulating 32,768 GPUs on one core: CPU seconds, medians of 10, printed with the machine's load.

    python -m benchmarks.bench_planner [REPEATS]
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable

from lightning_ntp.cost_model import CostModel
from lightning_ntp.planner import plan_placement
from lightning_ntp.presets import GPUS, PAPER_MODEL
from lightning_ntp.scenarios import NTP_PW, scenario
from lightning_ntp.simulator import simulate
from lightning_ntp.topology import Topology

NUM_GPUS = 32_768
NUM_LOST = 131
"""0.4 % of them, the worst that the paper shows."""


def measure(run: Callable[[], object], repeats: int) -> list[float]:
    """CPU seconds of each of `repeats` runs."""
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        run()
        seconds.append(time.process_time() - began)
    return seconds


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    cost = CostModel(PAPER_MODEL, GPUS["b200"], domain_size=32)
    topology = Topology.from_shapes([(8, 32)] * 128)
    lost = random.Random(0).sample(range(NUM_GPUS), NUM_LOST)
    paper = scenario("ntp-paper")
    cases: dict[str, Callable[[], object]] = {
        "plan, shapes kept": lambda: plan_placement(topology, cost, 81_920, lost, refactor=False),
        "plan, any shape": lambda: plan_placement(topology, cost, 81_920, lost),
        "simulate 15 days": lambda: simulate(paper.cluster, paper.kinds, NTP_PW, paper.table(), 15),
    }
    print(f"{NUM_GPUS} GPUs, {NUM_LOST} lost; load {os.getloadavg()[0]:.1f}; CPU seconds, median (max) of {repeats}")
    for name, run in cases.items():
        seconds = measure(run, repeats)
        print(f"  {name:18} {statistics.median(seconds):.3f}  ({max(seconds):.3f})")


if __name__ == "__main__":
    main()
