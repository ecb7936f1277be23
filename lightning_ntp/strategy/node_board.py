"""The other nodes, as the first node's supervisor sees them: they arrive, report, fall silent, and take orders.

    node_agent.py on node K  --hello, beats, exits-->  store  -->  NodeBoard  --orders-->  store  -->  node K

Keys (JSON, below the job's token): nodes/hellos, nodes/hello/I; node/K/beats; node/K/exits, node/K/exit/I;
node/K/orders, node/K/order/I; node/K/gone. Counters (written with `add`) say how many numbered entries there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from lightning_ntp.strategy.ending import EndedWorker
from lightning_ntp.strategy.rendezvous import peek_json, put_json

BEAT_SECONDS = 0.25
"""Between two signs of life of a node's supervisor."""


@dataclass(slots=True)
class NodeState:
    """A node that has said hello. num_slots: workers it can hold; gpus: their UUIDs where known."""

    number: int
    host: str
    num_slots: int
    gpus: tuple[str, ...] = ()
    beats: int = -1
    beat_seconds: float = 0.0
    num_exits: int = 0
    num_orders: int = 0
    lost: bool = False


@dataclass(frozen=True, slots=True)
class RemoteExit:
    """A worker of another node has ended; `last_words` are the last lines of its stderr."""

    ended: EndedWorker
    last_words: list[str]


@dataclass(slots=True)
class NodeBoard:
    """All nodes but the first. `now_seconds` is always the caller's clock: clocks of machines are not compared."""

    store: dist.Store
    nodes: dict[int, NodeState] = field(default_factory=dict)
    _num_hellos: int = 0

    def arrivals(self, now_seconds: float) -> list[NodeState]:
        """Nodes that have said hello since the last call."""
        arrived = []
        while self._num_hellos < self.store.add("nodes/hellos", 0):
            hello = peek_json(self.store, f"nodes/hello/{self._num_hellos + 1}")
            if hello is None:  # counted, but its text is still on the way
                break
            self._num_hellos += 1
            number, gpus = int(hello["node"]), tuple(hello["gpus"])
            node = NodeState(number, str(hello["host"]), int(hello["num_slots"]), gpus, beat_seconds=now_seconds)
            self.nodes[node.number] = node
            arrived.append(node)
        return arrived

    def exits(self, now_seconds: float) -> list[RemoteExit]:
        """Workers whose end has been reported since the last call."""
        found = []
        for node in self.live:
            while node.num_exits < self.store.add(f"node/{node.number}/exits", 0):
                report = peek_json(self.store, f"node/{node.number}/exit/{node.num_exits + 1}")
                if report is None:
                    break
                node.num_exits += 1
                ended = EndedWorker(
                    int(report["worker"]),
                    int(report["exit_code"]),
                    node.number,
                    str(report["why"]),
                    bool(report.get("has_traceback")),
                    bool(report.get("blames_a_peer")),
                    now_seconds if report.get("has_traceback") else None,
                )
                found.append(RemoteExit(ended, list(report.get("last_words", ()))))
        return found

    def silent(self, now_seconds: float, limit_seconds: float) -> list[NodeState]:
        """Nodes that have given no sign of life for so long. Each is reported once, and then lost."""
        silent = []
        for node in self.live:
            beats = self.store.add(f"node/{node.number}/beats", 0)
            if beats != node.beats:
                node.beats, node.beat_seconds = beats, now_seconds
            elif now_seconds - node.beat_seconds > limit_seconds:
                node.lost = True
                if not self.store.check([f"node/{node.number}/gone"]):  # it has taken its leave
                    silent.append(node)
        return silent

    @property
    def live(self) -> list[NodeState]:
        """Nodes that take orders."""
        return [node for node in self.nodes.values() if not node.lost]

    def order(self, number: int, do: str, **what: Any) -> None:
        """Tells a node what to do: "start" (worker, slot, environ), "give-up" (worker, why), "stacks", "end" (...)."""
        node = self.nodes.get(number)
        if node is None or node.lost:
            return
        node.num_orders += 1
        put_json(self.store, f"node/{number}/order/{node.num_orders}", {"do": do, **what})
        self.store.add(f"node/{number}/orders", 1)

    def order_all(self, do: str, **what: Any) -> None:
        """The same for every live node."""
        for node in self.live:
            self.order(node.number, do, **what)
