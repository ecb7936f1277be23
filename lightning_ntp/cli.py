"""The command line: ``ntp launch`` and ``drain`` (run a job), ``plan`` (what a loss would do), ``simulate`` (weeks of them)."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lightning_ntp.calibration import predict, read_records
from lightning_ntp.cost_model import CostModel, ModelShape
from lightning_ntp.errors import ConfigError, NTPError
from lightning_ntp.goodput_dashboard import parse_project, view_spec
from lightning_ntp.hf_config import load_hf_config
from lightning_ntp.layout import ShardLayout, nested_layouts
from lightning_ntp.planner import Placement, further_losses, plan_placement
from lightning_ntp.presets import LLAMA3_405B, PAPER_MODEL, gpu_spec
from lightning_ntp.report_cli import Every, Html, Run, report_run
from lightning_ntp.scenarios import SCENARIOS, RecoveryCosts, llama3_failures, report, scenario
from lightning_ntp.topology import Topology

app = typer.Typer(name="ntp", help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
_MODELS = {"ntp-paper": PAPER_MODEL, "llama3-405b": LLAMA3_405B}


@app.callback()
def _root() -> None:
    """Keeps `plan` and `simulate` as subcommands however many there are."""


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Users see our message and exit status 2, not a traceback."""
    try:
        yield
    except NTPError as error:
        typer.echo(f"ntp: {error}", err=True)
        raise typer.Exit(2) from error


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def launch(
    script: Annotated[str, typer.Argument(help="train.py (or: -- -m module)")],
    arguments: Annotated[list[str] | None, typer.Argument(help="what the script shall get")] = None,
    workers: Annotated[int | None, typer.Option(help="workers on this node (default: one per visible GPU)")] = None,
    nodes: Annotated[int | None, typer.Option(help="nodes of the job (default: 1, or srun's tasks)")] = None,
    node_rank: Annotated[int | None, typer.Option(help="number of this node; 0 hosts the store")] = None,
    endpoint: Annotated[str | None, typer.Option(help="HOST:PORT of the store on node 0 (default: loopback)")] = None,
    join: Annotated[bool, typer.Option("--join", help="add this node's workers to a job that runs")] = False,
    recovery: Annotated[
        bool, typer.Option(help="go on without lost workers; else the first failure ends the job")
    ] = True,
    max_respawns: Annotated[int, typer.Option(help="replacements of lost workers, over the job")] = 8,
    max_restarts: Annotated[int, typer.Option(help="lives from the last checkpoint, where the job cannot go on in place")] = 3,
    hang_seconds: Annotated[
        float, typer.Option(help="a standstill is at least this long (and 10 median steps)")
    ] = 60.0,
    logs: Annotated[Path | None, typer.Option(help="log folder (default: ntp_logs/<run>)")] = None,
    exit_file: Annotated[Path | None, typer.Option(help="node 0 writes the job's exit code there, for batch scripts")] = None,
) -> None:
    """Runs a script once per GPU under a supervisor. Several nodes: the same on each, with the same NTP_JOB_TOKEN."""
    from lightning_ntp.strategy.launching import LaunchOptions, plan_launch, script_command

    with _plain_errors():
        command = script_command(script, arguments or [])
        options = LaunchOptions(
            workers, nodes, node_rank, endpoint, join, recovery, max_respawns, hang_seconds, logs, exit_file, max_restarts
        )
        code = plan_launch(options, os.environ).run(command)
    raise typer.Exit(code)


