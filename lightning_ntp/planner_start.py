"""The planner at the start of a job: devices, memory and model size become replica shapes; `planner` decides after losses.

    sizes that the user gave, machine, model --> `plan_start` --> shapes, the reason, what else was possible
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_ntp.errors import ConfigError
from lightning_ntp.topology import Topology

Size = int | Literal["auto"]
Shape = tuple[int, int]
"""(fsdp size, tp degree) of a replica."""

MEMORY_SHARE = 0.7
"""Part of a device's memory that parameters, gradients and optimizer state may take; activations need the rest."""

SMALL_MODEL_SHARE = 0.25
"""FSDP alone gathers whole units; while all weights together take less than this part of a device, tp is not needed."""

STATE_BYTES_PER_PARAMETER = {"32-true": 16, "bf16-mixed": 16, "bf16-true": 8, "64-true": 32}
"""Parameter, gradient and two Adam moments, by precision. Also the list of supported precisions."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Sizes that the user gave; ``"auto"`` leaves one to the planner.

    Args:
        num_replicas, fsdp_size, tensor_parallel_size: of even replicas.
        replica_sizes: says it all: degrees, or (fsdp, tp) pairs; pairs once it is checked.
        min_workers: the job is not to run with fewer.
    """

    num_replicas: Size = "auto"
    fsdp_size: Size = "auto"
    tensor_parallel_size: Size = "auto"
    replica_sizes: tuple[Shape, ...] | None = None
    min_workers: int = 1

    def __post_init__(self) -> None:
        names = ("num_replicas", "fsdp_size", "tensor_parallel_size")
        for name in names:
            _check_size(name, getattr(self, name))
        if self.replica_sizes is not None:
            object.__setattr__(self, "replica_sizes", _as_shapes(self.replica_sizes))
            given = [name for name in names if getattr(self, name) != "auto"]
            if given:
                raise ConfigError(f"replica_sizes already says it all; remove {', '.join(given)} or replica_sizes")

    @property
    def nothing(self) -> bool:
        """Whether all is left to the planner."""
        return self.num_replicas == self.fsdp_size == self.tensor_parallel_size == "auto" and self.replica_sizes is None


