"""One job, the same failures, four policies: goodput, tokens per owned GPU-second, lost steps, end loss. Then: would the simulator have known?

    python -m benchmarks.bench_policies [--policies ntp drop restart torchft] [--out FOLDER] [--pace 0.15] [--stretch 1.0]

ntp      our strategy: hurt replicas go on at a smaller degree, returning GPUs join the running fit
drop     our strategy, but the mates of a lost GPU go with it and come back with it: what torchft does, with our recovery and the
         global batch kept
restart  no recovery: the job ends at a loss and is started again from its last checkpoint on the replicas that are whole. When a replica
         is whole again, at a step with a fresh checkpoint, it is stopped and started with it
torchft  torchft itself, where it can be imported (`pip install torchft`): a hurt group is dropped and relaunched, the batch shrinks meanwhile

The drill is `policies.drill.usual_drill`: 6 losses and 4 returns, one replica hurt at a time, without which none but ntp could go on.
All processes share the cores of this machine, so a step has a least time that hides what this costs (see policies.training), and the seconds of GPUs
are those owned: 6 x wall time, whoever lives. CPU figures; ratios between policies depend on how long a process takes to start.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.live_job import Event, JobFailedError, LiveJob, read_events
from benchmarks.policies.drill import Drill, usual_drill
from benchmarks.policies.model import LENGTH, held_out_loss
from benchmarks.policies.record import Account, Mark, Struck
from lightning_ntp.calibration import RunRecord, predict
from lightning_ntp.errors import ConfigError
from lightning_ntp.goodput_merge import read_run
from lightning_ntp.goodput_totals import IDLE, PRODUCTIVE

TOLERANCE = 1e-9
"""Of ntp's end loss to the undisturbed run's."""

Weights = dict[str, torch.Tensor]


class Bench:
    """Runs policies. `batch`: samples of a healthy replica and step."""

    def __init__(self, folder: Path, drill: Drill, pace: float, limit_seconds: float, batch: int = 6) -> None:
        self.folder, self.drill, self.pace, self.limit_seconds, self.batch = folder, drill, pace, limit_seconds, batch
        self.common = ["--drill", drill.to_json(), "--batch", str(batch), "--pace", str(pace)]
        self.global_batch = batch * drill.replicas

    def undisturbed(self) -> Weights:
        """The same job without failures, and without sleep: its end loss is all that is asked for."""
        out = self.folder / "undisturbed"
        self._run(out, ["--policy", "undisturbed", "--pace", "0"])
        return saved_weights(out)

    def run(self, policy: str) -> tuple[Account, Weights]:
        """One policy from its first step to its last, and the weights that it ends with."""
        if policy == "torchft":
            return self.torchft()
        return self.restart() if policy == "restart" else self.live(policy)

    def live(self, policy: str) -> tuple[Account, Weights]:
        """`ntp` and `drop`."""
        out = self.folder / policy
        self._run(out, ["--policy", policy])
        events = read_events(out)
        return self._account(policy, marks_of(events, self.drill), struck_of(events)), saved_weights(out)

    def restart(self) -> tuple[Account, Weights]:
        """One life after the other."""
        out, step, life = self.folder / "restart", 0, 0
        marks: list[Mark] = []
        struck: list[Struck] = []
        while step < self.drill.steps:
            whole = self.drill.whole_replicas(step)
            gpus = [gpu for replica in whole for gpu in self.drill.mates(replica * self.drill.degree)]
            grows = [back.step for back in self.drill.returns if back.step > step and len(self.drill.whole_replicas(back.step)) > len(whole)]
            until = min([*grows, self.drill.steps])
            arguments = ["--policy", "restart", "--checkpoints", str(out / "checkpoints"), "--gpus", *map(str, gpus), "--until", str(until)]
            events = self._life(out / f"life{life}", arguments)
            marks += marks_of(events, self.drill, tuple([self.drill.degree] * len(whole)), life)
            hits = struck_of(events)
            struck += hits
            step, life = marks[-1].step + 1, life + 1
            if not hits and step != until:
                raise JobFailedError(f"life {life} of the restarted job ended at step {step}, not {until}; see {out}")
        return self._account("restart", marks, struck), saved_weights(out / f"life{life - 1}")

    def torchft(self) -> tuple[Account, Weights]:
        """torchft's own processes."""
        out = self.folder / "torchft"
        with LiveJob(out, self.common, module="benchmarks.policies.torchft_groups") as job:
            if (code := job.finish(self.limit_seconds)) != 0:
                raise JobFailedError(f"torchft ended with {code}: {job.printed.read_text()[-3000:]}")
        events = read_events(out)
        rows: dict[int, Mark] = {}
        for event in events:
            if event["kind"] == "commit" and event["counts"] and event["step"] not in rows:
                degrees = (self.drill.degree,) * event["groups"]
                rows[event["step"]] = Mark(event["seconds"], event["step"], degrees, float(self.batch * event["groups"]))
        found = next(out.glob("weights-*.pt"))
        return self._account("torchft", [rows[step] for step in sorted(rows)], struck_of(events)), torch.load(found)

    def _run(self, out: Path, arguments: list[str]) -> None:
        with LiveJob(out, [*self.common, *arguments], module="benchmarks.policies.job") as job:
            if (code := job.finish(self.limit_seconds)) != 0:
                raise JobFailedError(f"the job in {out} ended with {code}: {job.printed.read_text()[-3000:]}")

    def _life(self, out: Path, arguments: list[str]) -> list[Event]:
        with LiveJob(out, [*self.common, *arguments], module="benchmarks.policies.job") as job:
            job.finish(self.limit_seconds)
        events = read_events(out)
        if not any(event["kind"] == "commit" for event in events):
            raise JobFailedError(f"a life of the restarted job did no step; see {job.printed}:\n{job.printed.read_text()[-3000:]}")
        return events

    def _account(self, policy: str, marks: list[Mark], struck: list[Struck]) -> Account:
        return Account(policy, self.drill, marks, struck, self.global_batch)


