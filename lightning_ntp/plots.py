"""Figures of plans and simulations, drawn off screen and written as PNG."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_ntp.goodput_bins import COLORS, bins_of, used_buckets
from lightning_ntp.goodput_file import History
from lightning_ntp.goodput_totals import IDLE
from lightning_ntp.scenarios import Scenario
from lightning_ntp.simulator import simulate_trace
from lightning_ntp.topology import Topology

_COLORS = {
    "dp-drop": "#b2182b",
    "ntp": "#2166ac",
    "ntp-pw": "#1b7837",
    "dp-drop-unpacked": "#f4a582",
    "ntp-unpacked": "#92c5de",
}
_PARTS = {
    "goodput": "#1b7837",
    "reduced": "#92c5de",
    "recovery": "#b2182b",
    "lost_work": "#f4a582",
    "checkpoints": "#bababa",
}
_LIVE, _LOST, _EMPTY = "#2166ac", "#b2182b", "#f0f0f0"
_MOST_ROWS = 48
"""A picture of more rows than this cannot be read: rows of replicas that nothing happens to are left out first."""


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _axes(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.2))
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


def draw_simulation(case: Scenario, result: dict[str, Any], folder: Path) -> list[Path]:
    """The figures of a `scenarios.report`: availability, loss, trace, spares, blast radius and goodput."""
    drawn = {
        "availability": _availability(result["availability"]),
        "loss": _loss(result["loss"]),
        "trace": _trace(case, result["trace"]["failed_threshold"]),
        "spares": _spares(result["trace"]["spare_domains_needed"]),
        "blast_radius": _blast_radius(result["blast_radius_any_degree"]),
        "goodput": _goodput(result["goodput"]),
    }
    for name, figure in drawn.items():
        _save(figure, folder / f"{name}.png")
    return [folder / f"{name}.png" for name in drawn]


def _availability(rows: Sequence[dict[str, Any]]) -> Figure:
    figure, axes = _axes("GPUs in domains without a failure", "failed GPUs (%)", "available (%)")
    for size in dict.fromkeys(row["domain_size"] for row in rows):
        own = [row for row in rows if row["domain_size"] == size]
        x = [0.0, *(100 * row["failed_fraction"] for row in own)]
        line = axes.plot(x, [100.0, *(100 * row["closed_form"] for row in own)], label=f"TP{size}: (1 - f)^{size}")[0]
        axes.plot(x[1:], [100 * row["drawn_mean"] for row in own], "o", color=line.get_color(), markersize=4)
    axes.plot([], [], "o", color="gray", markersize=4, label="drawn states, mean")
    axes.legend()
    return figure


def _loss(rows: Sequence[dict[str, Any]]) -> Figure:
    figure, axes = _axes("Throughput lost (mean, 5th to 95th percentile)", "failed GPUs (%)", "lost (%), log above 1")
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        x, color = [100 * row["failed_fraction"] for row in own], _COLORS[policy]
        axes.plot(x, [100 * row["mean"] for row in own], "--" if "unpacked" in policy else "-", color=color, label=policy)
        axes.fill_between(x, [100 * row["low"] for row in own], [100 * row["high"] for row in own], color=color, alpha=0.2)
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_yticks([0, 0.5, 1, 3, 12, 50], ["0", "0.5", "1", "3", "12", "50"])
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _trace(case: Scenario, threshold: float, seeds: int = 3) -> Figure:
    figure, axes = _axes(f"GPUs down over {case.days:g} days, {seeds} seeds", "days", "failed GPUs (%)")
    for seed in range(seeds):
        trace = simulate_trace(case.cluster, case.kinds, case.days, seed)
        share = 100 * trace.num_failed / case.cluster.num_gpus
        axes.step(trace.times / 86_400, share, where="post", linewidth=1.2, label=f"seed {seed}")
    axes.axhline(100 * threshold, color="black", linestyle=":", label=f"{threshold:.1%}")
    axes.legend()
    return figure


def _spares(needed: dict[str, dict[str, float]]) -> Figure:
    figure, axes = _axes("Spare domains for a fixed batch without a pause", "policy", "spare domains")
    names = list(needed)
    means = [needed[name]["mean"] for name in names]
    ends = [[needed[n]["mean"] - needed[n]["low"] for n in names], [needed[n]["high"] - needed[n]["mean"] for n in names]]
    bars = axes.bar(names, means, width=0.6, yerr=[[max(v, 0) for v in end] for end in ends], capsize=6, color=[_COLORS[n] for n in names])
    axes.bar_label(bars, [f"{mean:.1f}" for mean in means], padding=6)
    axes.margins(y=0.12)
    return figure


def _blast_radius(rows: Sequence[dict[str, Any]]) -> Figure:
    share = rows[0]["failed_fraction"]
    figure, axes = _axes(f"{share:.1%} of GPUs fail and take neighbours along", "GPUs down per failure", "lost (%)")
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        if "unpacked" not in policy:
            axes.plot(
                [row["blast_radius"] for row in own], [100 * row["mean"] for row in own], "o-", color=_COLORS[policy], label=policy
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def _goodput(outcomes: dict[str, dict[str, dict[str, float]]]) -> Figure:
    figure, axes = _axes("Where the time goes", "policy", "share of the healthy cluster's time (%)")
    bottom = [0.0] * len(outcomes)
    for part, color in _PARTS.items():
        heights = [100 * max(parts[part]["mean"], 0.0) for parts in outcomes.values()]
        axes.bar(list(outcomes), heights, bottom=bottom, color=color, label=part.replace("_", " "))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.tick_params(axis="x", rotation=20)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def draw_plan(before: Topology, after: Topology, lost: Collection[int], path: Path) -> None:
    """Replicas (rows of cells: one per worker, by role) before and after a loss; parked workers are named on top."""
    gone, kept = set(lost), set(before.replicas)
    left = _rows(before, lambda index: bool(gone & set(before.replicas[index].workers)))
    right = _rows(after, lambda index: after.replicas[index] not in kept)
    most = max(len(left), len(right))
    figure = Figure(figsize=(2.5 + 0.75 * before.num_roles, 1.4 + 0.32 * most), layout="constrained")
    for axes, title, rows in zip(figure.subplots(1, 2), ("before", "after"), (left, right), strict=True):
        _grid(axes, title, rows, before.num_roles, gone, most)
    parked = ", ".join(map(str, after.spares[:12])) + (" ..." if len(after.spares) > 12 else "")
    figure.suptitle(f"parked: {parked or 'nobody'}", fontsize=9)
    marks = {"live": _LIVE, "lost": _LOST, "no such role": _EMPTY}
    figure.legend([Patch(color=color) for color in marks.values()], list(marks), loc="outside lower left", ncols=3, fontsize=8)
    _save(figure, path)


def _rows(topology: Topology, changed: Callable[[int], bool]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(label, workers, their roles) of each data row; when there are too many, those of changed replicas first."""
    order = list(range(len(topology.replicas)))
    if sum(replica.fsdp_size for replica in topology.replicas) > _MOST_ROWS:
        order = sorted(order, key=lambda index: not changed(index))
    rows = [
        (f"r{index}", row, topology.roles(topology.replicas[index].degree)) for index in order for row in topology.replicas[index].grid
    ]
    return rows[:_MOST_ROWS]


