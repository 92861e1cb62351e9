"""Two pipelines side by side over a slow link: how much of an average lies beside the backward.

Two hosts are two network namespaces of this machine with a link between them that is as slow as
asked for (it takes root and the commands ``ip`` and ``tc``). Each trains a pipeline of one device,
which is the hardest case: with more, ranks average while others still go backward anyway. Printed,
in milliseconds, medians of the batches after the first ones:

- one pipeline: a batch of one of them alone;
- average: of its gradients over the link, with nothing beside it;
- two pipelines: a batch of both, and how much of the average lies beside the backward.

    python benchmarks/averages.py
    python benchmarks/averages.py --rate 10gbit --layers 16
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpp import GraphPipeStrategy

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.namespaces import two_hosts

WIDTH, WARM_UP, NUM_BATCHES = 1024, 8, 30


class Layers(pl.LightningModule):
    """Linear layers one after the other."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last layer's outputs."""
        return torch.as_tensor(self.layers(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """How far they are from zero."""
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD, which takes little time of its own."""
        return torch.optim.SGD(self.parameters(), 1e-3)


class Clock(pl.Callback):
    """Notes when batches begin, and what an average alone takes after the last one."""

    def __init__(self) -> None:
        self.begun_s: list[float] = []
        self.average_s = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """A batch begins."""
        self.begun_s.append(time.monotonic())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Pipelines average tensors like their gradients, three times."""
        peers = trainer.strategy.session.run.peers  # type: ignore[attr-defined]
        if peers is None:
            return
        tensors, taken_s = [torch.zeros_like(p) for p in pl_module.parameters()], []
        for _ in range(3):
            peers.meet("a benchmark")
            start_s = time.monotonic()
            peers.mean_(tensors, "a benchmark")
            taken_s.append(time.monotonic() - start_s)
        self.average_s = statistics.median(taken_s)


def train(num_hosts: int, layers: int, batch_size: int, microbatches: int, results: Path) -> None:
    """One process of a job, as torchrun starts it; that of rank 0 leaves its times."""
    torch.set_num_threads(1)
    clock, data = Clock(), TensorDataset(torch.randn(NUM_BATCHES * batch_size, WIDTH))
    trainer = pl.Trainer(
        accelerator="cpu",
        num_nodes=num_hosts,
        devices=1,
        strategy=GraphPipeStrategy(
            num_microbatches=microbatches, schedule="1f1b", pipelines=num_hosts, timeout=120
        ),
        max_epochs=1,
        logger=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    trainer.fit(Layers(layers), DataLoader(data, batch_size))
    if trainer.global_rank == 0:
        counted = clock.begun_s[WARM_UP:]
        batch_s = statistics.median(b - a for a, b in zip(counted, counted[1:], strict=False))
        results.write_text(f"{batch_s} {clock.average_s}", encoding="utf-8")


def measured(num_hosts: int, rate: str, arguments: list[str]) -> tuple[float, float]:
    """Seconds of a batch, and of an average, of as many pipelines as hosts."""
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        results, jobs = Path(folder) / "results", []
        for number, host in enumerate(hosts[:num_hosts]):
            limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
            add = ["tc", "-n", host.name, "qdisc", "add", "dev", host.link, "root", *limit]
            subprocess.run(add, check=True)
            command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_hosts}"]
            command += ["--nproc-per-node=1", f"--node-rank={number}"]
            command += [f"--master-addr={hosts[0].address}", "--master-port=29511", __file__]
            command += [*arguments, "--hosts", str(num_hosts), "--results", str(results)]
            environment = {**os.environ, **host.environment, "OMP_NUM_THREADS": "1"}
            jobs.append(
                subprocess.Popen(
                    host.command(command),
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
            )
        for job in jobs:
            _, errors = job.communicate()
            if job.returncode:
                raise RuntimeError(errors.decode()[-3000:])
        batch_s, average_s = map(float, results.read_text(encoding="utf-8").split())
        return batch_s, average_s


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc takes it")
    parser.add_argument("--layers", type=int, default=8, help="of 4.2 MB of gradients each")
    parser.add_argument("--batch-size", type=int, default=512, help="of a pipeline")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hosts", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.hosts is not None:
        train(given.hosts, given.layers, given.batch_size, given.microbatches, given.results)
        return
    print("| one pipeline | average | two pipelines | of the average beside the backward |")
    print("|---|---|---|---|")
    for _ in range(given.rounds):
        (one_s, _), (two_s, average_s) = (measured(n, given.rate, sys.argv[1:]) for n in (1, 2))
        beside_s = one_s + average_s - two_s
        cells = [f"{seconds * 1e3:.0f}" for seconds in (one_s, average_s, two_s, beside_s)]
        print(f"| {' | '.join(cells)} ({beside_s / average_s:.0%}) |", flush=True)


if __name__ == "__main__":
    main()
