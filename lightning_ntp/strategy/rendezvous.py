"""The meeting place of a job: one key-value store, a secret token, and the environment by which a worker finds both.

    supervisor  host_store("127.0.0.1:0", token)  --env-->  worker  connect_store(endpoint, token)

Every key lives below the job's token, so a worker of another job (or of an earlier life of this port) finds nothing,
disturbs nothing and is told so. Values are JSON; nothing read from the store is ever unpickled.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from lightning_ntp.errors import ConfigError, RankLostError

ENV_WORKER_ID = "NTP_WORKER_ID"
ENV_STORE_ENDPOINT = "NTP_STORE_ENDPOINT"
ENV_JOB_TOKEN = "NTP_JOB_TOKEN"
ENV_RECOVERY = "NTP_RECOVERY"

EXIT_LOST = 76
"""A worker that must leave by itself (a CUDA error of its own) ends with this code: a loss, not a failure of the program."""

EXIT_NO_SUPERVISOR = 75
"""A worker or a node whose first supervisor (the one with the store) is gone ends with this code: requeue the job."""

EXIT_TOO_MANY_RECOVERIES = 77
"""The supervisor ends a job that loses workers too often with this code, after asking the members to save."""

EXIT_SAVED = 78
"""A worker, and with it the job, ends with this code when its state is saved, as it was asked to leave or has lost too many
others to go on: requeue it."""

EXIT_PARKED = 79
"""A worker for which the topology has no role ends with this code once others hold what it held. The supervisor starts a fresh
process in its place, which waits for the next loss as a hot spare."""

EXIT_RENEW = 80
"""A worker whose neighbour was lost, and that cannot be trusted any more for that, hands its place to a fresh process."""

EXIT_RESTART = 81
"""A job ends with this code when it cannot go on in place, and a complete checkpoint is there to begin again from: the launcher does,
as often as it may; requeue it."""

LOOPBACK = "127.0.0.1:0"
"""Where a store listens unless told otherwise: nobody outside this machine can reach it; port 0 = any free one."""

CONNECT_SECONDS = 20.0
WAIT_SECONDS = 3600.0
"""How long one blocking read may wait. The member's watcher, not this limit, ends a wait for a peer that is gone."""