def _grid(
    axes: Axes, title: str, rows: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]], num_roles: int, gone: set[int], most: int
) -> None:
    axes.set_title(title)
    for y, (_, workers, roles) in enumerate(rows):
        held = dict(zip(roles, workers, strict=True))
        for role in range(num_roles):
            worker = held.get(role)
            color = _EMPTY if worker is None else _LOST if worker in gone else _LIVE
            axes.barh(y, 0.9, left=role - 0.45, height=0.8, color=color)
            if worker is not None:
                axes.text(role, y, str(worker), ha="center", va="center", color="white", fontsize=7)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_ylim(most - 0.5, -0.5)
    axes.set_xlim(-0.6, num_roles - 0.4)
    axes.set_xticks(range(num_roles))
    axes.set_xlabel("role")


def draw_goodput(history: History, path: Path) -> None:
    """What all GPUs did over time, as a stacked area: live capacity below, badput above it."""
    bins = bins_of(history, sorted(history.segments), 240)
    seconds = [(index + 0.5) * bins.width_ns / 1e9 for index in range(len(bins.spent))]
    buckets = sorted(used_buckets(history), key=lambda bucket: bucket == IDLE)  # what is not there on top
    figure, axes = _axes("GPUs over time, by what they did", "seconds", "GPUs")
    axes.stackplot(seconds, [bins.gpus(bucket) for bucket in buckets], colors=[COLORS[b] for b in buckets], labels=buckets)
    axes.set_xlim(0, seconds[-1])
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    _save(figure, path)
