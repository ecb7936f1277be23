"""What a membership speaks of: a generation, how it ended, and what a vote decides. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lightning_ntp.errors import ConfigError, RankLostError


class GenerationBrokenError(RankLostError):
    """The generation that this call belongs to has lost a member. Call `Member.join` outside of the ``except`` block."""


class FencedError(RankLostError):
    """The others have gone on without this worker. It must end; what it holds may be old."""


class Outcome(StrEnum):
    """What all members do with a step."""

    COMMIT = "commit"
    SKIP = "skip"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Decision:
    """Result of a vote, equal on all members. regroup: after acting on it everybody calls `Member.join` again."""

    outcome: Outcome
    regroup: bool = False


@dataclass(frozen=True, slots=True)
class MemberConfig:
    """Times of a member.

    heartbeat_seconds: between two signs of life.
    group_timeout_seconds: of the process groups; only a last resort, the watcher frees blocked calls much earlier.
    free_seconds: a call that is still blocked so long after its connections were cut will not come back: the worker leaves,
    unless the group timeout, which frees it as well, is not much further.
    confirm_seconds: how long to wait at most for the supervisor's word whether a failed collective means a lost peer.
    """

    backend: str = "gloo"
    heartbeat_seconds: float = 0.25
    group_timeout_seconds: float = 1800.0
    free_seconds: float = 20.0
    confirm_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("heartbeat_seconds", "group_timeout_seconds", "free_seconds", "confirm_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"MemberConfig.{name} is {getattr(self, name)}: wanted more than 0")


@dataclass(frozen=True, slots=True)
class Generation:
    """Who is in, in the order of global ranks, and what each said when it joined. Survivors come before newcomers.

    fenced: everybody who was ever lost, and why.
    leaving: members that were asked to leave: the others take over what they hold, then these call `Member.leave`.
    """

    number: int
    worker: int
    members: tuple[int, ...]
    infos: tuple[Any, ...]
    agree_seconds: float
    connect_seconds: float
    fenced: Mapping[int, str] = field(default_factory=dict)
    leaving: tuple[int, ...] = ()

    def who_said(self) -> tuple[tuple[int, Any], ...]:
        """(member, its info) of all."""
        return tuple(zip(self.members, self.infos, strict=True))

    @property
    def global_rank(self) -> int:
        return self.members.index(self.worker)

    @property
    def num_members(self) -> int:
        return len(self.members)

    @property
    def leader(self) -> int:
        """The lowest live worker."""
        return min(self.members)


def is_poisoned(worker: int, replicas: Sequence[frozenset[int]], lost: frozenset[int]) -> bool:
    """Whether a neighbour of `worker` is among the lost, and a replica that is not hurt holds what the worker would take with it."""
    hurt = [replica for replica in replicas if replica & lost]
    return len(hurt) < len(replicas) and any(worker in replica for replica in hurt)
