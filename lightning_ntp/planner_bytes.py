"""How many bytes of state a change of topology moves, from integers only: fast enough for 32,768 workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_ntp.layout import NestedLayouts, nested_layouts, subtract, total_length
from lightning_ntp.topology import Replica, Topology

if TYPE_CHECKING:
    from lightning_ntp.cost_model import ModelShape

_MOVED_BYTES = 12
"""Per parameter that changes its holder: fp32 master weight and two Adam moments."""


@dataclass(frozen=True, slots=True)
class _Seat:
    degree: int
    role: int
    fsdp_size: int
    coordinate: int

    def hidden(self, size: int) -> tuple[int, int]:
        """The run of hidden elements that fsdp leaves to this seat."""
        chunk = -(-size // self.fsdp_size)
        return min(self.coordinate * chunk, size), min((self.coordinate + 1) * chunk, size)


def moved_bytes(old: Topology, new: Topology, shape: ModelShape) -> int:
    """Bytes of parameters and optimizer state that workers of `new` must receive from others.

    What `reshard.plan_reshard` would move, norms and biases left out; exact where fsdp sizes divide the hidden size, which fsdp
    cuts (tp cuts the other dim of each matrix).
    """
    before, after, hidden = _dims(shape, old), _dims(shape, new), shape.hidden_size
    total = 0
    for (held, wanted), count in Counter(_moves(old, new)).items():
        start, stop = wanted.hidden(hidden)
        params = 0
        for (per_granule, layouts), (_, new_layouts) in zip(before, after, strict=True):
            spans = new_layouts[wanted.degree].of(wanted.role)
            params += per_granule * total_length(spans) * (stop - start)
            if held is not None:
                kept = total_length(spans) - total_length(subtract(spans, layouts[held.degree].of(held.role)))
                low, high = held.hidden(hidden)
                params -= per_granule * kept * max(0, min(stop, high) - max(start, low))
        total += count * params * _MOVED_BYTES
    return total


def _moves(old: Topology, new: Topology) -> Iterator[tuple[_Seat | None, _Seat]]:
    """Where each worker of `new` sat, or None, and where it shall sit; replicas that stay as they are left out."""
    unchanged = set(old.replicas)
    stays = old.loss_order == new.loss_order or all(replica.degree == old.num_roles for replica in old.replicas)
    held = {worker: seat for replica in old.replicas for worker, seat in _seats(old, replica)}
    for replica in new.replicas:
        if not (stays and replica in unchanged):
            for worker, seat in _seats(new, replica):
                yield held.get(worker), seat


def _seats(topology: Topology, replica: Replica) -> Iterator[tuple[int, _Seat]]:
    roles = topology.roles(replica.degree)
    for coordinate, row in enumerate(replica.grid):
        for role, worker in zip(roles, row, strict=True):
            yield worker, _Seat(replica.degree, role, replica.fsdp_size, coordinate)


def _dims(shape: ModelShape, topology: Topology) -> list[tuple[int, NestedLayouts]]:
    """(parameters per granule and hidden element over all layers, layouts) of the dims that tp cuts."""
    layers = shape.num_layers
    order = topology.loss_order[: topology.num_roles - topology.sync_degree]
    heads = nested_layouts(shape.num_heads, topology.num_roles, order)
    return [
        (layers * (shape.query_head_params // shape.hidden_size), heads),
        (layers * (shape.kv_head_params // shape.hidden_size), heads.grouped(shape.num_heads // shape.num_kv_heads)),
        (layers * (shape.ffn_column_params // shape.hidden_size), nested_layouts(shape.ffn_size, topology.num_roles, order)),
        (2, nested_layouts(shape.vocab_size, topology.num_roles, order)),
    ]