@dataclass(frozen=True, slots=True)
class Machine:
    """What the job runs on.

    Args:
        num_nodes: machines.
        devices_per_node: devices of each that take part.
        memory_bytes: of one device; None where it is not known (CPU), and then everything fits.
        domain_sizes: devices of each scale-up domain, in the order of global ranks; the nodes unless given.
        domain: what a domain is.
    """

    num_nodes: int
    devices_per_node: int
    memory_bytes: int | None = None
    domain_sizes: tuple[int, ...] = ()
    domain: str = "node"

    @property
    def domains(self) -> tuple[int, ...]:
        """Devices of each scale-up domain."""
        return self.domain_sizes or (self.devices_per_node,) * self.num_nodes

    @property
    def num_devices(self) -> int:
        """Devices of the whole job."""
        return sum(self.domains)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a replica must hold.

    Args:
        state_bytes: parameters of the whole model, gradients and optimizer state of those that are trained.
        weight_bytes: the parameters alone.
        max_degree: query heads of the attention that has fewest: every role needs one. None where nobody knows.
    """

    state_bytes: int
    weight_bytes: int
    max_degree: int | None = None

    @classmethod
    def of(
        cls, num_trained: int, precision: str, *, weight_bytes: int, frozen_bytes: int = 0, max_degree: int | None = None
    ) -> ModelSize:
        """Sizes under Adam with a precision of `STATE_BYTES_PER_PARAMETER`; of frozen parameters only the weights count."""
        return cls(num_trained * STATE_BYTES_PER_PARAMETER[precision] + frozen_bytes, weight_bytes, max_degree)

    def can_have(self, degree: int) -> bool:
        """Whether `degree` roles get a query head each."""
        return self.max_degree is None or degree <= self.max_degree


@dataclass(frozen=True, slots=True)
class StartPlan:
    """The replica shapes of a job, and why.

    Args:
        shapes: (fsdp size, tp degree) per replica.
        reason: one sentence.
        alternatives: options that would choose otherwise, each with its shapes.
    """

    shapes: tuple[Shape, ...]
    reason: str
    alternatives: tuple[str, ...] = ()

    @property
    def topology(self) -> Topology:
        """The healthy job: workers in the order of their global ranks."""
        return Topology.from_shapes(self.shapes)


def plan_start(wanted: Wanted, machine: Machine, model: ModelSize) -> StartPlan:
    """Replica shapes for a job. Local; equal arguments give equal results.

    What was given is taken. Else: the smallest replica that still fits after one loss, and two of them wherever two fit at all;
    devices that are left over make some replicas larger, so 7 devices of 8 start ragged. A replica stays inside a scale-up domain
    (node or NVLink fabric) unless it needs more. Weights are cut over fsdp alone while the model is small, else over tp within a
    domain, over no more roles than the model has query heads.

    Raises:
        ConfigError: sizes that do not add up to the devices, a model that fits nowhere, or fewer devices than ``min_workers``.
    """
    if machine.num_devices < wanted.min_workers:
        raise ConfigError(
            f"RecoveryConfig(min_workers={wanted.min_workers}): the job has {machine.num_devices} devices; lower it or use more"
        )
    if wanted.replica_sizes is not None:
        return _given_shapes(wanted.replica_sizes, machine)
    return _automatic(machine, model) if wanted.nothing else _from_sizes(wanted, machine, model)


def _given_shapes(shapes: tuple[Shape, ...], machine: Machine) -> StartPlan:
    needed = sum(fsdp * tp for fsdp, tp in shapes)
    if needed != machine.num_devices:
        raise ConfigError(
            f"replica_sizes={_shown(shapes)} needs {needed} devices, the Trainer has {machine.num_devices} "
            f"({machine.num_nodes} node(s) x {machine.devices_per_node}); set Trainer(devices={needed}) or other sizes"
        )
    return StartPlan(shapes, "replica_sizes was given")


def _automatic(machine: Machine, model: ModelSize) -> StartPlan:
    if machine.num_devices == 1:
        return StartPlan(((1, 1),), "one device: plain training")
    fewest, domains = _fewest_devices(machine, model), machine.domains
    if len(domains) > 1 and (min(domains) < fewest or max(domains) <= fewest):
        shapes = _spanning(machine, fewest + 1, model)
        reason = f"a replica that survives a loss needs {fewest + 1} devices, more than a {machine.domain} has"
    else:
        counts, reason = _replicas_by_domain(machine, fewest)
        sizes = [part for size, count in zip(domains, counts, strict=True) for part in _split(size, count)]
        shapes = _shapes(sizes, machine, model)
    return StartPlan(shapes, f"{reason}; {_cut_words(shapes, machine, model)}", _alternatives(machine, model, shapes))


def _replicas_by_domain(machine: Machine, fewest: int) -> tuple[list[int], str]:
    """How many replicas each domain gets, and why."""
    domains = machine.domains
    reason = f"{fewest} device(s) hold the model, one more leaves room for a loss"
    counts = [max(1, size // (fewest + 1)) for size in domains]
    if counts == [1] and domains[0] // fewest > 1:
        counts = [2]
        reason = f"{fewest} device(s) hold the model and two replicas fit, though one of them has no room for a loss"
    elif counts == [1]:
        reason += "; a second replica does not fit"
    if len(domains) > 1:
        reason += f"; no replica leaves its {machine.domain}"
    # A domain that lacks a few devices is cut like a whole one while its replicas hold the model: they differ by a role, not in kind.
    most = max(counts)
    return [most if size // most >= fewest else count for size, count in zip(domains, counts, strict=True)], reason


def _cut_words(shapes: Sequence[Shape], machine: Machine, model: ModelSize) -> str:
    """Why tp, or why not."""
    if all(degree == 1 for _, degree in shapes):
        return "fsdp alone cuts its weights" + (", which one device can gather" if machine.memory_bytes else "")
    return f"its weights ({_gib(model.weight_bytes)}) are too large to be gathered whole, so tp cuts them"


def _alternatives(machine: Machine, model: ModelSize, chosen: tuple[Shape, ...]) -> tuple[str, ...]:
    """Options that lead to other shapes which hold the model, with those shapes."""
    fewest, half, widest = _fewest_devices(machine, model), len(chosen) // 2, min(machine.domains)
    options = [(f"num_replicas={num}", Wanted(num_replicas=num)) for num in (1, half, 2 * len(chosen)) if num]
    options += [
        (f"tensor_parallel_size={degree}", Wanted(tensor_parallel_size=degree))
        for degree in (2, widest)
        if degree > 1 and model.can_have(degree)
    ]
    found: dict[tuple[Shape, ...], str] = {tuple(chosen): ""}
    for words, option in options:
        try:
            shapes = _from_sizes(option, machine, model).shapes
        except ConfigError:
            continue
        if min(fsdp * tp for fsdp, tp in shapes) >= fewest:
            found.setdefault(shapes, f"{words}: {_described(shapes)}")
    return tuple(text for text in found.values() if text)


def _described(shapes: Sequence[Shape]) -> str:
    """``2 of 4x1, 1 of 3x1``: runs of equal (fsdp x tp) replicas."""
    runs = [(shape, len(list(run))) for shape, run in itertools.groupby(shapes)]
    return ", ".join(f"{count} of {fsdp}x{tp}" for (fsdp, tp), count in runs)


def _fewest_devices(machine: Machine, model: ModelSize) -> int:
    if machine.memory_bytes is None:
        return 1
    usable = max(1, int(machine.memory_bytes * MEMORY_SHARE))
    fewest = max(1, -(-model.state_bytes // usable))
    if fewest > machine.num_devices:
        raise ConfigError(
            f"the model takes {_gib(model.state_bytes)} with gradients and optimizer state, {machine.num_devices} device(s) "
            f"have {_gib(usable * machine.num_devices)} for it ({MEMORY_SHARE:.0%} of their memory); use more devices, "
            'precision="bf16-true" or a smaller model'
        )
    return fewest


def _shapes(sizes: Sequence[int], machine: Machine, model: ModelSize) -> tuple[Shape, ...]:
    """Shapes of replicas inside domains. Unequal ones that need tp use it alone: then their layouts nest."""
    shapes = tuple(_shape(size, machine, model) for size in sizes)
    if len(set(sizes)) > 1 and any(degree > 1 for _, degree in shapes) and model.can_have(max(sizes)):
        return tuple((1, size) for size in sizes)
    return shapes


def _spanning(machine: Machine, size: int, model: ModelSize) -> tuple[Shape, ...]:
    """Replicas of whole domains: tp inside a domain, fsdp over them."""
    domains = machine.domains
    each = -(-size // min(domains))
    _, tp = _shape(math.gcd(*domains), machine, model)
    ends = itertools.accumulate(_split(len(domains), max(1, len(domains) // each)), initial=0)
    return tuple((sum(domains[start:end]) // tp, tp) for start, end in itertools.pairwise(ends))


def _shape(size: int, machine: Machine, model: ModelSize) -> Shape:
    """(fsdp, tp) of a replica of `size` devices: the smallest tp degree that keeps the gathered weights small."""
    if machine.memory_bytes is None:
        return size, 1
    limit = machine.memory_bytes * SMALL_MODEL_SHARE
    degrees = [d for d in range(1, size + 1) if size % d == 0 and model.can_have(d)]
    degree = next((d for d in degrees if model.weight_bytes / d <= limit), degrees[-1])
    return size // degree, degree


def _from_sizes(wanted: Wanted, machine: Machine, model: ModelSize) -> StartPlan:
    total, tp, fsdp, num = machine.num_devices, wanted.tensor_parallel_size, wanted.fsdp_size, wanted.num_replicas
    if isinstance(tp, int) and fsdp == "auto" and total % tp and num in ("auto", -(-total // tp)):
        # A node that shows 7 of 8 GPUs: the last replica starts with a smaller degree.
        shapes = ((1, tp),) * (total // tp) + ((1, total % tp),)
        return StartPlan(
            shapes, f"{total} devices are no multiple of {tp}: the last replica starts with a smaller degree"
        )
    unit = (fsdp if isinstance(fsdp, int) else 1) * (tp if isinstance(tp, int) else 1)
    if num == "auto":
        num = total // unit if isinstance(tp, int) or isinstance(fsdp, int) else 1
    if num < 1 or total < num * unit or total % unit or (fsdp != "auto" and tp != "auto" and num * unit != total):
        raise ConfigError(
            f"num_replicas={wanted.num_replicas!r} x fsdp_size={fsdp!r} x tensor_parallel_size={tp!r} does not make the "
            f'{total} devices of the Trainer; change one of them, leave one at "auto", or give replica_sizes=[...]'
        )
    sizes = [units * unit for units in _split(total // unit, num)]
    if isinstance(tp, int):
        shapes = tuple((size // tp, tp) for size in sizes)
    elif isinstance(fsdp, int):
        shapes = tuple((fsdp, size // fsdp) for size in sizes)
    else:
        shapes = _shapes(sizes, machine, model)
    return StartPlan(shapes, "from the sizes that were given")


def _split(total: int, parts: int) -> list[int]:
    base, rest = divmod(total, parts)
    return [base + (index < rest) for index in range(parts)]


def _check_size(name: str, value: object) -> None:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f'{name} is a number of at least 1 or "auto", got {value!r}')


def _as_shapes(sizes: Sequence[Any]) -> tuple[Shape, ...]:
    if isinstance(sizes, str) or not sizes:
        raise ConfigError(f"replica_sizes is a list of degrees such as [4, 3], or of (fsdp, tp) pairs, got {sizes!r}")
    shapes = []
    for entry in sizes:
        pair = (1, entry) if isinstance(entry, int) else tuple(entry) if isinstance(entry, (tuple, list)) else ()
        if len(pair) != 2 or not all(isinstance(n, int) and n >= 1 for n in pair):
            raise ConfigError(
                f"replica_sizes={sizes!r}: each entry is a tp degree or an (fsdp, tp) pair of numbers from 1 on, got {entry!r}"
            )
        shapes.append((pair[0], pair[1]))
    return tuple(shapes)


def _shown(shapes: Sequence[Shape]) -> str:
    degrees_only = all(fsdp == 1 for fsdp, _ in shapes)
    return str([tp for _, tp in shapes] if degrees_only else list(shapes))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
