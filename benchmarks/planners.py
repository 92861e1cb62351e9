"""Planners side by side: predicted throughput and search time, one table of one run.

Every planner answers the same question (model, cluster, costs, mini-batch), and one judge says what
its plan takes. Searches run one after the other, each in a process of its own that a time limit
ends; a planner that is out of time with a model is not asked about it on more devices.

    python benchmarks/planners.py                                # the paper's models, 4 to 32 GPUs
    python benchmarks/planners.py --models mmt:num_branches=2 --devices 32
    python benchmarks/planners.py --models FOLDER/pipedream/*.txt FOLDER/piper/*.json \
        --samples 0 16 4 --limit-s 90    # published graphs; 0: the samples of the model itself
    python benchmarks/planners.py --models foreign --planners graphpipe_exclusive sequential
    python benchmarks/planners.py --models chain:1000 towers:3000 --planners   # many operators
    python benchmarks/planners.py --schedule gpipe --inputs-ahead --planners   # sent a step early

Columns: samples per second of ``graphpipe``; its step over the work divided by all devices, which
no plan beats; processor seconds of its search; its throughput over that of the others. A star: the
other one is faster. ``limit``: Piper's number of downsets; ``memory``: the plan does not fit;
``none``: there is none.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_gpp.cluster import cluster_preset
from lightning_gpp.common.text_table import text_table
from lightning_gpp.common.units_of_measure import seconds_text
from lightning_gpp.jobs.problem.problem_of import load_workload
from lightning_gpp.jobs.search import OutOfTimeError, call_within
from lightning_gpp.planner import PLANNERS, PlanRequest, answer, evaluate_plan, plan_request
from lightning_gpp.workloads import Workload

REFERENCE = "graphpipe"
OTHERS = ("sequential", "data_parallel", "pipedream", "piper", "balanced")
PAPER = (
    *("mmt:num_branches=2", "mmt:num_branches=4", "dlrm", "candle_uno", "transformer"),
    "candle_uno:num_branches=16",
)
FOREIGN = ("inception", "residual", "unet", "translator", "two_towers", "experts", "exits")
OWN = (*FOREIGN, "chain", "towers")
IMAGES, SAMPLES = 128, {"gnmt": 32, "squeezenet": 256}
"""Of the mini-batches that PipeDream profiled; and in one of Piper's samples, in milliseconds."""

AS_FAST = 0.9995
"""A ratio below this one gets a star."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a planner found.

    Attributes:
        step_s: of its plan; None where there is none that fits.
        num_stages: of the plan.
        search_s: processor seconds of the search.
        failure: why there is none, in a word.
    """

    step_s: float | None = None
    num_stages: int = 0
    search_s: float = 0.0
    failure: str = ""


def workload(name: str) -> Workload:
    """A model by name (``mmt:num_branches=2``, ``unet``, ``chain:1000``) or in a file."""
    name, _, options = name.partition(":")
    if name in OWN:
        from foreign_models import foreign_workload, random_workload  # with torch, slowly

        return random_workload(name, int(options)) if options else foreign_workload(name)
    pairs = (item.split("=") for item in options.split(",") if item)
    own: dict[str, float] = {"time_unit_s": 1e-3} if name.endswith(".json") else {}
    if Path(name).is_file():
        own["samples"] = next((SAMPLES[kind] for kind in SAMPLES if kind in name), IMAGES)
    return load_workload(name, own | {key: int(value) for key, value in pairs})


def question(
    model: Workload, num_devices: int, samples: int, cluster_name: str, **options: Any
) -> PlanRequest:
    """What every planner is asked; 0 samples per device are the model's own."""
    cluster = cluster_preset(cluster_name, num_devices)
    size = (samples or model.samples_per_device) * num_devices
    costs = model.costs_for(cluster, size)
    return plan_request(model.graph, cluster, minibatch_size=size, costs=costs, **options)


