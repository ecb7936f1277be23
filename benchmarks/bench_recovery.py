"""One of six CPU workers is killed: how long until the next committed step, live and by restart from a checkpoint, in one run.

    python -m benchmarks.bench_recovery [--repeats 10] [--size small|large] [--json FILE]

live:    replicas 3 + 3, a kill in the middle of a step, the others go on; parts as the workers saw them
renewed: the same with neighbours="renew": the hurt replica's other two workers start again as fresh processes at degree 2, the healthy
         replica goes on alone until they are there ("replica back")
restart: the same job without recovery, a checkpoint every 4 steps, started again from the last one by this script
Judge by the ratio: seconds depend on the machine and on its load, which is printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.live_job import JobFailedError, LiveJob

SIZES = {
    "small": [],
    "large": ["--hidden", "768", "--inter", "3072", "--layers", "9", "--vocab", "12000", "--batch", "3"],
}
"""11 and about 100 million parameters."""

VICTIM, KILL_STEP, CHECKPOINT_EVERY = 4, 10, 4
"""Two steps after the checkpoint of step 8 is the mean of what a restart loses."""


def steps_of(job: LiveJob) -> list[float]:
    """Times at which the leader's steps ended."""
    return [event["seconds"] for event in job.events if event["kind"] == "step" and event["worker"] == 0]


def kill_in_step(job: LiveJob, step: int, limit_seconds: float) -> tuple[float, float]:
    """Kills the victim in the middle of `step`; the time of it and the median step's seconds before."""
    job.wait_for(lambda event: event["kind"] == "step" and event["worker"] == 0 and event["step"] == step - 1, limit_seconds)
    times = steps_of(job)
    median = statistics.median(b - a for a, b in itertools.pairwise(times[1:]))
    time.sleep(median / 2)
    return job.kill(VICTIM), median


def live(folder: Path, size: list[str], limit_seconds: float) -> dict[str, float]:
    """Seconds of one live recovery."""
    with LiveJob(folder, [*size, "--steps", "1000"]) as job:
        killed, step = kill_in_step(job, KILL_STEP, limit_seconds)
        again = job.wait_for(lambda event: event["kind"] == "commit" and event["seconds"] > killed and event["attempts"] > 1, limit_seconds)
        recovered = [event for event in job.events if event["kind"] == "recovery" and event["seconds"] > killed]
        heard = [event["heard"] for event in job.events if event["kind"] == "loss" and event["seconds"] > killed]
        parts = {name: max(event["parts"].get(name, 0.0) for event in recovered) for name in recovered[0]["parts"]}
    return {
        "step before": step,
        "detected": min(heard) - killed,
        **{name: seconds for name, seconds in parts.items() if name != "total"},
        "running again": max(event["seconds"] for event in recovered) - killed,
        "next commit": again["seconds"] - killed,
        "MB received": max(event["bytes"] for event in recovered) / 1e6,
    }


def renewed(folder: Path, size: list[str], limit_seconds: float) -> dict[str, float]:
    """Seconds until the healthy replica has committed a step, and until the hurt one is back from fresh processes."""
    with LiveJob(folder, [*size, "--steps", "100000", "--neighbours", "renew", "--max-respawns", "0"]) as job:
        killed, _ = kill_in_step(job, KILL_STEP, limit_seconds)
        again = job.wait_for(lambda event: event["kind"] == "commit" and event["seconds"] > killed and event["attempts"] > 1, limit_seconds)
        back = job.wait_for(lambda event: event["kind"] == "recovery" and bool(event["joined"]), limit_seconds)
        first = job.wait_for(lambda event: event["kind"] == "commit" and event["seconds"] > back["seconds"], limit_seconds)
        processes = {event["pid"] for event in job.events if event["kind"] == "start" and event["worker"] < 3}
    if tuple(back["degrees"]) != (3, 2) or len(processes) != 3:
        raise JobFailedError(f"wanted degrees 3 and 2 and no restart of the healthy three, got {back['degrees']} and {len(processes)} processes")
    return {
        "next commit": again["seconds"] - killed,
        "replica back": back["seconds"] - killed,
        "commit with it": first["seconds"] - killed,
    }


def restart(folder: Path, size: list[str], limit_seconds: float) -> dict[str, float]:
    """Seconds of one restart: from the kill until the step that was running is done."""
    arguments = [*size, "--steps", "1000", "--no-recovery", "--checkpoint-every", str(CHECKPOINT_EVERY)]
    with LiveJob(folder, arguments) as job:
        killed, _ = kill_in_step(job, KILL_STEP, limit_seconds)
        job.finish(60)
    with LiveJob(folder, arguments) as job:
        again = job.wait_for(lambda event: event["kind"] == "step" and event["seconds"] > killed and event["step"] >= KILL_STEP, limit_seconds)
        redone = {event["step"] for event in job.events if event["kind"] == "step" and event["seconds"] > killed and event["step"] < KILL_STEP}
    return {"next commit": again["seconds"] - killed, "steps redone": float(len(redone))}


def spread(results: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median, smallest and largest of each figure."""
    values = {name: [result[name] for result in results] for name in results[0]}
    return {name: {"median": statistics.median(v), "min": min(v), "max": max(v)} for name, v in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--limit-seconds", type=float, default=300.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"live": [], "renewed": [], "restart": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.repeats):  # in turn, so that all see the same load
            for name, run in (("live", live), ("renewed", renewed), ("restart", restart)):
                found[name].append(run(Path(folder) / f"{name}{number}", SIZES[options.size], options.limit_seconds))
    ratios = [a["next commit"] / b["next commit"] for a, b in zip(found["live"], found["restart"], strict=True)]
    report: dict[str, Any] = {name: spread(results) for name, results in found.items()}
    report |= {"ratio": spread([{"ratio": ratio} for ratio in ratios])["ratio"], "load": os.getloadavg()[0], "repeats": options.repeats}
    print(f"{options.size} job, 6 gloo workers on {os.cpu_count()} cores, load {report['load']:.1f}; median (min to max) of {options.repeats}")
    for name in found:
        print(name)
        for part, values in report[name].items():
            print(f"  {part:15} {values['median']:8.3f}  ({values['min']:.3f} to {values['max']:.3f})")
    ratio = report["ratio"]
    print(f"live / restart, kill to the next committed step: {ratio['median']:.3f}  ({ratio['min']:.3f} to {ratio['max']:.3f})")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
