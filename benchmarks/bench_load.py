"""Host memory of every worker while Hugging Face weights are read from a folder; nothing but own cells may be there.

    python -m benchmarks.bench_load [--gigabytes 1.0] [--json results.json]

Writes a random llama of that size (float32, files of 200 MB) into a temporary folder and reads it on six processes, replicas of
(fsdp, tp) 2x2 and 1x2. The bound of each worker: its own cells + 10 % of the model + 300 MB, beyond what the process holds before (the
libraries that were imported): torch with FSDP and transformers' llama, which imports torch._dynamo, take 410 MB without this package,
which adds 20 MB, so that no process would keep an absolute bound of 400 MB + own cells on a 1 GB model. The kernel's own high-water
mark is taken, so pages of mapped files count as well.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

SHAPES = [(2, 2), (1, 2)]
WORLD = sum(fsdp * tp for fsdp, tp in SHAPES)
MB = 10**6
VOCAB, WIDTH, COLUMNS = 16000, 1024, 2816


def write_model(folder: Path, num_bytes: float) -> int:
    """A llama of about `num_bytes` in float32; returns its bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    per_layer = 4 * (2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 4 + 3 * WIDTH * COLUMNS)
    layers = max(1, round((num_bytes - 8 * VOCAB * WIDTH) / per_layer))
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=COLUMNS, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="200MB")
    return sum(p.numel() * p.element_size() for p in model.parameters())


def resident(name: str) -> int:
    """A field of /proc/self/status, in bytes: VmRSS now, VmHWM at its highest since `forget_peak`."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Let the kernel measure VmHWM anew from here."""
    Path("/proc/self/clear_refs").write_text("5")


def load(rank: int, port: int, folder: str, pipe: Any) -> None:
    """One worker: what `Trainer.fit` does between `configure_model` and the first step."""
    import torch.distributed as dist

    import lightning_ntp
    from lightning_ntp.strategy.fsdp import local_of, shard_model
    from lightning_ntp.strategy.groups import Groups
    from lightning_ntp.strategy.huggingface import plan_model
    from lightning_ntp.strategy.weight_files import read_cells, sources_of
    from lightning_ntp.topology import Topology

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    build = lightning_ntp.from_pretrained
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    forget_peak()
    before, since = resident("VmRSS"), time.perf_counter()
    model = build(folder)
    topology = Topology.from_shapes(SHAPES)
    sources, groups = sources_of(model), Groups(topology, rank)
    sharded = shard_model(model, plan_model(model, topology.num_roles, topology.loss_order), groups)
    read_cells(sharded, sources)
    own = sum(local_of(p).numel() * p.element_size() for _, p in sharded.parameters())
    peak = resident("VmHWM")
    pipe.send({
        "rank": rank, "own_bytes": own, "before_bytes": before, "peak_bytes": peak, "growth_bytes": peak - before,
        "seconds": round(time.perf_counter() - since, 2),
    })  # fmt: skip
    dist.destroy_process_group()


def measure(folder: Path) -> list[dict[str, Any]]:
    """The figures of all workers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(WORLD)]
    processes = [
        context.Process(target=load, args=(rank, port, str(folder), sender)) for rank, (_, sender) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    try:
        return [receiver.recv() for receiver, _ in pipes]
    finally:
        for process in processes:
            process.join(60)
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ntp-bench-load-") as folder:
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as writer:  # so that this process and its children start small
            model_bytes = writer.apply(write_model, (Path(folder), args.gigabytes * 1e9))
        workers = measure(Path(folder))
    allowance = 0.1 * model_bytes + 300 * MB
    print(f"model {model_bytes / MB:,.0f} MB; replicas (fsdp x tp) {SHAPES}; bound: own cells + {allowance / MB:,.0f} MB")
    print("worker  own cells   before     peak   growth    bound   seconds   (MB)")
    for each in workers:
        each["bound_bytes"] = each["own_bytes"] + allowance
        own, before, peak, growth, bound = (
            each[f"{name}_bytes"] / MB for name in ("own", "before", "peak", "growth", "bound")
        )
        print(f"{each['rank']:6d} {own:10,.0f} {before:8,.0f} {peak:8,.0f} {growth:8,.0f} {bound:8,.0f} {each['seconds']:9.1f}")
    if args.json:
        args.json.write_text(json.dumps({"model_bytes": model_bytes, "workers": workers}, indent=2))
    worst = max(each["growth_bytes"] - each["bound_bytes"] for each in workers)
    if worst > 0:
        raise SystemExit(f"a worker is {worst / MB:,.0f} MB above the bound")


if __name__ == "__main__":
    main()
