"""How a job ends: who is asked, when harder means are due, and what is printed first: the cause.

ask (SIGTERM or SIGINT) --grace--> SIGKILL --abandon--> left behind, named
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_ntp.strategy.crew import Crew
from lightning_ntp.strategy.worker_process import WorkerProcess, blames_a_peer, describe_exit, shell_code

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class EndingState:
    """A job that ends before its workers have: when the next, harder means is due (times of the supervisor's clock).

    told: somebody ended the supervisor by a signal, or it ends by its own rules: no worker is to blame.
    saving: until `ask_seconds` the members may save their state and leave by themselves.
    """

    why: str
    exit_code: int
    means: int
    ask_seconds: float
    kill_seconds: float
    abandon_seconds: float
    told: bool
    saving: bool = False
    asked: bool = False
    killed: bool = False

    def tick(self, crew: Crew, now_seconds: float, abandon_after_seconds: float) -> list[int]:
        """Applies what is due to the workers of this node. Returns those that ignored even SIGKILL and are left behind."""
        if not self.saving or self.asked:
            crew.hold_output(now_seconds)
        if now_seconds >= self.ask_seconds and not self.asked:
            self.asked = True
            crew.signal_all(self.means)
        if now_seconds >= self.kill_seconds and not self.killed:
            self.killed = True
            # From here on the patience is counted anew: a second Ctrl-C may have brought this forward.
            self.abandon_seconds = now_seconds + abandon_after_seconds
            crew.signal_all(signal.SIGKILL)
        if not self.killed or now_seconds < self.abandon_seconds:
            return []
        left = crew.abandon()
        for process in left:
            _log.error("worker %d (pid %d) ignores SIGKILL and is left behind", process.worker, process.pid)
        return [process.worker for process in left]


@dataclass(frozen=True, slots=True)
class EndedWorker:
    """A worker that has ended, on this node or another.

    why: the supervisor's reason, if it ended the worker. held_since: when its traceback came, None without one. release: prints what was held back, on its own node.
    """

    worker: int
    exit_code: int
    node: int = 0
    why: str = ""
    has_traceback: bool = False
    blames_a_peer: bool = False
    held_since: float | None = None
    release: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, process: WorkerProcess, node: int = 0) -> EndedWorker:
        """One of this node; whatever it said last has been read."""
        assert process.exit_code is not None
        relay = process.relay
        return cls(
            process.worker,
            process.exit_code,
            node,
            process.why,
            relay.has_traceback,
            relay.blames_a_peer,
            relay.held_since,
            relay.release,
        )

    @property
    def is_cause(self) -> bool:
        """Whether its last words are an exception of its own, so that there is nothing to wait for."""
        return self.has_traceback and not self.blames_a_peer

    def __str__(self) -> str:
        where = f" on node {self.node}" if self.node else ""
        return f"worker {self.worker}{where}: {self.why or describe_exit(self.exit_code)}"


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An exception that a worker reported over the store before it ended."""

    worker: int
    text: str

    @property
    def blames_a_peer(self) -> bool:
        """Whether it is the exception of somebody who lost a peer, and so hardly the cause."""
        return blames_a_peer(self.text.encode())


def conclude(
    ending: EndingState,
    ended: Sequence[EndedWorker],
    failed_alone: Sequence[EndedWorker],
    reports: Sequence[ErrorReport],
    num_workers: int,
    write: Callable[[bytes], None],
) -> int:
    """Prints what was held back, the cause first, and gives the job's exit code.

    failed_alone: those that failed before anybody was asked to end.
    """
    cause = _cause(ended, failed_alone, reports)
    if cause is not None:
        if not cause.has_traceback:
            texts = [report.text for report in reports if report.worker == cause.worker]
            write("".join(texts[:1]).encode())
        cause.release()
        # Whoever reported an exception may be ended by our own signal while its interpreter takes its time to exit.
        asked_after_report = cause.exit_code < 0 and any(report.worker == cause.worker for report in reports)
        if cause.exit_code and not ending.told and not asked_after_report:
            ending.exit_code = shell_code(cause.exit_code)
            ending.why = str(cause)
    write(f"[supervisor] {ending.why}; the job of {num_workers} workers has ended.\n".encode())
    for each in sorted(ended, key=lambda each: each.worker):
        if each.has_traceback and each is not cause:
            write(f"[supervisor] worker {each.worker} ended later ({describe_exit(each.exit_code)}):\n".encode())
        each.release()
    return ending.exit_code


def _cause(
    ended: Sequence[EndedWorker], failed_alone: Sequence[EndedWorker], reports: Sequence[ErrorReport]
) -> EndedWorker | None:
    """The worker whose failure came first: reported, else with a traceback of its own, else killed, else first."""
    for report in sorted(reports, key=lambda report: report.blames_a_peer):  # stable: else in the order of arrival
        for each in ended:
            if each.worker == report.worker:
                return each
    failed = list(failed_alone) or [each for each in ended if each.exit_code]
    own = [each for each in failed if each.is_cause]
    if own:
        return min(own, key=lambda each: each.held_since or 0.0)
    killed = [each for each in failed if each.exit_code < 0]
    return next(iter(killed or failed), None)
