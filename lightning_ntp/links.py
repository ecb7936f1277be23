"""Slow links: which group of workers exchanges more slowly than other groups of its kind. Pure.

All members of a group wait for the one that comes last, so the time of the exchange itself is about the shortest that any member
spent in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_ntp.outliers import OutlierLimits, OutlierWatch, Sample, Turn
from lightning_ntp.topology import Topology

LINK_LIMITS = OutlierLimits(enter=2.0, leave=1.5)


@dataclass(frozen=True, slots=True)
class Link:
    """Workers that exchange with each other. kind: ``"slot"``, gradients between replicas, or ``"tp"``, roles of a data row."""

    kind: str
    workers: tuple[int, ...]

    def __str__(self) -> str:
        names = ", ".join(map(str, self.workers[:-1])) + f" and {self.workers[-1]}"
        return f"workers {names} ({'gradient sync between replicas' if self.kind == 'slot' else 'roles of one replica'})"


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Seconds that a worker spent in exchanges of one step, waiting included: with its roles, and with other replicas."""

    tp_seconds: float
    slot_seconds: float


@dataclass
class LinkWatch:
    """The links of a topology. Made anew with each topology."""

    topology: Topology
    limits: OutlierLimits = LINK_LIMITS
    _watches: dict[str, OutlierWatch[Link]] = field(init=False)

    def __post_init__(self) -> None:
        self._watches = {kind: OutlierWatch(self.limits) for kind in ("slot", "tp")}

    @property
    def slow(self) -> dict[Link, float]:
        """Slow links: how many times as long as usual they take."""
        return {link: factor for watch in self._watches.values() for link, factor in watch.slow.items()}

    def feed(self, exchanged: Mapping[int, Exchanged], samples: Mapping[int, int], step_seconds: float) -> list[Turn[Link]]:
        """One step of all workers with a role; `samples` that each has run. Which links have become slow, or are well again."""
        turns = []
        for kind, watch in self._watches.items():
            turns += watch.feed(self._slots(exchanged) if kind == "slot" else self._rows(exchanged, samples), step_seconds)
        return turns

    def _slots(self, exchanged: Mapping[int, Exchanged]) -> dict[Link, Sample]:
        """By the workers that reduce the same slots."""
        hosted: dict[Link, int] = {}
        for slot in self.topology.slots:
            hosts = tuple(self.topology.host(replica, slot) for replica in range(len(self.topology.replicas)))
            if len(hosts) > 1:
                link = Link("slot", hosts)
                hosted[link] = hosted.get(link, 0) + 1
        num_hosted = {worker: sum(n for link, n in hosted.items() if worker in link.workers) for worker in exchanged}
        return {
            link: Sample(min(exchanged[worker].slot_seconds / num_hosted[worker] for worker in link.workers), num)
            for link, num in hosted.items()
        }

    def _rows(self, exchanged: Mapping[int, Exchanged], samples: Mapping[int, int]) -> dict[Link, Sample]:
        """By data rows of one degree: others exchange other amounts."""
        rows = [row for replica in self.topology.replicas for row in replica.grid if replica.degree == self.topology.num_roles]
        return {
            Link("tp", row): Sample(
                min(exchanged[worker].tp_seconds for worker in row) / max(samples[row[0]], 1), max(samples[row[0]], 1)
            )
            for row in rows
            if len(row) > 1
        }
