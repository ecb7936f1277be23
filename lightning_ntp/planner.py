"""Which shape each hurt replica goes on with, who is parked, who runs how many samples, and why.

Candidates for a hurt replica: fewer roles, fewer data rows, both, a new (fsdp, tp) shape over all its live workers, or none at
all. Hurt rows of different replicas may be exchanged so that fewer replicas are hurt (packing). Each complete choice is timed
by a cost model; dropping the hurt replicas and shrinking them in place are always among the choices, so that a placement is
never worse than these by its own model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_ntp.cost_model import GpuSpec
from lightning_ntp.errors import ConfigError, UnrecoverableError
from lightning_ntp.planner_rows import Group, by_domain, fill_from_spares, live_groups, pack_hurt_rows
from lightning_ntp.reliability import require_positive
from lightning_ntp.topology import Replica, Topology

_REFACTOR_GAIN = 1.02
"""New shapes move nearly all of a replica's state: with them the step must be this much faster than without."""


class Costs(Protocol):
    """What a planner must know: `cost_model.CostModel` from a transformer's sizes, `plan_cost.PlanCost` from a cut model."""

    @property
    def gpu(self) -> GpuSpec: ...
    @property
    def domain_size(self) -> int: ...
    def sample_seconds(self, degree: int, fsdp_size: int = 1, speed: float = 1.0) -> float: ...
    def sync_seconds(self, sync_degree: int, fsdp_size: int = 1, num_replicas: int = 2) -> float: ...
    def power_to_keep_pace(self, degree: int, healthy_degree: int) -> float | None: ...
    def memory_bytes(self, degree: int, fsdp_size: int = 1, micro_batch: int = 1) -> float: ...
    def fits(self, degree: int, fsdp_size: int = 1, micro_batch: int = 1) -> bool: ...
    def moved_bytes(self, old: Topology, new: Topology) -> int: ...


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """What one replica does from now on.

    Args:
        action: "keep", "drop role", "drop row", "refactor" or "fill" (spares replace what was lost).
        samples: its share of the global batch.
        sample_seconds: one sample on one of its data rows.
        power: power at which it would keep pace with a healthy replica; None where the rack cannot give it.
    """

    action: str
    fsdp_size: int
    degree: int
    samples: int
    sample_seconds: float
    power: float | None
    memory_bytes: float

    @property
    def shape_words(self) -> str:
        """Action, shape, memory and power advice."""
        pace = "cannot keep pace by power" if self.power is None else f"{self.power:.2f}x power would keep pace"
        advice = "" if self.power == 1.0 else f", {pace}"
        return f"{self.action}: {self.fsdp_size}x{self.degree}, {self.memory_bytes / 1e9:.1f} GB a GPU{advice}"


