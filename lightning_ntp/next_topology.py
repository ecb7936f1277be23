"""Who plays what after workers were lost or have come: a pure function of the old topology, so that all members find the same."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_ntp.errors import ConfigError, UnrecoverableError
from lightning_ntp.topology import Topology


def next_topology(old: Topology, lost: Iterable[int], joined: Iterable[int]) -> Topology:
    """The topology to go on with: each hurt replica keeps its live workers at a smaller degree; newcomers fill hurt replicas up.

    Args:
        lost: workers or spares that are gone.
        joined: workers that have come; those for whom there is no role become spares.

    Raises:
        UnrecoverableError: nobody would be left.
    """
    topology = old
    for worker in sorted(lost):
        try:
            topology = topology.without(worker)
        except ConfigError as error:
            raise UnrecoverableError(f"after the loss of workers {sorted(lost)} no replica is left") from error
    for worker in sorted(joined):
        topology = Topology(topology.num_roles, topology.replicas, topology.loss_order, (*topology.spares, worker))
    return _with_spares_at_work(topology)


def _with_spares_at_work(topology: Topology) -> Topology:
    """Spares take lost roles over, in the replica of the smallest degree first."""
    while True:
        hurt = [
            (replica.degree, index)
            for index, replica in enumerate(topology.replicas)
            if replica.degree < topology.num_roles and replica.fsdp_size <= len(topology.spares)
        ]
        if not hurt:
            return topology
        _, index = min(hurt)
        topology = topology.with_workers(index, sorted(topology.spares)[: topology.replicas[index].fsdp_size])
