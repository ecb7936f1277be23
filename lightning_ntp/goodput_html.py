"""One page of HTML about a run, in one file: what it achieved, where its time went, every GPU's timeline, all events.

No script and nothing from the network: it opens from a disk, in a mail, on a phone.
"""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from lightning_ntp.goodput_bins import COLORS, bins_of, used_buckets
from lightning_ntp.goodput_file import History
from lightning_ntp.goodput_totals import PRODUCTIVE

NUM_BINS = 480
MAX_ROWS = 64
"""Timelines that a page shows; GPUs that were lost or parked come first."""

ROW, LABEL, WIDTH = 22, 150, 1100
EVENT_COLORS = {
    "loss": "#d62828", "recovery": "#e76f51", "rejoin": "#2a9d5c", "damage": "#7b2cbf", "exception": "#9d0208", "leave": "#457b9d",
    "slow": "#b08900",
}  # fmt: skip

_STYLE = """
:root{color-scheme:light dark;--ink:#1b2530;--dim:#5b6875;--paper:#fff;--card:#f4f6f8;--line:#d9dfe5}
@media(prefers-color-scheme:dark){:root{--ink:#e8edf2;--dim:#9aa7b4;--paper:#14181d;--card:#1e242b;--line:#333c46}}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 16px 64px}h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:32px 0 10px}
p.facts{color:var(--dim);margin:4px 0 0;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:20px}
.tile{background:var(--card);border-radius:8px;padding:12px 14px}.tile b{display:block;font-size:1.6rem;line-height:1.2}
.tile span{color:var(--dim);font-size:.85rem}.bar{display:flex;height:28px;border-radius:6px;overflow:hidden;margin-bottom:12px}
.wide{overflow-x:auto;-webkit-overflow-scrolling:touch;border:1px solid var(--line);border-radius:8px}
svg{display:block;min-width:720px;width:100%;height:auto}svg text{fill:var(--ink);font:11px system-ui,sans-serif}
svg .dim{fill:var(--dim)}svg line.grid{stroke:var(--line)}table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{text-align:left;padding:6px 10px;border-bottom:1px solid var(--line);vertical-align:top}th{color:var(--dim);font-weight:600}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.splits td:first-child,.events td:first-child{white-space:nowrap}tr:last-child td{border-bottom:0}i.key{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:7px}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:0 0 10px;font-size:.85rem;color:var(--dim)}
@media(max-width:640px){.events thead{display:none}.events tr{display:block;padding:8px 10px;border-bottom:1px solid var(--line)}
.events td{display:flex;gap:10px;border:0;padding:1px 0;text-align:left;white-space:normal;overflow-wrap:anywhere}
.events td:empty{display:none}.events td::before{content:attr(data-name);color:var(--dim);flex:0 0 86px}.splits .opt{display:none}.splits td,.splits th{padding:6px 3px}}
"""


def render_html(history: History, title: str, now_ns: int | None = None) -> str:
    """The page.

    Args:
        history: of the whole job.
        title: the run's name.
        now_ns: when the page is made; tells how old the last record is.
    """
    start = next((event for event in history.events if event["event"] == "start"), {})
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="facts">{html.escape(_facts(history, start, now_ns))}</p>',
        _tiles(history),
        "<h2>Where the time of all GPUs went</h2>",
        _split(history),
        *_timelines(history),
        f"<h2>Events ({len(history.events)})</h2>",
        _events(history),
    ]
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    head += '<meta name="viewport" content="width=device-width,initial-scale=1">'
    return f"{head}<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body><main>{''.join(body)}</main></body></html>"


def _facts(history: History, start: Mapping[str, Any], now_ns: int | None) -> str:
    parts = [f"began {_clock(history.start_ns)}", f"ran {duration((history.at_ns - history.start_ns) / 1e9)}"]
    if not _ended(history):
        age = "" if now_ns is None else f" {duration(max(0, now_ns - history.at_ns) / 1e9)} ago"
        parts.append(f"no end recorded: last record{age}")
    for name in ("topology", "device", "precision", "host"):
        if start.get(name):
            parts.append(f"{name} {start[name]}")
    versions = start.get("versions") or {}
    parts += [f"{name} {versions[name]}" for name in ("lightning-ntp", "torch", "lightning") if name in versions]
    if history.num_damaged:
        parts.append(f"{history.num_damaged} damaged lines left out")
    return " · ".join(parts)


