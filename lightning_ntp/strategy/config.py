"""Settings of the strategy, and how "auto" becomes replica shapes: a pure function of devices, memory and model size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_ntp.errors import ConfigError
from lightning_ntp.stragglers import SlowConfig
from lightning_ntp.strategy.coordinator import Patience

Size = int | Literal["auto"]
Shape = tuple[int, int]
"""(fsdp size, tp degree) of a replica."""

MEMORY_SHARE = 0.7
"""Part of a device's memory that parameters, gradients and optimizer state may take; activations need the rest."""

SMALL_MODEL_SHARE = 0.25
"""FSDP alone gathers whole units; while all weights together take less than this part of a device, tp is not needed."""

STATE_BYTES_PER_PARAMETER = {"32-true": 16, "bf16-mixed": 16, "bf16-true": 8, "64-true": 32}
"""Parameter, gradient and two Adam moments, by precision. Also the list of supported precisions."""


@dataclass(frozen=True)  # no slots: LightningCLI reads a default through vars()
class CheckpointConfig:
    """How checkpoints are written and read.

    Args:
        async_save: write beside training; the step waits only while its part is copied to host memory.
        full: one file in plain Lightning's form instead of a folder; the leader needs host memory for all of it.
        verify: read every file once before loading and compare checksums.
    """

    async_save: bool = True
    full: bool = False
    verify: bool = True


@dataclass(frozen=True)  # no slots: LightningCLI reads a default through vars()
class RecoveryConfig:
    """What happens when a worker is lost.

    Args:
        enabled: survivors go on without it; False ends the job with the first failure, as DDP does. So does the environment
            variable ``NTP_RECOVERY=off``.
        advise: after a loss only say what the recovery would do, then end the job as without it.
        batch_policy: ``"keep"``: the global batch stays after a loss, survivors run more. ``"shrink"``, which drops the lost
            share, is refused: it is not built.
        hang_seconds: a worker that makes no progress for this long counts as lost; more than the longest stretch of a run in
            which workers wait for one that computes or writes alone.
        min_workers: with fewer of them at work the fit is saved at the next step boundary and the job ends, with exit code 78.
        max_respawns: replacements that are started for lost workers over the whole job; they join the running fit.
            Hot spares do not count; with 0 there are none, as no process is ever started.
        integrity_every_n_steps: how often replicas compare the bits of their state, beside the comparison after each recovery;
            None: never. With three or more copies the one that differs is named and overwritten, with two the job ends.
        neighbours: what the other workers of a hurt replica do. ``"keep"``: they go on in place. ``"renew"``, for boards on which a
            lost GPU takes links and CUDA contexts of its neighbours with it: they end and are started again from fresh processes, which
            get the replica's state from another one at the smaller degree; the others go on meanwhile. Where no other replica is
            whole they go on in place.
        checkpoint: how the last resort is written.
        slow: what happens about slow GPUs.
    """

    enabled: bool = True
    advise: bool = False
    batch_policy: Literal["keep"] = "keep"
    hang_seconds: float = 600.0
    min_workers: int = 1
    max_respawns: int = 8
    integrity_every_n_steps: int | None = None
    neighbours: Literal["keep", "renew"] = "keep"
    checkpoint: CheckpointConfig = CheckpointConfig()
    slow: SlowConfig = SlowConfig()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        if self.batch_policy != "keep":
            raise ConfigError(
                f'RecoveryConfig: batch_policy is "keep", got {self.batch_policy!r}; the global batch cannot shrink with the job yet. '
                "To train on a smaller one, start again from the checkpoint with a smaller batch_size"
            )
        if not isinstance(self.checkpoint, CheckpointConfig):
            raise ConfigError(f"RecoveryConfig: checkpoint is a CheckpointConfig, got {type(self.checkpoint).__name__}")
        if not isinstance(self.slow, SlowConfig):
            raise ConfigError(f"RecoveryConfig: slow is a SlowConfig, got {type(self.slow).__name__}")
        if not self.hang_seconds > 0:
            raise ConfigError(f"RecoveryConfig: hang_seconds must be above 0, got {self.hang_seconds}")
        if self.min_workers < 1:
            raise ConfigError(f"RecoveryConfig: min_workers must be 1 or more, got {self.min_workers}")
        if self.neighbours not in ("keep", "renew"):
            raise ConfigError(f'RecoveryConfig: neighbours is "keep" or "renew", got {self.neighbours!r}')
        if self.max_respawns < 0:
            raise ConfigError(f"RecoveryConfig: max_respawns must be 0 or more, got {self.max_respawns}")
        if self.integrity_every_n_steps is not None and self.integrity_every_n_steps < 1:
            raise ConfigError(
                f"RecoveryConfig: integrity_every_n_steps is 1 or more, or None, got {self.integrity_every_n_steps}"
            )

    def is_on(self, environ: Mapping[str, str]) -> bool:
        """Whether the job recovers, with ``NTP_RECOVERY`` of the environment considered."""
        return self.enabled and environ.get("NTP_RECOVERY", "on") != "off"

    @property
    def patience(self) -> Patience:
        """When the supervisor takes a living worker for lost."""
        return Patience(join_seconds=self.hang_seconds, progress_floor_seconds=self.hang_seconds)

    @property
    def group_timeout_seconds(self) -> float:
        """Of collectives: below the patience, so that one that nobody completes fails before its workers are given up."""
        return 0.75 * self.hang_seconds


