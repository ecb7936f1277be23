"""One vote in the store: ballots are counted by the server, and whoever casts the last one writes the decision.

The decision is written once, by compare-and-set: an abort that comes first stands against a commit, and the other way round.
"""

from __future__ import annotations

import torch.distributed as dist

from lightning_ntp.strategy import rendezvous
from lightning_ntp.strategy.generation import Generation, Outcome

MISMATCH = "mismatch"
"""Outcome of a vote in which members cast different ballots."""


class Vote:
    """The vote under `key`, as one member sees it through its connection."""

    def __init__(self, store: dist.Store, key: str) -> None:
        self._store, self._key = store, key

    def cast(self, ballot: Outcome, num_members: int) -> bool:
        """Casts this member's ballot; whether it was the last one, so that this member decides."""
        if ballot is Outcome.SKIP:
            self._store.add(f"{self._key}/skips", 1)
        return self._store.add(self._key, 1) >= num_members

    def decide(self, generation: Generation) -> None:
        """Writes what the ballots say, and whether somebody waits to be taken in or wants to leave."""
        num_skips = self._store.add(f"{self._key}/skips", 0)
        outcome = {0: str(Outcome.COMMIT), generation.num_members: str(Outcome.SKIP)}.get(num_skips, MISMATCH)
        self._write(self._store, outcome, self._store.check([f"regroup/{generation.number}"]))

    def abort(self, store: dist.Store) -> None:
        """Writes an abort over another connection, for the thread that has heard of a loss."""
        self._write(store, str(Outcome.ABORT), False)

    def decision(self) -> tuple[str, bool]:
        """Waits for the outcome, and whether all shall re-form after acting on it."""
        decision = rendezvous.get_json(self._store, f"{self._key}/decision")
        return decision["outcome"], bool(decision["regroup"])

    def forget(self) -> None:
        """Deletes the vote once nobody reads it any more."""
        for key in (self._key, f"{self._key}/skips", f"{self._key}/decision"):
            self._store.delete_key(key)

    def _write(self, store: dist.Store, outcome: str, regroup: bool) -> None:
        store.compare_set(f"{self._key}/decision", "", rendezvous.to_json({"outcome": outcome, "regroup": regroup}))