def _ended(history: History) -> bool:
    return bool(history.events) and history.events[-1]["event"] in ("end", "exception")


def _tiles(history: History) -> str:
    total = history.gpu_ns()
    owned, job = sum(total.values()), sum(history.job.values())
    counts = {name: sum(event["event"] == name for event in history.events) for name in ("loss", "rejoin")}
    tiles = [
        (share(history.job[PRODUCTIVE], job), "goodput: time in which the job trained"),
        (share(total[PRODUCTIVE], owned), "of all GPU time trained (capacity-weighted)"),
        (f"{history.step:,}", "optimizer steps"),
        (f"{len(history.segments) or '?'}", f"GPUs owned, {len(history.idle)} idle at the end"),
        (f"{counts['loss']} / {counts['rejoin']}", "losses / returns"),
    ]
    return f'<div class="tiles">{"".join(f"<div class=tile><b>{value}</b><span>{what}</span></div>" for value, what in tiles)}</div>'


def _split(history: History) -> str:
    total = history.gpu_ns()
    owned, job = max(1, sum(total.values())), max(1, sum(history.job.values()))
    used = used_buckets(history)
    bar = "".join(
        f'<div style="width:{100 * total[b] / owned:.3f}%;background:{COLORS[b]}" title="{b} {share(total[b], owned)}"></div>' for b in used
    )
    rows = "".join(
        f'<tr><td><i class="key" style="background:{COLORS[b]}"></i>{b}</td><td class="n">{total[b] / 1e9:,.1f}</td>'
        f'<td class="n">{share(total[b], owned)}</td><td class="n opt">{history.job[b] / 1e9:,.1f}</td>'
        f'<td class="n opt">{share(history.job[b], job)}</td></tr>'
        for b in used
    )
    head = '<tr><th>bucket</th><th class="n">GPU-seconds</th><th class="n">share</th><th class="n opt">job seconds</th>'
    head += '<th class="n opt">share</th></tr>'
    sums = f'<tr><td>sum</td><td class="n">{owned / 1e9:,.1f}</td><td class="n">100%</td><td class="n opt">{job / 1e9:,.1f}</td>'
    return f'<div class="bar">{bar}</div><table class="splits">{head}{rows}{sums}<td class="n opt">100%</td></tr></table>'


def _legend(used: Iterable[str]) -> str:
    return f'<div class="legend">{"".join(f"<span><i class=key style=background:{COLORS[b]}></i>{b}</span>" for b in used)}</div>'


def _timelines(history: History) -> list[str]:
    if not history.segments:
        return ["<p>Whose time it was is not known: the ledger files of the run are not here, only its totals.</p>"]
    title = "<h2>Every GPU over time</h2>"
    return [title, _legend(used_buckets(history)), f'<div class="wide">{_timeline(history)}</div>']


def _timeline(history: History) -> str:
    shown = _rows(history)
    height = ROW * len(shown) + 46
    start, length = history.start_ns, max(1, history.at_ns - history.start_ns)
    plot = WIDTH - LABEL - 10
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="timeline of every GPU">']
    for index, gpu in enumerate(shown):
        y = 8 + ROW * index
        parts.append(f'<text x="8" y="{y + 14}">GPU {gpu}</text>')
        parts.append(_row(history, gpu, y, plot))
        parts.append(_roles(history, gpu, y, start, length, plot))
    bottom = 8 + ROW * len(shown)
    for event in history.events:
        color = EVENT_COLORS.get(event["event"])
        if color is not None:
            x = LABEL + plot * (int(event["t"]) - start) / length
            words = html.escape(f"{event['event']} at step {event.get('step')}: {event.get('why') or event.get('topology') or ''}")
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{bottom}" stroke="{color}" stroke-width="1.5"><title>{words}</title></line>'
            )
    parts += _axis(length, bottom, plot)
    hidden = len(history.segments) - len(shown)
    if hidden:
        parts.append(f'<text class="dim" x="8" y="{bottom + 32}">{hidden} GPUs that were never lost are not shown</text>')
    return "".join(parts) + "</svg>"


