"""Planners side by side: predicted throughput and search time, one table for one run.

Every planner answers the same question (model, cluster, costs, mini-batch) and its plan is judged
by the same cost model (``lightning_gpp.planner.evaluate_plan``). The models are those of the
GraphPipe paper (arXiv 2406.17145) and, with ``--graphs``, published profiles. Searches run one
after the other, each in a process of its own, so that a time limit can end them and none finds
what another one has computed.

    python benchmarks/planners.py                                # the paper's models, 4 to 32 GPUs
    python benchmarks/planners.py --workloads mmt:num_branches=2 --devices 32
    python benchmarks/planners.py --graphs DIR --workloads       # every profile in a folder
    python benchmarks/planners.py --branches 2 4 8 16            # CANDLE-Uno, figure 7 of the paper
    python benchmarks/planners.py --max-replicas 1 --samples-per-device 4    # pipelines alone

``ratio`` is the throughput of ``graphpipe`` over that of the row, ``faster`` the search time of the
row over that of ``graphpipe``. ``fill`` is the part of the step that is not the mini-batch at the
pace of the slowest stage: filling and emptying the pipeline. Our planner ``pipedream`` has two
levels (hosts) and replicas in powers of two; ``pipedream flat`` is the time of its recurrences
alone as the paper has them, over one level and all numbers of replicas, for every micro-batch size
(``--flat``).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_gpp.cluster import cluster_preset
from lightning_gpp.jobs.comparison import ComparedPlan, compared
from lightning_gpp.jobs.problem.workload_problem import workload_of
from lightning_gpp.jobs.search.searched import search
from lightning_gpp.jobs.search.time_limit import OutOfTimeError, call_within
from lightning_gpp.planner import PLANNERS, PlanRequest
from lightning_gpp.planner.pipedream.recurrence import Level, pipedream_stages
from lightning_gpp.planner.plan_to_run import PlanQuestion
from lightning_gpp.planner.units.linear import linear_layers
from lightning_gpp.text_table import text_table
from lightning_gpp.units_of_measure import bytes_text, seconds_text

REFERENCE = "graphpipe"
FLAT = "pipedream flat"
PAPER = (
    *("mmt:num_branches=2", "mmt:num_branches=4", "dlrm", "candle_uno", "transformer"),
    "candle_uno:num_branches=16",
)
PUBLISHED = ("graphpipe", "sequential", "pipedream", "piper")


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a number of devices.

    Attributes:
        graph: name or file, with options behind a colon (``mmt:num_branches=2``).
        num_devices: devices of the cluster.
    """

    graph: str
    num_devices: int


def arguments() -> argparse.Namespace:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="*", default=PAPER, help="models with their options")
    parser.add_argument("--graphs", type=Path, help="also every .txt and .json below this folder")
    parser.add_argument("--branches", type=int, nargs="*", help="CANDLE-Uno with so many branches")
    parser.add_argument("--devices", type=int, nargs="+", default=(4, 8, 16, 32))
    parser.add_argument("--planners", nargs="+", default=PUBLISHED, choices=sorted(PLANNERS))
    parser.add_argument("--flat", action="store_true", help="PipeDream's recurrences on one level")
    parser.add_argument("--cluster", default="summit", help="a preset")
    parser.add_argument("--samples-per-device", type=int, help="instead of the workload's")
    parser.add_argument("--max-replicas", type=int, help="of a stage; 1: pipelines alone")
    parser.add_argument("--recompute", action="store_true", help="stages may recompute")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for one search")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    return parser.parse_args()


