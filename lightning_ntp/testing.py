"""Faults on demand: what to break, in which worker, at which step and phase. For tests, demos and users' own drills.

    NTP_FAULTS='[{"action": "kill", "worker": 2, "step": 3, "phase": "sync"}]' python train.py

The running code calls ``script.fire(worker, step, phase)`` at each of its phases; without faults that costs nothing.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lightning_ntp.errors import ConfigError

ENV_FAULTS = "NTP_FAULTS"
ACTIONS = ("kill", "stop", "raise")
PHASES = (
    "start", "join", "connect", "forward", "backward", "sync", "vote", "decide", "after_commit", "control",
    "validation", "checkpoint", "broken", "planning", "moving", "teardown",
)  # fmt: skip
"""Where the code asks the script. "decide" is between the last vote and the decision; "connect" is in the forming of groups;
"broken" is the first moment of a survivor's recovery."""


class InjectedFault(RuntimeError):
    """What the action "raise" raises: an exception as a user's code might raise it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, once.

    action: "kill" (SIGKILL), "stop" (SIGSTOP: the process hangs), "raise" (`InjectedFault`).
    worker: id of the worker; step: optimizer step, None for any; phase: one of `PHASES`.
    delay_seconds: if above 0, the worker goes on and is hit by a "kill" or "stop" so much later, for example inside a collective.
    """

    action: str
    worker: int
    phase: str
    step: int | None = None
    delay_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ConfigError(f"fault action {self.action!r}: wanted one of {', '.join(ACTIONS)}")
        if self.phase not in PHASES:
            raise ConfigError(f"fault phase {self.phase!r}: wanted one of {', '.join(PHASES)}")
        if self.worker < 0 or (self.step is not None and self.step < 0):
            raise ConfigError(f"fault of worker {self.worker} at step {self.step}: wanted numbers from 0")
        if self.delay_seconds < 0 or (self.delay_seconds and self.action == "raise"):
            raise ConfigError(f"fault delay {self.delay_seconds} s: wanted 0 or more, and 0 for the action 'raise'")

    def matches(self, worker: int, step: int | None, phase: str) -> bool:
        return (self.worker, self.phase) == (worker, phase) and self.step in (None, step)

    def strike(self) -> None:
        """Does the damage to this process. Returns only from a delayed fault, or from "stop" after a SIGCONT."""
        if self.action == "raise":
            raise InjectedFault(f"injected into worker {self.worker} at step {self.step}, phase {self.phase}")
        number = signal.SIGKILL if self.action == "kill" else signal.SIGSTOP
        if not self.delay_seconds:
            os.kill(os.getpid(), number)
            return

        def later() -> None:
            time.sleep(self.delay_seconds)
            os.kill(os.getpid(), number)

        threading.Thread(target=later, name="ntp-fault", daemon=True).start()


class FaultScript:
    """The faults that are still to come. Each strikes once in a process: the retry of a step is not hit again."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = list(faults)

    def fire(self, worker: int, step: int | None, phase: str) -> None:
        """Strikes if a fault is due here. `InjectedFault` for the action "raise"."""
        for fault in self.faults:
            if fault.matches(worker, step, phase):
                self.faults.remove(fault)
                fault.strike()
                return

    def to_json(self) -> str:
        return json.dumps([asdict(fault) for fault in self.faults])

    @classmethod
    def from_json(cls, text: str) -> FaultScript:
        """A script from a JSON list of objects with the fields of `Fault`; `ConfigError` names what is wrong."""
        try:
            items = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{ENV_FAULTS} is no JSON: {error}") from error
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise ConfigError(
                f'{ENV_FAULTS}: wanted a list such as [{{"action": "kill", "worker": 2, "phase": "sync"}}]'
            )
        return cls(*(_fault(item) for item in items))

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> FaultScript:
        """The script of NTP_FAULTS; an empty one if it is not set."""
        return cls.from_json(environ.get(ENV_FAULTS) or "[]")


def _fault(item: dict[str, Any]) -> Fault:
    known = [field.name for field in fields(Fault)]
    unknown = sorted(item.keys() - set(known))
    missing = sorted({"action", "worker", "phase"} - item.keys())
    if unknown or missing:
        raise ConfigError(f"{ENV_FAULTS}: {item} has unknown {unknown}, lacks {missing}; known: {', '.join(known)}")
    return Fault(**item)
