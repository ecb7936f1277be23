"""A process that goes on with a job's ledger: after a restart from a checkpoint, or as a newcomer among workers that live."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_ntp.errors import NTPError
from lightning_ntp.goodput_file import read_ledger
from lightning_ntp.strategy import rendezvous
from lightning_ntp.strategy.ledger_observer import LedgerObserver


def job_id_of(environ: Mapping[str, str]) -> str | None:
    """A name for the job that all its workers derive alike, later ones too; None where no launcher of ours started it."""
    token = environ.get(rendezvous.ENV_JOB_TOKEN)
    return None if token is None else hashlib.sha256(token.encode()).hexdigest()[:8]


def adopt(observer: LedgerObserver, state: Mapping[str, Any], newcomer: bool) -> None:
    """Put the job's earlier time before this process' own.

    The newest ledger in the job's folder knows what was trained after the checkpoint and is thrown away now. Without the
    folder the checkpoint's own ledger is all there is, and what came after it counts as ``degraded_capacity``.
    """
    saved, generation = state["ledger"], observer.ledger.generation
    newest = None if newcomer else _newest(state.get("folder") or "")
    if newcomer:
        observer.ledger.join(saved)
    elif newest is not None and newest["at_ns"] > saved["at_ns"]:
        observer.ledger.load_state_dict(newest, saved)
    else:
        observer.ledger.load_state_dict(saved)
    observer.gpus = ({} if newcomer else observer.gpus) | {int(worker): gpu for worker, gpu in state["gpus"].items()}
    observer.events.extendleft(reversed(state["events"]))
    observer.ledger.generation = max(observer.ledger.generation, generation)
    if newcomer:
        observer.seat_unknown()
    observer.resumed()


def _newest(folder: str) -> dict[str, Any] | None:
    if not folder:
        return None
    files = sorted(Path(folder).glob("ledger-*.jsonl"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for file in files:
        try:
            return read_ledger(file).state()
        except NTPError:
            continue
    return None