def marks_of(events: list[Event], drill: Drill, degrees: tuple[int, ...] | None = None, life: int = 0) -> list[Mark]:
    """Steps of one life, each when its first worker had it, with the degrees of the replicas that did it."""
    degrees = degrees or (drill.degree,) * drill.replicas
    marks: dict[int, Mark] = {}
    for event in events:
        if event["kind"] == "recovery":
            degrees = tuple(event["degrees"])
        elif event["kind"] == "commit" and event["step"] not in marks:
            marks[event["step"]] = Mark(event["seconds"], event["step"], degrees, event["samples"], life)
    return [marks[step] for step in sorted(marks)]


def struck_of(events: list[Event]) -> list[Struck]:
    """Kills that took place."""
    return [Struck(event["at"], event["gpu"]) for event in events if event["kind"] == "struck"]


def saved_weights(out: Path) -> Weights:
    """What a job of ours left at its end."""
    return {name: tensor for file in (out / "weights").glob("*.safetensors") for name, tensor in load_file(file).items()}


def check_ledger(folder: Path, drill: Drill) -> dict[str, float]:
    """The goodput ledger of a run with real losses and returns; shares of all GPUs' time.

    Raises:
        AssertionError: buckets that do not sum to wall time x GPUs, or GPUs that were not `degraded_capacity` from loss to return.
    """
    run = next(path for path in folder.iterdir() if path.is_dir())
    history = read_run(run)
    total = sum(history.gpu_ns().values())
    assert total == drill.num_gpus * (history.at_ns - history.start_ns), "the ledger's buckets do not sum to wall time x GPUs"
    rejoins = [event for event in history.events if event["event"] == "rejoin"]
    losses = [event for event in history.events if event["event"] == "loss"]
    gone = 0
    for loss, gpu in ((event, gpu) for event in losses for gpu in event["gpus"]):
        back = next((event["t"] for event in rejoins if gpu in event["gpus"] and event["t"] > loss["t"]), None)
        gone += (back or history.at_ns) - loss["t"]
        after = [segment.spent.get(PRODUCTIVE, 0) for segment in history.segments[gpu] if back and segment.start_ns >= back]
        assert back is None or sum(after) > 0, f"GPU {gpu} did not train after its return"
    idle = history.gpu_ns()[IDLE]
    assert abs(idle / gone - 1) < 0.01, f"GPUs were lost for {gone / 1e9:.2f} s, {IDLE} has {idle / 1e9:.2f} s"
    return {bucket: ns / total for bucket, ns in history.gpu_ns().items()} | {"rejoins": float(len(rejoins)), "losses": float(len(losses))}


