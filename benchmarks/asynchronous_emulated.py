"""The pace of asynchronous training: emulated in real processes beside simulated.

Every configuration is trained with ``schedule="1f1b-async"`` on emulated devices: one process per
device, with the real strategy, Trainer loop, messages and optimizers, at the pace of a described
cluster. What a mini-batch takes there, from the end of one to the end of the next while the
pipeline is full, stands beside the same of a simulation of as many mini-batches, and beside the
*bound*: how long a mini-batch keeps the busiest device. Emulation and simulation share the
durations of actions and messages and nothing else.

    python benchmarks/asynchronous_emulated.py                   # all configurations, some minutes
    python benchmarks/asynchronous_emulated.py --only chain --steps 400
    python benchmarks/asynchronous_emulated.py --json rows.json

``of bound`` is the bound over the emulated pace; the pace of the first mini-batches, while the
pipeline fills and goes round once, and of the last ones, while it drains, is left out. ``slip`` is
what did not fit its emulated time on the rank that slipped most, as part of the counted time. Slip
is this machine's doing (a process beside it, say), so a run that slips by more than ``--slip`` is
repeated, and the one that slipped least counts; ``runs`` says how many there were.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpp import EmulatedAccelerator, GraphPipeStrategy
from lightning_gpp.cluster import Cluster, Device, DeviceKind, Link
from lightning_gpp.emulation.report import counted_windows
from lightning_gpp.text_table import text_table

WIDTH, BATCH = 32, 8
KIND = DeviceKind("slow", {"float32": 1.6e6}, 1e12, source="a forward of a layer takes 10 ms")


@dataclass(frozen=True)
class Case:
    """One configuration: parallel chains of stages and a join of equal layers.

    Attributes:
        name: of the row.
        shape: stages of every chain; the join is one more.
        heavy: layers of the first stage of the first chain.
        message: seconds of a message, in forwards of a layer.
        policy: of the weights.
    """

    name: str
    shape: tuple[int, ...]
    heavy: int = 1
    message: float = 1e-3
    policy: str = "pipeoptim"

    @property
    def num_devices(self) -> int:
        """A device for every stage."""
        return sum(self.shape) + 1

    @property
    def depth(self) -> int:
        """Stages from the first to the last."""
        return max(self.shape) + 1


CASES = (
    Case("chain", (1,)),
    Case("chain", (3,)),
    Case("chain, 2 layers in a stage", (3,), heavy=2),
    Case("chain, slow links", (3,), message=0.3),
    Case("chain, stash", (3,), policy="stash"),
    Case("chain", (7,)),
    Case("two branches", (1, 1)),
    Case("two branches", (3, 3)),
    Case("three branches, unequal", (3, 2, 1)),
    Case("two branches, 2 layers in a stage", (3, 1), heavy=2),
    Case("two branches, unequal", (7, 1)),
)


class Layers(nn.Module):
    """The layers of a stage, of the sum of what comes in."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))

    def forward(self, *values: Tensor) -> Tensor:
        """What goes on to the next stage."""
        total = values[0]
        for value in values[1:]:
            total = total + value
        return torch.tanh(self.layers(total))


class Branches(pl.LightningModule):
    """Parallel chains and a join."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.chains = nn.ModuleList(
            nn.ModuleList(
                Layers(case.heavy if chain == stage == 0 else 1) for stage in range(length)
            )
            for chain, length in enumerate(case.shape)
        )
        self.join = Layers(1)

    def forward(self, x: Tensor) -> Tensor:
        """All chains of the same input, joined."""
        ends = []
        for chain in self.chains:
            value = x
            for layers in chain:  # type: ignore[union-attr]
                value = layers(value)
            ends.append(value)
        joined: Tensor = self.join(*ends)
        return joined

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """A mean over samples."""
        return (self(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One whose steps are predicted from its state."""
        return torch.optim.Adam(self.parameters(), 1e-4)