def main() -> None:
    """Runs the searches and prints a table for every model."""
    given = arguments()
    print(f"cluster {given.cluster}; {platform.machine()}, Python {platform.python_version()}\n")
    rows: list[dict[str, object]] = []
    for graph in graphs(given):
        table = []
        for num_devices in given.devices:
            case = Case(graph, num_devices)
            planners = [*given.planners, *([FLAT] if given.flat else [])]
            found = [timed(planner, case, given) for planner in planners]
            table += lines(case, found)
            rows += [asdict(case) | asdict(row) for row in found]
        print(f"{graph}\n{render(table)}\n", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def graphs(given: argparse.Namespace) -> Iterator[str]:
    """All models that are asked for."""
    if given.branches:
        yield from (f"candle_uno:num_branches={count}" for count in given.branches)
        return
    yield from given.workloads
    if given.graphs:
        for path in sorted(given.graphs.rglob("*")):
            if path.suffix in (".txt", ".json"):
                samples = ":samples=128" if path.suffix == ".json" else ""
                yield f"{path}{samples}"


def question(case: Case, given: argparse.Namespace) -> PlanRequest:
    """What every planner is asked."""
    graph, _, options = case.graph.partition(":")
    pairs = (item.split("=") for item in options.split(",") if item)
    workload = workload_of(graph, {name: int(value) for name, value in pairs})
    per_device = given.samples_per_device or workload.samples_per_device
    cluster = cluster_preset(given.cluster, case.num_devices)
    minibatch_size = per_device * case.num_devices
    return PlanRequest(
        workload.graph,
        cluster,
        workload.costs_for(cluster, minibatch_size),
        minibatch_size,
        may_recompute=given.recompute,
        max_replicas=given.max_replicas,
    )


def timed(planner: str, case: Case, given: argparse.Namespace) -> ComparedPlan:
    """A planner's answer, searched in a process that is ended at the time limit."""
    try:
        return call_within(given.limit_s, answer, planner, case, given)
    except (OutOfTimeError, RuntimeError) as error:
        return ComparedPlan(planner, error=str(error).strip().rpartition("\n")[2])


def answer(planner: str, case: Case, given: argparse.Namespace) -> ComparedPlan:
    """Searches, and makes the row."""
    request = question(case, given)
    if planner == FLAT:
        return ComparedPlan(FLAT, search_s=flat_search_s(request), error="search time only")
    return compared(search(PlanQuestion(request, planner, request.schedule)), {})


def flat_search_s(request: PlanRequest) -> float:
    """Seconds of PipeDream's recurrences over all devices and numbers of replicas."""
    level = Level(request.num_devices, request.cluster.slowest_link.bandwidth_bytes_per_s)
    gc.collect()
    start_s = time.perf_counter()
    for microbatch_size in request.microbatch_sizes:
        pipedream_stages(linear_layers(request, microbatch_size), [level])
    return time.perf_counter() - start_s


def lines(case: Case, found: Sequence[ComparedPlan]) -> list[list[str]]:
    """Cells of the rows of a case."""
    reference = next((row for row in found if row.planner == REFERENCE), None)
    return [[str(case.num_devices), *cells(row, reference)] for row in found]


HEADER = (
    *("devices", "planner", "step", "samples/s", "ratio", "bottleneck", "bound", "fill", "stages"),
    *("depth", "in flight", "memory", "search", "faster", ""),
)


def cells(row: ComparedPlan, reference: ComparedPlan | None) -> list[str]:
    """Cells of one row behind the number of devices."""
    search_text = "" if row.search_s is None else seconds_text(row.search_s)
    faster = ratio(row.search_s, reference.search_s if reference else None)
    if row.step_s is None:
        short = row.error if len(row.error) <= 60 else f"{row.error[:57]}..."
        return [row.planner, *[""] * 10, search_text, faster, short]
    assert row.bottleneck_seconds_per_sample is not None and row.in_flight is not None
    assert row.samples_per_s is not None
    assert row.in_flight_samples is not None and row.peak_memory_bytes is not None
    return [
        row.planner,
        seconds_text(row.step_s),
        f"{row.samples_per_s:.5g}",
        ratio(reference.samples_per_s if reference else None, row.samples_per_s),
        seconds_text(row.bottleneck_seconds_per_sample),
        f"{row.bottleneck_bound}"[:7],
        f"{1 - row.bottleneck_seconds_per_sample * row.samples_per_s:.0%}",
        f"{row.num_stages}",
        f"{row.depth}",
        f"{row.in_flight} x {row.in_flight_samples / row.in_flight:g}",
        bytes_text(row.peak_memory_bytes),
        search_text,
        faster,
        row.error,
    ]


def ratio(above: float | None, below: float | None) -> str:
    """A quotient as text; empty where a number is missing."""
    return f"{above / below:.3g}" if above is not None and below else ""


def render(table: Sequence[Sequence[str]]) -> str:
    """The table of one model."""
    return text_table(HEADER, table, left={"planner", "bound", ""}, max_width=200)


if __name__ == "__main__":
    main()
