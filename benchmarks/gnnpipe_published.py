"""GNNPipe's sixteen cells: four data sets × four networks on 2 × 4 RTX A5000, simulated.

Epoch time and communication volume of a pipeline of layers, the hybrid of two
ways and four groups, and graph parallelism, beside those of arXiv 2308.10087 (from its authors'
logs). Nothing is trained: networks are known by the statistics of their graphs.

    python benchmarks/gnnpipe_published.py                # links of 58.5 Gb/s for every GPU
    python benchmarks/gnnpipe_published.py --port 88      # and one port of 88 Gb/s for each node
    python benchmarks/gnnpipe_published.py --emulate      # and every epoch emulated, minutes

An emulated epoch is one of the real runtime, its messages and a virtual clock, on eight threads
with tensors that are shapes alone. It shares the plan and the durations with the simulated one.

Compute is calibrated on seven epochs on one GPU alone (8 and 32 layers of GCN, with and without
chunks): four numbers, the same for all cells: the share of neighbours' rows that come out of memory
and not out of a cache, the parts of the data sheet's floating-point operations and memory bandwidth
that are sustained, and the seconds that a kernel takes to start. Mirrors are those that the
published volumes of graph parallelism over eight GPUs imply; those of two ways follow from them as
if neighbours were spread evenly.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from helpers.threads.emulate import emulate_plan
from scipy.optimize import least_squares

from lightning_gpp.cluster import Cluster, Device, DeviceKind, Link
from lightning_gpp.common.text_table import text_table
from lightning_gpp.cost import roofline_costs
from lightning_gpp.cost.roofline import roofline
from lightning_gpp.planner import plan_request
from lightning_gpp.planner.ways import WaysAnswer, answer_ways
from lightning_gpp.schedule import GPIPE_REVERSED
from lightning_gpp.simulate import TransferKind, simulate_plan
from lightning_gpp.workloads import FullGraphWorkload, full_graph

GIB = 2**30
NUM_GPUS = 8
KIND = "NVIDIA RTX A5000"
SHEET_FLOPS, SHEET_BYTES_PER_S, MEMORY_BYTES = 27.8e12, 768e9, 24 * 10**9
LINK_BITS_PER_S = 58.5e9
"""The middle of what their layer communication measured, 56 to 61 Gb/s per GPU."""

WAYS = {"pipeline": 1, "hybrid": 2, "graph": 8}
NETWORKS = ("gcn", "sage", "gcn2", "resgcn")


class DataSet(NamedTuple):
    """A graph, the width of the networks on it, and mirrors over eight GPUs."""

    num_vertices: int
    num_edges: int
    num_features: int
    num_classes: int
    width: int
    mirrors: int


DATA_SETS = {
    "squirrel": DataSet(5_201, 401_907, 2089, 5, 1000, 18_570),
    "flickr": DataSet(89_250, 989_006, 500, 7, 100, 192_900),
    "reddit": DataSet(232_965, 114_848_857, 602, 41, 100, 608_200),
    "physics": DataSet(34_493, 530_417, 8415, 5, 100, 36_700),
}

ONE_GPU = (
    ("reddit", 8, 1, 0.466),
    ("flickr", 8, 1, 0.026),
    ("physics", 8, 1, 0.026),
    ("reddit", 8, 4, 0.474),
    ("flickr", 8, 4, 0.037),
    ("physics", 8, 4, 0.032),
    ("reddit", 32, 4, 1.922),
)
"""Data set, layers of GCN, chunks, seconds of an epoch."""

EPOCH_S = {
    "squirrel": ((0.081, 0.111, 0.190), (0.147, 0.191, 0.268), (0.108, 0.140, 0.198),
                 (0.187, 0.241, 0.269)),
    "flickr": ((0.064, 0.090, 0.156), (0.104, 0.126, 0.173), (0.095, 0.116, 0.166),
               (0.162, 0.187, 0.186)),
    "reddit": ((0.357, 0.392, 0.874), (0.533, 0.568, 1.082), (0.415, 0.449, 0.902),
               (0.509, 0.546, 0.934)),
    "physics": ((0.066, 0.077, 0.053), (0.132, 0.125, 0.069), (0.108, 0.105, 0.060),
                (0.141, 0.153, 0.080)),
}  # fmt: skip
"""Data set -> for every network: pipeline, hybrid, graph parallelism."""

VOLUME_GIB = {
    "squirrel": ((0.271, 1.376, 4.427), (0.271, 1.615, 6.101), (0.543, 1.507, 4.531),
                 (0.271, 1.630, 6.203)),
    "flickr": ((0.465, 1.995, 4.60), (0.465, 1.998, 4.62), (0.931, 2.195, 4.60),
               (0.465, 1.997, 4.62)),
    "reddit": ((1.215, 5.868, 14.50), (1.215, 5.870, 14.52), (2.430, 6.388, 14.50),
               (1.215, 5.870, 14.52)),
    "physics": ((0.180, 0.620, 0.876), (0.180, 0.629, 0.935), (0.360, 0.698, 0.877),
                (0.180, 0.623, 0.894)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one GPU does."""

    edge_reads: float
    compute_efficiency: float
    memory_efficiency: float
    launch_s: float

    @property
    def kind(self) -> DeviceKind:
        """The GPU as data."""
        return DeviceKind(
            KIND,
            {"float32": SHEET_FLOPS},
            SHEET_BYTES_PER_S,
            MEMORY_BYTES,
            self.compute_efficiency,
            self.memory_efficiency,
            self.launch_s,
            source="peaks: data sheet; the rest: calibrated on GNNPipe's epochs on one GPU",
        )

    def workload(self, data_set: str, layer: str, layers: int = 32) -> FullGraphWorkload:
        """A network on a data set."""
        data = DATA_SETS[data_set]
        return full_graph(
            data.num_vertices,
            data.num_edges,
            num_features=data.num_features,
            num_classes=data.num_classes,
            layer=layer,
            layers=layers,
            width=data.width,
            mirrors=data.mirrors,
            edge_reads=self.edge_reads,
        )

    def epoch_on_one_gpu_s(self, data_set: str, layers: int, chunks: int) -> float:
        """Seconds of an epoch of GCN."""
        workload = self.workload(data_set, "gcn", layers)
        size = workload.samples_per_device / chunks
        each = (roofline(work, size, self.kind) for work in dict(workload.costs).values())
        return chunks * sum(cost.forward_s + cost.backward_s for cost in each)


