"""Named scenarios (cluster, model, failure record) and the report on them: what `ntp simulate` prints and docs/paper.md shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lightning_ntp import presets
from lightning_ntp.cluster import Cluster, FailureKind, Policy
from lightning_ntp.cost_model import CostModel
from lightning_ntp.errors import ConfigError
from lightning_ntp.reliability import availability, require_positive
from lightning_ntp.simulator import (
    Band,
    Outcome,
    StepTable,
    boosted_share,
    capacity,
    goodput,
    sample_failed,
    simulate_trace,
    spare_domains_needed,
)

DROP = Policy("dp-drop", shrink=False)
NTP = Policy("ntp", shrink=True)
NTP_PW = Policy("ntp-pw", shrink=True, boost=True)
PAPER_POLICIES = (DROP, NTP, NTP_PW)
"""The three of arXiv 2504.06095, hurt domains packed, without recovery costs."""


@dataclass(frozen=True, slots=True)
class RecoveryCosts:
    """What failures cost in time. The defaults are assumptions; replace them by what your own cluster measures."""

    restart_seconds: float = 600.0
    checkpoint_seconds: float = 60.0
    live_seconds: float = 30.0
    step_seconds: float = 20.0


def goodput_policies(costs: RecoveryCosts) -> tuple[Policy, ...]:
    """The policies with their recovery costs: by restart from a checkpoint, and live in the running job.

    Those that restart take repaired GPUs back for free, which favours them: in truth they wait for the next restart.
    """

    def by_restart(policy: Policy, name: str) -> Policy:
        return replace(
            policy,
            name=name,
            recovery_seconds=costs.restart_seconds,
            checkpoint_seconds=costs.checkpoint_seconds,
        )

    def live(policy: Policy, name: str) -> Policy:
        pause = costs.live_seconds
        return replace(
            policy, name=name, recovery_seconds=pause, rejoin_seconds=pause, step_seconds=costs.step_seconds
        )

    return (
        by_restart(DROP, "restart"),
        replace(live(DROP, "drop-live"), packed=False),
        by_restart(NTP, "ntp-restart"),
        by_restart(NTP_PW, "ntp-pw-restart"),
        live(NTP, "ntp-live"),
        live(NTP_PW, "ntp-pw-live"),
    )


def record_failures(
    interruptions: int, days: float, num_gpus: int, hardware_share: float, repair_days: Sequence[float]
) -> tuple[FailureKind, ...]:
    """Hardware and software failures at the rate of a record of interruptions."""
    if min(interruptions, days, num_gpus) <= 0 or not 0 < hardware_share < 1:
        raise ConfigError(
            f"a failure record needs interruptions, days and GPUs above 0 and a hardware share within (0, 1), got "
            f"{interruptions}, {days}, {num_gpus}, {hardware_share}"
        )
    rate = interruptions / days / num_gpus
    return (
        FailureKind("hardware", hardware_share * rate, tuple(repair_days)),
        FailureKind("software", (1 - hardware_share) * rate, presets.SOFTWARE_REPAIR_DAYS),
    )


def llama3_failures(
    repair_days: Sequence[float] = presets.HARDWARE_REPAIR_DAYS, rate_factor: float = 1.0, blast_radius: int = 1
) -> tuple[FailureKind, ...]:
    """The Llama 3 405B record; `rate_factor` scales it."""
    kinds = record_failures(
        presets.LLAMA3_INTERRUPTIONS,
        presets.LLAMA3_DAYS,
        presets.LLAMA3_GPUS,
        presets.LLAMA3_HARDWARE_SHARE,
        repair_days,
    )
    return tuple(replace(k, per_gpu_day=k.per_gpu_day * rate_factor, blast_radius=blast_radius) for k in kinds)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A job on a cluster: `samples` is the local batch of a replica in sequences, `degrees` those that may run (empty: all)."""

    name: str
    cluster: Cluster
    cost: CostModel
    samples: int
    days: float
    degrees: tuple[int, ...] = ()
    kinds: tuple[FailureKind, ...] = llama3_failures()
    idle_samples: float = 0.0

    def table(self) -> StepTable:
        """What a replica achieves at each degree."""
        return StepTable.from_cost(self.cost, self.cluster.domain_size, self.samples, self.degrees, self.idle_samples)


SCENARIOS = {
    "ntp-paper": Scenario(
        name="ntp-paper",
        cluster=Cluster(num_gpus=32_768, domain_size=32, domains_per_replica=8),
        cost=CostModel(presets.PAPER_MODEL, presets.GPUS["b200"], num_stages=8, domain_size=32),
        samples=8,
        days=15,
        degrees=(32, 30, 28),
    ),
    "llama3-405b": Scenario(
        name="llama3-405b",
        cluster=Cluster(num_gpus=16_384, domain_size=8, domains_per_replica=16),
        cost=CostModel(presets.LLAMA3_405B, presets.GPUS["h100"], num_stages=16, domain_size=8),
        samples=16,
        days=54,
        degrees=(8, 7, 6, 5, 4),
    ),
}
"""ntp-paper: TP32, 8 domains a replica, DP128, 1,024 sequences of 16K a step. llama3-405b: TP8, PP16, DP128, 2,048 of 8K."""


def scenario(name: str) -> Scenario:
    """A scenario by name; ConfigError lists the known ones."""
    if name not in SCENARIOS:
        raise ConfigError(f"unknown preset {name!r}; known: {', '.join(SCENARIOS)}")
    return SCENARIOS[name]


