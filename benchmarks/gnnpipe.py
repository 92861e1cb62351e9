"""Full-graph training: seconds of an epoch, and bytes on every rank, way by way.

A deep network on one generated graph trains on one process of one thread, on two such processes
that know nothing of each other (what the machine can give at most), as a pipeline of layers, as
graph parallelism, and as both. Ways to train alternate in rounds; printed are medians, and ratios
to one process within a round.

    python benchmarks/gnnpipe.py                        # two processes, a million edges
    python benchmarks/gnnpipe.py --memory --devices 4   # peak bytes of every rank instead
    python benchmarks/gnnpipe.py --preparing 10000000   # seconds to divide and cut so many edges

Bytes are counted as ``memory.py`` does: what glibc has handed out, at its peak. With
``--limit`` Linux gives every process that many MB on top of what it has when training begins
(``RLIMIT_DATA``), and no more.
"""

from __future__ import annotations

import argparse
import re
import resource
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from measuring import StepTimes, leave, of_ranks, parser, quiet, spread, trainer
from memory import LEAST, Counter
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gpp.common.text_table import text_table
from lightning_gpp.gnn import partition
from lightning_gpp.gnn.chunks import EdgeSet
from lightning_gpp.recipes.gnn import BlockModel, NodeNetwork
from lightning_gpp.strategy import GNNPipeStrategy

WARM_UP = 2
_NO_MEMORY = re.compile("can't allocate memory|MemoryError")
LAYERS, WIDTH, VERTICES, EDGES = 32, 32, 20_000, 1_000_000