def calibrated() -> Calibration:
    """The numbers with which the epochs on one GPU come out best, in squared logarithms."""

    def misses(logarithms: np.ndarray) -> list[float]:
        found = Calibration(*np.exp(logarithms).tolist())
        return [
            math.log(found.epoch_on_one_gpu_s(name, layers, chunks) / seconds)
            for name, layers, chunks, seconds in ONE_GPU
        ]

    low, high = np.log([1e-3, 0.01, 0.01, 1e-7]), np.log([2, 1, 1, 1e-3])
    starts = ([reads, 0.5, 0.7, 1e-5] for reads in (0.1, 0.3, 0.8))
    fits = [least_squares(misses, np.log(start), bounds=(low, high)) for start in starts]
    return Calibration(*np.exp(min(fits, key=lambda fit: fit.cost).x).tolist())


def nodes(kind: DeviceKind, port_bits_per_s: float | None) -> Cluster:
    """Two nodes of four GPUs.

    Args:
        kind: of the GPUs.
        port_bits_per_s: of the one port of every node; None gives every GPU its own link.
    """
    link = Link(LINK_BITS_PER_S / 8, 10e-6)
    rack = Link(LINK_BITS_PER_S / 8, 20e-6)
    if port_bits_per_s is not None:
        rack = Link(port_bits_per_s / 8, 20e-6, is_shared=True)
    devices = (
        Device(f"node{i // 4}:gpu{i % 4}", KIND, MEMORY_BYTES, f"node{i // 4}")
        for i in range(NUM_GPUS)
    )
    return Cluster(tuple(devices), link, rack, device_kinds=(kind,))


@dataclass(frozen=True, slots=True)
class Cell:
    """What is predicted of one way to train one network on one data set."""

    epoch_s: float
    volume_gib: float
    memory_gb: float
    emulated_s: float | None


