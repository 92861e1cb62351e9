"""What a step costs beside its arithmetic, by modules, logged values, micro-batches and ranks.

The model is tiny, so nearly all of a step is overhead; of ``width`` it is not: there a chain of
layers of that width trains on 512 samples (2,048 of the widest). Every line is a training of its
own in fresh processes, with plain Lightning on one process in turn: the step's processor time on
rank 0 (and on the rank that needs most of the others), the tenth percentile of its steps, which
other work on the machine disturbs least (of ``first``, of GPT-2 of 24 layers of 512, the first step
with tracing, measuring and planning); and the ratio to plain Lightning, the median of the rounds
and between which values it lies, of processor and wall-clock time (medians of steps). ``recorded``
compares with the same ranks of which no step is recorded.

    python benchmarks/overhead.py                  # all curves, some minutes
    python benchmarks/overhead.py modules logged
    python benchmarks/overhead.py width --rounds 7
    python benchmarks/overhead.py first           # from ``fit`` to the end of the first step
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from measuring import StepTimes, leave, of_ranks, parser, quiet, spread, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpp import GraphPipeStrategy

DEFAULTS = {"ranks": 1, "modules": 0, "logged": 0, "microbatches": 1, "width": 0}
DEFAULTS |= {"emulated": 0, "recorded": 0, "first": 0}
CURVES: dict[str, list[dict[str, int]]] = {
    "modules": [{"modules": n} for n in (10, 100, 1000, 10000)],
    "modules, two ranks": [{"ranks": 2, "modules": n} for n in (10, 100, 1000, 10000)],
    "logged": [{"logged": n} for n in (0, 1, 10, 100)],
    "logged, two ranks": [{"ranks": 2, "logged": n} for n in (0, 1, 10, 100)],
    "microbatches": [{"ranks": 2, "microbatches": n} for n in (1, 4, 16, 64)],
    "ranks": [{"ranks": n} for n in (1, 2, 4)],
    "ranks, emulated": [{"ranks": n, "emulated": 1} for n in (1, 2, 4, 8)],
    "width": [{"width": n} for n in (192, 1024)],
    "recorded": [{"ranks": 2, "microbatches": 8, "recorded": 1}],
    "first": [{"first": 24, "microbatches": 2}],
}
STEPS = {0: (120, 30), 192: (150, 30), 1024: (6, 1)}
"""Width -> steps, and how many of them do not count."""


class Unused(nn.Module):
    """A module that no step uses, with a parameter and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.rate = nn.Parameter(torch.ones(2)), 0.5


