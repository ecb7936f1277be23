"""When a lost worker is replaced, and when the job gives up: numbers and a clock, no processes.

A place (node, slot) whose worker was lost once is filled again at once. One that loses its workers again and again waits
longer each time and is then left empty, so that a flapping GPU cannot thrash the job. Before a place is filled its GPU
must pass a probe (health.py). A job that recovers too often in an hour saves and ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from lightning_ntp.errors import ConfigError

HOUR_SECONDS = 3600.0
PARTY_SECONDS = 1.0
"""Processes that were started within so long of each other were started together."""

Place = tuple[int, int]
"""(node, slot): a slot is the local rank, and with it the GPU."""


@dataclass(frozen=True, slots=True)
class RespawnConfig:
    """How losses are made good.

    max_respawns: replacements that are started without being asked for, over the whole job.
    cool_down_seconds: a place waits so long after its second loss within an hour, twice as long after the third, ...
    max_losses_per_place: after so many losses within an hour a place stays empty.
    max_recoveries_per_hour: more losses than that end the job with the state saved.
    """

    max_respawns: int = 0
    cool_down_seconds: float = 30.0
    max_losses_per_place: int = 4
    max_recoveries_per_hour: int = 20

    def __post_init__(self) -> None:
        for name, least in (
            ("max_respawns", 0),
            ("cool_down_seconds", 0),
            ("max_losses_per_place", 1),
            ("max_recoveries_per_hour", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"RespawnConfig.{name} is {getattr(self, name)}: wanted {least} or more")


@dataclass(slots=True)
class RespawnBook:
    """Who was lost where and when, and what is due. Times are those of the caller's clock, in seconds."""

    config: RespawnConfig
    empty: dict[Place, float] = field(default_factory=dict)
    """Places without a worker, and when each may be filled again."""
    num_respawns: int = 0
    _losses: dict[Place, deque[float]] = field(default_factory=dict)
    _recoveries: deque[float] = field(default_factory=deque)

    def lose(self, place: Place, now_seconds: float) -> str:
        """Notes a loss. Says in words what becomes of the place."""
        losses = _within_hour(self._losses.setdefault(place, deque()), now_seconds)
        losses.append(now_seconds)
        if len(losses) >= self.config.max_losses_per_place:
            self.retire(place)
            return f"lost {len(losses)} workers within an hour and stays empty"
        wait = self.config.cool_down_seconds * 2 ** (len(losses) - 2) if len(losses) > 1 else 0.0
        self.empty[place] = now_seconds + wait
        return f"may be filled again in {wait:g} s"

    def retire(self, place: Place) -> None:
        """This place is not filled again: its GPU or its node is gone."""
        self.empty.pop(place, None)

    def postpone(self, place: Place, now_seconds: float) -> None:
        """The place has failed its probe: it is looked at again after the cool-down."""
        self.empty[place] = now_seconds + max(self.config.cool_down_seconds, 1.0)

    def due(self, now_seconds: float) -> list[Place]:
        """Places to be filled now, within the budget of replacements."""
        ready = sorted(place for place, since in self.empty.items() if now_seconds >= since)
        return ready[: max(0, self.config.max_respawns - self.num_respawns)]

    def fill(self, place: Place) -> None:
        """A replacement has been started there."""
        self.empty.pop(place, None)
        self.num_respawns += 1

    def recover(self, now_seconds: float) -> bool:
        """Notes a recovery. False if that is one too many within the last hour."""
        recoveries = _within_hour(self._recoveries, now_seconds)
        recoveries.append(now_seconds)
        return len(recoveries) <= self.config.max_recoveries_per_hour


@dataclass(slots=True)
class PartyState:
    """Newcomers on their way. Those that were started together are taken in at once, as one replica perhaps."""

    _starts: dict[int, float] = field(default_factory=dict)
    _arrivals: dict[int, float] = field(default_factory=dict)

    def start(self, worker: int, now_seconds: float) -> None:
        """A process has been started."""
        self._starts[worker] = now_seconds

    def forget(self, worker: int) -> None:
        """It has ended."""
        self._starts.pop(worker, None)
        self._arrivals.pop(worker, None)

    def is_complete(self, here: Collection[int], expected: Collection[int], now_seconds: float) -> bool:
        """Whether whoever was started together with those who are `here` has come. Nobody waits longer than its own way took."""
        arrival = min(self._arrivals.setdefault(worker, now_seconds) for worker in here)
        start = min(self._starts[worker] for worker in here)
        party = {worker for worker in expected if self._starts[worker] - start <= PARTY_SECONDS}
        return party <= set(here) or now_seconds - arrival > arrival - start


def _within_hour(times: deque[float], now_seconds: float) -> deque[float]:
    while times and now_seconds - times[0] > HOUR_SECONDS:
        times.popleft()
    return times
