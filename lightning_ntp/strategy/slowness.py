"""Slow GPUs and links of a running fit: they are named, and work follows the speeds where `SlowConfig` says "act".

    commit -> judge_pace: what all have said of the step before -> turns -> SlowEvent, a new deal for the next step boundary
    next step boundary, shares only -> the loaders are shared anew from the last committed position, as after a loss
                        granules too -> the members regroup, as for a newcomer, and a slow role's neighbours take some of them

Everything is decided from numbers that all workers have, at a commit that all have reached: nobody needs to ask.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_ntp.errors import ConfigError
from lightning_ntp.layout import NestedLayouts
from lightning_ntp.links import Link, LinkWatch
from lightning_ntp.outliers import OutlierLimits, Turn
from lightning_ntp.stragglers import NewDeal, StragglerWatch
from lightning_ntp.strategy.events import SlowEvent
from lightning_ntp.strategy.loading import Loading
from lightning_ntp.strategy.pace import Heard
from lightning_ntp.strategy.replay import nothing
from lightning_ntp.strategy.stepping import Stepping
from lightning_ntp.topology import Topology

_log = logging.getLogger(__name__)


class Slowness(Stepping, Loading):
    """Watches the speeds of the topology that is live; a change of it begins anew, with shares by devices."""

    _watched: tuple[Topology, StragglerWatch, LinkWatch] | None = None
    _shares: tuple[Topology, tuple[int, ...]] | None = None
    _next_deal: tuple[Topology, NewDeal] | None = None
    _num_judged = 0

    @property
    def row_weights(self) -> tuple[int, ...]:
        """By which a window's samples are dealt to the data rows."""
        if self._shares is not None and self._shares[0] == self.topology:
            return self._shares[1]
        return tuple(self.topology.replicas[replica].degree for replica, _ in self.topology.data_rows)

    @property
    def measures_pace(self) -> bool:
        """Whether steps are timed; equal on all workers, also those who join later."""
        return self.config.recovery.slow.mode != "off" and self.lightning_module.automatic_optimization

    def check_slowness(self) -> None:
        """ConfigError where shares shall follow speeds and cannot."""
        if self.config.recovery.slow.mode == "act" and not self.lightning_module.automatic_optimization:
            raise ConfigError(
                'SlowConfig(mode="act") with automatic_optimization=False: a manual step runs equal shares in one piece, so they '
                'cannot follow speeds; use mode="off"'
            )

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """See `Stepping`; before it, what was decided at the last commit. Collective over all workers with a role."""
        if self._next_deal is not None:
            if self._next_deal[0] is self.topology:  # else somebody was lost meanwhile: shares by devices
                self._take(self._next_deal[1])
            self._next_deal = None
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _take(self, deal: NewDeal) -> None:
        began = time.monotonic()
        self._shares = deal.topology, deal.weights
        if deal.topology == self.topology:
            self.restart_data()
            self.replay_window()
            self.runner.pace.reshare_seconds = time.monotonic() - began
        else:
            self.recovery.run("commit", nothing, planned=True, unasked=True)
            self.runner.pace.move_seconds = time.monotonic() - began

    def dealt_anew(self, topology: Topology) -> Topology:
        """What becomes of a topology that neither loses nor gains a worker: with the granules of the deal that is taken now. Local."""
        due = self._next_deal is not None and self._next_deal[0] == topology
        return self._next_deal[1].topology if self._next_deal is not None and due else topology

    def work_fractions(self, topology: Topology) -> dict[int, float]:
        """Worker -> its part of what is cut over the roles of its replica. Local, equal on all."""
        weights: dict[int, tuple[NestedLayouts, float]] = {}
        for spec in self.sharded.plan.params:
            if spec.layouts is not None:
                before = weights.get(id(spec.layouts), (None, 0.0))[1]
                weights[id(spec.layouts)] = spec.layouts, before + spec.numel / spec.layouts.size
        found: dict[int, float] = {}
        for replica in topology.replicas:
            roles = topology.roles(replica.degree)
            cuts = [(layouts.at(replica.degree, replica.relief), weight) for layouts, weight in weights.values()]
            work = [sum(cut.local_size(role) * weight for cut, weight in cuts) or 1.0 for role in roles]
            for row in replica.grid:
                found |= {worker: one / sum(work) for worker, one in zip(row, work, strict=True)}
        return found

    def judge_pace(self) -> float:
        """After a commit: says who has become slow; seconds for which slow workers kept the others waiting. Local, equal on all."""
        heard = self.runner.pace.heard
        if heard is None:
            return 0.0
        if self._watched is None or self._watched[0] is not self.topology:
            slow = self.config.recovery.slow
            limits = OutlierLimits(slow.factor, 1 + (slow.factor - 1) / 2, slow.steps)
            links = OutlierLimits(max(2.0, slow.factor), 1 + (max(2.0, slow.factor) - 1) / 2, slow.steps)
            workers = StragglerWatch(self.topology, limits, self.work_fractions)
            self._watched = self.topology, workers, LinkWatch(self.topology, links)
            self._num_judged = 0
        _, workers, links_watch = self._watched
        turns = workers.feed(heard.measured)
        step_seconds = max(one.seconds for one in heard.measured.values())
        samples = {worker: one.samples for worker, one in heard.measured.items()}
        for turn in turns:
            self._tell(turn.key, (turn.key,), turn, self._worker_words(turn, workers))
        for link in links_watch.feed(heard.exchanged, samples, step_seconds):
            self._tell(link.key, link.key.workers, link, self._link_words(link))
        self._decide(workers, heard, bool(turns))
        return workers.waiting_seconds()

    def _decide(self, workers: StragglerWatch, heard: Heard, has_turned: bool) -> None:
        """A new deal for the next step boundary. Looked at when somebody turns, and now and then while work follows speeds."""
        slow = self.config.recovery.slow
        self._num_judged += 1
        follows = bool(workers.slow) or self._shares is not None or any(one.relief for one in self.topology.replicas)
        if slow.mode != "act" or not (has_turned or (follows and self._num_judged % slow.steps == 0)):
            return
        cost = max(slow.cost_seconds, heard.reshare_seconds)
        move = None if self.recovery.member is None else max(cost, heard.move_seconds)
        deal = workers.new_deal(self.row_weights, slow.horizon_seconds, cost, move)
        if deal is None:
            return
        self._next_deal = self.topology, deal
        words = f"batch shares follow the speeds: weights {list(deal.weights)} of the data rows"
        if deal.topology != self.topology:
            words = f"{self._relief_words(deal.topology)}; {words}"
        self._say(SlowEvent("shares", self._held_step, (), 1.0, f"{words}, {deal.gain:.0%} less time per step expected"))

    def _relief_words(self, topology: Topology) -> str:
        fractions, said = self.work_fractions(topology), []
        for index, (old, new) in enumerate(zip(self.topology.replicas, topology.replicas, strict=True)):
            roles = topology.roles(new.degree)
            kept = [f"role {role} keeps {fractions[new.grid[0][roles.index(role)]]:.0%}" for role, _ in new.relief]
            if new.relief != old.relief:
                said.append(f"replica {index}: {', '.join(kept) or 'every role its part'} of the replica's granules")
        return "; ".join(said)

    def _worker_words(self, turn: Turn[int], watch: StragglerWatch) -> str:
        worker = turn.key
        at = self.topology.coordinates(worker)
        replica = self.topology.position(worker).replica
        who = f"worker {worker} ({self._host_of(worker)}replica {replica}, role {at.role})"
        if not turn.is_slow:
            return f"{who} computes as fast as the others again"
        now = watch.step_seconds(self.row_weights)
        helps = [
            f"{help_.words} ({1 - help_.step_seconds / now:.0%} less time per step)"
            for help_ in watch.helps(worker, self.row_weights)
            if help_.step_seconds < now
        ]
        what = "What would help: " + "; ".join(helps) if helps else "Nothing but another GPU in its place would help"
        return f"{who} computes {turn.factor:.1f} times as long as usual for the same work, and all others wait. {what}"

    def _link_words(self, turn: Turn[Link]) -> str:
        hosts = "".join(sorted({self._host_of(worker) for worker in turn.key.workers}))
        where = f", on {hosts.rstrip(', ')}" if hosts else ""
        if not turn.is_slow:
            return f"the exchange of {turn.key}{where} takes as long as others again"
        return (
            f"the exchange of {turn.key}{where} takes {turn.factor:.1f} times as long as others of its kind. Look at the links and "
            "network cards of these GPUs (`nvidia-smi nvlink -e`, the ports' counters)"
        )

    def _tell(self, key: object, workers: Sequence[int], turn: Turn[Any], words: str) -> None:
        kind = ("link" if isinstance(key, Link) else "worker") if turn.is_slow else "well"
        self._say(SlowEvent(kind, self._held_step, tuple(workers), turn.factor, words))

    def _say(self, event: SlowEvent) -> None:
        if self.is_global_zero:
            _log.warning("step %d: %s", event.step, event.words)
        self.observers.slow(event)

    def _host_of(self, worker: int) -> str:
        """``"hostname, "``; empty where nobody has said."""
        member = self.recovery.member
        if member is None or member.generation is None:
            return ""
        told = dict(member.generation.who_said()).get(worker) or {}
        return f"{told['host']}, " if told.get("host") else ""