class Chain(LightningModule):
    """Layers, of which every rank has at least one."""

    def __init__(self, asked: dict[str, int]) -> None:
        super().__init__()
        width, count = (asked["width"], 8) if asked["width"] else (16, max(1, asked["ranks"]))
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))
        self.unused = nn.ModuleList(Unused() for _ in range(asked["modules"]))
        self.num_logged = asked["logged"]

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: ``(samples, width)`` to the same."""
        return self.layers(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean square, logged as often as asked for."""
        loss = self(batch).square().mean()
        for number in range(self.num_logged):
            self.log(f"loss {number}", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class GPT2(LightningModule):
    """GPT-2 of so many layers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": num_layers, "n_embd": 512, "n_head": 8}
        config = GPT2Config(vocab_size=1000, n_positions=128, use_cache=False, **sizes)
        self.model = GPT2LMHeadModel(config)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        """Predicts the next token."""
        logits = self.model(input_ids=ids).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters())


class FirstStep(StepTimes):
    """Counts from the beginning of the fit."""

    def setup(self, *_: Any, **__: Any) -> None:
        """The fit begins."""
        super().on_train_batch_start()

    def on_train_batch_start(self, *_: Any) -> None:
        """Nothing to note."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first step ends."""
        super().on_train_batch_start()
        leave(self.folder, trainer.global_rank, [self.steps(0), self.steps(1)])


class Recorded(StepTimes):
    """Records every step, as ``TimelineCallback`` does; gathering comes after a step."""

    def on_train_batch_start(self, trainer: Trainer | None = None, *_: Any) -> None:
        """A step begins."""
        super().on_train_batch_start()
        if trainer is not None:
            trainer.strategy.session.run.recorder.start()  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """It ends."""
        trainer.strategy.session.run.recorder.stop()  # type: ignore[attr-defined]


def train(asked: dict[str, int], folder: str) -> None:
    """Trains; every rank leaves its seconds of each step.

    Args:
        asked: see ``DEFAULTS``; no ranks are plain Lightning on one process.
        folder: for what ranks leave.
    """
    quiet()
    ranks, width = asked["ranks"], asked["width"]
    num_steps, num_warmup = STEPS[width]
    plan = None if width else [[f"layers.{number}"] for number in range(ranks)]
    strategy: Any = "auto"
    if ranks:
        cluster = "summit" if asked["emulated"] else None
        options = {"module": "model", "cache": False} if asked["first"] else {"plan": plan}
        strategy = GraphPipeStrategy(asked["microbatches"], cluster=cluster, **options)
    if asked["first"]:
        ids = torch.randint(0, 1000, (8, 64))
        trainer(strategy, max_steps=1, callbacks=[FirstStep(0, folder)]).fit(
            GPT2(asked["first"]), DataLoader([ids], batch_size=None)
        )
        return
    accelerator = "emulated" if ranks and asked["emulated"] else "cpu"
    times = (Recorded if ranks and asked["recorded"] else StepTimes)(num_warmup, folder)
    num_samples = {0: 64, 1024: 2048}.get(width, 512)
    batches = [torch.randn(num_samples, width or 16)] * num_steps
    trainer(
        strategy, max(1, ranks), accelerator=accelerator, max_steps=num_steps, callbacks=[times]
    ).fit(Chain(asked), DataLoader(batches, batch_size=None))


def measured(asked: dict[str, int]) -> tuple[list[float], float]:
    """A training in processes of its own: processor seconds of every rank, rank 0's wall-clock."""
    left = of_ranks(["--here", json.dumps(asked)], max(1, asked["ranks"]))
    cpu_s = [sorted(cpu)[len(cpu) // 10] for _, cpu in left]
    return cpu_s, statistics.median(left[0][0])


def line(asked: dict[str, int], rounds: int) -> str:
    """A training beside plain Lightning (or beside one that is not recorded), in turn."""
    other = asked | ({"recorded": 0} if asked["recorded"] else {"ranks": 0, "microbatches": 1})
    both = [(measured(other), measured(asked)) for _ in range(rounds)]
    plain_s = statistics.median(cpu[0] for (cpu, _), _ in both)
    ours = [statistics.median(each) for each in zip(*(cpu for _, (cpu, _) in both))]
    seconds = [plain_s, ours[0], *([max(ours[1:])] if ours[1:] else [])]
    shown = "".join(f" {1e3 * second:7.2f}" for second in seconds)
    cpu = spread([own[0] / plain[0] for (plain, _), (own, _) in both])
    wall = spread([own / plain for (_, plain), (_, own) in both])
    return f"{shown:24}  {cpu}  {wall}"


def main() -> None:
    """The command."""
    arguments = parser(__doc__)
    arguments.add_argument("curves", nargs="*", help=f"of {', '.join(CURVES)}; by default all")
    arguments.add_argument("--rounds", type=int, default=1)
    given = arguments.parse_args()
    if unknown := [name for name in given.curves if name not in CURVES]:
        arguments.error(f"no curve {', '.join(unknown)}; there are {', '.join(CURVES)}")
    for name in given.curves or CURVES:
        print(f"{name:>20}   plain  rank 0  others (ms of processor time)  ratio  of wall-clock")
        for options in CURVES[name]:
            found = line(DEFAULTS | options, given.rounds)
            print(f"{options[name.partition(',')[0]]:>20}{found}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        train(json.loads(sys.argv[2]), sys.argv[3])
    else:
        main()