@dataclass(frozen=True)
class Placement:
    """The planner's choice: a topology, one `ReplicaPlan` for each of its replicas, and what it costs."""

    topology: Topology
    replicas: tuple[ReplicaPlan, ...]
    packed: bool
    dropped_replicas: int
    step_seconds: float
    naive_step_seconds: float
    moved_bytes: int

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of the global batch by replica."""
        return tuple(plan.samples for plan in self.replicas)

    def explain(self) -> str:
        """The choice in words, one line per kind of replica."""
        kinds: dict[str, list[int]] = {}
        for plan in self.replicas:
            kinds.setdefault(plan.shape_words, []).append(plan.samples)
        lines = []
        for words, samples in kinds.items():
            low, high = min(samples), max(samples)
            lines.append(f"{len(samples)} x {words}, {low if low == high else f'{low} to {high}'} samples each")
        if self.dropped_replicas:
            lines.append(f"{self.dropped_replicas} replica(s) dropped: no shape of their live workers fits or helps")
        if self.packed:
            lines.append("hurt rows are packed into as few replicas as possible")
        if self.topology.spares:
            lines.append(f"{len(self.topology.spares)} worker(s) parked as spares")
        naive, chosen = self.naive_step_seconds, self.step_seconds
        saved = f"{naive / chosen - 1:.1%} faster than" if naive > chosen * 1.0005 else "as fast as"
        lines.append(
            f"step {chosen:.4g} s, {saved} the better of dropping and shrinking in place ({naive:.4g} s); "
            f"{self.moved_bytes / 1e9:.3g} GB of state move"
        )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Shape:
    action: str
    fsdp_size: int
    degree: int


@dataclass(frozen=True)
class _Choice:
    """A shape, or None (dropped), for each group of rows; `spares` are the workers that belong to no group."""

    groups: Sequence[Group]
    shapes: Sequence[_Shape | None]
    spares: Sequence[int]
    packed: bool = False

    @property
    def kept(self) -> list[_Shape]:
        return [shape for shape in self.shapes if shape is not None]

    @property
    def hurdle(self) -> float:
        """Factor on the step time that stands for the cost of the change."""
        return _REFACTOR_GAIN if any(shape.action == "refactor" for shape in self.kept) else 1.0


@dataclass(frozen=True)
class _Job:
    topology: Topology
    cost: Costs
    global_batch: int
    micro_batch: int
    boost: bool

    @property
    def widest(self) -> int:
        """The largest degree at work: where roles are kept free for other shapes, less than ``num_roles``."""
        return max(replica.degree for replica in self.topology.replicas)

    def timed(self, choice: _Choice) -> tuple[tuple[ReplicaPlan, ...], float]:
        """Plans of the replicas of a choice, and seconds of its step."""
        shapes, cost = choice.kept, self.cost
        known: dict[_Shape, tuple[float, float | None, float]] = {}
        for shape in set(shapes):
            power = cost.power_to_keep_pace(shape.degree, self.widest)
            speed = cost.gpu.speed_at(power or cost.gpu.max_power) if self.boost else 1.0
            memory = cost.memory_bytes(shape.degree, shape.fsdp_size, self.micro_batch)
            known[shape] = (cost.sample_seconds(shape.degree, shape.fsdp_size, speed), power, memory)
        rates = [(shape.fsdp_size, known[shape][0]) for shape in shapes]
        shares = split_batch(rates, self.global_batch)
        plans = tuple(
            ReplicaPlan(shape.action, shape.fsdp_size, shape.degree, share, *known[shape])
            for shape, share in zip(shapes, shares, strict=True)
        )
        busy = max(-(-share // rows) * each for share, (rows, each) in zip(shares, rates, strict=True))
        if len(shapes) == 1:
            return plans, busy
        degree, fsdp_size = min(s.degree for s in shapes), max(s.fsdp_size for s in shapes)
        # the sync runs beside the last micro-batch's backward, two thirds of it; what is longer shows
        sync = cost.sync_seconds(degree, fsdp_size, len(shapes))
        return plans, busy + max(0.0, sync - 2 / 3 * min(each for _, each in rates))

    def shape(self, group: Group, refactor: bool) -> _Shape | None:
        """The fastest shape over the group's live workers that fits; None when none does."""
        alive, cost = [len(row.plays) for row in group.rows], self.cost
        shapes = []
        for degree in sorted(set(alive) - {0}, reverse=True):
            rows = sum(count >= degree for count in alive)
            action = "drop row" if degree == group.degree else "drop role"
            if rows == group.fsdp_size and degree == group.degree:
                action = "fill" if group.refilled else "keep"
            shapes.append(_Shape(action, rows, degree))
        if refactor and group.hurt:
            inside = [len(workers) for workers in by_domain(group.workers, cost.domain_size)]
            sizes = {d: sum(count // d for count in inside) for d in range(1, self.topology.num_roles + 1)}
            shapes += [_Shape("refactor", rows, d) for d, rows in sizes.items() if rows]

        def rate(shape: _Shape) -> float:
            return shape.fsdp_size / cost.sample_seconds(shape.degree, shape.fsdp_size)

        return max((s for s in shapes if cost.fits(s.degree, s.fsdp_size, self.micro_batch)), key=rate, default=None)


def plan_placement(
    topology: Topology,
    cost: Costs,
    global_batch: int,
    lost: Collection[int] = (),
    *,
    micro_batch: int = 1,
    boost: bool = False,
    refactor: bool = True,
) -> Placement:
    """The best placement after `lost` workers are gone; the same on every worker that calls it with the same arguments. Local.

    Args:
        global_batch: samples of one optimizer step; they stay what they are.
        micro_batch: most samples that a data row holds at a time; sets the memory of activations.
        boost: count on the power that the plans advise.
        refactor: allow new (fsdp, tp) shapes, which move nearly all state of a hurt replica.

    Raises:
        ConfigError: a lost worker that is not in the topology, or sizes below 1.
        UnrecoverableError: nothing that is left can hold the model.
    """
    require_positive(global_batch=global_batch, micro_batch=micro_batch)
    gone = set(lost)
    unknown = gone - set(topology.workers) - set(topology.spares)
    if unknown:
        raise ConfigError(f"lost workers {sorted(unknown)} are not in the topology of {len(topology.workers)} workers")
    job = _Job(topology, cost, global_batch, micro_batch, boost)
    naive, others = _choices(job, gone, refactor)
    timed = [(job.timed(choice), choice) for choice in naive + others]
    if not timed:
        healthy = max(topology.replicas, key=lambda replica: len(replica.workers))
        needed = cost.memory_bytes(healthy.degree, healthy.fsdp_size, micro_batch)
        raise UnrecoverableError(
            f"with {len(gone)} workers lost no replica can hold the model: a {healthy.fsdp_size}x{healthy.degree} replica needs "
            f"{needed / 1e9:.0f} GB on each GPU of {cost.gpu.memory_bytes / 1e9:.0f} GB (less a tenth); larger replicas, a smaller "
            "micro-batch or recompute=True would help"
        )
    # ties go to the earlier choice, which moves less
    (plans, step), best = min(timed, key=lambda entry: round(entry[0][1] * entry[1].hurdle, 12))
    reference = min((entry[0][1] for entry in timed[: len(naive)]), default=step)
    new = _realised(job, best, _loss_order(topology, gone))
    moved = cost.moved_bytes(topology, new)
    return Placement(new, plans, best.packed, len(best.groups) - len(plans), step, reference, moved)


def further_losses(
    placement: Placement,
    cost: Costs,
    global_batch: int,
    count: int,
    *,
    micro_batch: int = 1,
    boost: bool = False,
    refactor: bool = True,
) -> list[Placement]:
    """What up to `count` further losses cost, one after the other, each in the fullest replica; shorter when nothing is left."""
    found = []
    for _ in range(count):
        topology = placement.topology
        fullest = max(topology.replicas, key=lambda replica: len(replica.workers))
        if len(topology.workers) == 1:
            break
        try:
            placement = plan_placement(
                topology,
                cost,
                global_batch,
                fullest.workers[-1:],
                micro_batch=micro_batch,
                boost=boost,
                refactor=refactor,
            )
        except UnrecoverableError:
            break
        found.append(placement)
    return found


def split_batch(rates: Sequence[tuple[int, float]], global_batch: int) -> tuple[int, ...]:
    """Whole samples by replica so that the slowest is done soonest.

    Args:
        rates: ``(data rows, seconds per sample of one row)`` of each replica.

    Returns:
        Shares that sum to `global_batch`. A row runs ``ceil(share / rows)`` samples.
    """
    kinds = Counter(rates)

    def within(seconds: float) -> int:
        return sum(count * rows * int(seconds / each + 1e-9) for (rows, each), count in kinds.items())

    low, high = 0.0, max(each for _, each in kinds) * global_batch
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if within(middle) >= global_batch else (middle, high)
    shares = [rows * int(high / each + 1e-9) for rows, each in rates]
    excess = sum(shares) - global_batch
    # whoever finishes last gives back first: its rows are then idle the longest
    for index in sorted(range(len(rates)), key=lambda i: (-shares[i] / rates[i][0] * rates[i][1], i)):
        given = min(excess, rates[index][0], shares[index])
        shares[index] -= given
        excess -= given
    for index, share in enumerate(shares):
        given = min(excess, share)
        shares[index] -= given
        excess -= given
    return tuple(shares)


def _choices(job: _Job, gone: set[int], refactor: bool) -> tuple[list[_Choice], list[_Choice]]:
    """The naive choices (shrink in place, drop what is hurt) and the others, without those that leave no replica."""
    topology, domain_size = job.topology, job.cost.domain_size
    spares = [worker for worker in topology.spares if worker not in gone]
    groups = live_groups(topology, gone)
    in_place = [job.shape(group, refactor=False) for group in groups]
    dropped = [None if group.hurt else shape for group, shape in zip(groups, in_place, strict=True)]
    naive = [_Choice(groups, in_place, spares), _Choice(groups, dropped, spares)]
    filled, rest = fill_from_spares(groups, spares, domain_size)
    arranged = [filled]
    if topology.num_roles * max(replica.fsdp_size for replica in topology.replicas) > domain_size:
        arranged.append(pack_hurt_rows(filled))
    others = [
        _Choice(rows, [job.shape(group, new_shapes) for group in rows], rest, rows != filled)
        for new_shapes in ((False, True) if refactor else (False,))
        for rows in arranged
    ]
    return [c for c in naive if c.kept], [c for c in others if c.kept]


def _loss_order(topology: Topology, gone: set[int]) -> tuple[int, ...]:
    """While all replicas were complete: the roles lost most often come first, so that few workers change their role."""
    if any(replica.degree < topology.num_roles for replica in topology.replicas):
        return topology.loss_order
    counts = Counter(
        role
        for replica in topology.replicas
        if not gone.issuperset(replica.workers)
        for row in replica.grid
        for role, worker in enumerate(row)
        if worker in gone
    )
    front = sorted(counts, key=lambda role: (-counts[role], role))
    return (*front, *(role for role in topology.loss_order if role not in counts))[: topology.num_roles - 1]


def _realised(job: _Job, choice: _Choice, order: tuple[int, ...]) -> Topology:
    """The topology of a choice: who plays which role, who is parked."""
    num_roles = job.topology.num_roles
    replicas, parked = [], list(choice.spares)
    for group, shape in zip(choice.groups, choice.shapes, strict=True):
        if shape is None:
            parked += group.workers
            continue
        lacking = set(order[: num_roles - shape.degree])
        roles = [role for role in range(num_roles) if role not in lacking]
        grid, left = _grid(group, shape, roles, job.cost.domain_size)
        replicas.append(Replica(grid))
        parked += left
    return Topology(num_roles, tuple(replicas), order, tuple(sorted(parked)))


def _grid(
    group: Group, shape: _Shape, roles: Sequence[int], domain_size: int
) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
    """A group at its new shape, its rows within a domain each, and the workers that it parks."""
    if shape.action == "refactor":
        size = shape.degree
        cuts = [(mates, len(mates) // size * size) for mates in by_domain(group.workers, domain_size)]
        grid = tuple(tuple(mates[at : at + size]) for mates, end in cuts for at in range(0, end, size))
        return grid, [worker for mates, end in cuts for worker in mates[end:]]
    rows: list[tuple[int, ...]] = []
    parked: list[int] = []
    for row in group.rows:
        if len(row.plays) < shape.degree or len(rows) == shape.fsdp_size:
            parked += row.workers
            continue
        plays = dict(row.plays)
        free = [worker for role, worker in row.plays if role not in roles]
        rows.append(tuple(plays[role] if role in plays else free.pop(0) for role in roles))
        parked += free
    return tuple(rows), parked
