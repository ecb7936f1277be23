"""Faults on demand: what to break, in which worker, at which step and phase. For tests, demos and users' own drills.

    NTP_FAULTS='[{"action": "kill", "worker": 2, "step": 3, "phase": "sync"}]' python train.py

The running code calls ``script.fire(worker, step, phase)`` at each of its phases; without faults that costs nothing.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lightning_ntp.errors import ConfigError

ENV_FAULTS = "NTP_FAULTS"
ACTIONS = ("kill", "stop", "raise", "slow", "drop-network", "fill-disk", "out-of-memory", "flip-bit")
PHASES = (
    "start", "join", "connect", "forward", "backward", "sync", "vote", "decide", "after_commit", "control",
    "validation", "checkpoint", "integrity", "broken", "planning", "moving", "moved", "teardown",
)  # fmt: skip
"""Where the code asks the script. "decide" is between the last vote and the decision; "connect" is in the forming of groups;
"broken" is the first moment of a survivor's recovery; "moved" is when it has all its new cells and can still go back to the old ones;
"start" and "teardown" are the first and the last of a membership."""


class InjectedFault(RuntimeError):
    """What the action "raise" raises: an exception as a user's code might raise it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, once ("slow": from then on, whenever the phase is reached).

    action: "kill" (SIGKILL), "stop" (SIGSTOP: the process hangs), "raise" (`InjectedFault`), "slow" (sleeps `seconds`),
    "drop-network" (all TCP connections of the process end), "fill-disk" (writing to files fails, for `seconds` if given),
    "out-of-memory" (raises MemoryError, as a host that has none left),
    "flip-bit" (`bit` of the first element of a held parameter whose name ends in `parameter`; see `FaultScript.handlers`).
    worker: id of the worker; step: optimizer step, None for any; phase: one of `PHASES`.
    delay_seconds: if above 0, the worker goes on and is hit by a "kill" or "stop" so much later, for example inside a collective.
    """

    action: str
    worker: int
    phase: str
    step: int | None = None
    delay_seconds: float = 0.0
    seconds: float = 0.0
    parameter: str = ""
    bit: int = 0

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ConfigError(f"fault action {self.action!r}: wanted one of {', '.join(ACTIONS)}")
        if self.phase not in PHASES:
            raise ConfigError(f"fault phase {self.phase!r}: wanted one of {', '.join(PHASES)}")
        if self.worker < 0 or (self.step is not None and self.step < 0):
            raise ConfigError(f"fault of worker {self.worker} at step {self.step}: wanted numbers from 0")
        if self.delay_seconds < 0 or (self.delay_seconds and self.action not in ("kill", "stop")):
            raise ConfigError(f"fault delay {self.delay_seconds} s: wanted 0 or more, and 0 for the action {self.action!r}")
        if self.seconds < 0 or (self.action == "slow" and not self.seconds):
            raise ConfigError(f"fault of {self.seconds} s: wanted 0 or more, and more than 0 for the action 'slow'")

    def matches(self, worker: int, step: int | None, phase: str) -> bool:
        if (self.worker, self.phase) != (worker, phase):
            return False
        if self.action == "slow" and self.step is not None:
            return step is not None and step >= self.step
        return self.step in (None, step)

    def strike(self) -> None:
        """Does the damage to this process. Returns only from a delayed fault, or from "stop" after a SIGCONT."""
        if self.action == "raise":
            raise InjectedFault(f"injected into worker {self.worker} at step {self.step}, phase {self.phase}")
        if self.action == "out-of-memory":
            raise MemoryError(f"injected into worker {self.worker} at step {self.step}, phase {self.phase}")
        if self.action == "slow":
            time.sleep(self.seconds)
            return
        if self.action == "drop-network":
            from lightning_ntp.strategy.sockets import cut_all

            cut_all()
            return
        if self.action == "fill-disk":
            fill_disk(self.seconds)
            return
        number = signal.SIGKILL if self.action == "kill" else signal.SIGSTOP
        if not self.delay_seconds:
            os.kill(os.getpid(), number)
            return

        def later() -> None:
            time.sleep(self.delay_seconds)
            os.kill(os.getpid(), number)

        threading.Thread(target=later, name="ntp-fault", daemon=True).start()


def fill_disk(seconds: float = 0.0) -> None:
    """From now on no file of this process can grow: writing fails with OSError, as on a full disk (EFBIG for ENOSPC).

    seconds: after so long there is room again; 0: never.
    """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    if seconds:
        timer = threading.Timer(seconds, resource.setrlimit, (resource.RLIMIT_FSIZE, (before, hard)))
        timer.daemon = True
        timer.start()


class FaultScript:
    """The faults that are still to come. Each strikes once in a process: the retry of a step is not hit again.

    handlers: what to do for actions that need more than the process ("flip-bit" needs the model): action -> function of
    the fault. Whoever owns the thing puts one in.
    """

    def __init__(self, *faults: Fault) -> None:
        self.faults = list(faults)
        self.handlers: dict[str, Callable[[Fault], None]] = {}

    def fire(self, worker: int, step: int | None, phase: str) -> None:
        """Strikes if a fault is due here. `InjectedFault` for the action "raise"."""
        for fault in self.faults:
            if fault.matches(worker, step, phase):
                if fault.action != "slow":
                    self.faults.remove(fault)
                self._strike(fault)
                return

    def _strike(self, fault: Fault) -> None:
        if fault.action in self.handlers:
            self.handlers[fault.action](fault)
        elif fault.action == "flip-bit":
            raise ConfigError(f"nobody here can flip a bit at phase {fault.phase!r}: there is no model yet")
        else:
            fault.strike()

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
