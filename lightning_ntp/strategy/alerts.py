"""Tells people: W&B alerts, a command, a webhook. Rate-limited, and never in the way of training."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy.background import Background
from lightning_ntp.strategy.events import RecoveryEvent, SlowEvent

KINDS = ("loss", "recovery", "rejoin", "damage", "slow", "unrecoverable", "goodput")
SEND_SECONDS = 20.0
"""A command or webhook that takes longer is given up."""

CLOSE_SECONDS = 5.0
"""How long the end of training waits for alerts that are on their way."""


@dataclass(frozen=True, slots=True)
class AlertConfig:
    """Who is told of what.

    Args:
        kinds: of `KINDS`.
        command: a program with arguments; gets the alert as JSON on stdin.
        webhook: a URL; gets the same by POST, with a ``text`` that chat services show.
        wandb: also ``wandb.alert``, where there is a W&B run.
        every_seconds: no more than one alert of a kind in this time; the next one says how many were held back.
        goodput_below: alert when the goodput of the window is lower than this ...
        for_seconds: ... for so long.
    """

    kinds: tuple[str, ...] = KINDS
    command: tuple[str, ...] = ()
    webhook: str | None = None
    wandb: bool = True
    every_seconds: float = 300.0
    goodput_below: float | None = None
    for_seconds: float = 600.0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.kinds) - set(KINDS))
        if unknown:
            raise ConfigError(f"AlertConfig: no alerts of the kind {unknown}; there are {', '.join(KINDS)}")
        if isinstance(self.command, str):
            raise ConfigError(f"AlertConfig: command is a list of a program and its arguments, got the text {self.command!r}")
        if self.webhook is not None and not self.webhook.startswith(("http://", "https://")):
            raise ConfigError(f"AlertConfig: webhook is an http(s) URL, got {self.webhook!r}")
        if self.goodput_below is not None and not 0 < self.goodput_below <= 1:
            raise ConfigError(f"AlertConfig: goodput_below is a share from 0 to 1, got {self.goodput_below}")
        if self.every_seconds < 0 or self.for_seconds < 0:
            raise ConfigError("AlertConfig: every_seconds and for_seconds are 0 or more")


@dataclass(frozen=True, slots=True)
class Alert:
    """One message."""

    kind: str
    title: str
    text: str
    job: str = ""


def recovery_alerts(event: RecoveryEvent, why: str, job: str) -> list[Alert]:
    """What to say of a recovery. `why`: the supervisor's words for the loss before it."""
    text = f"{event.topology}; {event.seconds.get('total', 0.0):.1f} s, {event.bytes_moved} bytes received by the leader"
    found = []
    if event.lost:
        found.append(Alert("loss", f"lost worker {_listed(event.lost)}", f"{why}; step {event.step}", job))
        found.append(Alert("recovery", "training goes on", text, job))
    if event.left:
        found.append(Alert("recovery", f"worker {_listed(event.left)} has left", text, job))
    if event.joined:
        found.append(Alert("rejoin", f"worker {_listed(event.joined)} is back", text, job))
    return found


def slow_alerts(event: SlowEvent, job: str) -> list[Alert]:
    """What to say of slow hardware; nothing of shares that follow it, or once all is well again."""
    if event.kind not in ("worker", "link"):
        return []
    return [Alert("slow", f"slow {event.kind}: {_listed(event.workers)}", event.words, job)]


def _listed(workers: Sequence[int]) -> str:
    return ", ".join(map(str, workers))


class Alerts:
    """Sends alerts from a thread of its own, which runs only while there is something to send.

    Args:
        config: who is told of what.
        wandb_alert: ``wandb.alert(title, text)``; called on the calling thread, as it only hands over.
        clock: seconds.
    """

    def __init__(
        self,
        config: AlertConfig,
        wandb_alert: Callable[[str, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._wandb_alert, self._clock = wandb_alert, clock
        self._sent: dict[str, float] = {}
        self._held: dict[str, int] = {}
        self._low_since: float | None = None
        self._background = Background("ntp-alerts")
        self._num_queued = 0

    def send(self, alert: Alert) -> bool:
        """Passes an alert on unless one of its kind has just been; whether it did."""
        if alert.kind not in self.config.kinds:
            return False
        now, last = self._clock(), self._sent.get(alert.kind)
        if last is not None and now - last < self.config.every_seconds:
            self._held[alert.kind] = self._held.get(alert.kind, 0) + 1
            return False
        self._sent[alert.kind] = now
        held = self._held.pop(alert.kind, 0)
        if held:
            alert = Alert(alert.kind, alert.title, f"{alert.text} ({held} earlier ones were held back)", alert.job)
        if self.config.wandb and self._wandb_alert is not None:
            self._wandb_alert(alert.title[:63], alert.text)
        if self.config.command or self.config.webhook:
            self._enqueue(alert)
        return True

    def watch(self, goodput: float, job: str = "") -> bool:
        """Looks at the goodput of the window; whether an alert went out."""
        limit = self.config.goodput_below
        if limit is None:
            return False
        now = self._clock()
        if goodput >= limit:
            self._low_since = None
            return False
        if self._low_since is None:
            self._low_since = now
        if now - self._low_since < self.config.for_seconds:
            return False
        text = f"goodput has been below {limit:.0%} for {now - self._low_since:.0f} s, it is {goodput:.1%} now"
        return self.send(Alert("goodput", f"goodput below {limit:.0%}", text, job))

    @property
    def num_failed(self) -> int:
        """Deliveries that did not work."""
        return self._background.num_failed

    def close(self) -> None:
        """Waits a moment for alerts that are on their way."""
        self._background.wait(CLOSE_SECONDS)

    def _enqueue(self, alert: Alert) -> None:
        message = json.dumps(asdict(alert) | {"text": f"[{alert.title}] {alert.text}"}).encode()
        for deliver in (self._run_command, self._post):
            self._num_queued += 1
            self._background.submit(self._num_queued, partial(deliver, message))

    def _run_command(self, message: bytes) -> None:
        command: Sequence[str] = self.config.command
        if command:
            subprocess.run(command, input=message, timeout=SEND_SECONDS, check=True, stdout=subprocess.DEVNULL)

    def _post(self, message: bytes) -> None:
        if self.config.webhook is None:
            return
        headers = {"Content-Type": "application/json"}
        request: Any = urllib.request.Request(self.config.webhook, data=message, headers=headers, method="POST")
        with urllib.request.urlopen(request, timeout=SEND_SECONDS) as answer:
            answer.read(1024)
