"""Random faults over random topologies, each run held against one process that never failed.

    python -m benchmarks.chaos [--minutes 30] [--seed 0] [--json FILE]

An episode is a small float64 job with up to three faults of `FaultScript` (kill, or stop: a hang) at random workers, steps and
phases. It must end by itself, with every sample used once and in order, every step's loss and the final weights equal to those of
one process to 1e-9, and leave nothing: no process, no file descriptor or thread more than before, no open port, no shared memory
(see leaks.py). A table at the end; exit code 1 if an episode failed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.leaks import become_subreaper, leaks
from benchmarks.live_job import Event, JobFailedError, LiveJob, read_events
from lightning_ntp.testing import Fault, FaultScript

TINY = ["--float64", "--vocab", "96", "--hidden", "48", "--inter", "97", "--layers", "2", "--heads", "6", "--kv-heads", "3", "--length", "8"]
TOPOLOGIES = (["3", "3"], ["3", "2"], ["2", "2", "2"], ["2x2", "2x1"], ["3x1", "3x1"], ["4", "3"])
STEPS = 10
STEP_PHASES = ("forward", "backward", "sync", "vote", "decide", "after_commit", "control")
START_PHASES, RECOVERY_PHASES = ("join", "connect"), ("broken", "planning", "moving", "moved")
TOLERANCE = 1e-9
DEADLINE_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Episode:
    """What will happen: replicas, batch, accumulated batches, and the faults."""

    replicas: tuple[str, ...]
    batch: int
    accumulate: int
    faults: tuple[Fault, ...]

    @property
    def arguments(self) -> list[str]:
        """For `recovery_job`."""
        return [
            *TINY,
            *("--replicas", *self.replicas),
            *("--batch", str(self.batch), "--accumulate", str(self.accumulate), "--steps", str(STEPS)),
        ]

    @property
    def undisturbed(self) -> tuple[int, int]:
        """Samples of a global batch, and accumulated batches: episodes that are equal in it share their reference run."""
        return self.batch * sum(int(word.rpartition("x")[0] or 1) for word in self.replicas), self.accumulate

    @property
    def alone(self) -> list[str]:
        """The same training in one process."""
        batch, accumulate = self.undisturbed
        return [*TINY, "--replicas", "1", "--batch", str(batch), "--accumulate", str(accumulate), "--steps", str(STEPS)]


def draw(rng: random.Random) -> Episode:
    """A random episode that a job must survive.

    No more workers are hit than the smallest replica has, each in a step of its own: two that die in one step the same way are a
    poison batch, and one role lost at once in all replicas is gone for good.
    """
    replicas = rng.choice(TOPOLOGIES)
    num_workers = sum(_workers(word) for word in replicas)
    most = min(3, min(_workers(word) for word in replicas))
    victims = rng.sample(range(num_workers), rng.randint(max(1, most - 1), most))
    steps = rng.sample(range(2, STEPS - 1), most)
    faults: list[Fault] = []
    for victim, at in zip(victims, steps, strict=False):
        phase = rng.choice((*STEP_PHASES, *(START_PHASES + RECOVERY_PHASES if faults else ())))
        step = at if phase in STEP_PHASES else None
        action = "stop" if rng.random() < 0.15 else "kill"
        faults.append(Fault(action, victim, phase, step, rng.choice((0.0, 0.0, 0.01))))
    return Episode(tuple(replicas), rng.choice((4, 6)), rng.choice((1, 2)), tuple(faults))


def _workers(word: str) -> int:
    fsdp, _, tp = word.rpartition("x")
    return int(fsdp or 1) * int(tp)


def samples_by_step(events: list[Event]) -> dict[int, list[int]]:
    """Samples of every update, over all workers; roles of a data row saw the same ones."""
    rows: dict[int, set[tuple[int, ...]]] = {}
    for event in events:
        if event["kind"] == "commit":
            rows.setdefault(event["step"], set()).add(tuple(event["seen"]))
    return {step: sorted(index for row in found for index in row) for step, found in rows.items()}


def losses_by_batch(events: list[Event]) -> dict[int, float]:
    """What was logged at the end of every loop batch."""
    return {event["batch"]: event["loss"] for event in events if event["kind"] == "step" and event["loss"] is not None}


def weights(out: Path) -> dict[str, torch.Tensor]:
    """What the job saved at its end."""
    return {name: tensor for file in (out / "weights").glob("*.safetensors") for name, tensor in load_file(file).items()}


def differences(reference: Path, out: Path) -> list[str]:
    """In what a run is not the reference; empty when it is."""
    before, after = read_events(reference), read_events(out)
    got, losses = samples_by_step(after), losses_by_batch(after)
    found = [f"step {step} used {got.get(step)} for {ids}" for step, ids in samples_by_step(before).items() if got.get(step) != ids]
    found += [
        f"batch {batch}: loss {losses.get(batch)} for {loss}"
        for batch, loss in losses_by_batch(before).items()
        if abs(losses.get(batch, float("inf")) - loss) > TOLERANCE
    ]
    ours = weights(out)
    for name, tensor in weights(reference).items():
        if name not in ours or not torch.allclose(ours[name], tensor, rtol=0, atol=TOLERANCE):
            found.append(f"{name} differs at the end")
    return found


def struck(fault: Fault, events: list[Event]) -> bool:
    """Whether a fault has hit its worker: it has not come to the end of the fit."""
    return not any(event["kind"] == "end" and event["worker"] == fault.worker for event in events)


def play(episode: Episode, reference: Path, out: Path) -> list[str]:
    """Everything that is wrong with one run of an episode."""
    environ = {"NTP_FAULTS": FaultScript(*episode.faults).to_json()}
    with LiveJob(out, episode.arguments, environ) as job:
        try:
            code = job.finish(DEADLINE_SECONDS)
        except JobFailedError as error:
            return [f"hang: {error}"]
        wrong = [] if code == 0 else [f"exit code {code}: {job.printed.read_text()[-2000:]}"]
    wrong += leaks(read_events(out))
    return wrong or differences(reference, out)


def run_reference(episode: Episode, out: Path) -> None:
    """The same job in one process."""
    with LiveJob(out, episode.alone) as job:
        if (code := job.finish(DEADLINE_SECONDS)) != 0:
            raise JobFailedError(f"the undisturbed run ended with {code}: {job.printed.read_text()[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    become_subreaper()
    rng, until = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    references: dict[tuple[Any, ...], Path] = {}
    table: Counter[tuple[str, str, bool]] = Counter()
    leaked: Counter[str] = Counter()
    failed: list[dict[str, Any]] = []
    num_faults = num_episodes = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1_000_000):
            if time.monotonic() > until:
                break
            episode = draw(rng)
            if episode.undisturbed not in references:
                references[episode.undisturbed] = Path(folder) / f"reference{number}"
                run_reference(episode, references[episode.undisturbed])
            wrong = play(episode, references[episode.undisturbed], Path(folder) / f"episode{number}")
            hit = [fault for fault in episode.faults if struck(fault, read_events(Path(folder) / f"episode{number}"))]
            num_faults, num_episodes = num_faults + len(hit), num_episodes + 1
            for fault in hit:
                table[fault.phase, fault.action, not wrong] += 1
            leaked.update(line.split(":")[0].removeprefix("leaked ") for line in wrong if line.startswith("leaked "))
            if wrong:
                failed.append({"number": number, "episode": asdict(episode), "wrong": wrong})
                print(f"episode {number} {episode}\n  " + "\n  ".join(wrong[:5]), flush=True)
    print(f"seed {options.seed}: {num_faults} faults in {num_episodes} episodes, {len(failed)} of them failed")
    print("leaked: " + (", ".join(f"{count} {kind}" for kind, count in sorted(leaked.items())) or "nothing"))
    print(f"{'phase':14}{'action':8}{'survived':>9}{'failed':>8}")
    for phase, action in sorted({(p, a) for p, a, _ in table}):
        print(f"{phase:14}{action:8}{table[phase, action, True]:9}{table[phase, action, False]:8}")
    if options.json is not None:
        options.json.write_text(json.dumps({"faults": num_faults, "episodes": num_episodes, "failed": failed}, indent=2))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
