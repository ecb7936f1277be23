"""Step time and peak memory beside stock FSDP2 + TP (what Lightning's ModelParallelStrategy users write by hand). CPU and gloo.

    python benchmarks/bench_step.py [--steps 12] [--json results.json]

Times are paired: in each round every contender runs one step on the same four processes, and ratios are taken within the round.
Memory is the peak resident size of fresh processes that run one contender only, in turn; differences are taken within the round.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_ntp.strategy.fsdp import shard_model
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.huggingface import plan_model
from lightning_ntp.topology import Topology

WORLD, BATCH, LENGTH, VOCAB = 4, 4, 64, 8000


def make_model() -> LlamaForCausalLM:
    """A llama of 18.7 million parameters, the same weights everywhere."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=384, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2, head_dim=64,
        intermediate_size=1024, vocab_size=VOCAB, tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tokens(step: int) -> torch.Tensor:
    """The global batch of a step."""
    return torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


class Stock:
    """Stock FSDP2 + parallelize_module on a (rows, 2) mesh; ``hsdp`` replicates over rows instead of sharding."""

    def __init__(self, hsdp: bool, sharded_loss: bool) -> None:
        names = ("replicate", "fsdp", "tp") if hsdp else ("fsdp", "tp")
        mesh = init_device_mesh("cpu", (2, 1, 2) if hsdp else (2, 2), mesh_dim_names=names)
        self.model, self.sharded_loss, self.row = make_model(), sharded_loss, dist.get_rank() // 2
        head = (
            ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
            if sharded_loss
            else ColwiseParallel(output_layouts=Replicate())
        )
        plan: dict[str, Any] = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()), "lm_head": head}
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.*.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.*.{name}"] = RowwiseParallel()
        parallelize_module(self.model, mesh["tp"], plan)
        data_mesh = mesh["replicate", "fsdp"] if hsdp else mesh["fsdp"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=data_mesh)
        fully_shard(self.model, mesh=data_mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, index: int) -> None:
        """Forward, backward, sync, AdamW."""
        self.optimizer.zero_grad()
        ids = tokens(index).chunk(2)[self.row]
        labels = F.pad(ids[:, 1:], (0, 1), value=-100).flatten()
        if self.sharded_loss:
            with loss_parallel():
                F.cross_entropy(self.model(input_ids=ids, use_cache=False).logits.flatten(0, 1), labels).backward()
        else:
            F.cross_entropy(self.model(input_ids=ids, use_cache=False).logits.flatten(0, 1), labels).backward()
        self.optimizer.step()


class Ours:
    """The same model through this package, no parallel code."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        topology = Topology.from_shapes(shapes)
        rank = dist.get_rank()
        groups = Groups(topology, rank)
        self.idle = rank not in topology.workers
        if self.idle:
            return
        self.model = make_model()
        plan = plan_model(self.model, topology.num_roles, topology.loss_order)
        self.sharded = shard_model(self.model, plan, groups)
        self.row, self.num_rows = topology.data_row(rank), len(topology.data_rows)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, index: int) -> None:
        """Forward, backward, sync, AdamW."""
        if self.idle:
            return
        self.optimizer.zero_grad()
        self.sharded.begin_window()
        ids = tokens(index).chunk(self.num_rows)[self.row]
        (self.model(input_ids=ids, labels=ids, use_cache=False).loss / self.num_rows).backward()
        self.sharded.finish_backward()
        self.optimizer.step()


RAGGED = "ours 1x2 + 1x1 (3 ranks)"
CONTENDERS: dict[str, Callable[[], Any]] = {
    "stock 2x2": lambda: Stock(False, False),
    "stock 2x2, loss_parallel": lambda: Stock(False, True),
    "ours 2x2": lambda: Ours([(2, 2)]),
    "stock HSDP 2 x (1x2)": lambda: Stock(True, False),
    "stock HSDP 2 x (1x2), loss_parallel": lambda: Stock(True, True),
    "ours 1x2 + 1x2": lambda: Ours([(1, 2), (1, 2)]),
    RAGGED: lambda: Ours([(1, 2), (1, 1)]),
}
PAIRS = [
    ("ours 2x2", "stock 2x2"),
    ("ours 2x2", "stock 2x2, loss_parallel"),
    ("ours 1x2 + 1x2", "stock HSDP 2 x (1x2)"),
    ("ours 1x2 + 1x2", "stock HSDP 2 x (1x2), loss_parallel"),
]


def worker(rank: int, port: int, steps: int, names: list[str], output: Any) -> None:
    """Run the named contenders in turn; rank 0 reports times, every rank its peak memory."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    runs = {name: CONTENDERS[name]() for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(steps + 2):
        for name, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            run.step(index)
            dist.barrier()
            if index > 1:
                seconds[name].append(time.perf_counter() - start)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    output.put((rank, seconds, peak_mib))
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(steps: int, names: list[str]) -> tuple[dict[str, list[float]], float]:
    """Fresh processes; returns rank 0's times and the largest peak memory of any rank in MiB."""
    context = mp.get_context("spawn")
    output = context.SimpleQueue()
    processes = [context.Process(target=worker, args=(r, free, steps, names, output)) for free in [free_port()] for r in range(WORLD)]
    for process in processes:
        process.start()
    results = [output.get() for _ in processes]
    for process in processes:
        process.join()
    return next(s for rank, s, _ in results if rank == 0), max(peak for _, _, peak in results)


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "q1": low, "q3": high}


def main() -> None:
    """Run, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-memory", action="store_true")
    options = parser.parse_args()
    seconds, _ = launch(options.steps, list(CONTENDERS))
    report: dict[str, Any] = {"steps": options.steps, "load": os.getloadavg()[0], "torch": torch.__version__, "device": "cpu"}
    report["milliseconds"] = {name: spread([1e3 * s for s in values]) for name, values in seconds.items()}
    report["ratio"] = {
        f"{a} / {b}": spread([x / y for x, y in zip(seconds[a], seconds[b], strict=True)]) for a, b in PAIRS
    }
    if not options.no_memory:
        names = [name for name in CONTENDERS if name != RAGGED]
        peaks: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(3):  # in turn: what a process takes before any model varies by some MiB
            for name in names:
                peaks[name].append(launch(3, [name])[1])
        report["peak_mib"] = {name: statistics.median(values) for name, values in peaks.items()}
        report["more_mib"] = {
            f"{a} - {b}": spread([x - y for x, y in zip(peaks[a], peaks[b], strict=True)]) for a, b in PAIRS
        }
    for section in ("milliseconds", "ratio", "more_mib"):
        for name, value in report.get(section, {}).items():
            print(f"{section:13s} {name:58s} {value['median']:9.3f}  [{value['q1']:.3f} .. {value['q3']:.3f}]")
    for name, value in report.get("peak_mib", {}).items():
        print(f"{'peak MiB':13s} {name:58s} {value:9.1f}")
    print(f"CPU figures, {WORLD} processes, load {report['load']:.1f}, {options.steps} paired steps")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
