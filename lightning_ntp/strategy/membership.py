"""A worker's side of the membership: who is in, how everybody is freed when somebody is lost, and the vote on a step.

    supervisor (coordinator.py)      worker (this file)
    generation N broken  --store-->  watcher thread: cut sockets, abort groups, abort an open vote
                                     main thread:    the blocked call raises -> confirm_loss -> join
    members of N+1       --store-->  join: groups of generation N+1 stand

One generation is one life of the process groups. The main thread works; a thread waits for bad news and another sends the
heartbeat, each on a connection of its own. No collective is needed for any of it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_ntp.errors import PlanMismatchError, RankLostError
from lightning_ntp.strategy import _torch_private, rendezvous
from lightning_ntp.strategy.generation import (
    Decision,
    FencedError,
    Generation,
    GenerationBrokenError,
    MemberConfig,
    Outcome,
    is_poisoned,
)
from lightning_ntp.strategy.heartbeat import Heartbeat
from lightning_ntp.strategy.life_signs import StandstillProbe, show_stacks_on_request
from lightning_ntp.strategy.restart import Restart
from lightning_ntp.strategy.sockets import GroupSockets
from lightning_ntp.strategy.vote import MISMATCH, Vote
from lightning_ntp.testing import FaultScript

_log = logging.getLogger(__name__)


LOOK_SECONDS = 0.25
"""Between two looks at a main thread that a break should have freed."""

HEARING_SECONDS = 0.1
"""From hearing of a loss to closing connections: by then all have heard of it."""

_TRANSPORT_WORDS = ("connection", "gloo", "nccl", "socket", "timed out", "broken pipe")


class Member:
    """This process as a member of its job. Used by the main thread; at most one per process.

    `generation` is None before the first `join`. `groups` notes the connections of process groups: make every further
    group inside ``with member.groups:``, else a loss cannot free a call that waits on it.
    """

    def __init__(
        self,
        address: rendezvous.JobAddress,
        config: MemberConfig | None = None,
        *,
        device: torch.device | None = None,
        faults: FaultScript | None = None,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self.worker = address.worker
        self.config = config or MemberConfig()
        self.device = device
        self.faults = faults or FaultScript()
        self.generation: Generation | None = None
        self.groups = GroupSockets()
        self.broken_at_seconds: float | None = None  # time.monotonic() at which the loss was heard of
        self.replicas: tuple[frozenset[int], ...] = ()  # if a worker must not outlive its neighbours: who they are, for all
        self._fenced: frozenset[int] = frozenset()  # who had been lost when the current generation formed
        self.faults.fire(self.worker, None, "start")
        self._exit_process = exit_process
        # The supervisor asks for stacks before it gives up on workers that live; works while the interpreter is stuck too.
        show_stacks_on_request()
        self._store = rendezvous.connect_store(address.endpoint, address.token)
        self._watch_store = rendezvous.own_connection(self._store)
        self._heart = Heartbeat(self.worker, rendezvous.own_connection(self._store), self.config.heartbeat_seconds)
        self._lock = threading.RLock()
        self._broken = threading.Event()
        self._closed = threading.Event()
        self._joining = threading.Event()
        self._number = 0  # of the current generation
        self._standing = threading.Condition(self._lock)
        self._open_vote: Vote | None = None
        self._last_vote: Vote | None = None
        self._regroup_wanted = False
        self._main_thread, self._main_native_id = threading.get_ident(), threading.get_native_id()
        self._threads = [
            threading.Thread(target=self._until_supervisor_is_gone, args=(body,), name=f"ntp-{name}", daemon=True)
            for name, body in (("watch", self._watch), ("heartbeat", self._beat))
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    # The other threads.

    def _until_supervisor_is_gone(self, body: Callable[[], None]) -> None:
        try:
            body()
        except dist.DistNetworkError:
            if not self._closed.is_set():
                # Nobody is left who could form a new generation, and nobody must outlive the job.
                self._exit_process(rendezvous.EXIT_NO_SUPERVISOR)

    def _beat(self) -> None:
        self._heart.run(self._closed)

    def _watch(self) -> None:
        """Waits for the end of each generation. The server pushes it: no polling, and no timeouts, which torch logs."""
        seen = 0
        while True:
            with self._standing:
                while self._number == seen and not self._closed.is_set():
                    self._standing.wait()
                seen = self._number
            if self._closed.is_set():
                return
            end = rendezvous.get_json(self._watch_store, f"ended/{seen}/{self.worker}")
            if end["broken"]:
                self._break(seen)
                if is_poisoned(self.worker, self.replicas, self._fenced | set(end.get("workers", ()))):
                    self._exit_process(rendezvous.EXIT_RENEW)
                self._see_free(seen)

    def _see_free(self, number: int) -> None:
        """Ends this worker if the cut has not freed its main thread; see the note on gloo in sockets.py. A loss, no hang."""
        probe, still = StandstillProbe(self._main_thread, self._main_native_id), 0
        limit, group_timeout = self.config.free_seconds, self.config.group_timeout_seconds
        if group_timeout <= 2 * limit:
            limit = 2 * limit + LOOK_SECONDS
        while still * LOOK_SECONDS < limit:
            if self._closed.wait(LOOK_SECONDS) or number != self._number or not self._broken.is_set():
                return
            if self._joining.is_set():
                return
            still = still + 1 if probe.stands_still() else 0
        faulthandler.dump_traceback(all_threads=True)
        _log.error("worker %d is still blocked %.0f s after a loss: it leaves", self.worker, limit)
        self._exit_process(rendezvous.EXIT_LOST)

    def _break(self, number: int) -> None:
        """Frees the main thread, wherever it waits: for a decision, in a collective, or while groups are made."""
        with self._lock:
            if number != self._number or self._broken.is_set():
                return
            self.broken_at_seconds = time.monotonic()
            self._broken.set()
            if self._open_vote is not None:
                self._open_vote.abort(self._watch_store)
            if self.config.backend == "nccl":
                _torch_private.abort_groups()
            self.groups.cut()

    # Joining.

    def join(self, info: Any = None, regroup: bool = False) -> Generation:
        """Leaves the current generation and returns when the groups of a new one stand. All survivors.

        `info` (JSON) is what the others shall know: the last complete step, for instance. Starts over if a member is
        lost meanwhile. `FencedError` if the others have given this worker up. regroup: nobody is lost and no vote has
        asked for it, all members have agreed to re-form here.
        """
        self._heart.pause()
        self._joining.set()
        self._let_others_hear()
        if self._regroup_wanted or regroup:
            self._store.add(f"regrouping/{self._number}", 1)
            self._regroup_wanted = False
        while True:
            began = time.monotonic()
            self._teardown()
            number, world = self._agree_on_members(info)
            agreed = time.monotonic()
            self.faults.fire(self.worker, None, "connect")
            try:
                self._connect(number, world)
            except (RuntimeError, dist.DistError) as error:
                if not self.confirm_loss(error):
                    raise
                continue
            self.generation = Generation(
                number=number,
                worker=self.worker,
                members=tuple(world["members"]),
                infos=tuple(world["infos"]),
                agree_seconds=agreed - began,
                connect_seconds=time.monotonic() - agreed,
                fenced={int(worker): why for worker, why in world["fenced"].items()},
                leaving=tuple(world["leaving"]),
            )
            return self.generation

    def _let_others_hear(self) -> None:
        """Leaves the connections of a broken generation open for a moment.

        Closing them resets those of peers that have not been cut yet, and a write that meets a reset is what gloo never
        reports; see the notes in sockets.py.
        """
        if self._broken.is_set() and self.broken_at_seconds is not None:
            time.sleep(max(0.0, self.broken_at_seconds + HEARING_SECONDS - time.monotonic()))

    def _agree_on_members(self, info: Any) -> tuple[int, dict[str, Any]]:
        """Offers itself for the next generation until one is formed with it."""
        last = self._number
        self.faults.fire(self.worker, None, "join")
        while True:
            number = max(last + 1, int(rendezvous.get_json(self._store, "generation")))
            rendezvous.put_json(self._store, f"join/{number}/{self.worker}", info)
            self._store.add(f"joined/{number}", 1)
            world = rendezvous.await_json(self._store, f"world/{number}")
            if self.worker in world["members"]:
                return number, world
            if str(self.worker) in world["fenced"]:
                raise FencedError(f"worker {self.worker} was given up: {world['fenced'][str(self.worker)]}")
            last = number  # broken while it formed, or formed before this newcomer was heard

    def _connect(self, number: int, world: dict[str, Any]) -> None:
        """Makes the default group of a generation, over connections that `_break` can cut."""
        rank, num_members = world["members"].index(self.worker), len(world["members"])
        with self._lock:
            self.groups = GroupSockets()
            self._broken.clear()
            self._joining.clear()  # it may be broken, and its main thread blocked, from here on
            self._number, self._fenced = number, frozenset(int(worker) for worker in world["fenced"])
            self._standing.notify_all()
        with self.groups:
            # A connection of its own, so that the cut also frees a rendezvous that waits for a dead peer.
            store = dist.PrefixStore(f"groups/{number}", rendezvous.own_connection(self._store))
            dist.init_process_group(
                self.config.backend,
                store=store,
                rank=rank,
                world_size=num_members,
                timeout=timedelta(seconds=self.config.group_timeout_seconds),
                device_id=self.device,
            )
            # Everybody is connected: from here on a missing member shows as a loss, not as a slow start.
            if store.add("connected", 1) == num_members:
                store.set("all_connected", "1")
            store.wait(["all_connected"])

    def _teardown(self) -> None:
        """Ends the groups of the current generation, working or not."""
        with self._lock:
            self.generation = None
            self._last_vote = None
        if dist.is_initialized():
            try:
                _torch_private.end_groups(self.config.backend)
            except RuntimeError as error:
                _log.debug("groups of generation %d did not end cleanly: %s", self._number, error)

    # Working.

    def check(self) -> None:
        """`GenerationBrokenError` if a member of this generation is lost. Local."""
        if self._broken.is_set():
            raise GenerationBrokenError(f"generation {self._number} has lost a member")

    def progress(self, phase: str) -> None:
        """Tells the supervisor, with the next heartbeat, that the main thread has reached `phase`. Local."""
        self._heart.enter(phase)

    def confirm_loss(self, error: BaseException) -> bool:
        """Whether `error` means that a peer is gone, so that the caller should `join`. If not, it is a bug: raise it.

        A rank that merely left out a call looks like a dead peer to the others; only the supervisor knows who lives.
        """
        if isinstance(error, FencedError):
            return False
        if isinstance(error, RankLostError) or self._broken.is_set():
            return True
        if not isinstance(error, RuntimeError):  # gloo raises plain RuntimeError, dist.DistError is one too
            return False
        self._store.add(f"suspect/{self._number}", 1)
        if not isinstance(error, dist.DistError) and not any(word in str(error).lower() for word in _TRANSPORT_WORDS):
            return self._broken.wait(min(0.5, self.config.confirm_seconds))
        self._store.add(f"doubt/{self._number}", 1)
        return self._broken.wait(self.config.confirm_seconds)

    def call_off(self, why: str) -> None:
        """Breaks this generation without a loss, for what cannot go on although everybody lives: all are freed and join again."""
        rendezvous.put_json(self._store, f"called-off/{self._number}", f"worker {self.worker}: {why}")
        self._broken.wait(self.config.confirm_seconds)

    def agree(
        self, step: int, attempt: int = 0, ballot: Outcome = Outcome.COMMIT, fault_phase: str | None = "vote"
    ) -> Decision:
        """The vote on a step, or on anything else that all must have done: one atomic decision that all members read.

        COMMIT or SKIP once every member has cast this ballot; else `GenerationBrokenError` on all survivors alike, and
        nobody may act on the step. `PlanMismatchError` if ballots differ. (step, attempt) must be new in this generation.
        `fault_phase` is how a `FaultScript` calls the vote. No collective. All members.
        """
        generation = self._current()
        vote = Vote(self._store, f"vote/{generation.number}/{step}/{attempt}")
        if fault_phase is not None:
            self.faults.fire(self.worker, step, fault_phase)
        with self._lock:
            self.check()
            self._open_vote = vote
        try:
            if vote.cast(ballot, generation.num_members):
                if fault_phase == "vote":
                    self.faults.fire(self.worker, step, "decide")
                vote.decide(generation)
            outcome, regroup = vote.decision()
        finally:
            with self._lock:
                self._open_vote = None
        if outcome == Outcome.ABORT:
            self._broken.wait()  # the abort may have been read before this worker's own watcher got the news
            raise GenerationBrokenError(
                f"generation {generation.number} has lost a member before step {step} was decided"
            )
        if outcome == MISMATCH:
            raise PlanMismatchError(f"step {step}: some members voted to commit, others to skip; nothing was updated")
        if self.worker == generation.leader and self._last_vote is not None:
            self._last_vote.forget()  # all have voted on this one, so all have read that decision
        self._last_vote = vote
        if fault_phase == "vote":
            self._heart.commit()
        self._regroup_wanted = regroup
        return Decision(Outcome(outcome), regroup)

    def request_leave(self, why: str) -> None:
        """Asks for this worker's planned leave; may be called in a signal handler. See `leave_requested`."""
        self._heart.request_leave(why)

    def leave_requested(self) -> str:
        """Why this worker shall leave at a step boundary ("drain", the name of a signal, ...); "" if it shall not.

        The next vote then says `regroup` to everybody. All join; the new `Generation.leaving` names the leavers. Their
        state is handed out; then they call `leave`, and the others join once more with ``regroup=True``.
        """
        return self._heart.leave_why

    def leave(self, frees_role: bool = True) -> None:
        """Ends this worker's membership for good, without being a loss. Call it when the others join again.

        frees_role: hot spares are called for the role that it had; False: there was none for it.
        """
        rendezvous.put_json(self._store, f"left/{self.worker}", frees_role)
        self._store.add("leaves", 1)
        self.close()

    def report_error(self, error: BaseException) -> None:
        """Ends the job with this exception of user code as its cause."""
        rendezvous.report_error(self._store, self.worker, error)

    def tell(self, kind: str, words: Sequence[str], **facts: Any) -> None:
        """Has the supervisor note an event and print it. Call it on one member."""
        rendezvous.tell(self._store, kind, self.worker, words, facts)

    def offer(self, restart: Restart) -> None:
        """Where the job can begin again, should it end now."""
        restart.offer(self._store)

    def close(self) -> None:
        """Ends the groups and the threads. Also called when the interpreter exits: a thread inside torch would abort it."""
        if self._closed.is_set():
            return
        self.faults.fire(self.worker, None, "teardown")
        atexit.unregister(self.close)
        with self._standing:
            self._closed.set()
            self._standing.notify_all()
        with contextlib.suppress(dist.DistNetworkError):  # the supervisor is gone, and with it the wait of the watcher
            # The heartbeat ends here, and the process may live on for a while.
            rendezvous.put_json(self._store, f"closed/{self.worker}", True)
            rendezvous.put_json(self._store, f"ended/{self._number}/{self.worker}", {"broken": False})
        self._teardown()
        for thread in self._threads:
            thread.join(2 * self.config.heartbeat_seconds + 5.0)

    def _current(self) -> Generation:
        if self.generation is None:
            raise GenerationBrokenError("no generation: call Member.join first")
        return self.generation
