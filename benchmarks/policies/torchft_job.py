"""The same model under torchft: replica groups that train as torchft's users write it. Needs the package torchft.

A group is tensor parallel inside (torch's own `parallelize_module`); its gradients are averaged over the groups by torchft's Manager.
This process imports everything once. For each line on stdin (JSON: group, life, environ) it forks what stands for the group's torchrun:
that forks the ranks, ends them all with the first one that fails, and leaves its exit code in a file.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchft import Manager, ProcessGroupGloo

from benchmarks.policies.drill import PHASE, Drill, end_file, note_kills
from benchmarks.policies.model import LEARNING_RATE, LENGTH, SEED, SIZES, training_data
from benchmarks.small_llama import small_llama
from lightning_ntp.strategy.worker_process import die_with_parent

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
PATIENCE = timedelta(seconds=60)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Rank:
    """One rank: model, optimizer, and torchft's Manager over them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rank = options, int(os.environ["RANK"])
        drill: Drill = options.drill
        self.gpu = options.group * drill.degree + self.rank
        self.log = (options.out / f"{self.gpu}-{os.getpid()}.jsonl").open("a")
        dist.init_process_group("gloo", timeout=PATIENCE)
        self.model = small_llama(SIZES, LENGTH, SEED).double()
        mesh = init_device_mesh("cpu", (drill.degree,))
        plan: dict[str, Any] = {}
        for layer in range(SIZES["layers"]):
            plan |= {f"model.layers.{layer}.{name}": ColwiseParallel() for name in COLUMNS}
            plan |= {f"model.layers.{layer}.{name}": RowwiseParallel() for name in ROWS}
        parallelize_module(self.model, mesh, plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, foreach=False)
        self.named = list(self.model.named_parameters())  # once: torchft asks for the state in another thread during forward
        self._make_moments()
        if self.rank == 0:  # it writes the address of the group's manager, which the others read
            self.manager = self._manager()
        dist.barrier()
        if self.rank != 0:
            self.manager = self._manager()

    def write(self, kind: str, **values: Any) -> None:
        """One event."""
        print(json.dumps({"kind": kind, "gpu": self.gpu, "seconds": time.monotonic(), **values}), file=self.log, flush=True)

    def _make_moments(self) -> None:
        """A peer's moments can be copied only to where there are some: one step of rate 0 on gradients of 0."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer.param_groups[0]["lr"] = LEARNING_RATE
        for parameter in self.model.parameters():
            self.optimizer.state[parameter]["step"].zero_()

    def _manager(self) -> Manager:
        return Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE),
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=1,
            timeout=PATIENCE,
            quorum_timeout=PATIENCE,
            replica_id=f"group_{self.options.group}",
            hostname="localhost",
            init_sync=False,
        )

    def _state(self) -> dict[str, torch.Tensor]:
        found = {f"parameter/{name}": local(parameter.detach()).clone() for name, parameter in self.named}
        for name, parameter in self.named:
            found |= {f"{key}/{name}": local(value).clone() for key, value in self.optimizer.state[parameter].items()}
        return found

    def _load(self, state: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.named:
                local(parameter.detach()).copy_(state[f"parameter/{name}"])
                for key, value in self.optimizer.state[parameter].items():
                    local(value).copy_(state[f"{key}/{name}"])

    def await_all(self) -> None:
        """At the job's beginning: else the group that is up first trains alone."""
        (self.options.out / f"ready-{self.gpu}").touch()
        while len(list(self.options.out.glob("ready-*"))) < self.options.drill.num_gpus:
            time.sleep(0.01)

    def train(self) -> None:
        """To the end of the drill; the weights are saved by every group's first rank."""
        drill, manager, data = self.options.drill, self.manager, training_data()
        script = drill.script(whole=False)  # the launcher ends the mates, as torchrun does
        note_kills(script, self.write)
        while (step := manager.current_step()) < drill.steps:
            began = time.monotonic()
            first = (step * drill.replicas + self.options.group) * self.options.batch
            ids = torch.stack([data[first + index]["input_ids"] for index in range(self.options.batch)])
            manager.start_quorum()
            self.optimizer.zero_grad()
            script.fire(self.gpu, step, PHASE)
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self._average()
            time.sleep(max(0.0, began + self.options.pace * self.options.batch - time.monotonic()))
            if manager.should_commit():
                self.optimizer.step()
                groups = manager.num_participants()
                self.write("commit", step=step, groups=groups, counts=manager.is_participating(), loss=loss.item())
            else:
                self.write("failed", step=step)
        self._save()
        manager.shutdown(wait=False)

    def _average(self) -> None:
        """One bucket."""
        gradients = [local(parameter.grad) for _, parameter in self.named if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self.manager.allreduce(flat).wait()
        for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def _save(self) -> None:
        whole = {
            name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
            for name, parameter in self.named
        }
        if self.rank == 0:
            torch.save(whole, self.options.out / f"weights-{self.options.group}.pt")
        dist.barrier()


def work(options: argparse.Namespace, rank: int) -> None:
    """The life of a rank; does not return."""
    code = 1
    try:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        torch.set_num_threads(1)
        job = Rank(options)
        if os.environ["FIRST_LIFE"] == "yes":
            job.await_all()
        job.train()
        code = 0
    except BaseException:  # noqa: BLE001  it must not return into the launcher
        traceback.print_exc()
    finally:
        os._exit(code)  # threads of gloo and of the manager may hold the exit


def launch(options: argparse.Namespace) -> int:
    """Forks the ranks and waits for them; 0 if all ended well."""
    ranks, arm = set[int](), die_with_parent(os.getpid())
    for rank in range(options.drill.degree):
        pid = os.fork()
        if pid == 0:
            arm()
            work(options, rank)
        ranks.add(pid)
    failed = 0
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status and not failed:
            failed = 1
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drill", type=Drill.from_json, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True)
    options = parser.parse_args()
    arm = die_with_parent(os.getpid())
    for line in sys.stdin:
        order = json.loads(line)
        if os.fork() == 0:
            arm()
            os.environ.update(order["environ"])
            options.group = order["group"]
            end_file(options.out, order["group"], order["life"]).write_text(str(launch(options)))
            os._exit(0)


if __name__ == "__main__":
    main()
