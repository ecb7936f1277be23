"""When copies of the state are compared, and what follows if they differ; integrity.py says how.

    every N steps, after the update  --\\                      /-- equal:       nothing
                                        >-- check_integrity --<--- a majority:  its bits are put back, and it is told
    after every recovery             --/                      \\-- no majority: it is told, and the job ends

Whatever is found, the steps since the check before have summed gradients of the damaged copy into everybody's: that is told as well.
"""

from __future__ import annotations

import logging
import time

import torch

from lightning_ntp.errors import ConfigError, SilentCorruptionError
from lightning_ntp.strategy.base import StrategyBase
from lightning_ntp.strategy.events import DamageEvent
from lightning_ntp.strategy.integrity import check_integrity, why_not_comparable

_log = logging.getLogger(__name__)


class Inspection(StrategyBase):
    """The strategy's look at its own state."""

    _inspected_step = 0

    def check_inspectable(self) -> None:
        """Before the first step: whether copies can be compared at all. Local.

        Raises:
            ConfigError: they cannot, and are to be.
        """
        why = why_not_comparable(self.state_holders, self.root_device)
        if why and self.config.recovery.integrity_every_n_steps is not None:
            raise ConfigError(f"integrity_every_n_steps needs copies that have the same bits: {why}. Leave one of the two out")
        if why and self.recovery.member is not None and self.is_global_zero:
            _log.warning("copies of the state are not compared after a recovery: %s", why)

    def inspect_if_due(self) -> None:
        """The check of every N steps; none where there is one replica only. Collective over all workers with a role."""
        every = self.config.recovery.integrity_every_n_steps
        if every is not None and self._held_step % every == 0 and len(self.topology.replicas) > 1:
            self.recovery.all_or_nobody("integrity", self.inspect)

    def inspect(self) -> None:
        """Compares all copies of parameters and of what optimizers keep, and puts right what a majority can. All workers with a role.

        Raises:
            SilentCorruptionError: two holders differ, or more without a majority; on all workers alike.
        """
        if len(self.topology.workers) < 2 or why_not_comparable(self.state_holders, self.root_device):
            return
        with torch.inference_mode(False):
            report = check_integrity(self.sharded, self.state_holders, repair=True)
        since, self._inspected_step = self._inspected_step, self._held_step
        if not report.damages:
            return
        event = DamageEvent(
            step=self._held_step,
            since_step=since,
            workers=report.culprits,
            places=tuple(map(str, report.damages)),
            num_repaired=report.num_repaired,
            generation=self.recovery.generation,
            seconds=time.monotonic(),
        )
        self.observers.damage(event)
        words = in_words(event)
        if self.is_global_zero:
            self._tell_of_damage(event, words)
        if report.num_open:
            raise SilentCorruptionError("\n".join(words))

    def _tell_of_damage(self, event: DamageEvent, words: list[str]) -> None:
        if self.recovery.member is None:
            _log.warning("%s", "\n".join(words))
        else:
            self.recovery.member.tell("damage", words, step=event.step, workers=event.workers)


def in_words(event: DamageEvent) -> list[str]:
    """Lines for people."""
    lines = [f"after step {event.step} copies of the same state differ (looked at before: after step {event.since_step}):"]
    lines += [f"  {place}" for place in event.shown]
    if event.num_repaired:
        lines.append(f"  {event.num_repaired} of {len(event.places)} places got the bits of the majority back")
    lines.append(
        f"  steps after {event.since_step} may have used the damaged copy: a checkpoint of step {event.since_step} or before is free of it"
    )
    if event.num_repaired < len(event.places):
        lines.append("  to be able to tell who is right, run three replicas or more; test the GPUs of the workers named here")
    return lines
