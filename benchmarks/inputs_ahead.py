r"""Steps with and without inputs that are sent a step early, in turns; real or emulated.

A batch is read by a worker process. Without, rank 0 does not look ahead, and all else is the same.
On CPUs, where nothing is read ahead otherwise, this shows why.

    python benchmarks/inputs_ahead.py                         # two towers, batches of 8 MB
    python benchmarks/inputs_ahead.py --model dlrm            # and sixteen tables of embeddings
    python benchmarks/inputs_ahead.py --link 5e7 --ranks 4    # emulated, with links of 50 MB/s
    python benchmarks/inputs_ahead.py --link 5e7 --ranks 32 --towers 16 --width 128 --samples 128 \
        --time-scale 120
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from measuring import StepTimes, leave, of_ranks, parser, quiet, spread, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_gpp import EmulatedAccelerator, GraphPipeStrategy
from lightning_gpp.cluster import Cluster, Device, DeviceKind, Link
from lightning_gpp.strategy.step import loaders

TABLES, ROWS = 16, 1000
SLOW = DeviceKind("slow", {"float32": 5e9}, 1e12, source="made up")


class Batches(Dataset[Any]):
    """Batches as wide as a user's, which cost the worker nothing."""

    def __init__(self, count: int, given: argparse.Namespace) -> None:
        self.count = count
        self.features = torch.randn(given.samples, given.width)
        self.ids = torch.randint(0, ROWS, (given.samples, TABLES))
        self.towers = given.towers

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        # Copies: what a worker sends goes into shared memory, with all that looks at it.
        return self.ids.clone(), *(self.features.roll(at, 1) for at in range(self.towers))


class Towers(pl.LightningModule):
    """Towers and a head; of ``dlrm`` the head reads embeddings, too."""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(given.width, 256), nn.ReLU(), *(nn.Linear(256, 256) for _ in range(4))
            )
            for _ in range(given.towers)
        )
        count = TABLES if given.model == "dlrm" else 0
        self.tables = nn.ModuleList(nn.Embedding(ROWS, 32) for _ in range(count))
        self.head = nn.Linear(256 * given.towers + 32 * count, 1)

    def forward(self, ids: Tensor, *features: Tensor) -> Any:
        """A score per sample."""
        read = [tower(each) for tower, each in zip(self.towers, features, strict=True)]
        read += [table(ids[:, at]) for at, table in enumerate(self.tables)]
        return self.head(torch.cat(read, dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Some loss."""
        return self(*batch).square().mean()

    def configure_optimizers(self) -> Any:
        """Stochastic gradient descent."""
        return torch.optim.SGD(self.parameters(), 1e-3)


def fit(given: argparse.Namespace, *, is_ahead: bool) -> None:
    """Trains, and leaves what steps took, by the emulated clock if there is one."""
    quiet()
    loaders.can_look_ahead = lambda *_: is_ahead  # on CPUs, too
    times = [] if given.link else [StepTimes(4, given.folder)]
    options: dict[str, Any] = {"callbacks": times, "max_epochs": 1}
    if given.link:
        devices = tuple(Device(f"slow:{index}", SLOW.name) for index in range(given.ranks))
        cluster = Cluster(devices, Link(given.link, 1e-4), device_kinds=(SLOW,))
        options["accelerator"] = EmulatedAccelerator(cluster, time_scale=given.time_scale)
    strategy = GraphPipeStrategy(start_method="fork", schedule="gpipe", num_microbatches=4)
    run = trainer(strategy, given.ranks, **options)
    batches = Batches(8 if given.link else 24, given)
    run.fit(Towers(given), DataLoader(batches, None, num_workers=1))
    if given.link:
        leave(given.folder, 0, {name: each.item() for name, each in run.callback_metrics.items()})


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains in turns, and prints both."""
    form = parser(__doc__)
    form.add_argument("--model", choices=("towers", "dlrm"), default="towers")
    form.add_argument("--ranks", type=int, default=2)
    form.add_argument("--link", type=float, default=0.0, help="bytes/s; emulates the ranks")
    form.add_argument("--towers", type=int, default=2)
    form.add_argument("--width", type=int, default=2048, help="of the features of a tower")
    form.add_argument("--samples", type=int, default=512)
    form.add_argument("--time-scale", type=float, help="real seconds of an emulated one")
    form.add_argument("--rounds", type=int, default=5)
    form.add_argument("--fit", choices=("with", "without"), help="used by the script itself")
    form.add_argument("folder", nargs="?", default=tempfile.gettempdir())
    given = form.parse_args(arguments)
    if given.fit:
        fit(given, is_ahead=given.fit == "with")
        return
    asked = [*(arguments or ())]
    if given.link:
        for how in ("without", "with"):
            found = of_ranks([*asked, f"--fit={how}"])[0]
            print(how, {name: f"{1e3 * value:.4g} ms" for name, value in found.items()})
        return
    rounds = []
    for _ in range(given.rounds):
        found = [of_ranks([*asked, f"--fit={how}"])[0][0] for how in ("without", "with")]
        rounds.append([statistics.median(steps) for steps in found])
        print(" ".join(f"{1e3 * seconds:.1f}" for seconds in rounds[-1]), "ms", flush=True)
    print(f"with over without: {spread([after / before for before, after in rounds])}")


if __name__ == "__main__":
    main(sys.argv[1:])
