"""How many bytes of state a change of topology moves, from integers only: fast enough for 32,768 workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lightning_ntp.cost_model import CostModel
from lightning_ntp.layout import NestedLayouts, nested_layouts, subtract, total_length
from lightning_ntp.topology import Topology

_MOVED_BYTES = 12
"""Per parameter that changes its holder: fp32 master weight and two Adam moments."""


def moved_bytes(old: Topology, new: Topology, cost: CostModel) -> int:
    """Bytes of parameters and optimizer state that workers of `new` must receive from others."""
    moves = Counter(_moves(old, new))
    before, after = (_dims(cost, topology) for topology in (old, new))
    total = 0
    for (held, wanted), count in moves.items():
        params = 0
        for (params_each, layouts), (_, new_layouts) in zip(before, after, strict=True):
            have = layouts[held[0]].of(held[1]) if held is not None else ()
            params += params_each * total_length(subtract(new_layouts[wanted[0]].of(wanted[1]), have))
        total += count * params * _MOVED_BYTES // (wanted[2] * cost.num_stages)
    return total


def _moves(old: Topology, new: Topology) -> Iterable[tuple[tuple[int, int] | None, tuple[int, int, int]]]:
    """(degree, role) that each worker held, or None, and (degree, role, fsdp size) that it shall hold; unchanged ones left out."""
    new_roles = {replica.degree: new.roles(replica.degree) for replica in new.replicas}
    old_roles = {replica.degree: old.roles(replica.degree) for replica in old.replicas}
    unchanged = set(old.replicas)
    stays = old.loss_order == new.loss_order or all(replica.degree == old.num_roles for replica in old.replicas)
    held = {}
    for replica in old.replicas:
        for f, row in enumerate(replica.grid):
            for role, worker in zip(old_roles[replica.degree], row, strict=True):
                held[worker] = (replica.degree, role, replica.fsdp_size, f)
    for replica in new.replicas:
        if stays and replica in unchanged:
            continue
        for f, row in enumerate(replica.grid):
            for role, worker in zip(new_roles[replica.degree], row, strict=True):
                at = held.get(worker)
                same_cut = at is not None and at[2:] == (replica.fsdp_size, f)
                yield (at[:2] if at is not None and same_cut else None), (replica.degree, role, replica.fsdp_size)


def _dims(cost: CostModel, topology: Topology) -> list[tuple[int, NestedLayouts]]:
    """(parameters per granule over all layers, layouts) of the dims that tp cuts."""
    shape = cost.model
    order = topology.loss_order[: topology.num_roles - topology.sync_degree]
    heads = nested_layouts(shape.num_heads, topology.num_roles, order)
    return [
        (shape.num_layers * shape.query_head_params, heads),
        (shape.num_layers * shape.kv_head_params, heads.grouped(shape.num_heads // shape.num_kv_heads)),
        (shape.num_layers * shape.ffn_column_params, nested_layouts(shape.ffn_size, topology.num_roles, order)),
        (2 * shape.hidden_size, nested_layouts(shape.vocab_size, topology.num_roles, order)),
    ]
