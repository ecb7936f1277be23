"""``ntp report``: where the time of a run's GPUs went, in the terminal and as a page of HTML."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lightning_ntp.errors import ConfigError
from lightning_ntp.goodput_bins import COLORS, bins_of, used_buckets
from lightning_ntp.goodput_file import History, read_ledger
from lightning_ntp.goodput_html import duration, event_cells, render_html, share
from lightning_ntp.goodput_merge import read_run
from lightning_ntp.goodput_totals import PRODUCTIVE

BAR = 64
MAX_LINES = 32


Run = Annotated[Path, typer.Argument(help="folder of a job's ledgers (ntp_logs/RUN), one ledger file, or a W&B offline folder")]
Html = Annotated[Path | None, typer.Option("--html", help="also write one self-contained page of HTML")]
Every = Annotated[float, typer.Option("--every", help="show it anew every so many seconds, until Ctrl-C")]


def report_run(run: Path, html: Path | None, every: float) -> None:
    """See ``ntp report --help``. ConfigError: nothing to report on."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    if every <= 0:
        _show(console, run, html)
        return
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(_page(_load(run), run, html), refresh=True)
                time.sleep(every)
        except KeyboardInterrupt:
            return


def _show(console: Console, run: Path, html: Path | None) -> None:
    console.print(_page(_load(run), run, html))


def _load(run: Path) -> History:
    if run.is_file() and run.suffix == ".jsonl":
        return read_ledger(run)
    folder = run.parent if run.is_file() else run
    if not folder.is_dir():
        raise ConfigError(f"{run} is neither a folder nor a ledger file")
    if any(folder.glob("ledger-*.jsonl")):
        return read_run(folder)
    from lightning_ntp.strategy.wandb_offline import read_offline_folder

    history = read_offline_folder(folder)
    if history is None:
        raise ConfigError(f"{folder} holds neither ledger-*.jsonl nor a W&B run; a run names its ledger folder when it starts")
    return history


def _page(history: History, run: Path, html: Path | None) -> Group:
    name = str(history.header.get("job") or run.name)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(render_html(history, f"run {name}", time.time_ns()), encoding="utf-8")
    parts: list[RenderableType] = [_summary(history, name), _split(history)]
    if history.segments:
        parts.append(_timelines(history))
    if history.events:
        parts.append(_events(history))
    if html is not None:
        parts.append(Text(f"wrote {html}"))
    return Group(*parts)


def _summary(history: History, name: str) -> Text:
    total = history.gpu_ns()
    seconds = (history.at_ns - history.start_ns) / 1e9
    lines = [
        f"run {name}: {history.step} steps in {duration(seconds)}, last record {duration(max(0.0, time.time() - history.at_ns / 1e9))} ago",
        f"goodput: {share(history.job[PRODUCTIVE], sum(history.job.values()))} of the job's time",
        f"capacity-weighted: {share(total[PRODUCTIVE], sum(total.values()))} of the time of all GPUs",
    ]
    if history.num_damaged:
        lines.append(f"{history.num_damaged} damaged lines were left out")
    return Text("\n".join(lines))


def _split(history: History) -> Table:
    table = Table(title="where the time went")
    for column in ("bucket", "GPU-seconds", "share", "job seconds"):
        table.add_column(column, justify="left" if column == "bucket" else "right")
    total = history.gpu_ns()
    owned = sum(total.values())
    for bucket in used_buckets(history):
        style = COLORS[bucket]
        table.add_row(
            Text(bucket, style=style), f"{total[bucket] / 1e9:,.1f}", share(total[bucket], owned), f"{history.job[bucket] / 1e9:,.1f}"
        )
    table.add_section()
    table.add_row("sum", f"{owned / 1e9:,.1f}", "100.00%", f"{sum(history.job.values()) / 1e9:,.1f}")
    return table


def _timelines(history: History) -> Table:
    table = Table(title="every GPU over time", box=None, pad_edge=False)
    table.add_column("GPU", justify="right")
    table.add_column("what it did", no_wrap=True)
    table.add_column("role", no_wrap=True)
    placed: dict[str, list[int]] = next((event["placed"] for event in reversed(history.events) if event.get("placed")), {})
    gpus = sorted(history.segments)
    for gpu in gpus[:MAX_LINES]:
        line = Text()
        for bucket in bins_of(history, [gpu], BAR).most():
            line.append("█" if bucket else " ", style=COLORS.get(bucket, ""))
        at = placed.get(str(gpu))
        table.add_row(str(gpu), line, "idle" if at is None else f"replica {at[0]} role {at[2]} of {at[3]}")
    if len(gpus) > MAX_LINES:
        table.caption = f"and {len(gpus) - MAX_LINES} more: see --html"
    return table


def _events(history: History) -> Table:
    table = Table(title="events")
    names = ("time", "step", "event", "workers", "roles", "took", "moved", "what")
    for name in names:
        table.add_column(name, overflow="fold")
    for event in history.events:
        cells = event_cells(event, history.start_ns)
        table.add_row(*(cells[name] for name in names))
    return table
