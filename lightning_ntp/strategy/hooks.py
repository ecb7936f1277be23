"""Methods of `ReshardOnGPULoss` that are there for users, and who calls them: the ledger's observer, once the ledger has been told."""

from __future__ import annotations

from typing import Any

from lightning_ntp.strategy.events import CommitEvent, DamageEvent, LossEvent, RecoveryEvent, SlowEvent
from lightning_ntp.strategy.ledger_observer import LedgerObserver


class UserHooks:
    """What users may override; see `ReshardOnGPULoss`."""

    def on_gpu_lost(self, event: LossEvent) -> None:
        """For users: workers are gone, and the new members are known."""

    def on_reshard(self, event: RecoveryEvent) -> None:
        """For users: state has moved to another topology."""

    def on_recovered(self, event: RecoveryEvent) -> None:
        """For users: training goes on after a loss."""

    def on_rejoined(self, event: RecoveryEvent) -> None:
        """For users: workers have been taken in."""

    def on_damage(self, event: DamageEvent) -> None:
        """For users: a comparison of replicas has found a flipped bit."""

    def on_slow(self, event: SlowEvent) -> None:
        """For users: a worker or a link is slow, or well again, or batch shares follow."""


class JobObserver(LedgerObserver):
    """Tells the callback after the ledger has been told."""

    callback: Any = None

    def on_commit(self, event: CommitEvent) -> None:
        super().on_commit(event)
        self.callback._on_commit(event)

    def on_loss(self, event: LossEvent) -> None:
        super().on_loss(event)
        self.callback.on_gpu_lost(event)

    def on_recovery(self, event: RecoveryEvent) -> None:
        super().on_recovery(event)
        self.callback._on_recovery(event)

    def on_damage(self, event: DamageEvent) -> None:
        super().on_damage(event)
        self.callback._on_damage(event)

    def on_slow(self, event: SlowEvent) -> None:
        super().on_slow(event)
        self.callback._on_slow(event)
