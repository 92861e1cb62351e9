"""The default, all forwards before the step and all backwards after it, against 1F1B.

Two processes train the same module on the same data: a fit with the one schedule, a fit with the
other, and so on. A fit's step time is the lower quartile of its steps, as other load only adds.
Printed are the medians over the fits, the median, smallest and largest ratio of neighbouring fits,
the ratio of the fastest steps of all fits (what is left where other load comes and goes), and the
ratio that a simulation with measured costs says. Then, for several numbers of
micro-batches, the most memory that each rank takes during a step, beside what the planner predicts
for its activations. Memory is what the process holds at its peak beyond what it held before the
step (``VmHWM`` of Linux).

The C library gives freed memory back to Linux and pays for each page when it takes it again: the
more activations a schedule holds, the more of that. Where time is taken it keeps its memory, as
the allocator of a GPU does (``--malloc default``: as it comes); where memory is taken it gives
allocations of 64 kB and more back at once.

    python benchmarks/both_schedules.py                # times and memory
    python benchmarks/both_schedules.py --fits 10 --only times
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpp import GraphPipeStrategy
from lightning_gpp.capture import capture, profile_costs
from lightning_gpp.planner import PlanRequest, evaluate_plan, plan_request
from lightning_gpp.planner.plan.manual import resolve_plan
from lightning_gpp.simulate.plan_costs import simulate_plan

SCHEDULES = ("gpipe", "1f1b")
KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""What processes of glibc are started with."""


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        name: for the table.
        width: of every layer.
        batch_size: samples of a mini-batch.
        branches: towers side by side before the head; 1 is a chain.
        num_steps: of a fit; a fifth of them warms up.
        num_microbatches: that a mini-batch is cut into.
    """

    name: str
    width: int
    batch_size: int
    branches: int
    num_steps: int
    num_microbatches: int = 4


CASES = (
    Case("chain, short steps", width=192, batch_size=512, branches=1, num_steps=100),
    Case("chain, long steps", width=1024, batch_size=2048, branches=1, num_steps=10),
    Case("branches, short steps", width=192, batch_size=512, branches=2, num_steps=100),
    Case("branches, long steps", width=1024, batch_size=2048, branches=2, num_steps=10),
)


class Towers(LightningModule):
    """Towers of four layers on the same input, and a head of four layers on their sum."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.towers = nn.ModuleList(_layers(case.width) for _ in range(case.branches))
        self.head = _layers(case.width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, width)`` to ``(batch, width)``."""
        total: Tensor = self.towers[0](x)
        for tower in self.towers[1:]:
            total = total + tower(x)
        y: Tensor = self.head(total)
        return y

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean squared error."""
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _layers(width: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)))


def plan_of(case: Case) -> list[dict[str, Any]]:
    """Towers on one device each, the head on the second one."""
    if case.branches == 1:
        return [{"modules": ["towers"], "device": 0}, {"modules": ["head"], "device": 1}]
    return [
        {"modules": ["towers.0"], "device": 0},
        {"modules": ["towers.1"], "device": 1},
        {"modules": ["head"], "device": 1},
    ]


class Meter(Callback):
    """Times of the steps, or the most memory of one beyond what was there before it."""

    def __init__(self, num_warmup: int, memory: bool) -> None:
        self.num_warmup = num_warmup
        self.memory = memory
        self.ends_s: list[float] = []
        self.peak_bytes = 0

    def on_train_batch_start(self, *args: Any) -> None:
        """Forgets the peak so far."""
        if not self.memory:
            return
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status_bytes("VmRSS")

    def on_train_batch_end(self, *args: Any) -> None:
        """Notes the time and the peak."""
        self.ends_s.append(time.perf_counter())
        if self.memory and len(self.ends_s) > self.num_warmup:
            self.peak_bytes = max(self.peak_bytes, _status_bytes("VmHWM") - self._before)

    def steps_s(self) -> list[float]:
        """Seconds from the end of each step to the end of the next."""
        ends = self.ends_s[self.num_warmup :]
        return [b - a for a, b in zip(ends, ends[1:])]


def _status_bytes(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if name in x)
    return 1024 * int(line.split()[1])


