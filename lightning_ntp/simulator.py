"""What failures do to a cluster over weeks: traces of who is down, and what each policy makes of them.

A trace (who is down when) does not depend on the policy, so that all policies meet the same failures and differences between
them are not noise. Everything is a function of the seed.

    FailureKind, Cluster --simulate_trace--> Trace --capacity--> samples per step --goodput--> Outcome
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_ntp.cluster import Cluster, FailureKind, Policy
from lightning_ntp.cost_model import CostModel
from lightning_ntp.errors import ConfigError
from lightning_ntp.reliability import SECONDS_PER_DAY, require_positive, young_daly_seconds

Array = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
BATCHES = ("floating", "pause", "keep")


@dataclass(frozen=True, slots=True)
class StepTable:
    """What a replica achieves when its worst domain has a given degree.

    Args:
        samples: local batch of a healthy replica.
        seconds: ``seconds[degree]``: time of a sample relative to the healthy degree; inf where the degree cannot run.
        boosted: the same at the power that the rack allows, never below 1 (a boosted domain only catches up).
        idle_samples: fixed time per step (pipeline bubble) in samples of the same degree.
    """

    samples: int
    seconds: tuple[float, ...]
    boosted: tuple[float, ...]
    idle_samples: float = 0.0

    @classmethod
    def from_cost(
        cls, cost: CostModel, degree: int, samples: int, degrees: Sequence[int] = (), idle_samples: float = 0.0
    ) -> StepTable:
        """From a cost model. `degrees`: those that may run (a domain uses the largest that it can); empty: all that fit."""
        require_positive(samples=samples, degree=degree)
        usable = set(degrees) or {d for d in range(1, degree + 1) if cost.fits(d)}
        if not usable <= set(range(1, degree + 1)) or degree not in usable:
            raise ConfigError(f"degrees {sorted(usable)} must be within 1..{degree} and include the healthy {degree}")
        top = cost.gpu.speed_at(cost.gpu.max_power)
        plain, fast = [math.inf], [math.inf]
        for live in range(1, degree + 1):
            runs = max((d for d in usable if d <= live), default=0)
            plain.append(cost.relative_seconds(runs, degree) if runs else math.inf)
            fast.append(max(1.0, cost.relative_seconds(runs, degree, top)) if runs else math.inf)
        return cls(samples, tuple(plain), tuple(fast), idle_samples)

    @property
    def degree(self) -> int:
        """The healthy degree."""
        return len(self.seconds) - 1

    def relative(self, policy: Policy) -> Floats:
        """Time per sample by degree as the policy runs it; inf for domains that it cannot use."""
        if not policy.shrink:
            return np.array([math.inf] * self.degree + [1.0])
        return np.array(self.boosted if policy.boost else self.seconds)

    def samples_within(self, policy: Policy, step: float = 1.0) -> Array:
        """Samples that a replica finishes by degree within `step` healthy step times."""
        time = step * (self.samples + self.idle_samples) / self.relative(policy) - self.idle_samples
        return np.maximum(np.floor(time + 1e-9), 0).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Trace:
    """Who is down over time.

    Args:
        times: start of each interval of constant state, in seconds, from 0.0 (nobody down).
        end: length in seconds.
        failed: ``(intervals, domains)``, GPUs down in each domain.
        is_failure: whether the interval began with a failure (else: with a repair; the first is neither).
    """

    times: Floats
    end: float
    failed: Array
    is_failure: npt.NDArray[np.bool_]

    @property
    def durations(self) -> Floats:
        """Seconds of each interval."""
        return np.diff(self.times, append=self.end)

    @property
    def num_failed(self) -> Array:
        """GPUs down in each interval."""
        return np.asarray(self.failed.sum(axis=1))

    def interrupts(self, shrink: bool) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Which intervals begin with a failure, and which with a repair, that the job feels.

        Who shrinks hurt domains feels all. Else a hurt domain idles: further failures in it, and repairs that leave it hurt,
        interrupt nobody.
        """
        before = np.vstack([np.zeros_like(self.failed[:1]), self.failed[:-1]])
        changed = self.failed != before
        felt = changed.any(axis=1)
        if not shrink:
            felt = (changed & ((before == 0) | (self.failed == 0))).any(axis=1)
        return felt & self.is_failure, felt & ~self.is_failure

    def time_share(self, condition: npt.NDArray[np.bool_]) -> float:
        """Share of the time in intervals where `condition` holds."""
        return float(self.durations[condition].sum() / self.end)

    def first_domains(self, count: int) -> Trace:
        """The same trace of the first `count` domains only: fewer spares under the very same failures."""
        return Trace(self.times, self.end, self.failed[:, :count], self.is_failure)