class Memory(pl.Callback):
    """Every rank writes the most bytes that it held after the first epochs."""

    def __init__(self, folder: str, limit_mb: int | None) -> None:
        self.folder, self.limit_mb = folder, limit_mb
        self.before = 0

    def setup(self, *_: Any, **__: Any) -> None:
        """What is there before training does not count; the graph is already there."""
        self.counter = Counter()
        self.before = self.counter.now()
        if self.limit_mb is not None:
            lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
            data_kb = next(int(line.split()[1]) for line in lines if line.startswith("VmData"))
            most = (data_kb << 10) + self.limit_mb * 10**6
            resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))

    def on_train_start(self, *_: Any) -> None:
        """Counting begins."""
        self.counter.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """The first step, in which the model is planned, does not count."""
        if trainer.global_step <= 1:
            self.counter.most = 0

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Leaves the number."""
        self.counter.__exit__(None, None, None)
        leave(self.folder, trainer.global_rank, self.counter.most - self.before)


def ways_to_train(num_devices: int) -> dict[str, tuple[int, dict[str, Any] | None]]:
    """Name -> devices, options of the strategy; None for plain Lightning."""
    found: dict[str, tuple[int, dict[str, Any] | None]] = {
        "one process": (1, None),
        "pipeline": (num_devices, {}),
        "graph parallel": (num_devices, {"mode": "exact", "ways": num_devices}),
    }
    if num_devices >= 4:
        found["hybrid"] = (num_devices, {"ways": 2})
    return found


def graph_of(options: argparse.Namespace) -> Data:
    """The generated graph."""
    data = BlockModel(options.vertices, options.edges // 2, num_classes=40, within=0.9)
    return data.graph


def fit(options: argparse.Namespace, folder: str) -> None:
    """Trains in the way that is asked for; every rank leaves what it saw."""
    num_devices, strategy = ways_to_train(options.devices)[options.fit]
    graph = graph_of(options)
    torch.manual_seed(0)
    module = NodeNetwork(
        graph.num_features, int(graph.y.max()) + 1, options.layer, options.layers, options.width
    )
    seen = Memory(folder, options.limit) if options.memory else StepTimes(WARM_UP, folder)
    chosen: Any = "auto"
    if strategy is not None:
        chosen = GNNPipeStrategy(cache=False, start_method="popen", **strategy)
    trainer(chosen, num_devices, max_epochs=WARM_UP + options.epochs, callbacks=[seen]).fit(
        module,
        DataLoader([graph], batch_size=None),
    )


def seconds_of(name: str) -> float:
    """The median epoch of a fit in processes of its own."""
    ((wall_s, _),) = of_ranks([*sys.argv[1:], "--fit", name])
    return statistics.median(wall_s)


def measure_times(options: argparse.Namespace) -> None:
    """Prints the table of epochs."""
    ways = [*ways_to_train(options.devices)]
    seconds: dict[str, list[float]] = {name: [] for name in [*ways, "apart"]}
    with ThreadPoolExecutor(options.devices) as pool:
        for _ in range(options.rounds):
            for name in ways:
                seconds[name].append(seconds_of(name))
            apart = pool.map(seconds_of, ["one process"] * options.devices)
            seconds["apart"].append(statistics.median(apart))
    rows = []
    for name, each in seconds.items():
        work = options.devices if name == "apart" else 1
        ratios = [work * a / b for a, b in zip(seconds["one process"], each, strict=True)]
        rows.append([name, f"{statistics.median(each):.2f} s", spread(ratios)])
    print(text_table(["", "epoch", "times as fast"], rows, left={""}))
    print(f"apart: {options.devices} processes that train the same, each by itself")


def measure_memory(options: argparse.Namespace) -> None:
    """Prints the table of bytes."""
    rows = []
    for name, (num_devices, _) in ways_to_train(options.devices).items():
        try:
            arguments = [*sys.argv[1:], "--fit", name]
            taken = of_ranks(arguments, num_devices, MALLOC_MMAP_THRESHOLD_=str(LEAST))
        except SystemExit as error:
            said = str(error).splitlines()
            refused = [line for line in said if _NO_MEMORY.search(line)]
            if options.limit is None or not refused:
                raise
            rows.append([name, "refused", refused[0]])
            continue
        each = ", ".join(f"{number / 1e6:.0f}" for number in taken)
        rows.append([name, f"{max(taken) / 1e6:.0f}", each])
    print(text_table(["MB", "most", "every rank"], rows, left={"MB", "every rank"}))


def measure_preparing(num_edges: int, options: argparse.Namespace) -> None:
    """Prints the seconds that dividing and cutting a graph takes."""
    data = BlockModel(num_edges // 20, num_edges // 2, num_classes=40, within=0.9)
    edges, num_vertices = data.graph.edge_index, data.graph.num_nodes
    start = time.perf_counter()
    chunks = partition(edges, num_vertices, 4 * options.devices)
    middle = time.perf_counter()
    EdgeSet(edges, chunks).of(chunks.rows(0))
    end = time.perf_counter()
    print(chunks.describe())
    print(
        f"{edges.shape[1]:,} edges: dividing {middle - start:.1f} s, cutting {end - middle:.1f} s"
    )


def main() -> None:
    """Measures what is asked for."""
    arguments = parser(__doc__)
    arguments.add_argument("--devices", type=int, default=2)
    arguments.add_argument("--layer", default="resgcn")
    for name, default in (("layers", LAYERS), ("width", WIDTH)):
        arguments.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("vertices", VERTICES), ("edges", EDGES), ("epochs", 3), ("rounds", 3)):
        arguments.add_argument(f"--{name}", type=int, default=default)
    arguments.add_argument("--memory", action="store_true")
    arguments.add_argument("--limit", type=int, help="MB of a process, with --memory")
    arguments.add_argument("--preparing", type=int)
    arguments.add_argument("--fit", help=argparse.SUPPRESS)
    arguments.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    quiet()
    if options.fit is not None:
        fit(options, options.folder)
    elif options.preparing is not None:
        measure_preparing(options.preparing, options)
    else:
        print(
            f"{options.layers} layers of {options.width} ({options.layer}), {options.vertices:,} "
            f"vertices, {options.edges:,} edges, {options.devices} processes of one thread, torch "
            f"{torch.__version__}"
        )
        (measure_memory if options.memory else measure_times)(options)


if __name__ == "__main__":
    main()
