"""What a job gives up when a worker has not the memory for its part of the state that moves: the replica that was hurt."""

from __future__ import annotations

from collections.abc import Collection

import torch

from lightning_ntp.errors import UnrecoverableError
from lightning_ntp.topology import Topology

_CPU_WORDS = "can't allocate memory"
"""What torch's CPU allocator says, in a plain RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed, on the device or on the host."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _CPU_WORDS in str(error)


def given_up(topology: Topology, hungry: Collection[int], gone: Collection[int], joined: Collection[int]) -> set[int]:
    """Workers that have to go so that nobody grows: newcomers, and what is left of every replica that has lost somebody.

    The other replicas hold the whole model in what they have. Where no replica would be left, those of the hungry ones go.

    Args:
        topology: that holds the state.
        hungry: workers whose memory did not suffice.
        gone: workers that are lost or about to leave.
        joined: workers that hold nothing yet.

    Raises:
        UnrecoverableError: no replica would be left either way.
    """
    hurt = [replica for replica in topology.replicas if set(replica.workers) & set(gone)]
    if len(hurt) in (0, len(topology.replicas)) and not set(joined) & set(hungry):
        hurt = [replica for replica in topology.replicas if set(replica.workers) & set(hungry)]
    if len(hurt) == len(topology.replicas):
        raise UnrecoverableError(
            f"workers {sorted(hungry)} ran out of memory while they took over the state of others, and no replica is left that could go "
            "on without them. Start again from the last checkpoint, on more devices or with a smaller model"
        )
    return set(joined) | {worker for replica in hurt for worker in replica.workers}
