"""Cutting the sockets of process groups, because gloo has no abort.

[Note: why sockets are cut] A rank that waits in a gloo collective for somebody who waits for a dead peer sits there until
the group's timeout: `abort`, `shutdown` and `destroy_process_group` from another thread do not free it. Shutting down
the group's own TCP connections does, within milliseconds. They are found by what appeared in /proc/self/fd while the
groups were made; a connection is recognised by its inode, so a file descriptor that was reused is left alone, and a
listening socket is never touched, because gloo ends the whole process when its listener fails.

Only the reading side is shut down. With the writing side shut as well, a write that was just being made would fail by the cut
itself, which is the one thing that gloo forgets to report, see below.

[Note: what no cut can free] In gloo's TCP transport a send that could not be written at once, because the buffers are full or
the write met a connection reset, is put aside for the event loop (`Pair::sendAsyncMode`). When the loop then sees the end of
the connection, `Pair::signalException` wakes pending sends and receives, but not the sends put aside. Such a call sits in
`UnboundBuffer::waitSend` until the group's timeout with all connections closed (6 of 408 kills at load 20, stacks by gdb).
Every group therefore has the timeout of the default group. Where that is long, `Member` notices that its main thread stands
still after a cut and leaves: a second worker is lost, nobody waits.
"""

from __future__ import annotations

import os
import socket
from types import TracebackType
from typing import Self


class GroupSockets:
    """``with sockets: <make groups>`` notes their connections; ``sockets.cut()`` makes what waits on them fail.

    `cut` may be called from another thread, also while the ``with`` block runs. Nested and repeated blocks add up.
    """

    def __init__(self) -> None:
        self._inodes: dict[int, str] = {}
        self._before: list[dict[int, str]] = []

    def __enter__(self) -> Self:
        self._before.append(_open_sockets())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._scan()
        self._before.pop()

    def __len__(self) -> int:
        return len(self._inodes)

    def _scan(self) -> None:
        before = self._before[0]  # of the outermost block
        self._inodes.update({fd: inode for fd, inode in _open_sockets().items() if before.get(fd) != inode})

    def cut(self) -> int:
        """Shuts the noted connections down; returns how many."""
        if self._before:
            self._scan()
        return sum(_cut(fd, inode) for fd, inode in list(self._inodes.items()))


def cut_all() -> int:
    """Shuts down every TCP connection of this process, the store's too, as a dead network card would; returns how many."""
    return sum(_cut(fd, inode) for fd, inode in _open_sockets().items())


def _open_sockets() -> dict[int, str]:
    """File descriptor -> ``socket:[inode]`` of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # closed since it was listed
            continue
        if target.startswith("socket:["):
            found[int(name)] = target
    return found


def _cut(fd: int, inode: str) -> bool:
    """Shuts down the reading side of one connection if `fd` still is that socket, is TCP, and does not listen."""
    try:
        copy = os.dup(fd)
    except OSError:
        return False
    if os.readlink(f"/proc/self/fd/{copy}") != inode:
        os.close(copy)
        return False
    with socket.socket(fileno=copy) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        try:
            connection.shutdown(socket.SHUT_RD)
        except OSError:  # not connected (any more)
            return False
    return True
