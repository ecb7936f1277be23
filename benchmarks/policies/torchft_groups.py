"""Plays the scheduler of a torchft job: a lighthouse, a launcher per replica group; a group that lost a GPU waits for it.

All ranks of a group end with the first one, as under torchrun. The group starts again when all of its GPUs are back, forked from a process
that has everything imported, as the replacements of our own policies are.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from torchft.coordination import LighthouseServer

from benchmarks.policies.drill import Drill, end_file, last_step

HEARTBEAT_MS = 1000
"""Of torchft's lighthouse, whose default is 5000: survivors wait that long before they go on without a group. In torchft's favour."""

LOOK_SECONDS = 0.05


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class TorchftJob:
    """All groups of one job.

    Args:
        out: folder of the event logs and weights.
        drill: what happens to them.
        arguments: further ones of `torchft_job`.
    """

    def __init__(self, out: Path, drill: Drill, arguments: list[str]) -> None:
        self.out, self.drill = out, drill
        self.running: dict[int, int] = {}  # group -> number of its life
        self._lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=100, heartbeat_timeout_ms=HEARTBEAT_MS
        )
        command = [sys.executable, "-m", "benchmarks.policies.torchft_job", "--out", str(out), "--drill", drill.to_json(), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()  # launchers and ranks die with it
        self._process.wait()
        self._lighthouse.shutdown()

    def run(self) -> bool:
        """From the first start to the end of the last group that lives; whether anybody got to the end."""
        waiting: dict[int, int | None] = {}
        for group in range(self.drill.replicas):
            self._start(group, 0)
        while self.running and self._process.poll() is None:
            for group, life in list(self.running.items()):
                ended = end_file(self.out, group, life)
                if not ended.exists() or not (code := ended.read_text()):
                    continue
                del self.running[group]
                if code != "0":
                    step = last_step(self.out) + 1
                    gpu = next(gpu for gpu in self.drill.mates(group * self.drill.degree) if gpu in self.drill.down(step))
                    waiting[group] = self.drill.back_at(gpu, step, whole=True)
            for group, back in list(waiting.items()):
                if back is not None and last_step(self.out) >= back - 1:
                    self._start(group, back)
                    del waiting[group]
            time.sleep(LOOK_SECONDS)
        return last_step(self.out) == self.drill.steps - 1

    def _start(self, group: int, life: int) -> None:
        environ = {
            "FIRST_LIFE": "no" if life else "yes",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(self.drill.degree),
            "REPLICA_GROUP_ID": str(group),
            "NUM_REPLICA_GROUPS": str(self.drill.replicas),
            "TORCHFT_LIGHTHOUSE": self._lighthouse.address().replace(socket.gethostname() + ":", "127.0.0.1:"),
        }
        assert self._process.stdin is not None
        print(json.dumps({"group": group, "life": life, "environ": environ}), file=self._process.stdin, flush=True)
        self.running[group] = life


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drill", type=Drill.from_json, required=True)
    options, arguments = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with TorchftJob(options.out, options.drill, arguments) as job:
        sys.exit(0 if job.run() else 1)


if __name__ == "__main__":
    main()
