"""What an ended job has left behind: processes, file descriptors, threads, open ports, shared memory."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36

MOST_GROWN = {"file descriptors": 16, "threads": 4}
"""A worker may have so many more at its end than at its first step: connections of groups that other shapes need."""


def become_subreaper() -> None:
    """Processes of a job whose parent has died become children of this one, where `leaks` finds them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def leaks(events: list[dict[str, Any]]) -> list[str]:
    """One line ``leaked KIND: what`` for everything that is left of the job that wrote the events. All its processes should be gone."""
    starts = [event for event in events if event["kind"] == "start"]
    found = [f"leaked process: {pid}, {_name(pid)}" for pid in children()]
    found += [f"leaked port: {event['endpoint']}" for event in starts[:1] if event["endpoint"] and _answers(event["endpoint"])]
    pids = {str(event["pid"]) for event in starts}
    found += [f"leaked shared memory: {path}" for path in Path("/dev/shm").glob("*") if pids & set(path.name.split("_"))]
    return found + _grown(events)


def usage() -> dict[str, int]:
    """File descriptors and threads of this process."""
    return {"file descriptors": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}


def children() -> list[int]:
    """Pids below this process that still run; what has ended meanwhile is reaped."""
    pids = [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    return [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


def _grown(events: list[dict[str, Any]]) -> list[str]:
    """Workers that have grown from their first step to their last."""
    found = []
    for worker in sorted({event["worker"] for event in events if event["kind"] == "commit"}):
        used = [event["usage"] for event in events if event["kind"] == "commit" and event["worker"] == worker]
        for kind, most in MOST_GROWN.items():
            if used[-1][kind] - used[0][kind] > most:
                found.append(f"leaked {kind}: worker {worker} had {used[0][kind]} at first and {used[-1][kind]} at the end")
    return found


def _answers(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return False
    return True


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    except OSError:
        return "ended meanwhile"
