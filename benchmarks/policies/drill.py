"""Which GPU is lost and comes back at which step: the same for every policy. Standard library and `FaultScript` only.

A GPU is lost inside a step, `delay_seconds` after its forward began, and is back before a step. GPUs are numbered over replicas.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning_ntp.errors import ConfigError
from lightning_ntp.testing import Fault, FaultScript

PHASE = "forward"


@dataclass(frozen=True, slots=True)
class Return:
    """A GPU is back before this step."""

    gpu: int
    step: int


@dataclass(frozen=True, slots=True)
class Drill:
    """Losses and returns of one job.

    Args:
        steps: of the whole run.
        degree: GPUs of a healthy replica; `replicas` of them.
        losses: kills by GPU (the fault's worker).
        returns: of lost GPUs.

    Raises:
        ConfigError: a GPU returns that is not lost, or the last whole replica is hurt, so that only NTP could go on.
    """

    steps: int
    degree: int
    replicas: int
    losses: tuple[Fault, ...]
    returns: tuple[Return, ...]

    def __post_init__(self) -> None:
        for back in self.returns:
            if back.gpu not in self.down(back.step - 1):
                raise ConfigError(f"GPU {back.gpu} cannot be back at step {back.step}: it is not lost then")
        for step in range(self.steps):
            if not self.whole_replicas(step):
                raise ConfigError(f"step {step}: no replica is whole, so no policy but NTP could go on; hurt one replica at a time")

    @property
    def num_gpus(self) -> int:
        """Owned by the job."""
        return self.degree * self.replicas

    def down(self, step: int) -> set[int]:
        """GPUs that are lost once `step` is over."""
        changes = [(fault.step or 0, fault.worker, True) for fault in self.losses]
        changes += [(back.step, back.gpu, False) for back in self.returns]
        lost: set[int] = set()
        for _, gpu, is_loss in sorted(change for change in changes if change[0] <= step):
            lost = lost | {gpu} if is_loss else lost - {gpu}
        return lost

    def mates(self, gpu: int) -> range:
        """All GPUs of its replica."""
        first = gpu // self.degree * self.degree
        return range(first, first + self.degree)

    def whole_replicas(self, step: int) -> list[int]:
        """Replicas without a lost GPU once `step` is over."""
        hurt = {gpu // self.degree for gpu in self.down(step)}
        return [replica for replica in range(self.replicas) if replica not in hurt]

    def back_at(self, gpu: int, step: int, whole: bool) -> int | None:
        """When a process at this place may start that was not there at `step`; None: never.

        Args:
            whole: not before every GPU of its replica is back.
        """
        needed = set(self.mates(gpu)) if whole else {gpu}
        for back in sorted(self.returns, key=lambda each: each.step):
            if back.step > step and not needed & self.down(back.step):
                return back.step
        return None

    def script(self, whole: bool) -> FaultScript:
        """What strikes a process at a GPU.

        Args:
            whole: the mates of a lost GPU go with it.
        """
        faults: Iterable[Fault] = self.losses
        if whole:
            faults = (replace(fault, worker=mate) for fault in self.losses for mate in self.mates(fault.worker))
        return FaultScript(*faults)

    def to_json(self) -> str:
        """As a worker's command line carries it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Drill:
        """The inverse."""
        values: dict[str, Any] = json.loads(text)
        values["losses"] = tuple(Fault(**fault) for fault in values["losses"])
        values["returns"] = tuple(Return(**back) for back in values["returns"])
        return cls(**values)


def usual_drill(stretch: float = 1.0) -> Drill:
    """Six losses and four returns over 2 replicas x 3, one replica at a time: the kindest case for whoever drops replicas.

    Args:
        stretch: more steps between the events, for machines on which a process takes long to start.
    """

    def at(step: int) -> int:
        return round(step * stretch / SAVE_EVERY) * SAVE_EVERY

    losses = ((1, 17, 0.2), (2, 25, 0.8), (4, 53, 0.5), (5, 62, 0.9), (3, 91, 0.3), (4, 99, 0.6))
    returns = ((1, 32), (2, 40), (4, 72), (5, 80))
    return Drill(
        steps=at(112),
        degree=3,
        replicas=2,
        losses=tuple(Fault("kill", gpu, PHASE, round(step * stretch), delay) for gpu, step, delay in losses),
        returns=tuple(Return(gpu, at(step)) for gpu, step in returns),
    )


SAVE_EVERY = 8
"""Steps between two checkpoints of who restarts. GPUs are back at such steps, so that taking them in costs it no work."""


def note_kills(script: FaultScript, write: Callable[..., None]) -> None:
    """Have every kill of the script written down, with the time at which it takes effect."""

    def strike(fault: Fault) -> None:
        write("struck", gpu=fault.worker, at=time.monotonic() + fault.delay_seconds)
        fault.strike()

    script.handlers["kill"] = strike


def last_step(folder: Path) -> int:
    """The newest committed step in a folder of event logs; -1 before the first."""
    newest = -1
    for file in folder.glob("*.jsonl"):
        for line in reversed(file.read_text().splitlines()):
            try:
                event = json.loads(line)
            except ValueError:  # its writer was killed in the middle of it
                continue
            if event["kind"] == "commit":
                newest = max(newest, event["step"])
                break
    return newest


def end_file(out: Path, group: int, life: int) -> Path:
    """Where the exit code of a life of a group is left."""
    return out / f"ended-{group}-{life}"