@app.command()
def drain(
    target: Annotated[str, typer.Argument(help="a worker (3) or a node (node1)")],
    endpoint: Annotated[str | None, typer.Option(help="HOST:PORT of the job's store (default: from the logs)")] = None,
    logs: Annotated[Path | None, typer.Option(help="log folder of the job (default: the newest)")] = None,
) -> None:
    """Asks workers of a running job to leave at the next step boundary: the others take over, no step is lost."""
    from lightning_ntp.strategy.launching import drain as ask
    from lightning_ntp.strategy.launching import find_job

    with _plain_errors():
        where, token = find_job(logs, endpoint, os.environ)
        typer.echo(f"asked to leave: workers {', '.join(map(str, ask(target, where, token)))}")


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="config.json, a folder with one, a hub id, or ntp-paper / llama3-405b")],
    replicas: Annotated[str, typer.Option(help="healthy replicas: NUMBERxFSDPxTP, e.g. 4x1x8")] = "2x1x8",
    roles: Annotated[int, typer.Option(help="roles to plan for (0: the tp degree); more let 2x4 go on as 1x7")] = 0,
    lost: Annotated[str, typer.Option(help="lost workers, e.g. 3,12 (worker = position over all replicas)")] = "",
    batch: Annotated[int, typer.Option(help="samples of one optimizer step")] = 64,
    sequence: Annotated[int, typer.Option(help="tokens of a sample (0: the preset's own, else 4096)")] = 0,
    gpu: Annotated[str, typer.Option(help="a100, h100, h200 or b200")] = "h100",
    domain: Annotated[int, typer.Option(help="GPUs that NVLink joins (0: the tp degree)")] = 0,
    micro_batch: Annotated[int, typer.Option(help="samples that a data row holds at a time")] = 1,
    recompute: Annotated[bool, typer.Option(help="activation checkpointing")] = False,
    boost: Annotated[bool, typer.Option(help="count on more power for hurt replicas")] = False,
    refactor: Annotated[bool, typer.Option(help="allow new (fsdp, tp) shapes")] = True,
    further: Annotated[int, typer.Option(help="list what so many further losses would cost")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    png: Annotated[Path | None, typer.Option(help="also draw replicas and roles before and after")] = None,
) -> None:
    """Layout before and after a loss: shapes, shares, bytes that move, memory, and what the next losses would cost."""
    with _plain_errors():
        shape = _MODELS.get(model) or ModelShape.from_hf_config(load_hf_config(model), sequence or 4096)
        shape = replace(shape, sequence_length=sequence or shape.sequence_length)
        number, fsdp, tp = _three(replicas)
        cost = CostModel(shape, gpu_spec(gpu), domain_size=domain or tp, recompute=recompute)
        cost.check_degree(max(tp, roles))
        healthy = Topology.from_shapes([(fsdp, tp)] * number, num_roles=roles or tp)
        gone = _numbers(lost)
        before = plan_placement(healthy, cost, batch, micro_batch=micro_batch)
        after = plan_placement(healthy, cost, batch, gone, micro_batch=micro_batch, boost=boost, refactor=refactor)
        chain = further_losses(
            after, cost, batch, further, micro_batch=micro_batch, boost=boost, refactor=refactor
        )
        if png is not None:
            from lightning_ntp.plots import draw_plan  # matplotlib costs a second, only who draws pays it

            draw_plan(healthy, after.topology, gone, png)
        if as_json:
            typer.echo(json.dumps(_plan_json(shape, before, after, chain, batch), indent=2))
        else:
            _print_plan(shape, before, after, chain, batch)


@app.command()
def simulate(
    preset: Annotated[str, typer.Option(help=" or ".join(SCENARIOS))] = "ntp-paper",
    seeds: Annotated[int, typer.Option(help="runs of the trace")] = 40,
    samples: Annotated[int, typer.Option(help="drawn states per failed fraction")] = 200,
    repair_days: Annotated[str, typer.Option(help="equally likely repair times of hardware, e.g. 3,5")] = "3,5",
    rate_factor: Annotated[float, typer.Option(help="failure rate against the Llama 3 record")] = 1.0,
    fractions: Annotated[str, typer.Option(help="failed fractions to draw states for (empty: 0.0005 to 0.004)")] = "",
    restart_seconds: Annotated[float, typer.Option(help="from a failure to the first step, by restart")] = 600.0,
    checkpoint_seconds: Annotated[float, typer.Option(help="time that one checkpoint stops the job")] = 60.0,
    live_seconds: Annotated[float, typer.Option(help="pause of a live recovery")] = 30.0,
    step_seconds: Annotated[float, typer.Option(help="longest loss of work in a live recovery")] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    csv_folder: Annotated[Path | None, typer.Option("--csv", help="write availability.csv, loss.csv, ... into this folder")] = None,
    plots: Annotated[Path | None, typer.Option(help="write the figures as PNG into this folder")] = None,
) -> None:
    """Failures of weeks on a cluster: availability, loss by policy, spares needed, goodput, over many seeds."""
    with _plain_errors():
        kinds = llama3_failures(_decimals(repair_days, "--repair-days"), rate_factor)
        case = replace(scenario(preset), kinds=kinds)
        costs = RecoveryCosts(restart_seconds, checkpoint_seconds, live_seconds, step_seconds)
        chosen = {"fractions": _decimals(fractions, "--fractions")} if fractions else {}
        result = report(case, seeds, samples, costs, **chosen)
        if csv_folder is not None:
            _write_csv(result, csv_folder)
        if plots is not None:
            from lightning_ntp.plots import draw_simulation

            draw_simulation(case, result, plots)
        if as_json:
            typer.echo(json.dumps(result, indent=2))
        else:
            _print_simulation(result)


