"""Real torchrun: four workers on one node, and two nodes of unequal size."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks.bench_step import free_port

SCRIPT = """
    import os
    import lightning as L, torch
    import lightning_ntp

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def prepare_data(self):
            print("prepared", flush=True)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    trainer = L.Trainer(
        strategy="ntp", accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=nodes, max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    net = Net()
    trainer.fit(net, torch.utils.data.DataLoader(torch.ones(12, 4), batch_size=1))
    rows = len(trainer.strategy.topology.data_rows)
    print(f"after {trainer.global_rank} {trainer.global_step} {rows}", flush=True)
"""


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [(4,), (2, 1)])
def test_torchrun(tmp_path: Path, processes: tuple[int, ...]) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    run = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(processes)}", "--master-addr=127.0.0.1"]
    run += [f"--master-port={free_port()}"]
    started = [
        subprocess.Popen(
            [*run, f"--node-rank={node}", f"--nproc-per-node={count}", str(script)],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node, count in enumerate(processes)
    ]
    texts = [process.communicate(timeout=500)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(processes), texts
    lines = [line for text in texts for line in text.splitlines()]
    world = sum(processes)
    assert sorted(line for line in lines if line.startswith("after")) == [
        f"after {rank} {12 // world} {world}" for rank in range(world)
    ]
    assert lines.count("prepared") == len(processes), "once per node"
