"""What replica shapes cost for one real model, from the very plan that cuts it: what the strategy plans with.

`cost_model.CostModel` knows a transformer by seven sizes and plans clusters; this one knows every parameter of a model of any
kind, so that bytes are exact and a degree that the model's layouts do not have is never chosen. Times are ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_ntp.cost_model import GpuSpec
from lightning_ntp.model_spec import Coordinates, ParamSpec
from lightning_ntp.reliability import require_positive
from lightning_ntp.reshard import plan_reshard
from lightning_ntp.topology import Topology

ParamsFor = Callable[[Sequence[int]], Sequence[ParamSpec]]
"""Loss order -> how each parameter is cut under it."""

_FLOPS_PER_PARAMETER = 6
"""Of one token: a multiply and an add in forward, twice that in backward."""
_GRADIENT_BYTES = 4


@dataclass(frozen=True)
class PlanCost:
    """Times and memory of a replica of some shape; the same figures as `CostModel`, for `planner.plan_placement`.

    Args:
        params_for: the model's parameters as they are cut under a loss order.
        topology: whose roles and loss order the figures are for.
        gpu: speeds and memory of one device.
        state_bytes: per element: parameter, gradient and optimizer state.
        moved_bytes_per_element: per element that changes its holder: all of the above but the gradient.
        tokens_per_sample: sets compute against traffic; the choice between shapes hardly depends on it.
        domain_size: devices that a fast link joins; wider fsdp traffic goes over the network.
    """

    params_for: ParamsFor
    topology: Topology
    gpu: GpuSpec
    state_bytes: int = 16
    moved_bytes_per_element: int = 12
    tokens_per_sample: int = 2048
    domain_size: int = 8

    def __post_init__(self) -> None:
        require_positive(
            state_bytes=self.state_bytes,
            moved_bytes_per_element=self.moved_bytes_per_element,
            tokens_per_sample=self.tokens_per_sample,
            domain_size=self.domain_size,
        )

    @cached_property
    def params(self) -> tuple[ParamSpec, ...]:
        """As cut under the topology's loss order."""
        return tuple(self.params_for(self.topology.loss_order))

    @cached_property
    def _degrees(self) -> range:
        """Degrees that every parameter has a layout for."""
        lowest = [spec.layouts.layouts[-1].degree for spec in self.params if spec.layouts is not None]
        return range(max(lowest, default=1), self.topology.num_roles + 1)

    @cached_property
    def _elements(self) -> dict[tuple[int, int], int]:
        return {}

    def elements(self, degree: int, fsdp_size: int = 1) -> int:
        """Parameters that the fullest worker of such a replica holds."""
        key = degree, fsdp_size
        if key not in self._elements:
            seats = [Coordinates(degree, role, fsdp_size, 0) for role in self.topology.roles(degree)]
            self._elements[key] = max(sum(spec.cell(at).numel for spec in self.params) for at in seats)
        return self._elements[key]

    def compute_seconds(self, degree: int) -> float:
        """Forward and backward of one sample on the fullest role, without communication."""
        flops = _FLOPS_PER_PARAMETER * self.tokens_per_sample * self.elements(degree)
        return flops / (self.gpu.peak_flops * self.gpu.flops_efficiency)

    def sample_seconds(self, degree: int, fsdp_size: int = 1, speed: float = 1.0) -> float:
        """One sample on one data row. Fsdp traffic overlaps compute; the longer of the two counts."""
        inside = fsdp_size * degree <= self.domain_size
        bandwidth = self.gpu.nvlink_bytes_per_second if inside else self.gpu.network_bytes_per_second
        gathered = 3 * 2 * self.elements(degree) * (fsdp_size - 1) / fsdp_size
        return max(self.compute_seconds(degree) / speed, gathered / bandwidth)

    def sync_seconds(self, sync_degree: int, fsdp_size: int = 1, num_replicas: int = 2) -> float:
        """All-reduce of the float32 gradients over the replicas."""
        shard = _GRADIENT_BYTES * self.elements(sync_degree) / fsdp_size
        return 2 * shard * (num_replicas - 1) / num_replicas / self.gpu.network_bytes_per_second

    def power_to_keep_pace(self, degree: int, healthy_degree: int) -> float | None:
        """Power at which `degree` is as fast as the healthy degree; None where the device cannot have it."""
        return self.gpu.power_for(self.compute_seconds(degree) / self.compute_seconds(healthy_degree))

    def memory_bytes(self, degree: int, fsdp_size: int = 1, micro_batch: int = 1) -> float:
        """Parameters, gradients and optimizer state of the fullest worker; activations are not known here."""
        return float(self.state_bytes * self.elements(degree, fsdp_size))

    def fits(self, degree: int, fsdp_size: int = 1, micro_batch: int = 1) -> bool:
        """Whether the model can be cut so, and its state fits into the device's memory less a tenth."""
        return degree in self._degrees and self.memory_bytes(degree, fsdp_size) <= 0.9 * self.gpu.memory_bytes

    def moved_bytes(self, old: Topology, new: Topology) -> int:
        """Bytes of state that workers of `new` receive.

        Raises:
            UnrecoverableError: a region died with its last holder.
        """
        dead = set(old.workers) - set(new.workers) - set(new.spares)
        return plan_reshard(self.params_for(new.loss_order), old, new, dead).bytes(self.moved_bytes_per_element)