def predicted(workload: FullGraphWorkload, cluster: Cluster, ways: int, *, emulates: bool) -> Cell:
    """A simulated epoch: four chunks per GPU of all ways together; one in graph parallelism."""
    chunks = 1 if ways == NUM_GPUS else 4 * NUM_GPUS // ways
    model, works = workload.in_ways(ways, chunks)
    num_vertices = workload.samples_per_device
    sizes = sorted({num_vertices / chunks / 2, num_vertices / chunks, float(num_vertices)})
    request = plan_request(
        model.graph,
        cluster,
        minibatch_size=num_vertices,
        costs=roofline_costs(works, cluster.device_kinds, sizes),
        num_microbatches=chunks,
        schedule=GPIPE_REVERSED.name,
        max_replicas=1,
    )
    return _cell(answer_ways(request, model, "balanced"), emulates=emulates)


def _cell(found: WaysAnswer, *, emulates: bool) -> Cell:
    simulation = simulate_plan(found.plan, found.request)
    transfers = [task for task in simulation.tasks if task.kind is TransferKind.MESSAGE]
    return Cell(
        simulation.step_s,
        sum(task.size_bytes or 0 for task in transfers) / GIB,
        found.evaluation.peak_memory_bytes / 1e9,
        emulate_plan(found.plan, found.request)[0] if emulates else None,
    )


def main() -> None:
    """Prints the calibration and the cells."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--port", type=float, help="Gb/s of the one port of every node")
    parser.add_argument("--emulate", action="store_true", help="emulate every epoch, too")
    parser.add_argument("--data", nargs="+", default=list(DATA_SETS), choices=list(DATA_SETS))
    options = parser.parse_args()
    port, emulates = options.port, options.emulate
    calibration = calibrated()
    print(calibration)
    for name, layers, chunks, seconds in ONE_GPU:
        one_s = calibration.epoch_on_one_gpu_s(name, layers, chunks)
        print(f"  {name}, {layers} layers, {chunks} chunks: {one_s:.3f} s, published {seconds} s")
    cluster = nodes(calibration.kind, None if port is None else port * 1e9)
    rows, logarithms, num_same = [], [], 0
    for data_set in options.data:
        for index, layer in enumerate(NETWORKS):
            workload = calibration.workload(data_set, layer)
            cells = [
                predicted(workload, cluster, ways, emulates=emulates) for ways in WAYS.values()
            ]
            published = EPOCH_S[data_set][index]
            ours = [cell.epoch_s for cell in cells]
            is_same = ours.index(min(ours)) == published.index(min(published))
            num_same += is_same
            logarithms += [math.log(a / b) for a, b in zip(ours, published, strict=True)]
            rows += _rows(data_set, index, cells, is_same)
            print("\n".join("  ".join(row) for row in rows[-len(WAYS) :]), flush=True)
    header = ["cell", "", "epoch", "publ.", "ratio", "GiB", "publ.", "memory"]
    header += ["emulated", "off"] * emulates
    print(f"\n{text_table(header, rows, left={'cell', ''}, max_width=140)}\n")
    off = math.exp(sum(map(abs, logarithms)) / len(logarithms)) - 1
    mean = math.exp(sum(logarithms) / len(logarithms))
    print(
        f"same winner in {num_same} of {len(rows) // len(WAYS)} cells; mean ratio of the "
        f"{len(rows)} epochs {mean:.2f} "
        f"(geometric), {off:.0%} off on average"
    )


def _rows(data_set: str, index: int, cells: list[Cell], is_same: bool) -> list[list[str]]:
    rows = []
    for place, (name, cell) in enumerate(zip(WAYS, cells, strict=True)):
        published_s = EPOCH_S[data_set][index][place]
        title = f"{data_set} {NETWORKS[index]}{'' if is_same else ' *'}" if not place else ""
        rows.append(
            [
                title,
                name,
                f"{cell.epoch_s:.3f} s",
                f"{published_s:.3f} s",
                f"{cell.epoch_s / published_s:.2f}",
                f"{cell.volume_gib:.3f}",
                f"{VOLUME_GIB[data_set][index][place]:.3f}",
                f"{cell.memory_gb:.1f} GB",
            ]
        )
        if cell.emulated_s is not None:
            off = cell.emulated_s / cell.epoch_s - 1
            rows[-1] += [f"{cell.emulated_s:.4f} s", f"{off:+.2%}"]
    return rows


if __name__ == "__main__":
    main()
