"""Which GPUs this node has, by UUID: asked of nvidia-smi, in a child with a deadline, because a driver may hang.

An index is a place in a list that the driver makes anew when a GPU falls off the bus; a UUID stays.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping

QUESTION = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
ANSWER_SECONDS = 10.0

_LINE = re.compile(r"^\s*(\d+)\s*,\s*(GPU-[0-9a-fA-F-]+)\s*$")


def ask_driver() -> str:
    """The driver's list; empty where there is no driver, or none that answers in time."""
    try:
        answer = subprocess.run(QUESTION, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def visible_gpus(environ: Mapping[str, str], ask: Callable[[], str] = ask_driver) -> tuple[str, ...]:
    """UUIDs of the GPUs that a process with this environment sees, in its order; () where nothing is known."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and not chosen.strip():
        return ()
    return select_gpus(ask(), chosen)


def select_gpus(answer: str, chosen: str | None) -> tuple[str, ...]:
    """The UUIDs in the driver's `answer` that CUDA_VISIBLE_DEVICES=`chosen` selects, as CUDA reads it.

    CUDA stops at the first entry that it does not know. MIG instances are left to CUDA: ().
    """
    known = {int(match[1]): match[2] for match in map(_LINE.match, answer.splitlines()) if match}
    if chosen is None:
        return tuple(known[index] for index in sorted(known))
    selected: list[str] = []
    for entry in (part.strip() for part in chosen.split(",")):
        found = [known[int(entry)]] if entry.isdigit() and int(entry) in known else []
        if entry.startswith("GPU-"):
            found = [uuid for uuid in known.values() if uuid.startswith(entry)]
        if len(found) != 1 or found[0] in selected:
            break
        selected += found
    return tuple(selected)
