"""Four towers and a head on two processes: one device, data parallelism, plans by hand, and ours.

Data parallelism is Lightning's DDP and ``pipelines=2``, each of one stage.

The smallest model that asks for stages that share devices: two towers on each device run side by
side, and the head is a stage of its own beside the towers of one of them, so that no tower waits
for another one's end. Fits alternate in rounds; printed are medians, and ratios within a round.

    python benchmarks/towers.py                # 4 towers of 6 layers of 768, 512 samples
    python benchmarks/towers.py --steps 12 --rounds 3

``predicted`` is the step that our plan was chosen for, from costs measured in that run, with what
its recorded steps cost besides left out.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from measuring import StepTimes, leave, parser, quiet, spread, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpp import GraphPipeStrategy
from lightning_gpp.planner import evaluate_plan

NUM_TOWERS, NUM_LAYERS, WIDTH, NUM_SAMPLES = 4, 6, 768, 512
WARM_UP = 3
BY_HAND = [
    {"modules": ["towers.0", "towers.1"], "device": 0},
    {"modules": ["towers.2", "towers.3"], "device": 1},
    {"modules": ["head"], "device": 0},
]


class Towers(LightningModule):
    """Equal towers over parts of the input, and a head over all of their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(
                *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(NUM_LAYERS))
            )
            for _ in range(NUM_TOWERS)
        )
        self.head = Head()

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """Shapes: each ``(num_samples, WIDTH)``; the result ``(num_samples, 1)``."""
        parts = zip(self.towers, (a, b, c, d), strict=True)
        return self.head(*(tower(part) for tower, part in parts))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The mean square of the output."""
        return self(*batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Head(nn.Module):
    """Joins the towers."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(NUM_TOWERS * WIDTH, 1)

    def forward(self, *parts: Tensor) -> Tensor:
        """Shapes: each ``(num_samples, WIDTH)``; the result ``(num_samples, 1)``."""
        return self.last(torch.cat(parts, 1))


class Planned(StepTimes):
    """Rank 0 also leaves the predicted step and the plan."""

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Leaves them."""
        self.on_train_batch_start()
        predicted_s, text = 0.0, ""
        if isinstance(trainer.strategy, GraphPipeStrategy) and trainer.is_global_zero:
            planned = trainer.strategy.session.run.pipeline.planned
            predicted_s = evaluate_plan(planned.plan, planned.request).step_s
            text = ", ".join(
                f"{len(stage.operators)} operators on {list(stage.devices)}"
                for stage in planned.plan.stages
            )
        leave(self.folder, trainer.global_rank, (self.steps(), predicted_s, text))


def fit(strategy: Any, num_devices: int, num_steps: int) -> tuple[float, float, str]:
    """Trains; the median step, the predicted one, and the plan."""
    seed_everything(0, verbose=False)
    batch = [torch.randn(NUM_SAMPLES, WIDTH) for _ in range(NUM_TOWERS)]
    replicas = num_devices if strategy == "ddp_spawn" else getattr(strategy, "num_pipelines", 1)
    batch = [part[: NUM_SAMPLES // replicas] for part in batch]  # its share of the mini-batch
    count = num_steps + WARM_UP
    with tempfile.TemporaryDirectory() as folder:
        trainer(
            strategy,
            num_devices,
            max_steps=count,
            use_distributed_sampler=False,
            callbacks=[Planned(WARM_UP, folder)],
        ).fit(Towers(), DataLoader([batch] * count, batch_size=None))
        steps_s, predicted_s, plan = json.loads(Path(folder, "0.json").read_text())
    return statistics.median(steps_s), predicted_s, plan


def main() -> None:
    """The command."""
    command = parser(__doc__)
    command.add_argument("--steps", type=int, default=15)
    command.add_argument("--rounds", type=int, default=3)
    arguments = command.parse_args()
    quiet()
    found: dict[str, list[tuple[float, float, str]]] = {}
    for _ in range(arguments.rounds):
        ours = {"start_method": "spawn", "cache": False}
        ways = {
            "one device": ("auto", 1),
            "DDP": ("ddp_spawn", 2),
            "pipelines": (GraphPipeStrategy(1, pipelines=2, **ours), 2),
            "by hand": (GraphPipeStrategy(1, plan=BY_HAND, **ours), 2),
            "planned": (GraphPipeStrategy(**ours), 2),
        }
        for name, (strategy, num_devices) in ways.items():
            found.setdefault(name, []).append(fit(strategy, num_devices, arguments.steps))
    alone_s = [step_s for step_s, _, _ in found["one device"]]
    for name, rows in found.items():
        steps_s = [step_s for step_s, _, _ in rows]
        ratios = [one / step_s for one, step_s in zip(alone_s, steps_s)]
        line = f"{name:10} {1e3 * statistics.median(steps_s):6.1f} ms"
        line += f"  {spread(ratios)} times one device"
        if name == "planned":
            errors = [predicted_s / step_s - 1 for step_s, predicted_s, _ in rows]
            line += f"  predicted {1e3 * rows[-1][1]:.1f} ms, {statistics.median(errors):+.0%}"
            line += f"  {rows[-1][2]}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