@dataclass(frozen=True, slots=True)
class Row:
    """What came out for a case; seconds of a mini-batch on the emulated devices, but ``wall_s``."""

    name: str
    devices: int
    depth: int
    steps: int
    counted: int
    bound_s: float
    predicted_s: float
    emulated_s: float
    slip: float
    runs: int
    wall_s: float

    @property
    def error(self) -> float:
        """How much longer a mini-batch took emulated, as part of the predicted one."""
        return self.emulated_s / self.predicted_s - 1

    @property
    def of_bound(self) -> float:
        """How busy the busiest device was."""
        return self.bound_s / self.emulated_s


def measured(case: Case, given: argparse.Namespace) -> Row:
    """Trains a case; again where it slipped."""
    start_s = time.monotonic()
    runs: list[dict[str, float]] = []
    while len(runs) < given.runs and (not runs or slipped(runs[-1]) > given.slip):
        runs.append(emulated(case, given))
    run = min(runs, key=slipped)
    return Row(
        case.name,
        case.num_devices,
        case.depth,
        given.steps,
        len(counted_windows(given.steps, case.depth - 1)),
        run["busiest_device_s"],
        run["predicted_step_s"],
        run["emulated_step_s"],
        slipped(run),
        len(runs),
        time.monotonic() - start_s,
    )


def slipped(run: dict[str, float]) -> float:
    """Slip as part of the time in which it was."""
    return run["emulated_slip_s"] / run["emulated_step_s"]


def emulated(case: Case, given: argparse.Namespace) -> dict[str, float]:
    """One run in processes of this machine; what its emulation reports."""
    torch.manual_seed(0)
    data = TensorDataset(*(torch.randn(given.steps * BATCH, WIDTH) for _ in range(2)))
    size_bytes, forward_s = 4 * BATCH * WIDTH, 2 * BATCH * WIDTH**2 / KIND.flops_per_s("float32")
    devices = tuple(Device(f"slow:{i}", KIND.name) for i in range(case.num_devices))
    link = Link(size_bytes / (case.message * forward_s))
    stages = [
        [f"chains.{chain}.{stage}"]
        for chain, length in enumerate(case.shape)
        for stage in range(length)
    ]
    strategy = GraphPipeStrategy(
        schedule="1f1b-async",
        weights=case.policy,
        plan=[*stages, ["join"]],
        cluster=Cluster(devices, link, device_kinds=(KIND,)),
        timeout=120.0,
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=EmulatedAccelerator(time_scale=given.time_scale),
        devices=case.num_devices,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Branches(case), DataLoader(data, BATCH))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


HEADER = (
    *("case", "devices", "depth", "steps", "bound", "predicted", "emulated", "error", "of bound"),
    *("slip", "runs", "real"),
)


def render(rows: Sequence[Row]) -> str:
    """The table, and the worst in one line."""
    table = [
        [
            *(row.name, str(row.devices), str(row.depth), f"{row.counted} of {row.steps}"),
            *(f"{1e3 * s:.2f} ms" for s in (row.bound_s, row.predicted_s, row.emulated_s)),
            *(f"{row.error:+.2%}", f"{row.of_bound:.1%}", f"{row.slip:.2%}", str(row.runs)),
            f"{row.wall_s:.0f} s",
        ]
        for row in rows
    ]
    worst = max(rows, key=lambda row: abs(row.error))
    return (
        text_table(HEADER, table, left={"case"}, max_width=200)
        + f"\n\nworst error {abs(worst.error):.2%} ({worst.name}, depth {worst.depth})"
    )


def main() -> None:
    """Runs the cases and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--depth", type=int, help="cases of this depth")
    parser.add_argument("--steps", type=int, default=120, help="mini-batches of a run")
    parser.add_argument("--time-scale", type=float, help="real seconds per emulated second")
    parser.add_argument("--slip", type=float, default=0.01, help="part of the time; else again")
    parser.add_argument("--runs", type=int, default=3, help="most runs of a case")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_gpp"):
        logging.getLogger(name).setLevel(logging.ERROR)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch "
        f"{torch.__version__}\n"
    )
    cases = [c for c in CASES if given.only in c.name and given.depth in (None, c.depth)]
    rows = [measured(case, given) for case in cases]
    print(render(rows))
    if given.json:
        found = [asdict(row) | {"error": row.error, "of_bound": row.of_bound} for row in rows]
        given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
