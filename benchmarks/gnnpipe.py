"""Full-graph training: seconds of an epoch, and bytes on every rank, way by way.

A deep network on one generated graph trains on one process of one thread, on two such processes
that know nothing of each other (what the machine can give at most), as a pipeline of layers, as
graph parallelism, and as both. Ways to train alternate in rounds; printed are medians, and ratios
to one process within a round.

    python benchmarks/gnnpipe.py                        # two processes, a million edges
    python benchmarks/gnnpipe.py --memory --devices 4   # peak bytes of every rank instead
    python benchmarks/gnnpipe.py --preparing 10000000   # seconds to divide and cut so many edges

Bytes are counted as ``asynchronous_memory.py`` does: what glibc has handed out, at its peak. With
``--limit`` Linux gives every process that many MB on top of what it has when training begins
(``RLIMIT_DATA``), and no more.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import lightning.pytorch as pl
import torch
from asynchronous_memory import LEAST, Counter
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gpp.gnn import partition
from lightning_gpp.gnn.chunks import EdgeSet
from lightning_gpp.recipes.gnn import BlockModel, NodeNetwork
from lightning_gpp.strategy import GNNPipeStrategy
from lightning_gpp.text_table import text_table

WARM_UP = 2
_NO_MEMORY = re.compile("can't allocate memory|MemoryError")
LAYERS, WIDTH, VERTICES, EDGES = 32, 32, 20_000, 1_000_000


class EpochTimes(pl.Callback):
    """When epochs begin."""

    def __init__(self) -> None:
        self.begun: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """An epoch is one batch."""
        self.begun.append(time.perf_counter())

    def on_train_end(self, *_: Any) -> None:
        """The last one ends."""
        self.begun.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Of every epoch after those that warm up."""
        return [b - a for a, b in zip(self.begun, self.begun[1:])][WARM_UP:]


class Memory(pl.Callback):
    """Every rank writes the most bytes that it held after the first epochs."""

    def __init__(self, folder: Path, limit_mb: int | None) -> None:
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
        """Writes the number."""
        self.counter.__exit__(None, None, None)
        text = str(self.counter.most - self.before)
        (self.folder / str(trainer.global_rank)).write_text(text, encoding="ascii")


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


def fit(options: argparse.Namespace, folder: Path) -> None:
    """Trains in the way that is asked for, and writes what it saw; all ranks come here."""
    num_devices, strategy = ways_to_train(options.devices)[options.fit]
    graph = graph_of(options)
    torch.manual_seed(0)
    module = NodeNetwork(
        graph.num_features, int(graph.y.max()) + 1, options.layer, options.layers, options.width
    )
    times = EpochTimes()
    callbacks: list[pl.Callback] = [times]
    if options.memory:
        callbacks.append(Memory(folder, options.limit))
    chosen: Any = "auto"
    if strategy is not None:
        chosen = GNNPipeStrategy(cache=False, start_method="popen", **strategy)
    trainer = pl.Trainer(
        strategy=chosen,
        devices=num_devices,
        accelerator="cpu",
        max_epochs=WARM_UP + options.epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader([graph], batch_size=None))  # type: ignore[arg-type]
    if trainer.is_global_zero:
        (folder / "seconds").write_text(json.dumps(times.seconds), encoding="ascii")


def started(name: str, folder: Path, *, quiet: bool = False) -> subprocess.Popen[bytes]:
    """A fit in processes of its own; what a quiet one says is in the file ``said``."""
    command = [sys.executable, *sys.argv, "--fit", name, "--folder", str(folder)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(LEAST)}
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            command,
            env=environment if "--memory" in sys.argv else None,
            stderr=said if quiet else None,
        )


def seconds_of(names: list[str]) -> float:
    """The median epoch of fits that run at the same time."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(i) for i in range(len(names))]
        for folder in folders:
            folder.mkdir()
        running = [started(*pair) for pair in zip(names, folders, strict=True)]
        if any(process.wait() for process in running):
            raise SystemExit("a fit failed")
        found = [json.loads((folder / "seconds").read_text("ascii")) for folder in folders]
    return statistics.median(seconds for each in found for seconds in each)


def measure_times(options: argparse.Namespace) -> None:
    """Prints the table of epochs."""
    ways = [*ways_to_train(options.devices)]
    seconds: dict[str, list[float]] = {name: [] for name in [*ways, "apart"]}
    for _ in range(options.rounds):
        for name in ways:
            seconds[name].append(seconds_of([name]))
        seconds["apart"].append(seconds_of(["one process"] * options.devices))
    one = seconds["one process"]
    rows = []
    for name, each in seconds.items():
        work = options.devices if name == "apart" else 1
        ratios = [work * a / b for a, b in zip(one, each, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        median = statistics.median(ratios)
        rows.append([name, f"{statistics.median(each):.2f} s", f"{median:.2f}", spread])
    print(text_table(["", "epoch", "times as fast", "over rounds"], rows, left={""}))
    print(f"apart: {options.devices} processes that train the same, each by itself")


def measure_memory(options: argparse.Namespace) -> None:
    """Prints the table of bytes."""
    rows = []
    for name, (num_devices, _) in ways_to_train(options.devices).items():
        with tempfile.TemporaryDirectory() as folder:
            if started(name, Path(folder), quiet=options.limit is not None).wait():
                if options.limit is None:
                    raise SystemExit("a fit failed")
                said = (Path(folder) / "said").read_text(encoding="utf-8", errors="replace")
                reason = next((line for line in said.splitlines() if _NO_MEMORY.search(line)), "")
                if not reason:
                    raise SystemExit(said)
                rows.append([name, "refused", reason])
                continue
            taken = [
                int((Path(folder) / str(rank)).read_text("ascii")) for rank in range(num_devices)
            ]
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--layer", default="resgcn")
    for name, default in (("layers", LAYERS), ("width", WIDTH)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("vertices", VERTICES), ("edges", EDGES), ("epochs", 3), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--limit", type=int, help="MB of a process, with --memory")
    parser.add_argument("--preparing", type=int)
    parser.add_argument("--fit", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_gpp"):
        logging.getLogger(name).setLevel(logging.ERROR)
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
