"""How long it takes from ``fit`` to the end of the first step, by phase.

Every line is a training of its own in a fresh process, on one thread, without caches: processor and
wall-clock seconds of

- ``capture``: tracing the forward, and checking the trace against the module;
- ``measure``: what its operators cost;
- ``plan``: from costs to a plan;
- ``prepare``: the rest of building (parameters given out, stages made);
- ``try``: whether batches can be cut;
- ``step``: the first step itself, with Lightning's beginning.

::

    python benchmarks/first_step.py                       # all models, a minute
    python benchmarks/first_step.py gpt2 --runs 3         # the least of three
    python benchmarks/first_step.py gpt2 --profile p.prof
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

PHASES = ("capture", "measure", "plan", "prepare", "try", "step")


class Phases:
    """Seconds of phases; what a phase contains of others is not counted twice.

    Attributes:
        spent: phase -> processor and wall-clock seconds.
    """

    def __init__(self) -> None:
        self.spent = {phase: [0.0, 0.0] for phase in PHASES}
        self._open: list[str] = []
        self._since = (0.0, 0.0)

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Counts the body as a part of a phase."""
        self._count()
        self._open.append(phase)
        yield
        self._count()
        self._open.pop()

    def _count(self) -> None:
        now = (time.process_time(), time.perf_counter())
        if self._open:
            spent = self.spent[self._open[-1]]
            spent[:] = [s + n - b for s, n, b in zip(spent, now, self._since, strict=True)]
        self._since = now

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Counts calls of a function as parts of a phase."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.inside(phase):
                return function(*args, **kwargs)

        setattr(owner, name, watched)


def gpt2() -> tuple[Any, Any, str | None]:
    """GPT-2 of 24 layers, width 512, on 8 sequences of 64 tokens."""
    import torch
    from lightning.pytorch import LightningModule
    from torch.nn.functional import cross_entropy
    from transformers import GPT2Config, GPT2LMHeadModel

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"n_layer": 24, "n_embd": 512, "n_head": 8}
            config = GPT2Config(vocab_size=1000, n_positions=128, use_cache=False, **sizes)
            self.model = GPT2LMHeadModel(config)

        def training_step(self, ids: Any) -> Any:
            logits = self.model(input_ids=ids).logits
            return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    return Module(), torch.randint(0, 1000, (8, 64)), "model"


def two_towers() -> tuple[Any, Any, str | None]:
    """Two towers of 8 layers of 512, and a head, on 64 pairs."""
    import torch
    from lightning.pytorch import LightningModule
    from torch import nn

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (
                nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)))
                for _ in range(2)
            )
            self.head = nn.Bilinear(512, 512, 1)

        def forward(self, left: Any, right: Any) -> Any:
            return self.head(self.left(left), self.right(right))

        def training_step(self, batch: Any) -> Any:
            return self(*batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    return Module(), (torch.randn(64, 512), torch.randn(64, 512)), None


def gnn() -> tuple[Any, Any, str | None]:
    """The recipe ``gnn``: four layers of graph convolutions on 128 small graphs."""
    from lightning_gpp.recipes.gnn import Motifs, network_for

    data = Motifs(num_graphs=300, batch_size=128)
    data.prepare_data()
    data.setup("fit")
    module = network_for(data, layer="gin", depth=4, width=64)
    return module, next(iter(data.train_dataloader())), None


MODELS: dict[str, Callable[[], tuple[Any, Any, str | None]]] = {
    "gpt2": gpt2,
    "two_towers": two_towers,
    "gnn": gnn,
}


def first_step(model: str, profile: str | None) -> dict[str, list[float]]:
    """Processor and wall-clock seconds of the phases of a training of one step.

    Args:
        model: its name.
        profile: a file for Python's profile of all of it.
    """
    import torch
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lightning_gpp import GraphPipeStrategy
    from lightning_gpp.strategy import build
    from lightning_gpp.strategy.pipelined_run import PipelinedRun
    from lightning_gpp.strategy.step import trials

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, batch, name = MODELS[model]()
    phases = Phases()
    for function, phase in (("capture", "capture"), ("measure_kinds", "measure")):
        phases.watch(build, function, phase)
    phases.watch(build, "plan_pipeline", "plan")
    phases.watch(PipelinedRun, "build", "prepare")
    phases.watch(trials, "why_not_cut", "try")
    trainer = Trainer(
        strategy=GraphPipeStrategy(num_microbatches=2, module=name, cache=False),
        accelerator="cpu", devices=1, max_steps=1, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    recorder = cProfile.Profile()
    if profile is not None:
        recorder.enable()
    with phases.inside("step"):
        trainer.fit(module, DataLoader([batch], batch_size=None))
    if profile is not None:
        recorder.disable()
        recorder.dump_stats(profile)
    return phases.spent


def least_of(model: str, runs: int) -> list[tuple[float, float]]:
    """The phases of the run, of several in fresh processes, that took the least processor time."""
    found = []
    for _ in range(runs):
        command = [sys.executable, __file__, model, "--here"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    spent = min(found, key=lambda each: sum(cpu_s for cpu_s, _ in each.values()))
    return [tuple(spent[phase]) for phase in PHASES]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--runs", type=int, default=1, help="of which the least counts")
    parser.add_argument("--profile", metavar="FILE", help="of one model, in this process")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    models = options.models or [*MODELS]
    if unknown := set(models) - set(MODELS):
        parser.error(f"unknown models {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    if options.here or options.profile:
        (model,) = models
        print(json.dumps(first_step(model, options.profile)))
        return
    print("processor / wall-clock seconds")
    print(f"{'':10}" + "".join(f"{phase:>15}" for phase in (*PHASES, "together")))
    for model in models:
        spent = least_of(model, options.runs)
        spent.append((sum(cpu_s for cpu_s, _ in spent), sum(wall_s for _, wall_s in spent)))
        cells = (f"{f'{cpu_s:.2f} / {wall_s:.2f}':>15}" for cpu_s, wall_s in spent)
        print(f"{model:10}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
