"""What a step costs: FLOPs, bytes and memory of the busiest role at each degree, and what more power buys.

A first-order model for decisions (which shape is better, what fits, how much boost), not a predictor of absolute step times:
choices depend on ratios, and the few free numbers (`GpuSpec.flops_efficiency`, `CostModel.exposed_tp`) are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ntp.errors import ConfigError
from lightning_ntp.planner_bytes import moved_bytes
from lightning_ntp.reliability import require_positive
from lightning_ntp.topology import Topology

_BF16, _FP32 = 2, 4
_STATE_BYTES = _BF16 + _FP32 + 3 * _FP32
"""Per parameter: weight (bf16), gradient (fp32), master weight and two Adam moments (fp32)."""
_ACTIVATION_BYTES = 34
"""Per token, layer and hidden element, in bf16 with flash attention (Korthikanti et al. 2022, without the score matrices)."""
_BACKWARD_COST = 2
"""A backward costs two forwards."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU and its links.

    Args:
        peak_flops: dense bf16 operations per second.
        flops_efficiency: share of them that large matmuls reach.
        nvlink_bytes_per_second, network_bytes_per_second: per GPU and direction.
        max_power: highest power as a multiple of the normal limit that the rack can feed to one GPU.
        boost_losses: ``((power, loss), (power, loss))``, two measured points of performance per watt lost when boosted;
            the defaults are those of arXiv 2504.06095 (1.1x: 2.8%, 1.2x: 6.5%).
    """

    name: str
    peak_flops: float
    memory_bytes: float
    nvlink_bytes_per_second: float
    network_bytes_per_second: float
    flops_efficiency: float = 0.5
    max_power: float = 1.3
    boost_losses: tuple[tuple[float, float], tuple[float, float]] = ((1.1, 0.028), (1.2, 0.065))

    def __post_init__(self) -> None:
        require_positive(
            peak_flops=self.peak_flops,
            memory_bytes=self.memory_bytes,
            nvlink_bytes_per_second=self.nvlink_bytes_per_second,
            network_bytes_per_second=self.network_bytes_per_second,
        )
        if not 0 < self.flops_efficiency <= 1 or self.max_power < 1:
            raise ConfigError(
                f"{self.name}: flops_efficiency lies in (0, 1] and max_power is at least 1, got {self.flops_efficiency} and "
                f"{self.max_power}"
            )
        (low, low_loss), (high, high_loss) = self.boost_losses
        if not (1 < low < high and 0 < low_loss < high_loss < 1):
            raise ConfigError(f"{self.name}: boost_losses are two rising (power > 1, loss) points, got {self.boost_losses}")

    def speed_at(self, power: float) -> float:
        """Compute speed at `power` times the normal limit; 1.0 at 1.0.

        The loss of performance per watt is a power law of the excess through the two known points.
        """
        if power < 1:
            raise ConfigError(f"power is a multiple of the normal limit and at least 1, got {power}")
        (low, low_loss), (high, high_loss) = self.boost_losses
        exponent = math.log(high_loss / low_loss) / math.log((high - 1) / (low - 1))
        return power * (1 - low_loss * ((power - 1) / (low - 1)) ** exponent)

    def power_for(self, speed: float) -> float | None:
        """Least power (to 0.001) that computes `speed` times as fast; None where `max_power` does not reach it."""
        steps = round((self.max_power - 1) * 1000)
        if speed <= 1:
            return 1.0
        if self.speed_at(self.max_power) < speed:
            return None
        low, high = 0, steps
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.speed_at(1 + middle / 1000) >= speed else (middle + 1, high)
        return 1 + low / 1000


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer. `gated`: the MLP has gate, up and down instead of up and down."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    num_layers: int
    vocab_size: int
    sequence_length: int
    gated: bool = True
    head_size: int = 0

    def __post_init__(self) -> None:
        if not self.head_size:
            object.__setattr__(self, "head_size", self.hidden_size // max(self.num_heads, 1))
        for name in ("hidden_size", "num_heads", "num_kv_heads", "ffn_size", "num_layers", "vocab_size", "sequence_length"):
            require_positive(**{name: getattr(self, name)})
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} query heads do not form groups of {self.num_kv_heads} KV heads")

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], sequence_length: int) -> ModelShape:
        """Sizes out of a Hugging Face ``config.json`` (the `text_config` of a multimodal one).

        Raises:
            ConfigError: a size is missing, with the names that were looked for.
        """
        config = config.get("text_config", config)

        def size(*names: str, default: int | None = None) -> int:
            for name in names:
                if config.get(name) is not None:
                    return int(config[name])
            if default is None:
                raise ConfigError(f"the config has none of {', '.join(names)}; it is no decoder that can be planned")
            return default

        hidden, heads = size("hidden_size", "n_embd", "d_model"), size("num_attention_heads", "n_head", "num_heads")
        return cls(
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=size("num_key_value_heads", default=heads),
            ffn_size=size("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
            num_layers=size("num_hidden_layers", "n_layer", "num_layers"),
            vocab_size=size("vocab_size"),
            sequence_length=sequence_length,
            gated=str(config.get("hidden_act", "")) in ("silu", "swish") or "gated" in str(config.get("hidden_act", "")),
            head_size=size("head_dim", default=hidden // heads),
        )

    @property
    def query_head_params(self) -> int:
        """Parameters that come with one query head in a layer: its rows of q and columns of o."""
        return 2 * self.hidden_size * self.head_size

    @property
    def kv_head_params(self) -> int:
        """Parameters that come with one KV head in a layer."""
        return 2 * self.hidden_size * self.head_size

    @property
    def ffn_column_params(self) -> int:
        """Parameters that come with one feed-forward column in a layer."""
        return (3 if self.gated else 2) * self.hidden_size

    @property
    def num_params(self) -> int:
        """Parameters of the layers, the embedding and the head; norms and biases are left out."""
        layer = (
            self.num_heads * self.query_head_params
            + self.num_kv_heads * self.kv_head_params
            + self.ffn_size * self.ffn_column_params
        )
        return self.num_layers * layer + 2 * self.vocab_size * self.hidden_size

    def role_params(self, degree: int) -> int:
        """Parameters of the busiest role: whole heads (KV heads follow their query heads), columns and vocabulary rows."""
        heads = -(-self.num_heads // degree)
        kv_heads = min(-(-heads // (self.num_heads // self.num_kv_heads)), self.num_kv_heads)
        layer = (
            heads * self.query_head_params
            + kv_heads * self.kv_head_params
            + -(-self.ffn_size // degree) * self.ffn_column_params
        )
        return self.num_layers * layer + 2 * -(-self.vocab_size // degree) * self.hidden_size

    def role_flops(self, degree: int) -> float:
        """Operations of the busiest role for forward and backward of one sequence, attention scores (causal) included."""
        heads = -(-self.num_heads // degree)
        scores = 2 * self.sequence_length * heads * self.head_size * self.num_layers
        embedding = -(-self.vocab_size // degree) * self.hidden_size
        matmuls = 2 * (self.role_params(degree) - embedding)
        return float((1 + _BACKWARD_COST) * self.sequence_length * (matmuls + scores))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Times and memory of a replica of some shape.

    Args:
        num_stages: pipeline stages of a replica (one domain each); the layers are spread evenly over them.
        exposed_tp: share of the tensor-parallel all-reduces that compute does not hide.
        domain_size: GPUs that NVLink joins; wider fsdp traffic goes over the network.
        recompute: keep one activation per layer and compute the rest again in backward (a third more compute).
    """

    model: ModelShape
    gpu: GpuSpec
    num_stages: int = 1
    exposed_tp: float = 0.5
    domain_size: int = 8
    recompute: bool = False

    def __post_init__(self) -> None:
        require_positive(num_stages=self.num_stages, domain_size=self.domain_size)
        if not 0 <= self.exposed_tp <= 1:
            raise ConfigError(f"exposed_tp is a share between 0 and 1, got {self.exposed_tp}")

    def check_degree(self, degree: int) -> None:
        """ConfigError for a degree that no layout has: every role needs a query head."""
        if not 1 <= degree <= self.model.num_heads:
            raise ConfigError(f"degree {degree} is outside 1..{self.model.num_heads}: every role needs a query head")

    def compute_seconds(self, degree: int) -> float:
        """Forward and backward of one sequence on one stage's busiest role, without communication."""
        self.check_degree(degree)
        flops = self.model.role_flops(degree) / self.num_stages
        again = (2 + _BACKWARD_COST) / (1 + _BACKWARD_COST) if self.recompute else 1.0
        return again * flops / (self.gpu.peak_flops * self.gpu.flops_efficiency)

    def tp_seconds(self, degree: int) -> float:
        """Exposed part of a stage's all-reduces for one sequence: two per layer in forward, two in backward."""
        per_reduce = self.model.sequence_length * self.model.hidden_size * _BF16
        total = 4 * self.model.num_layers / self.num_stages * 2 * per_reduce * (degree - 1) / degree
        return self.exposed_tp * total / self.gpu.nvlink_bytes_per_second

    def sample_seconds(self, degree: int, fsdp_size: int = 1, speed: float = 1.0) -> float:
        """One sequence through one stage of one data row. Fsdp traffic overlaps compute; the longer of the two counts."""
        busy = self.compute_seconds(degree) / speed + self.tp_seconds(degree)
        inside = fsdp_size * degree <= self.domain_size
        bandwidth = self.gpu.nvlink_bytes_per_second if inside else self.gpu.network_bytes_per_second
        moved = 3 * _BF16 * self.model.role_params(degree) / self.num_stages * (fsdp_size - 1) / fsdp_size
        return max(busy, moved / bandwidth)

    def sync_seconds(self, sync_degree: int, fsdp_size: int = 1, num_replicas: int = 2) -> float:
        """All-reduce of the fp32 gradients over the replicas, by as many network cards per replica as the sync layout has."""
        shard = _FP32 * self.model.role_params(sync_degree) / self.num_stages / fsdp_size
        return 2 * shard * (num_replicas - 1) / num_replicas / self.gpu.network_bytes_per_second

    def relative_seconds(self, degree: int, healthy_degree: int, speed: float = 1.0) -> float:
        """Time of a sample at `degree` over that at the healthy degree."""
        return self.sample_seconds(degree, speed=speed) / self.sample_seconds(healthy_degree)

    def power_to_keep_pace(self, degree: int, healthy_degree: int) -> float | None:
        """Power at which `degree` is as fast as the healthy degree; None where the GPU cannot have it.

        Only compute runs faster; what communication takes has to be made up for as well.
        """
        left = self.sample_seconds(healthy_degree) - self.tp_seconds(degree)
        return None if left <= 0 else self.gpu.power_for(self.compute_seconds(degree) / left)

    def memory_bytes(self, degree: int, fsdp_size: int = 1, micro_batch: int = 1) -> float:
        """Weights, gradients, optimizer state, one unsharded layer and the activations of the busiest role."""
        shape = self.model
        state = _STATE_BYTES * shape.role_params(degree) / self.num_stages / fsdp_size
        gathered = 2 * _BF16 * shape.role_params(degree) / shape.num_layers if fsdp_size > 1 else 0.0
        per_layer = shape.sequence_length * shape.hidden_size * (_BF16 if self.recompute else _ACTIVATION_BYTES) / degree
        in_flight = micro_batch * self.num_stages  # the first stage holds one micro-batch per stage
        logits = micro_batch * shape.sequence_length * -(-shape.vocab_size // degree) * (_BF16 + _FP32)
        return state + gathered + in_flight * per_layer * shape.num_layers / self.num_stages + logits

    def fits(self, degree: int, fsdp_size: int = 1, micro_batch: int = 1) -> bool:
        """Whether `memory_bytes` is within the GPU's memory, less a tenth for the allocator and NCCL."""
        return self.memory_bytes(degree, fsdp_size, micro_batch) <= 0.9 * self.gpu.memory_bytes

    def moved_bytes(self, old: Topology, new: Topology) -> int:
        """Bytes of parameters and optimizer state that workers of `new` receive: `planner_bytes.moved_bytes`."""
        return moved_bytes(old, new, self.model) // self.num_stages
