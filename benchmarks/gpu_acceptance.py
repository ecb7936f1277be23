"""What an owner of a GPU box runs: parity, bf16, step time and memory on every device of it; writes one JSON.

    python -m benchmarks.gpu_acceptance [--json acceptance.json]            one process per GPU, NCCL
    python -m benchmarks.gpu_acceptance --device cpu --world 3 --small      the same program on CPU processes, gloo

Nothing here needs a network. Exit code 1 when a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_ntp.model_spec import Cell
from lightning_ntp.strategy.fsdp import ShardedModel, local_of, shard_model
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.huggingface import plan_model
from lightning_ntp.topology import Topology

PARITY_LIMIT = 1e-4
"""Largest error of a gradient relative to its largest element; float32, as HF's norms compute in it."""

BF16_LIMIT = 0.05
"""Largest difference of the loss between bf16-mixed and float32 over the first steps."""

Shapes = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all processes know."""

    device: str
    world: int
    small: bool
    steps: int

    def llama(self) -> LlamaForCausalLM:
        """The model of all checks, same weights everywhere; about 0.4 billion parameters on GPUs."""
        torch.manual_seed(0)
        width, layers, vocab = (48, 2, 512) if self.small else (1536, 12, 32000)
        heads = 6 if self.small else 24
        config = LlamaConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 3,
            intermediate_size=width * 8 // 3, vocab_size=vocab, tie_word_embeddings=False, attn_implementation="sdpa",
        )  # fmt: skip
        return LlamaForCausalLM(config).to(self.device)

    def tokens(self, step: int, num_rows: int) -> torch.Tensor:
        """The global batch of a step: as many samples per data row on every topology."""
        vocab, length = (512, 32) if self.small else (32000, 1024)
        generator = torch.Generator().manual_seed(step)
        return torch.randint(vocab, (2 * num_rows, length), generator=generator).to(self.device)


def topologies(world: int) -> dict[str, Shapes]:
    """Name -> replica shapes that fit `world` devices."""
    high, low = world - world // 2, world // 2
    shapes: dict[str, Shapes] = {"one replica": [(1, world)]}
    if world >= 2:
        shapes["fsdp only"] = [(high, 1), (low, 1)]
        shapes["even"] = [(1, low), (1, low)]
    if world >= 3:
        shapes["ragged"] = [(1, high), (1, low)] if high != low else [(1, high), (1, low - 1)]
    if world >= 6:
        shapes["ragged in both"] = [(2, world // 4), (1, low - 1)]
    return shapes


class Job:
    """This process's part of a topology; `idle` where it has none."""

    def __init__(self, setting: Setting, rank: int, shapes: Shapes, mp_policy: MixedPrecisionPolicy | None = None) -> None:
        topology = Topology.from_shapes(shapes)
        self.setting, self.num_rows = setting, len(topology.data_rows)
        groups = Groups(topology, rank, setting.device)
        self.idle = rank not in topology.workers
        if self.idle:
            return
        self.row = topology.data_row(rank)
        self.speaks = topology.position(rank).tp == 0
        model = setting.llama()
        self.sharded: ShardedModel = shard_model(
            model, plan_model(model, topology.num_roles, topology.loss_order), groups, mp_policy
        )
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def backward(self, step: int) -> float:
        """Gradients of the mean over the global batch; returns its loss. Collective over the default group."""
        part = torch.zeros((), dtype=torch.float64, device=self.setting.device)
        if not self.idle:
            self.optimizer.zero_grad()
            self.sharded.begin_window()
            ids = self.setting.tokens(step, self.num_rows).chunk(self.num_rows)[self.row]
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss / self.num_rows
            loss.backward()
            self.sharded.finish_backward()
            part += loss.detach().double() * self.speaks
        dist.all_reduce(part)
        return part.item()

    def step(self, step: int) -> float:
        """One AdamW step; returns the loss before it."""
        loss = self.backward(step)
        if not self.idle:
            self.optimizer.step()
        return loss


def rows_and_columns(whole: torch.Tensor, cell: Cell) -> torch.Tensor:
    """The cell of a whole matrix."""
    rows = [i for s in cell.rows for i in range(s.start, s.stop)]
    columns = [i for s in cell.columns for i in range(s.start, s.stop)]
    return whole[rows][:, columns]


def worst_gradient(job: Job, twin: nn.Module) -> float:
    """Largest error of any gradient element on any worker, relative to the gradient's largest element."""
    worst = torch.zeros((), device=job.setting.device)
    if not job.idle:
        gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
        for spec, parameter in job.sharded.parameters():
            cell = spec.cell(job.sharded.coordinates)
            whole = gradients[spec.fqn].reshape(spec.matrix_shape)
            mine = local_of(parameter.grad).reshape(cell.shape)
            if mine.numel():
                error = (mine - rows_and_columns(whole, cell)).abs().max() / whole.abs().max()
                worst = torch.maximum(worst, error.float())
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def check_parity(setting: Setting, rank: int) -> dict[str, Any]:
    """Loss and all gradients of each topology against the whole model in one process."""
    found = {}
    for name, shapes in topologies(setting.world).items():
        job, twin = Job(setting, rank, shapes), setting.llama()
        loss = job.backward(0)
        ids = setting.tokens(0, job.num_rows)
        wanted = twin(input_ids=ids, labels=ids, use_cache=False).loss
        wanted.backward()
        error = worst_gradient(job, twin)
        passed = error < PARITY_LIMIT and abs(loss - wanted.item()) < PARITY_LIMIT
        found[name] = {"shapes": shapes, "loss": loss, "loss_error": loss - wanted.item(), "worst_gradient_error": error}
        found[name]["passed"] = passed
    return found


