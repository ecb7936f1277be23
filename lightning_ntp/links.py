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
    _slots: dict[Link, int] = field(init=False)  # how many slots its workers reduce
    _rows: tuple[Link, ...] = field(init=False)
    _num_hosted: dict[int, int] = field(init=False)  # slots that a worker reduces, over all links

    def __post_init__(self) -> None:
        self._watches = {kind: OutlierWatch(self.limits) for kind in ("slot", "tp")}
        topology, self._slots, self._num_hosted = self.topology, {}, dict.fromkeys(self.topology.workers, 0)
        for slot in topology.slots if len(topology.replicas) > 1 else ():
            link = Link("slot", tuple(topology.host(replica, slot) for replica in range(len(topology.replicas))))
            self._slots[link] = self._slots.get(link, 0) + 1
            for worker in link.workers:
                self._num_hosted[worker] += 1
        # Data rows of other degrees exchange other amounts.
        complete = [replica for replica in topology.replicas if replica.degree == topology.num_roles > 1]
        self._rows = tuple(Link("tp", row) for replica in complete for row in replica.grid)

    @property
    def slow(self) -> dict[Link, float]:
        """Slow links: how many times as long as usual they take."""
        return {link: factor for watch in self._watches.values() for link, factor in watch.slow.items()}

    def feed(self, exchanged: Mapping[int, Exchanged], samples: Mapping[int, int], step_seconds: float) -> list[Turn[Link]]:
        """One step of all workers with a role; `samples` that each has run. Which links have become slow, or are well again."""
        turns = []
        for kind, watch in self._watches.items():
            told = self._of_slots(exchanged) if kind == "slot" else self._of_rows(exchanged, samples)
            turns += watch.feed(told, step_seconds)
        return turns

    def _of_slots(self, exchanged: Mapping[int, Exchanged]) -> dict[Link, Sample]:
        return {
            link: Sample(min(exchanged[worker].slot_seconds / self._num_hosted[worker] for worker in link.workers), num)
            for link, num in self._slots.items()
        }

    def _of_rows(self, exchanged: Mapping[int, Exchanged], samples: Mapping[int, int]) -> dict[Link, Sample]:
        told = {}
        for link in self._rows:
            units = max(samples[link.workers[0]], 1)
            told[link] = Sample(min(exchanged[worker].tp_seconds for worker in link.workers) / units, units)
        return told
