"""All planners on the graphs that PipeDream and Piper published, as one table of one run.

Every planner answers the same question and is judged by the same cost model. Searches run one after
the other, each in a process of its own that a time limit ends. A planner that is out of time with a
graph is not asked about it on more devices.

    python benchmarks/published_graphs.py GRAPHS     # writes published_graphs.txt and .json
    python benchmarks/published_graphs.py GRAPHS --devices 4 8 --samples 0 --limit-s 20

``GRAPHS`` is a folder with ``pipedream/*.txt`` and ``piper/*.json``.
"""

from __future__ import annotations

import argparse
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
from lightning_gpp.planner.make_plan import plan_request
from lightning_gpp.planner.plan_to_run import PlanQuestion
from lightning_gpp.text_table import text_table, wrapped
from lightning_gpp.units_of_measure import count_text

REFERENCE = "graphpipe"
OTHERS = ("sequential", "data_parallel", "pipedream", "piper", "balanced")
PIPER_IMAGES = {"samples": 128}
"""One of the "samples" of Piper's ``resnet.json`` stands for so many images."""

AS_FAST = 0.9995
"""A ratio below this one gets a star."""

LIMIT, MEMORY = "limit", "memory"


@dataclass(frozen=True, slots=True)
class Case:
    """A question.

    Attributes:
        graph: file of the graph.
        num_devices: of the cluster.
        samples_per_device: samples of the mini-batch for every device; 0: the workload's own.
    """

    graph: Path
    num_devices: int
    samples_per_device: int

    @property
    def name(self) -> str:
        """The graph, for people."""
        return f"{self.graph.stem}{' (Piper)' if self.graph.suffix == '.json' else ''}"


@dataclass(frozen=True, slots=True)
class Answered:
    """A case with the answers of all planners.

    Attributes:
        case: the question; its samples are known.
        plans: planner -> its answer.
    """

    case: Case
    plans: dict[str, ComparedPlan]


def arguments() -> argparse.Namespace:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("graphs", type=Path, help="folder with pipedream/*.txt and piper/*.json")
    parser.add_argument("--devices", type=int, nargs="+", default=(4, 8, 16, 32))
    parser.add_argument(
        "--samples", type=int, nargs="+", default=(0, 16, 4), help="per device; 0: the workload's"
    )
    parser.add_argument("--cluster", default="summit", help="a preset")
    parser.add_argument("--limit-s", type=float, default=90.0, help="for one search")
    here = Path(__file__).with_suffix("")
    parser.add_argument("--out", type=Path, default=here, help="files, without their suffix")
    return parser.parse_args()


def main() -> None:
    """Asks all planners, and writes the table and all rows."""
    given = arguments()
    start_s = time.perf_counter()
    found = []
    for answered in answers(given):
        found.append(answered)
        print(" ".join(cells(answered, given.limit_s)), flush=True)
    text = report(found, given, time.perf_counter() - start_s)
    given.out.with_suffix(".txt").write_text(text, encoding="utf-8")
    rows = [plan_row(answered.case, plan) for answered in found for plan in answered.plans.values()]
    given.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"\n{text}")


def answers(given: argparse.Namespace) -> Iterator[Answered]:
    """The answers to all questions, one after the other."""
    paths = [*sorted(given.graphs.glob("pipedream/*.txt")), *given.graphs.glob("piper/*.json")]
    if not paths:
        raise SystemExit(f"no pipedream/*.txt or piper/*.json below {given.graphs}")
    for samples in given.samples:
        for path in paths:
            too_slow: set[str] = set()
            for num_devices in sorted(given.devices):
                case = Case(path, num_devices, samples or samples_per_device(path))
                yield Answered(case, plans(case, given, too_slow))


def samples_per_device(path: Path) -> int:
    """The workload's own."""
    return workload_of(str(path), options_of(path)).samples_per_device


def options_of(path: Path) -> dict[str, int]:
    """Options of the reader."""
    return PIPER_IMAGES if path.suffix == ".json" else {}


def plans(case: Case, given: argparse.Namespace, too_slow: set[str]) -> dict[str, ComparedPlan]:
    """What every planner answers; adds those that are out of time to ``too_slow``."""
    found = {}
    for planner in (REFERENCE, *OTHERS):
        if planner in too_slow:
            found[planner] = ComparedPlan(planner, error=f"> {given.limit_s:g} s")
            continue
        try:
            found[planner] = call_within(given.limit_s, answer, planner, case, given.cluster)
        except OutOfTimeError:
            found[planner] = ComparedPlan(planner, error=f"> {given.limit_s:g} s")
            too_slow.add(planner)
    return found


def answer(planner: str, case: Case, cluster_name: str) -> ComparedPlan:
    """A planner's answer, in a process of its own."""
    workload = workload_of(str(case.graph), options_of(case.graph))
    cluster = cluster_preset(cluster_name, case.num_devices)
    minibatch_size = case.samples_per_device * case.num_devices
    request = plan_request(
        workload.graph,
        cluster,
        minibatch_size=minibatch_size,
        costs=workload.costs_for(cluster, minibatch_size),
    )
    return compared(search(PlanQuestion(request, planner, request.schedule)), {})


def cells(answered: Answered, limit_s: float) -> list[str]:
    """One row of the table."""
    case, plans_of = answered.case, answered.plans
    best = plans_of[REFERENCE]
    rate = "" if best.samples_per_s is None else f"{best.samples_per_s:.5g}"
    ratios = [ratio_text(best, plans_of[name], limit_s) for name in OTHERS]
    return [case.name, str(case.num_devices), str(case.samples_per_device), rate, *ratios]


def ratio_text(best: ComparedPlan, other: ComparedPlan, limit_s: float) -> str:
    """Throughput of ``graphpipe`` over that of another planner, or why there is none."""
    if other.samples_per_s is None:
        is_time = other.error.startswith(">")
        return f"> {limit_s:g} s" if is_time else LIMIT if "downsets" in other.error else "none"
    if other.error:
        return MEMORY
    if best.samples_per_s is None:
        return "0*"
    ratio = best.samples_per_s / other.samples_per_s
    return f"{ratio:.3f}{'*' if ratio < AS_FAST else ''}"


def report(found: Sequence[Answered], given: argparse.Namespace, wall_s: float) -> str:
    """The table with what it is of."""
    header = ["graph", "devices", "samples\nper device", "graphpipe\nsamples/s", *OTHERS]
    table = text_table(header, [cells(one, given.limit_s) for one in found], left=["graph"])
    stars = table.count("*")
    sentences = (
        f"Published graphs (profiles of PipeDream, resnet.json of Piper) on the preset "
        f"{given.cluster}: predicted samples per second of graphpipe, and its throughput over that "
        "of the others; below 1, marked with a star: another planner is faster.",
        f"limit: Piper's number of downsets; > {given.limit_s:g} s: the search was ended, here or "
        "with fewer devices; memory: the plan does not fit; none: no plan.",
        f"{count_text(len(found), 'question')}, {count_text(stars, 'star')}; {wall_s:.0f} s on "
        f"{platform.machine()}, Python {platform.python_version()}. Made by "
        "benchmarks/published_graphs.py.",
    )
    return f"{wrapped(sentences, 100)}\n\n{table}\n"


def plan_row(case: Case, plan: ComparedPlan) -> dict[str, object]:
    """A planner's answer for the JSON file."""
    found = asdict(plan)
    del found["settings"]
    return {
        "graph": case.graph.name,
        "num_devices": case.num_devices,
        "samples_per_device": case.samples_per_device,
    } | found


if __name__ == "__main__":
    main()