def check_bf16(setting: Setting, rank: int) -> dict[str, Any]:
    """The first losses in bf16-mixed (float32 masters and reduction) beside those in float32, on the most ragged topology."""
    shapes = list(topologies(setting.world).values())[-1]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    curves = []
    for chosen in (None, policy):
        job = Job(setting, rank, shapes, chosen)
        curves.append([job.step(step) for step in range(5)])
    difference = max(abs(a - b) for a, b in zip(*curves, strict=True))
    return {"float32": curves[0], "bf16": curves[1], "largest_difference": difference, "passed": difference < BF16_LIMIT}


def measure(setting: Setting, rank: int) -> dict[str, Any]:
    """Median step time and peak memory per topology, bf16-mixed."""
    found = {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, shapes in topologies(setting.world).items():
        if setting.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        job = Job(setting, rank, shapes, policy)
        seconds = []
        for step in range(setting.steps + 3):
            dist.barrier()
            start = time.perf_counter()
            job.step(step)  # ends with the loss on the host, so the device is done
            seconds.append(time.perf_counter() - start)
        found[name] = {"shapes": shapes, "median_ms": 1e3 * statistics.median(seconds[3:]), "peak_mib": peak_mib(setting)}
        del job
    return found


def peak_mib(setting: Setting) -> float:
    """Largest peak over all processes; on CPU the resident size, which never falls again."""
    own = torch.cuda.max_memory_allocated() / 2**20 if setting.device == "cuda" else 0.0
    if setting.device == "cpu":
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    peak = torch.tensor(own, device=setting.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return peak.item()


def versions(setting: Setting) -> dict[str, Any]:
    """What the figures were measured on."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "device": setting.device}
    if setting.device == "cuda":
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["cuda"], found["nccl"] = torch.version.cuda, ".".join(map(str, torch.cuda.nccl.version()))
    return found | {"world": setting.world, "backend": "nccl" if setting.device == "cuda" else "gloo"}


def run_checks(rank: int, world: int, setting: Setting) -> dict[str, Any]:
    """The whole report. Collective over the default group."""
    return versions(setting) | {
        "parity": check_parity(setting, rank),
        "bf16_mixed": check_bf16(setting, rank),
        "speed": measure(setting, rank),
    }


def worker(rank: int, setting: Setting, store_file: str, output: Path) -> None:
    """One process; rank 0 writes the report."""
    torch.set_num_threads(1)
    if setting.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if setting.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store_file}", rank=rank, world_size=setting.world)
    report = run_checks(rank, setting.world, setting)
    if rank == 0:
        output.write_text(json.dumps(report, indent=1))
    dist.destroy_process_group()


def passed(report: dict[str, Any]) -> bool:
    """Whether every check of the report did."""
    return report["bf16_mixed"]["passed"] and all(case["passed"] for case in report["parity"].values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything and says where the report is; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--world", type=int, help="processes (default: all GPUs)")
    parser.add_argument("--small", action="store_true", help="a model of some thousand parameters")
    parser.add_argument("--steps", type=int, default=20, help="timed steps per topology")
    parser.add_argument("--json", type=Path, default=Path("gpu_acceptance.json"))
    options = parser.parse_args(arguments)
    world = options.world or torch.cuda.device_count()
    if options.device == "cuda" and not 1 <= world <= torch.cuda.device_count():
        parser.error(f"wanted {world} CUDA devices, found {torch.cuda.device_count()}; --device cpu --world 3 tries it on CPU")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(options.device, world, options.small, options.steps)
        mp.spawn(worker, (setting, f"{folder}/store", options.json), nprocs=world)
    report = json.loads(options.json.read_text())
    for name, case in report["parity"].items():
        print(f"parity  {name:16s} {case['shapes']!s:24s} worst gradient error {case['worst_gradient_error']:.1e}")
    print(f"bf16    largest difference of the loss {report['bf16_mixed']['largest_difference']:.1e}")
    for name, case in report["speed"].items():
        print(f"speed   {name:16s} {case['shapes']!s:24s} {case['median_ms']:9.2f} ms  {case['peak_mib']:9.0f} MiB")
    print(f"{'passed' if passed(report) else 'FAILED'} on {options.device}; {options.json}")
    return 0 if passed(report) else 1


if __name__ == "__main__":
    raise SystemExit(main())
