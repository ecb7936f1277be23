"""Reads W&B's offline folders, as far as a report needs them: configuration, scalars, and the table of events.

A ``run-ID.wandb`` file is a log of blocks of 32 KiB as LevelDB writes them: records of (checksum, length, type), a long one in pieces.
It is read up to the first record that is not whole, so a run that is alive or was killed can be read as well.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_ntp.errors import ConfigError
from lightning_ntp.goodput_file import History
from lightning_ntp.goodput_merge import read_run
from lightning_ntp.goodput_totals import BADPUT, BUCKETS, PRODUCTIVE

MAGIC = b":W&B"
BLOCK = 32768
_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4


@dataclass(slots=True)
class OfflineRun:
    """One ``.wandb`` file.

    Args:
        folder: of the run.
        run_id: W&B's.
        config: nested values by key.
        rows: scalars and others, as logged, one dict per ``log``.
        summary: last values that were written.
    """

    folder: Path
    run_id: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)
    alerts: list[str] = field(default_factory=list)


def find_wandb_file(folder: Path) -> Path | None:
    """The run file of an offline (or online) run's folder; of the newest run where `folder` holds several."""
    own = sorted(folder.glob("run-*.wandb"))
    nested = sorted((*folder.glob("*run-*/run-*.wandb"), *folder.glob("wandb/*run-*/run-*.wandb")), key=lambda f: f.stat().st_mtime)
    return own[0] if own else nested[-1] if nested else None


def read_wandb(file: Path) -> OfflineRun:
    """Everything that is whole in a run file.

    Raises:
        ConfigError: not such a file.
    """
    from wandb.proto import wandb_internal_pb2

    run = OfflineRun(file.parent)
    for data in _records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.run_id = record.run.run_id or run.run_id
            _update(run.config, record.run.config.update)
        elif kind == "config":
            _update(run.config, record.config.update)
        elif kind == "history":
            row: dict[str, Any] = {}
            _update(row, record.history.item)
            run.rows.append(row)
        elif kind == "summary":
            _update(run.summary, record.summary.update)
        elif kind == "metric":
            run.metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "alert":
            run.alerts.append(record.alert.title)
    return run


def _records(file: Path) -> Iterator[bytes]:
    data = file.read_bytes()
    if data[: len(MAGIC)] != MAGIC:
        raise ConfigError(f"{file} is no W&B run file: it does not begin with {MAGIC!r}")
    at, parts = 7, b""
    while True:
        at += -at % BLOCK if BLOCK - at % BLOCK < _HEADER.size else 0
        if at + _HEADER.size > len(data):
            return
        _, length, kind = _HEADER.unpack_from(data, at)
        body = data[at + _HEADER.size : at + _HEADER.size + length]
        if kind == 0 or len(body) < length:
            return
        at += _HEADER.size + length
        parts = body if kind in (_FULL, _FIRST) else parts + body
        if kind in (_FULL, _LAST):
            yield parts


def _update(values: dict[str, Any], items: Any) -> None:
    """W&B's key paths into nested dicts."""
    for item in items:
        path = list(item.nested_key) or [item.key]
        at = values
        for name in path[:-1]:
            below = at.get(name)
            at[name] = at = below if isinstance(below, dict) else {}
        try:
            at[path[-1]] = json.loads(item.value_json)
        except ValueError:
            at[path[-1]] = item.value_json


def read_offline_folder(folder: Path) -> History | None:
    """The job of an offline folder: from the ledgers that it holds or names, else the totals alone. None: no W&B folder.

    Raises:
        ConfigError: the run file holds nothing about goodput (yet).
    """
    file = find_wandb_file(folder)
    if file is None:
        return None
    run = read_wandb(file)
    named = run.config.get("ntp", {}).get("ledger") or ""
    for place in (file.parent / "files", Path(named) if named else file.parent):
        if any(path.exists() for path in place.glob("ledger-*.jsonl")):
            return read_run(place)
    rows = [row for row in run.rows if "goodput/cumulative" in row]
    if not rows:
        raise ConfigError(f"{file} holds no goodput yet, and the run's ledger is not on this machine ({named or 'not named'})")
    return _from_rows(run, rows)


def _from_rows(run: OfflineRun, rows: list[dict[str, Any]]) -> History:
    """Totals and events; whose time it was is not known."""
    last = rows[-1]
    gpu_ns = dict.fromkeys(BUCKETS, 0) | {b: round(last[f"badput_s/{b}"] * 1e9) for b in BADPUT if f"badput_s/{b}" in last}
    gpu_ns[PRODUCTIVE] = round(last.get("goodput/productive_gpu_s", 0.0) * 1e9)
    wall = round(last["ntp/wall_s"] * 1e9)
    trained = round(last["goodput/cumulative"] * wall)
    history = History({"worker": 0, "job": run.run_id}, at_ns=round(last["_timestamp"] * 1e9), step=int(last.get("trainer/global_step", 0)))
    history.totals_only = gpu_ns
    history.began_ns = history.at_ns - wall
    history.job |= {PRODUCTIVE: trained, "other": wall - trained}
    history.events = _events(run)
    return history


def _events(run: OfflineRun) -> list[dict[str, Any]]:
    tables = [row["ntp/events"]["path"] for row in run.rows if isinstance(row.get("ntp/events"), dict) and "path" in row["ntp/events"]]
    if not tables or not (file := run.folder / "files" / tables[-1]).is_file():
        return []
    table = json.loads(file.read_text())
    events = []
    for cells in table["data"]:
        row = dict(zip(table["columns"], cells, strict=True))
        seconds = {"total": row["seconds"]} if row.get("seconds") is not None else {}
        words = {name: str(row[name] or "").split() for name in ("workers", "gpus", "roles")}
        events.append(row | words | {"t": round(row["time"] * 1e9), "seconds": seconds})
    return events