@app.command()
def calibrate(
    records: Annotated[Path, typer.Argument(help="what `make goodput` wrote: a file, or a folder of them")],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """The simulator beside runs that took place: fed with their failures and costs, what goodput would it have said?"""
    with _plain_errors():
        found = [predict(record) for record in read_records(records)]
    if as_json:
        typer.echo(json.dumps([{**asdict(each), "error": each.error} for each in found], indent=2))
        return
    table = Table(title=f"goodput of the runs in {records.name}, and what the simulator says")
    for column in ("policy", "measured", "predicted", "error", "reduced", "recovery", "lost work", "checkpoints"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for each in found:
        said = each.predicted
        shares = (each.measured, said.goodput, each.error, said.reduced, said.recovery, said.lost_work, said.checkpoints)
        table.add_row(each.policy, *(f"{share:.1%}" for share in shares))
    _console().print(table)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(f"--lost takes numbers of workers with commas between, got {text!r}") from error


def _decimals(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"{option} takes numbers with commas between, got {text!r}") from error


def _three(text: str) -> tuple[int, int, int]:
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--replicas takes NUMBERxFSDPxTP, e.g. 4x1x8, got {text!r}")
    return int(parts[0]), int(parts[1]), int(parts[2])


def _tokens_per_second(placement: Placement, shape: ModelShape, batch: int) -> float:
    return batch * shape.sequence_length / placement.step_seconds


def _row(placement: Placement, shape: ModelShape, batch: int) -> dict[str, Any]:
    topology = placement.topology
    shapes: dict[str, int] = {}
    for replica in topology.replicas:
        name = f"{replica.fsdp_size}x{replica.degree}"
        shapes[name] = shapes.get(name, 0) + 1
    return {
        "workers": len(topology.workers),
        "spares": len(topology.spares),
        "shapes": shapes,
        "shares": list(placement.shares) if len(placement.shares) <= 64 else None,
        "tokens_per_second": _tokens_per_second(placement, shape, batch),
        "step_seconds": placement.step_seconds,
        "memory_bytes": max(each.memory_bytes for each in placement.replicas),
        "moved_bytes": placement.moved_bytes,
        "packed": placement.packed,
        "dropped_replicas": placement.dropped_replicas,
    }


def _spans(layout: ShardLayout, role: int) -> str:
    return " ".join(map(repr, layout.of(role))) or "nothing"


def _layouts(shape: ModelShape, placement: Placement) -> list[dict[str, Any]]:
    """What the roles of the healthy and of the smallest degree store, over query heads and feed-forward columns."""
    topology = placement.topology
    order = topology.loss_order[: topology.num_roles - topology.sync_degree]
    heads = nested_layouts(shape.num_heads, topology.num_roles, order)
    columns = nested_layouts(shape.ffn_size, topology.num_roles, order)
    return [
        {"degree": degree, "role": role, "heads": _spans(heads[degree], role), "ffn": _spans(columns[degree], role)}
        for degree in sorted({topology.num_roles, topology.sync_degree}, reverse=True)
        for role in topology.roles(degree)
    ]


def _plan_json(
    shape: ModelShape, before: Placement, after: Placement, chain: list[Placement], batch: int
) -> dict[str, Any]:
    return {
        "parameters": shape.num_params,
        "model": asdict(shape),
        "before": _row(before, shape, batch),
        "after": _row(after, shape, batch),
        "further_losses": [_row(each, shape, batch) for each in chain],
        "loss_order": list(after.topology.loss_order),
        "layouts": _layouts(shape, after),
        "explanation": after.explain().splitlines(),
    }


def _print_plan(shape: ModelShape, before: Placement, after: Placement, chain: list[Placement], batch: int) -> None:
    console = _console()
    table = Table(title=f"{shape.num_params / 1e9:.1f}B parameters, {batch} samples of {shape.sequence_length} tokens a step")
    for column in ("", "replicas", "workers", "parked", "tokens/s", "against healthy", "GB a GPU", "GB moved"):
        table.add_column(column, justify="left" if column in ("", "replicas") else "right")
    names = ["healthy", "after the loss", *(f"{i} more lost" for i in range(1, len(chain) + 1))]
    healthy = _tokens_per_second(before, shape, batch)
    for name, placement in zip(names, [before, after, *chain], strict=True):
        row = _row(placement, shape, batch)
        table.add_row(
            name,
            ", ".join(f"{count} of {each}" for each, count in row["shapes"].items()),
            str(row["workers"]),
            str(row["spares"]),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second'] / healthy:.1%}",
            f"{row['memory_bytes'] / 1e9:.1f}",
            f"{row['moved_bytes'] / 1e9:,.1f}",
        )
    console.print(table)
    console.print(after.explain(), highlight=False)
    held = Table(title="what each role stores (storage order): healthy degree, then the smallest live degree")
    for column in ("degree", "role", "query heads", "feed-forward columns"):
        held.add_column(column)
    for entry in _layouts(shape, after):
        held.add_row(str(entry["degree"]), str(entry["role"]), entry["heads"], entry["ffn"])
    console.print(held)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=120)


def _percent(band: dict[str, float]) -> str:
    return f"{100 * band['mean']:.2f} ({100 * band['low']:.1f}-{100 * band['high']:.1f})"


def _print_simulation(result: dict[str, Any]) -> None:
    console = _console()
    loss = Table(title=f"{result['preset']}: throughput lost in %, mean (5th-95th percentile)")
    names = list(dict.fromkeys(row["policy"] for row in result["loss"]))
    for column in ("failed", *names):
        loss.add_column(column.replace("-unpacked", " unpacked"), justify="right")
    for fraction in dict.fromkeys(row["failed_fraction"] for row in result["loss"]):
        rows = {row["policy"]: row for row in result["loss"] if row["failed_fraction"] == fraction}
        loss.add_row(f"{fraction:.2%}", *(_percent(rows[name]) for name in names))
    console.print(loss)
    trace = result["trace"]
    facts = Table(title=f"{trace['days']} days from an unfailed start, {trace['seeds']} seeds")
    facts.add_column("")
    facts.add_column("mean (5th-95th percentile)", justify="right")
    facts.add_row(f"time above {trace['failed_threshold']:.1%} failed, %", _percent(trace["share_of_time_above_threshold"]))
    facts.add_row("peak of boosted domains, %", _percent(trace["boosted_domains_peak_share"]))
    counts = {"peak of failed GPUs": trace["peak_failed_gpus"]}
    counts.update({f"spare domains for {policy}": band for policy, band in trace["spare_domains_needed"].items()})
    for name, band in counts.items():
        facts.add_row(name, f"{band['mean']:.1f} ({band['low']:.0f}-{band['high']:.0f})")
    console.print(facts)
    kept = Table(title="where the time goes, recovery costs included")
    parts = list(next(iter(result["goodput"].values())))
    for column in ("policy", *parts):
        kept.add_column(column.replace("_", " "), justify="left" if column == "policy" else "right")
    for policy, shares in result["goodput"].items():
        kept.add_row(policy, *(f"{abs(shares[part]['mean']):.2%}" for part in parts))
    console.print(kept)


def _write_csv(result: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tables = {name: result[name] for name in ("availability", "loss", "blast_radius", "blast_radius_any_degree")}
    tables["goodput"] = [
        {"policy": policy, **{f"{part}_{key}": value for part, band in parts.items() for key, value in band.items()}}
        for policy, parts in result["goodput"].items()
    ]
    for name, rows in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


@app.command("report")
def _report(run: Run, html: Html = None, every: Every = 0.0) -> None:
    """Goodput of a run, finished or alive: what every GPU did, what was lost, and every event."""
    with _plain_errors():
        report_run(run, html, every)


@app.command()
def dashboard(
    project: Annotated[str, typer.Argument(help="ENTITY/PROJECT of W&B")],
    title: Annotated[str, typer.Option(help="name of the view")] = "Goodput",
    out: Annotated[Path | None, typer.Option(help="write the specification to this file; W&B is not asked")] = None,
) -> None:
    """A W&B workspace with goodput, badput, throughput and events of all runs of a project."""
    with _plain_errors():
        parse_project(project)
        if out is not None:
            out.write_text(json.dumps(view_spec(), indent=1) + "\n")
            typer.echo(f"{out}: the specification; `ntp dashboard {project}` puts it into the project")
            return
        from lightning_ntp.strategy.wandb_dashboard import save_dashboard  # wandb takes seconds

        typer.echo(f"the dashboard is at {save_dashboard(project, title)}")


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="checkpoint folder of a run with a Hugging Face model")],
    out: Annotated[Path, typer.Argument(help="folder to make for from_pretrained")],
    shard_gb: Annotated[float, typer.Option(help="size above which weights are split over files")] = 5.0,
) -> None:
    """Weights of a checkpoint as safetensors, with config and tokenizer; one tensor in memory at a time."""
    with _plain_errors():
        if not shard_gb > 0:
            raise ConfigError(f"--shard-gb is a size above 0, got {shard_gb}")
        from lightning_ntp.strategy.pretrained import export as write  # torch costs seconds, only who exports pays them

        entries = write(checkpoint, out, int(shard_gb * 10**9))
        size = sum(entry.num_bytes for entry in entries)
        typer.echo(f"{out}: {len(entries)} tensors, {size / 10**9:.3f} GB; load it with from_pretrained({str(out)!r})")


def main() -> None:
    """Entry point of the `ntp` command."""
    app()