def simulate_trace(cluster: Cluster, kinds: Sequence[FailureKind], days: float, seed: int) -> Trace:
    """Failures and repairs of all domains, spare ones too, over `days` from an unfailed start.

    A GPU that is down does not fail again.

    Raises:
        ConfigError: no kind of failure, days not above 0, or a blast radius past the domain.
    """
    require_positive(days=days)
    if not kinds or any(kind.blast_radius > cluster.domain_size for kind in kinds):
        raise ConfigError(f"a trace needs kinds of failure with a blast radius of at most a domain ({cluster.domain_size})")
    rng = np.random.default_rng(seed)
    num_gpus = cluster.all_domains * cluster.domain_size
    strikes: list[tuple[float, int, int, float]] = []
    for kind in kinds:
        count = rng.poisson(kind.per_gpu_day * num_gpus * days)
        when, who = np.sort(rng.uniform(0, days, count)), rng.integers(0, num_gpus, count)
        repair = rng.choice(np.array(kind.repair_days), count)
        strikes += zip(when.tolist(), who.tolist(), [kind.blast_radius] * count, repair.tolist(), strict=True)
    return trace_of(cluster, sorted(strikes), days)


def trace_of(cluster: Cluster, strikes: Sequence[tuple[float, int, int, float]], days: float) -> Trace:
    """The trace of given failures.

    Args:
        strikes: ascending ``(days, gpu, blast radius, days until repaired)``; one on a GPU that is down counts nothing.
    """
    down: set[int] = set()
    repairs: list[tuple[float, tuple[int, ...]]] = []
    state = np.zeros(cluster.all_domains, np.int64)
    times, states, is_failure = [0.0], [state.copy()], [False]

    def change(when: float, gpus: tuple[int, ...], by: int) -> None:
        for gpu in gpus:
            state[gpu // cluster.domain_size] += by
        times.append(when)
        states.append(state.copy())
        is_failure.append(by > 0)

    for when, gpu, radius, repair in [*strikes, (days, -1, 1, math.inf)]:
        while repairs and repairs[0][0] <= when:
            at, back = heapq.heappop(repairs)
            down.difference_update(back)
            change(at, back, -1)
        if gpu < 0 or gpu in down:
            continue
        start = gpu % cluster.domain_size // radius * radius + gpu // cluster.domain_size * cluster.domain_size
        stop = min(start + radius, (gpu // cluster.domain_size + 1) * cluster.domain_size)
        hit = tuple(each for each in range(start, stop) if each not in down)
        down.update(hit)
        change(when, hit, 1)
        if when + repair < days:
            heapq.heappush(repairs, (when + repair, hit))
    return Trace(
        np.array(times) * SECONDS_PER_DAY, days * SECONDS_PER_DAY, np.array(states), np.array(is_failure, np.bool_)
    )


def replica_degrees(failed: Array, cluster: Cluster, policy: Policy, table: StepTable) -> Array:
    """``(states, degrees)``: how many replicas have each degree (that of their worst domain) in each state.

    Packed: the best domains form replicas first, spare ones included, and what is left over is idle.
    """
    degrees = cluster.domain_size - failed
    degrees[~np.isfinite(table.relative(policy))[degrees]] = 0
    size = cluster.domains_per_replica
    if policy.packed:
        at_least = np.cumsum(_counts(degrees, cluster.domain_size)[:, ::-1], axis=1)[:, ::-1]
        whole = at_least // size
        return whole - np.pad(whole[:, 1:], ((0, 0), (0, 1)))
    if cluster.spare_domains:
        raise ConfigError(f"{policy.name}: spare domains need packing (packed=True), which moves domains between replicas")
    return _counts(degrees.reshape(len(failed), -1, size).min(axis=2), cluster.domain_size)


def _counts(degrees: Array, highest: int) -> Array:
    """``(states, things) -> (states, highest + 1)``: how many of each degree."""
    flat = degrees + (np.arange(len(degrees)) * (highest + 1))[:, None]
    return np.bincount(flat.ravel(), minlength=len(degrees) * (highest + 1)).reshape(len(degrees), -1)


def capacity(failed: Array, cluster: Cluster, policy: Policy, table: StepTable, batch: str = "floating") -> Floats:
    """Throughput of each state ``failed[state, domain]`` relative to the healthy job's.

    `batch`: "floating", each replica runs what it finishes within the healthy step time; "pause", the job waits while that is
    less than the global batch; "keep", the global batch stays and the step takes as long as it needs.
    """
    if batch not in BATCHES:
        raise ConfigError(f"batch is one of {BATCHES}, got {batch!r}")
    if table.degree != cluster.domain_size:
        raise ConfigError(f"the step table is for degree {table.degree}, the domains have {cluster.domain_size} GPUs")
    counts = replica_degrees(failed, cluster, policy, table)
    wanted = cluster.num_replicas * table.samples
    if batch == "keep":
        return _stretched(counts, policy, table, wanted)
    done = np.minimum(counts @ table.samples_within(policy), wanted) / wanted
    return done if batch == "floating" else np.where(done >= 1.0, 1.0, 0.0)


def _stretched(counts: Array, policy: Policy, table: StepTable, wanted: int) -> Floats:
    relative = table.relative(policy)
    finite = np.unique(relative[np.isfinite(relative)])
    finished = np.arange(1, 4 * table.samples + 1)
    steps = (finished[:, None] + table.idle_samples) * finite / (table.samples + table.idle_samples)
    steps = np.unique(steps[steps >= 1.0 - 1e-9])
    samples = np.stack([table.samples_within(policy, float(step)) for step in steps], axis=1)
    enough = counts @ samples >= wanted
    return np.where(enough.any(axis=1), 1.0 / np.maximum(steps[enough.argmax(axis=1)], 1.0), 0.0)


def boosted_share(failed: Array, cluster: Cluster, table: StepTable) -> Floats:
    """Share of all domains that run on boosted power in each state: hurt, but still running."""
    degrees = cluster.domain_size - failed
    runs = np.isfinite(np.array(table.boosted))[degrees]
    return np.asarray((runs & (failed > 0)).mean(axis=1))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where the time of a trace went, as shares of it; they sum to 1.

    `goodput` is work that is kept, in units of the healthy cluster; `reduced` is what hurt and idle domains did not do.
    """

    goodput: float
    reduced: float
    recovery: float
    lost_work: float
    checkpoints: float


def goodput(trace: Trace, capacities: Floats, policy: Policy) -> Outcome:
    """Play the policy's costs over a trace whose states have the given capacities."""
    failures, repairs = trace.interrupts(policy.shrink)
    interval = policy.interval_seconds
    if policy.checkpoint_seconds and not interval:
        interval = young_daly_seconds(policy.checkpoint_seconds, trace.end / max(int(failures.sum()), 1))
    kept = lost = recovery = reduced = written = unsaved = up_until = 0.0
    ends = np.append(trace.times[1:], trace.end)
    for start, end, now, failure, repair in zip(trace.times, ends, capacities.tolist(), failures, repairs, strict=True):
        if failure:
            lost += unsaved if policy.checkpoint_seconds else min(policy.step_seconds, unsaved)
            unsaved = 0.0
        elif repair and policy.checkpoint_seconds and policy.rejoin_seconds:
            unsaved = 0.0  # who stops to take a GPU in saves before
        if failure or repair:
            up_until = max(up_until, start + (policy.recovery_seconds if failure else policy.rejoin_seconds))
        up = max(0.0, end - max(start, up_until))
        recovery += end - start - up
        work, writing, unsaved = _worked(up, now, unsaved, interval, policy.checkpoint_seconds)
        kept, written, reduced = kept + work, written + writing * now, reduced + up * (1 - now)
    return Outcome(*(part / trace.end for part in (kept - lost, reduced, recovery, lost, written)))


def _worked(up: float, now: float, unsaved: float, interval: float, save: float) -> tuple[float, float, float]:
    """Work done in `up` seconds at capacity `now`, seconds spent on checkpoints, and the work that none of them holds at the end.

    A checkpoint of `save` seconds is due after every `interval` of work, which takes a hurt job longer; 0: never.
    """
    first = (interval - unsaved) / now if interval and now else math.inf
    if up <= first:
        return up * now, 0.0, unsaved + up * now
    whole, part = divmod(up - first, save + interval / now)
    after = max(0.0, part - save) * now
    work = interval - unsaved + whole * interval + after
    return work, whole * save + min(part, save), after if part >= save else interval


def simulate(
    cluster: Cluster,
    kinds: Sequence[FailureKind],
    policy: Policy,
    table: StepTable,
    days: float,
    seed: int = 0,
    batch: str = "floating",
) -> Outcome:
    """One run: `simulate_trace`, `capacity` and `goodput` in a row."""
    trace = simulate_trace(cluster, kinds, days, seed)
    return goodput(trace, capacity(trace.failed, cluster, policy, table, batch), policy)


@dataclass(frozen=True, slots=True)
class Band:
    """A value over seeds: mean, and the 5th, 50th and 95th percentile."""

    mean: float
    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float] | Floats) -> Band:
        """Of one value per seed."""
        low, median, high = np.percentile(values, (5, 50, 95)).tolist()
        return cls(float(np.mean(values)), low, median, high)


def monte_carlo(run: Callable[[int], float], seeds: int) -> Band:
    """``run(seed)`` for seeds 0..seeds-1."""
    require_positive(seeds=seeds)
    return Band.of([run(seed) for seed in range(seeds)])


def sample_failed(cluster: Cluster, num_failed: int, seed: int, samples: int, blast_radius: int = 1) -> Array:
    """``(samples, domains)``: states with GPUs drawn uniformly, each taking its aligned group of `blast_radius` along.

    Raises:
        ConfigError: more failed GPUs than there are.
    """
    num_gpus = cluster.all_domains * cluster.domain_size
    require_positive(samples=samples, blast_radius=blast_radius)
    if not 0 <= num_failed <= num_gpus or blast_radius > cluster.domain_size or cluster.domain_size % blast_radius:
        raise ConfigError(
            f"cannot draw {num_failed} failed of {num_gpus} GPUs with a blast radius of {blast_radius} in domains of "
            f"{cluster.domain_size}: draw at most all, with a radius that divides the domain"
        )
    rng = np.random.default_rng(seed)
    groups = cluster.domain_size // blast_radius
    states = np.zeros((samples, cluster.all_domains), np.int64)
    for state in states:
        hit = np.unique(rng.choice(num_gpus, num_failed, replace=False) // blast_radius)
        state += blast_radius * np.bincount(hit // groups, minlength=cluster.all_domains)
    return states


def spare_domains_needed(trace: Trace, cluster: Cluster, policy: Policy, table: StepTable) -> int | None:
    """Fewest spare domains with which the fixed batch never pauses in `trace`, a trace of a cluster with spares to try.

    None where all of its spares are not enough.
    """

    states = trace.failed

    def pausing(spares: int) -> npt.NDArray[np.bool_]:
        smaller = replace(cluster, spare_domains=spares)
        return capacity(states[:, : smaller.all_domains], smaller, policy, table, "pause") < 1.0

    if pausing(cluster.spare_domains).any():
        return None
    low, high = 0, cluster.spare_domains
    while low < high:
        middle = (low + high) // 2
        short = pausing(middle)
        if short.any():
            # what is enough for a state stays enough with more spares, so only the others need another look
            low, states = middle + 1, states[short]
        else:
            high = middle
    return low