def availability_report(num_gpus: int, sizes: Sequence[int], fractions: Sequence[float], samples: int) -> list[dict[str, Any]]:
    """Share of GPUs in whole domains by failed fraction and domain size: closed form beside uniformly drawn states."""
    rows = []
    for size in sizes:
        cluster = Cluster(num_gpus, size)
        for fraction in fractions:
            states = sample_failed(cluster, round(fraction * num_gpus), 0, samples)
            drawn = Band.of((states == 0).mean(axis=1))
            rows.append(
                {
                    "domain_size": size,
                    "failed_fraction": fraction,
                    "closed_form": availability(fraction, size),
                    **{f"drawn_{key}": value for key, value in asdict(drawn).items()},
                }
            )
    return rows


def loss_report(
    case: Scenario, fractions: Sequence[float], samples: int, batch: str = "floating", blast_radius: int = 1
) -> list[dict[str, Any]]:
    """Throughput lost by failed fraction and policy, over uniformly drawn states without recovery costs.

    `failed_fraction` counts the GPUs that fail by themselves; those that go down with them come on top.
    """
    rows, table = [], case.table()
    for fraction in fractions:
        num_failed = round(fraction * case.cluster.num_gpus)
        states = sample_failed(case.cluster, num_failed, 0, samples, blast_radius)
        for policy in (*PAPER_POLICIES, *(replace(p, name=f"{p.name}-unpacked", packed=False) for p in (DROP, NTP))):
            lost = Band.of(1 - capacity(states, case.cluster, policy, table, batch))
            rows.append({"failed_fraction": fraction, "policy": policy.name, "blast_radius": blast_radius, **asdict(lost)})
    return rows


def trace_report(case: Scenario, seeds: int, threshold: float = 0.001, spares_to_try: int = 192) -> dict[str, Any]:
    """The trace from an unfailed start, over seeds: time above the threshold, peaks, spares, boosted domains.

    A seed in which `spares_to_try` spare domains are not enough counts as one more than that.
    """
    table = case.table()
    needed: dict[str, list[float]] = {policy.name: [] for policy in PAPER_POLICIES}
    above, peak, boosted_peak, boosted_mean = [], [], [], []
    spacious = replace(case.cluster, spare_domains=spares_to_try)
    for seed in range(seeds):
        trace = simulate_trace(case.cluster, case.kinds, case.days, seed)
        above.append(trace.time_share(trace.num_failed > threshold * case.cluster.num_gpus))
        peak.append(float(trace.num_failed.max()))
        boosted = boosted_share(trace.failed, case.cluster, table)
        boosted_peak.append(float(boosted.max()))
        boosted_mean.append(float((boosted * trace.durations).sum() / trace.end))
        trace = simulate_trace(spacious, case.kinds, case.days, seed)
        for policy in PAPER_POLICIES:
            found = spare_domains_needed(trace, spacious, policy, table)
            needed[policy.name].append(spares_to_try + 1 if found is None else found)
    return {
        "days": case.days,
        "seeds": seeds,
        "failed_threshold": threshold,
        "share_of_time_above_threshold": asdict(Band.of(above)),
        "peak_failed_gpus": asdict(Band.of(peak)),
        "spare_domains_needed": {name: {**asdict(Band.of(v)), "max": max(v)} for name, v in needed.items()},
        "boosted_domains_peak_share": asdict(Band.of(boosted_peak)),
        "boosted_domains_mean_share": asdict(Band.of(boosted_mean)),
    }


def goodput_report(case: Scenario, seeds: int, costs: RecoveryCosts, batch: str = "floating") -> dict[str, Any]:
    """Where the time goes under each policy, recovery costs included, over seeds; all policies see the same failures."""
    table, policies = case.table(), goodput_policies(costs)
    outcomes: dict[str, list[Outcome]] = {policy.name: [] for policy in policies}
    for seed in range(seeds):
        trace = simulate_trace(case.cluster, case.kinds, case.days, seed)
        for policy in policies:
            states = capacity(trace.failed, case.cluster, policy, table, batch)
            outcomes[policy.name].append(goodput(trace, states, policy))
    return {
        name: {f.name: asdict(Band.of([getattr(each, f.name) for each in runs])) for f in fields(Outcome)}
        for name, runs in outcomes.items()
    }


def report(
    case: Scenario,
    seeds: int = 40,
    samples: int = 200,
    costs: RecoveryCosts | None = None,
    fractions: Sequence[float] = (0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004),
) -> dict[str, Any]:
    """Everything that `ntp simulate --json` prints, as one JSON-ready dictionary."""
    require_positive(seeds=seeds, samples=samples)
    costs, table = costs or RecoveryCosts(), case.table()
    blasts = [radius for radius in (1, 2, 4, 8) if radius <= case.cluster.domain_size]
    free = replace(case, degrees=())
    return {
        "preset": case.name,
        "num_gpus": case.cluster.num_gpus,
        "domain_size": case.cluster.domain_size,
        "samples_by_degree": {
            str(degree): {
                "ntp": int(table.samples_within(NTP)[degree]),
                "ntp-pw": int(table.samples_within(NTP_PW)[degree]),
                "power_to_keep_pace": case.cost.power_to_keep_pace(degree, case.cluster.domain_size),
            }
            for degree in case.degrees
        },
        "failures": [asdict(kind) for kind in case.kinds],
        "availability": availability_report(case.cluster.num_gpus, (8, 16, 32, 64), fractions, samples),
        "loss": loss_report(case, fractions, samples),
        "blast_radius": [row for r in blasts for row in loss_report(case, (0.001,), samples, blast_radius=r)],
        "blast_radius_any_degree": [row for r in blasts for row in loss_report(free, (0.001,), samples, blast_radius=r)],
        "trace": trace_report(case, seeds),
        "goodput": goodput_report(case, seeds, costs),
        "recovery_costs": asdict(costs),
    }