def _rows(history: History) -> list[int]:
    """All GPUs, or those with the most idle time."""
    gpus = sorted(history.segments)
    if len(gpus) <= MAX_ROWS:
        return gpus
    idle = {gpu: sum(s.spent.get("degraded_capacity", 0) for s in history.segments[gpu]) for gpu in gpus}
    return sorted(sorted(gpus, key=lambda gpu: -idle[gpu])[:MAX_ROWS])


def _row(history: History, gpu: int, y: int, plot: int) -> str:
    most = bins_of(history, [gpu], NUM_BINS).most()
    parts, at = [], 0
    for bucket, run in groupby(most):
        number = len(list(run))
        if bucket:
            x, width = LABEL + plot * at / NUM_BINS, plot * number / NUM_BINS
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.2f}" height="{ROW - 5}" fill="{COLORS[bucket]}"><title>{bucket}</title></rect>'
            )
        at += number
    return "".join(parts)


def _roles(history: History, gpu: int, y: int, start_ns: int, length_ns: int, plot: int) -> str:
    """The role of a GPU where it changes, over its bar; the first one beside its number."""
    parts, before = [], None
    for event in history.events:
        placed: Mapping[str, Sequence[int]] | None = event.get("placed")
        if placed is None:
            continue
        at = placed.get(str(gpu))
        words = "" if at is None else f"r{at[0]}·tp{at[2]}/{at[3]}" + (f"·f{at[1]}" if at[1] else "")
        if words and words != before:
            x = LABEL + plot * (int(event["t"]) - start_ns) / length_ns
            title = "" if at is None else f"replica {at[0]}, fsdp {at[1]}, role {at[2]}, degree {at[3]}"
            if before is None:
                parts.append(f'<text class="dim" x="60" y="{y + 14}"><title>{title}</title>{words}</text>')
            elif x < WIDTH - 80:
                parts.append(f'<text x="{x + 4:.1f}" y="{y + 13}" style="fill:#fff"><title>{title}</title>{words}</text>')
        before = words if words else before
    return "".join(parts)


def _axis(length_ns: int, y: int, plot: int) -> list[str]:
    marks = []
    for index in range(6):
        x = LABEL + plot * index / 5
        anchor = "end" if index == 5 else "middle" if index else "start"
        text = duration(length_ns * index / 5 / 1e9)
        marks.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 5}"/>')
        marks.append(f'<text class="dim" x="{x:.1f}" y="{y + 18}" text-anchor="{anchor}">{text}</text>')
    return marks


_COLUMNS = ("time", "step", "event", "workers", "roles", "took", "moved", "what")


def _events(history: History) -> str:
    if not history.events:
        return "<p>None.</p>"
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    rows = []
    for event in history.events:
        cells = event_cells(event, history.start_ns)
        row = "".join(f'<td data-name="{name}">{html.escape(cells[name])}</td>' for name in _COLUMNS)
        rows.append(f"<tr>{row}</tr>")
    return f'<table class="events"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def event_cells(event: Mapping[str, Any], start_ns: int) -> dict[str, str]:
    """An event in words, by column."""
    seconds = event.get("seconds") or {}
    phases = ", ".join(f"{name} {seconds[name]:.2f}" for name in ("broken", "regrouping", "planning", "moving") if name in seconds)
    return {
        "time": f"+{duration((int(event['t']) - start_ns) / 1e9)}",
        "step": str(event.get("step", "")),
        "event": str(event["event"]),
        "workers": " ".join(map(str, event.get("workers", ()))),
        "roles": " ".join(filter(None, event.get("roles", ()))),
        "took": f"{seconds['total']:.2f} s ({phases})" if "total" in seconds else "",
        "moved": num_bytes(event["bytes_moved"]) if event.get("bytes_moved") is not None else "",
        "what": str(event.get("why") or event.get("topology") or ""),
    }


def share(part: float, whole: float) -> str:
    """A percentage."""
    return f"{100 * part / whole:.2f}%" if whole else "-"


def duration(seconds: float) -> str:
    """``3 d 4 h``, ``2 h 5 min``, ``4 min 10 s``, ``3.2 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def num_bytes(number: float) -> str:
    """A size."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("unreachable")


def _clock(ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(ns / 1e9))