def fit(case: Case, schedule: str, memory: bool) -> Meter:
    """One fit as this process's rank."""
    seed_everything(0, verbose=False)
    meter = Meter(num_warmup=max(2, case.num_steps // 5), memory=memory)
    trainer = Trainer(
        strategy=GraphPipeStrategy(
            num_microbatches=case.num_microbatches,
            schedule=schedule,
            plan=plan_of(case),
            cluster_environment=TorchElasticEnvironment(),
            timeout=120,
        ),
        accelerator="cpu",
        devices=2,
        max_steps=case.num_steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[meter],
    )
    shape = case.batch_size, case.width
    batches = [(torch.randn(shape), torch.randn(shape))] * case.num_steps
    trainer.fit(Towers(case), DataLoader(batches, batch_size=None))
    return meter


def work(rank: int, jobs: Sequence[tuple[Case, str]], memory: bool, folder: str) -> None:
    """One of the two processes: fits one after the other; what was measured goes into a file."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "benchmark",
    }
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    found = []
    for case, schedule in jobs:
        meter = fit(case, schedule, memory)
        found.append((meter.steps_s(), meter.peak_bytes))
    torch.save(found, Path(folder) / f"{rank}.pt")


def measured(jobs: Sequence[tuple[Case, str]], memory: bool) -> list[list[tuple[list[float], int]]]:
    """For each rank (seconds of each step, bytes) of every fit."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (jobs, memory, folder), nprocs=2)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


def question(case: Case) -> tuple[Any, PlanRequest]:
    """The plan, and its question with costs measured here."""
    module = Towers(case)
    x = torch.randn(case.batch_size // case.num_microbatches, case.width)
    captured = capture(module, (x,))
    plan = resolve_plan(plan_of(case), captured.graph)
    request = plan_request(
        captured.graph,
        2,
        minibatch_size=case.batch_size,
        costs=profile_costs(captured, (x,)),
        num_microbatches=case.num_microbatches,
    )
    return replace(plan, num_microbatches=case.num_microbatches), request


def times(num_fits: int, malloc: str, cases: str) -> None:
    """Step times of both schedules, for the cases whose names contain a text."""
    os.environ |= {} if malloc == "default" else KEEPS_MEMORY
    print("gpipe (the default) over 1f1b; ms are medians of the fits")
    for case in (case for case in CASES if cases in case.name):
        plan, request = question(case)
        simulated = [
            simulate_plan(plan, replace(request, schedule=name)).step_s for name in SCHEDULES
        ]
        found = measured(
            [(case, name) for _ in range(num_fits) for name in SCHEDULES], memory=False
        )[0]
        steps = [statistics.quantiles(fit)[0] for fit, _ in found]
        fastest = [min(min(fit) for fit, _ in found[start::2]) for start in range(2)]
        ratios = [a / b for a, b in zip(steps[::2], steps[1::2])]
        print(
            f"{case.name:22} {1e3 * statistics.median(steps[::2]):8.2f} ms "
            f"{1e3 * statistics.median(steps[1::2]):8.2f} ms, ratio "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
            f"of the fastest steps {fastest[0] / fastest[1]:.3f}, "
            f"simulated {simulated[0] / simulated[1]:.3f}",
            flush=True,
        )


def memory() -> None:
    """Activations of both schedules, predicted and measured."""
    os.environ |= GIVES_BACK
    print("\nMB on ranks 0 and 1: predicted activations | measured peak of a step")
    counts = (4, 8, 16, 32)
    case = Case("chain", width=512, batch_size=4096, branches=1, num_steps=5)
    cases = [replace(case, num_microbatches=count) for count in counts]
    found = measured([(each, name) for each in cases for name in SCHEDULES], memory=True)
    for index, each in enumerate(cases):
        plan, request = question(each)
        for place, name in enumerate(SCHEDULES):
            evaluation = evaluate_plan(plan, replace(request, schedule=name))
            # The rank of the loss is the last stage's.
            held = [s.memory.activation_bytes for s in reversed(evaluation.stages)]
            took = [found[rank][2 * index + place][1] for rank in range(2)]
            print(
                f"{each.num_microbatches:4} micro-batches {name:6}"
                + "".join(f" {1e-6 * size:8.1f}" for size in held)
                + " |"
                + "".join(f" {1e-6 * size:8.1f}" for size in took),
                flush=True,
            )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fits", type=int, default=6, help="of each schedule")
    parser.add_argument("--only", choices=["times", "memory"])
    parser.add_argument("--cases", default="", help="times of those whose name contains this")
    parser.add_argument("--malloc", choices=["keeps", "default"], default="keeps")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.only != "memory":
        times(arguments.fits, arguments.malloc, arguments.cases)
    if arguments.only != "times":
        memory()


if __name__ == "__main__":
    main()