def row_of(account: Account, weights: Weights, wanted_loss: float) -> dict[str, Any]:
    """The record of a run, with what the table shows beside it."""
    record = account.record()
    calibration = predict(RunRecord.from_dict(record))
    loss = held_out_loss(weights)
    owned = record["num_gpus"] * record["wall_seconds"]
    return record | {
        "goodput": calibration.measured,
        "predicted_goodput": calibration.predicted.goodput,
        "prediction_error": calibration.error,
        "tokens_per_owned_gpu_second": record["committed_samples"] * LENGTH / owned,
        "end_loss": loss,
        "end_loss_minus_undisturbed": loss - wanted_loss,
        "load": os.getloadavg()[0],
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    print(f"{'policy':10}{'wall':>9}{'goodput':>9}{'tokens/(GPU s)':>16}{'lost steps':>12}{'end loss':>10}{'  - undisturbed':>15}{'simulated':>11}{'error':>8}")
    for row in rows:
        print(
            f"{row['policy']:10}{row['wall_seconds']:8.1f}s{row['goodput']:9.1%}{row['tokens_per_owned_gpu_second']:16.2f}"
            f"{row['lost_steps']:12}{row['end_loss']:10.4f}{row['end_loss_minus_undisturbed']:15.1e}"
            f"{row['predicted_goodput']:11.1%}{row['prediction_error']:+8.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=("ntp", "drop", "restart", "torchft"), default=["ntp", "drop", "restart", "torchft"])
    parser.add_argument("--out", type=Path, default=Path("bench_results/goodput"), help="one record per policy, for `ntp calibrate`")
    parser.add_argument("--pace", type=float, default=0.15, help="least seconds of a whole replica per sample")
    parser.add_argument("--stretch", type=float, default=1.0, help="more steps between the failures")
    parser.add_argument("--limit-seconds", type=float, default=900.0, help="of one policy")
    parser.add_argument("--keep", type=Path, help="folder for the logs of all runs")
    options = parser.parse_args()
    drill = usual_drill(options.stretch)
    if "torchft" in options.policies and importlib.util.find_spec("torchft") is None:
        print("torchft cannot be imported here (pip install torchft==0.2.0): its row is left out")
        options.policies.remove("torchft")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        bench = Bench(folder, drill, options.pace, options.limit_seconds)
        wanted = held_out_loss(bench.undisturbed())
        print(f"{len(drill.losses)} losses, {len(drill.returns)} returns, {drill.steps} steps; undisturbed end loss {wanted:.6f}", flush=True)
        rows, wrong = [], []
        for policy in options.policies:
            try:
                row = row_of(*bench.run(policy), wanted)
                if policy in ("ntp", "drop"):
                    row["ledger"] = check_ledger(folder / policy / "ledger", drill)
            except (JobFailedError, ConfigError, AssertionError) as error:
                wrong.append(f"{policy}: {error}")
                continue
            rows.append(row)
            (options.out / f"{policy}.json").write_text(json.dumps({"runs": [row]}, indent=1) + "\n")
            show([row])
            sys.stdout.flush()
    show(rows)
    wrong += [f"{row['policy']}: the simulator is off by {row['prediction_error']:+.1%}" for row in rows if abs(row["prediction_error"]) > 0.05]
    wrong += [f"{row['policy']} ends elsewhere than without failures" for row in rows if row["policy"] == "ntp" and abs(row["end_loss_minus_undisturbed"]) > TOLERANCE]
    print("\n".join(wrong) or "the simulator is within 5% of each; ntp ends where the undisturbed run ends; the ledgers add up")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