def found(planner: str, request: PlanRequest) -> Answer:
    """Searches; called in a process of its own."""
    start_s = time.process_time()
    try:
        plan = answer(request, planner)
    except ValueError as error:
        failure = "limit" if "downsets" in str(error) else "none"
        return Answer(search_s=time.process_time() - start_s, failure=failure)
    search_s = time.process_time() - start_s
    judged = evaluate_plan(plan, request)
    if not judged.is_feasible:
        return Answer(None, plan.num_stages, search_s, "memory")
    return Answer(judged.step_s, plan.num_stages, search_s)


def answers(request: PlanRequest, given: argparse.Namespace, slow: set[str]) -> dict[str, Answer]:
    """Planner -> its answer; those that are out of time are added to ``slow``."""
    all_found = {}
    for planner in (REFERENCE, *given.planners):
        late = Answer(failure=f"> {given.limit_s:g} s")
        if planner not in slow:
            try:
                all_found[planner] = call_within(given.limit_s, found, planner, request)
                continue
            except OutOfTimeError:
                slow.add(planner)
        all_found[planner] = late
    return all_found


def rows(given: argparse.Namespace) -> Iterator[list[str]]:
    """A line of the table for every question."""
    names = [each for name in given.models for each in (FOREIGN if name == "foreign" else [name])]
    for name in names:
        model = workload(name)
        for samples in given.samples:
            slow: set[str] = set()
            for num_devices in sorted(given.devices):
                options = {"schedule": given.schedule, "inputs_ahead": given.inputs_ahead}
                request = question(model, num_devices, samples, given.cluster, **options)
                plans = answers(request, given, slow)
                short = Path(name).name if "/" in name else name
                asked = short, len(model.graph), num_devices, request.minibatch_size // num_devices
                yield cells(asked, request, plans)


def cells(asked: Sequence[object], request: PlanRequest, plans: dict[str, Answer]) -> list[str]:
    """One row of the table."""
    best = plans[REFERENCE]
    rate = bound = best.failure
    if best.step_s is not None:
        rate = f"{request.minibatch_size / best.step_s:.5g}"
        bound = f"{best.step_s / least_s(request):.3f}"
    ratios = [ratio(best, plan) for name, plan in plans.items() if name != REFERENCE]
    stages = str(best.num_stages)
    return [*map(str, asked), rate, bound, stages, seconds_text(best.search_s), *ratios]


def ratio(best: Answer, other: Answer) -> str:
    """Throughput of ``graphpipe`` over that of another planner, or why there is none."""
    if other.step_s is None:
        return other.failure
    found = 0.0 if best.step_s is None else other.step_s / best.step_s
    return f"{found:.3f}{'*' if found < AS_FAST else ''}"


def least_s(request: PlanRequest) -> float:
    """Work of a step divided over all devices, at its largest micro-batch."""
    profile = max(request.costs.profiles, key=lambda each: each.microbatch_size)
    work_s = sum(each.forward_s + each.backward_s for each in profile.operators.values())
    return work_s / profile.microbatch_size * request.minibatch_size / request.num_devices


def main() -> None:
    """Asks all planners, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=PAPER, help="names or files; or foreign")
    parser.add_argument("--devices", type=int, nargs="+", default=(4, 8, 16, 32))
    parser.add_argument("--samples", type=int, nargs="+", default=(0,), help="for every device")
    parser.add_argument("--planners", nargs="*", default=OTHERS, choices=sorted(PLANNERS))
    parser.add_argument("--cluster", default="summit", help="a preset")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--inputs-ahead", action="store_true", help="with --schedule gpipe")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for one search")
    given = parser.parse_args()
    start_s, table = time.perf_counter(), []
    for line in rows(given):
        table.append(line)
        print(" ".join(line), flush=True)
    header = ["model", "operators", "devices", "samples\nper device", "samples/s", "of bound"]
    header += ["stages", "search", *given.planners]
    print(f"\n{text_table(header, table, left={'model'}, max_width=200)}\n")
    print(
        f"{given.cluster}; {len(table)} questions in {time.perf_counter() - start_s:.0f} s on "
        f"{platform.machine()}, Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main()