_TOKEN = re.compile(r"[0-9A-Za-z_-]{8,128}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A TCP address."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not self.host or not 0 <= self.port <= 65535:
            raise ConfigError(f"endpoint {self.host!r}:{self.port}: wanted HOST:PORT with a port in 0..65535")

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """``"host:port"``; `ConfigError` if it is anything else."""
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdigit():
            raise ConfigError(f"endpoint {text!r}: wanted HOST:PORT, for example 127.0.0.1:29500")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class JobAddress:
    """What a worker must know to reach its job; read once from the environment and passed on."""

    endpoint: Endpoint
    token: str
    worker: int
    recovery: bool = False

    def __post_init__(self) -> None:
        check_token(self.token)
        if self.worker < 0:
            raise ConfigError(f"worker id {self.worker}: wanted 0 or more")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> JobAddress:
        """Reads what the supervisor set; `ConfigError` names the first variable that is missing or no number."""
        wanted = (ENV_STORE_ENDPOINT, ENV_JOB_TOKEN, ENV_WORKER_ID)
        for name in wanted:
            if name not in environ:
                raise ConfigError(
                    f"{name} is not set: this process was not started by a supervisor; run the script itself"
                )
        if not environ[ENV_WORKER_ID].isdigit():
            raise ConfigError(f"{ENV_WORKER_ID}={environ[ENV_WORKER_ID]!r}: wanted a whole number")
        return cls(
            endpoint=Endpoint.parse(environ[ENV_STORE_ENDPOINT]),
            token=environ[ENV_JOB_TOKEN],
            worker=int(environ[ENV_WORKER_ID]),
            recovery=environ.get(ENV_RECOVERY) == "on",
        )

    def to_env(self) -> dict[str, str]:
        """The variables that `from_env` reads."""
        return {
            ENV_STORE_ENDPOINT: str(self.endpoint),
            ENV_JOB_TOKEN: self.token,
            ENV_WORKER_ID: str(self.worker),
            ENV_RECOVERY: "on" if self.recovery else "off",
        }


def new_token() -> str:
    """128 random bits as text."""
    return secrets.token_hex(16)


def check_token(token: str) -> None:
    """`ConfigError` unless `token` can be part of a store key. The token itself is not repeated in the message."""
    if not _TOKEN.fullmatch(token):
        raise ConfigError("the job token must be 8 to 128 letters, digits, '-' or '_'")


def host_store(listen: str, token: str, job: Mapping[str, Any]) -> tuple[dist.Store, Endpoint]:
    """Starts the server of a job and announces the job on it. Returns the job's view of the store, and its address.

    The store lives as long as the object returned. `ConfigError` if the port is taken: two jobs never share one.
    """
    wanted = Endpoint.parse(listen)
    check_token(token)
    listener = socket.socket()
    try:
        # Our own listening socket: left alone, TCPStore listens on every interface of the machine.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((wanted.host, wanted.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {wanted} for the job's store ({error.strerror}): another job may be using this port; "
            f"give another one, or port 0 for any free port"
        ) from error
    endpoint = Endpoint(wanted.host, listener.getsockname()[1])
    server = dist.TCPStore(
        endpoint.host,
        endpoint.port,
        None,
        True,
        timeout=timedelta(seconds=CONNECT_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    store = dist.PrefixStore(f"ntp/{token}", server)
    put_json(store, "job", job)
    return store, endpoint


def connect_store(endpoint: Endpoint, token: str, connect_seconds: float = CONNECT_SECONDS) -> dist.Store:
    """The job's view of the store at `endpoint`, for one thread: a client is one lock, so each thread clones its own.

    `RankLostError` if nobody answers within about `connect_seconds`; `ConfigError` if the store belongs to another job.
    """
    check_token(token)
    try:
        client = dist.TCPStore(
            endpoint.host,
            endpoint.port,
            None,
            False,
            timeout=timedelta(seconds=connect_seconds),
            wait_for_workers=False,
        )
    except dist.DistNetworkError as error:
        raise RankLostError(
            f"no store answers at {endpoint} within {connect_seconds:g} s: is the job's supervisor still running?"
        ) from error
    store = dist.PrefixStore(f"ntp/{token}", client)
    if not store.check(["job"]):
        raise ConfigError(
            f"the store at {endpoint} does not know this job's token: it belongs to another job or to an earlier one. "
            f"Nothing was written. Start this worker with the environment of its own supervisor"
        )
    store.set_timeout(timedelta(seconds=WAIT_SECONDS))
    return store


def own_connection(store: dist.Store) -> dist.Store:
    """The same keys over another connection: a client serves one blocking call at a time."""
    copy: dist.Store = cast(Any, store).clone()  # torch's stubs lack it
    copy.set_timeout(timedelta(seconds=WAIT_SECONDS))
    return copy


def to_json(value: Any) -> str:
    return json.dumps(value)


def put_json(store: dist.Store, key: str, value: Any) -> None:
    """Writes `value` as JSON. Does not wait for the server."""
    store.set(key, to_json(value))


def get_json(store: dist.Store, key: str) -> Any:
    """Reads the JSON value of `key`, waiting for it to appear (as long as the store's timeout)."""
    return json.loads(store.get(key))


def await_json(store: dist.Store, key: str) -> Any:
    """`get_json` that outlasts the store's timeout: a hot spare may wait for days. ``DistNetworkError`` if the store is gone."""
    while True:
        try:
            return get_json(store, key)
        except dist.DistNetworkError:
            raise
        except dist.DistStoreError:
            continue


def peek_json(store: dist.Store, key: str) -> Any:
    """Reads the JSON value of `key`, or None if nobody has written it."""
    return json.loads(store.get(key)) if store.check([key]) else None


def tell(store: dist.Store, kind: str, worker: int, words: Sequence[str], facts: Mapping[str, Any]) -> None:
    """Tells the supervisor of something that has happened: an event of `kind` for its log, and lines for people."""
    put_json(store, f"news/{store.add('news', 1)}", {"kind": kind, "worker": worker, "words": list(words), "facts": dict(facts)})


def delete_below(store: dist.Store, path: str) -> None:
    """Deletes the key `path` and every ``path/...``."""
    for key in store.list_keys():
        if key == path or key.startswith(path + "/"):
            store.delete_key(key)


def report_error(store: dist.Store, worker: int, error: BaseException) -> None:
    """Tells the supervisor that user code failed on this worker: that ends the job, with this traceback first.

    The earliest place that sees the exception should call it: before groups are torn down, which makes peers fail too.
    """
    text = "".join(traceback.format_exception(error))
    number = store.add("errors", 1)
    put_json(store, f"error/{number}", {"worker": worker, "type": type(error).__name__, "text": text})