@dataclass(frozen=True, slots=True)
class StrategyConfig:
    """The keyword arguments of `NTPStrategy`, checked. See there."""

    num_replicas: Size = "auto"
    fsdp_size: Size = "auto"
    tensor_parallel_size: Size = "auto"
    replica_sizes: tuple[Shape, ...] | None = None
    plan: Any = "auto"
    batch_weight: str | Callable[[Any], float] = "samples"
    recovery: RecoveryConfig = RecoveryConfig()
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_replicas", "fsdp_size", "tensor_parallel_size"):
            _check_size(name, getattr(self, name))
        if self.replica_sizes is not None:
            object.__setattr__(self, "replica_sizes", _as_shapes(self.replica_sizes))
            given = [n for n in ("num_replicas", "fsdp_size", "tensor_parallel_size") if getattr(self, n) != "auto"]
            if given:
                raise ConfigError(f"replica_sizes already says it all; remove {', '.join(given)} or replica_sizes")
        if self.batch_weight not in ("samples", "tokens") and not callable(self.batch_weight):
            raise ConfigError(
                f'batch_weight is "samples", "tokens" or a function of the batch, got {self.batch_weight!r}'
            )
        if not isinstance(self.recovery, RecoveryConfig):
            raise ConfigError(f"recovery is a RecoveryConfig, got {type(self.recovery).__name__}")


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
        num_parameters: of the whole model.
        state_bytes: parameters, gradients and optimizer state of the whole model.
        weight_bytes: the parameters alone.
    """

    num_parameters: int
    state_bytes: int
    weight_bytes: int

    @classmethod
    def of(cls, num_parameters: int, weight_bytes: int, precision: str) -> ModelSize:
        """Sizes under Adam with a precision of `STATE_BYTES_PER_PARAMETER`."""
        return cls(num_parameters, num_parameters * STATE_BYTES_PER_PARAMETER[precision], weight_bytes)


@dataclass(frozen=True, slots=True)
class ShapeChoice:
    """The replica shapes of a job, and why.

    Args:
        shapes: (fsdp size, tp degree) per replica.
        reason: one sentence.
        alternatives: options that would choose otherwise, each with its shapes.
    """

    shapes: tuple[Shape, ...]
    reason: str
    alternatives: tuple[str, ...] = ()


def choose_shapes(config: StrategyConfig, machine: Machine, model: ModelSize) -> ShapeChoice:
    """Replica shapes for a job.

    Without sizes: the smallest replica that still fits after one loss, and two of them wherever two fit at all; devices that are
    left over make some replicas larger, so 7 devices of 8 start ragged. A replica stays inside a scale-up domain (node or NVLink
    fabric) unless it needs more. Weights are cut over fsdp alone while the model is small, else over tp within a domain.

    Raises:
        ConfigError: sizes that do not add up to the devices, a model that fits nowhere, or fewer devices than ``min_workers``.
    """
    if machine.num_devices < config.recovery.min_workers:
        raise ConfigError(
            f"RecoveryConfig(min_workers={config.recovery.min_workers}): the job has {machine.num_devices} devices; lower it or use more"
        )
    if config.replica_sizes is not None:
        return _given_shapes(config.replica_sizes, machine)
    if config.num_replicas == config.fsdp_size == config.tensor_parallel_size == "auto":
        return _automatic(machine, model)
    return _from_sizes(config, machine, model)


def _given_shapes(shapes: tuple[Shape, ...], machine: Machine) -> ShapeChoice:
    wanted = sum(fsdp * tp for fsdp, tp in shapes)
    if wanted != machine.num_devices:
        raise ConfigError(
            f"replica_sizes={_shown(shapes)} needs {wanted} devices, the Trainer has {machine.num_devices} "
            f"({machine.num_nodes} node(s) x {machine.devices_per_node}); set Trainer(devices={wanted}) or other sizes"
        )
    return ShapeChoice(shapes, "replica_sizes was given")


def _automatic(machine: Machine, model: ModelSize) -> ShapeChoice:
    if machine.num_devices == 1:
        return ShapeChoice(((1, 1),), "one device: plain training")
    fewest, domains = _fewest_devices(machine, model), machine.domains
    reason = f"{fewest} device(s) hold the model, one more leaves room for a loss"
    if len(domains) > 1 and (min(domains) < fewest or max(domains) <= fewest):
        shapes = _spanning(machine, fewest + 1, model)
        reason = f"a replica that survives a loss needs {fewest + 1} devices, more than a {machine.domain} has"
        return ShapeChoice(shapes, reason, _alternatives(machine, model, shapes))
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
    counts = [most if size // most >= fewest else count for size, count in zip(domains, counts, strict=True)]
    sizes = [part for size, count in zip(domains, counts, strict=True) for part in _split(size, count)]
    shapes = _shapes(sizes, machine, model)
    return ShapeChoice(shapes, reason, _alternatives(machine, model, shapes))


def _alternatives(machine: Machine, model: ModelSize, chosen: tuple[Shape, ...]) -> tuple[str, ...]:
    """Options that lead to other shapes which hold the model, with those shapes."""
    fewest, half, widest = _fewest_devices(machine, model), len(chosen) // 2, min(machine.domains)
    options = [(f"num_replicas={num}", StrategyConfig(num_replicas=num)) for num in (1, half, 2 * len(chosen)) if num]
    options += [
        (f"tensor_parallel_size={degree}", StrategyConfig(tensor_parallel_size=degree))
        for degree in (2, widest)
        if degree > 1
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
    if len(set(sizes)) > 1 and any(degree > 1 for _, degree in shapes):
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
    degree = next((d for d in range(1, size) if size % d == 0 and model.weight_bytes / d <= limit), size)
    return size // degree, degree


def _from_sizes(config: StrategyConfig, machine: Machine, model: ModelSize) -> ShapeChoice:
    total, tp, fsdp, num = machine.num_devices, config.tensor_parallel_size, config.fsdp_size, config.num_replicas
    if isinstance(tp, int) and fsdp == "auto" and total % tp and num in ("auto", -(-total // tp)):
        # A node that shows 7 of 8 GPUs: the last replica starts with a smaller degree.
        shapes = ((1, tp),) * (total // tp) + ((1, total % tp),)
        return ShapeChoice(
            shapes, f"{total} devices are no multiple of {tp}: the last replica starts with a smaller degree"
        )
    unit = (fsdp if isinstance(fsdp, int) else 1) * (tp if isinstance(tp, int) else 1)
    if num == "auto":
        num = total // unit if isinstance(tp, int) or isinstance(fsdp, int) else 1
    if num < 1 or total < num * unit or total % unit or (fsdp != "auto" and tp != "auto" and num * unit != total):
        raise ConfigError(
            f"num_replicas={config.num_replicas!r} x fsdp_size={fsdp!r} x tensor_parallel_size={tp!r} does not make the "
            f'{total} devices of the Trainer; change one of them, leave one at "auto", or give replica_sizes=[...]'
        )
    sizes = [units * unit for units in _split(total // unit, num)]
    if isinstance(tp, int):
        shapes = tuple((size // tp, tp) for size in sizes)
    elif isinstance(fsdp, int):
        shapes = tuple((fsdp, size // fsdp) for size in sizes)
    else:
        shapes = _shapes(sizes, machine, model)
    return ShapeChoice(shapes, "from the sizes that were given")


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
