"""A job that cannot go on in place begins again: all workers anew, from the last checkpoint that is complete.

    worker    UnrecoverableError --offer--> store
    supervisor    the job has ended with EXIT_RESTART, `Restart` at hand
    launcher    the same command again, told of it by NTP_RESUME --> the fit that was lost resumes from the checkpoint
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch.distributed as dist

from lightning_ntp.strategy import rendezvous
from lightning_ntp.testing import ENV_FAULTS, FaultScript

ENV_RESUME = "NTP_RESUME"
_KEY = "restart"


@dataclass(frozen=True, slots=True)
class Restart:
    """Where a job begins again.

    path: the checkpoint. setup: the how manieth fit or evaluation of the script it belongs to; those before it run as always.
    """

    path: str
    setup: int

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Restart | None:
        """What `to_env` has said; None in a job's first life."""
        told = environ.get(ENV_RESUME)
        return None if told is None else cls(**json.loads(told))

    def to_env(self) -> dict[str, str]:
        """For the workers. A script of faults was for the job's first life: it would strike at the same step again."""
        return {ENV_RESUME: json.dumps(asdict(self)), ENV_FAULTS: FaultScript().to_json()}

    def offer(self, store: dist.Store) -> None:
        """Tell the supervisor. The checkpoint is complete, so it does not matter who is heard last."""
        rendezvous.put_json(store, _KEY, asdict(self))


def offered(store: dist.Store) -> Restart | None:
    """What a worker has offered."""
    told = rendezvous.peek_json(store, _KEY)
    return None if told is None else Restart(str(told["path"]), int(told["setup"]))


def with_restarts(
    live: Callable[[Restart | None], tuple[int, Restart | None]], max_restarts: int, write: Callable[[bytes], None]
) -> int:
    """Live, and again as long as the job ends with `rendezvous.EXIT_RESTART` and has come further than before; the exit code.

    live: a job's life from its start or a restart; its exit code, and where the next one would begin (None where another node knows).
    """
    resume: Restart | None = None
    for number in range(1, max_restarts + 1):
        code, following = live(resume)
        if code != rendezvous.EXIT_RESTART or (following is not None and following == resume):
            return code
        resume = following
        where = "with the first node" if resume is None else f"from {resume.path}"
        write(f"[ntp] the job cannot go on in place: it starts again {where} (restart {number} of {max_restarts})\n".encode())
    return live(resume)[0]
