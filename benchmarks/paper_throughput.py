"""The throughput experiment of GraphPipe (arXiv 2406.17145, figure 6), simulated and emulated.

MMT, DLRM and CANDLE-Uno on 4 to 32 emulated V100s of the ``summit`` cluster, planned by every
planner: samples per second as the simulator predicts them, and as the real executor, messages and
sums make them on emulated devices (one thread for each of up to 32, tensors that are shapes alone).
Beside them the published figures, read off the image to 1 or 2 %.

    python benchmarks/paper_throughput.py --folder out        # table, throughput.json, .png
    python benchmarks/paper_throughput.py --folder out --models mmt --devices 4 8 --no-emulation

Plans are kept in the folder and taken from there the next time; a search that does not end within
``--limit-s`` is said to have been cut off. Costs are estimated (roofline of the V100's data sheet),
mini-batches are those of the workloads, so published and simulated samples per second compare in
their ratios, not in their size.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from helpers.threads.emulate import EmulatedRun
from helpers.threads.shapes import emulate_plan

from lightning_gpp.cluster import cluster_preset
from lightning_gpp.jobs.figures import COLOURS, MARKERS, diagram, tidy
from lightning_gpp.jobs.problem.workload_problem import workload_of
from lightning_gpp.jobs.search.searched import search
from lightning_gpp.planner import PLANNERS, Plan, PlanRequest, evaluate_plan
from lightning_gpp.planner.plan.plan_json import load_plan, save_plan
from lightning_gpp.planner.plan_to_run import PlanQuestion
from lightning_gpp.simulate.plan_costs import simulate_plan
from lightning_gpp.text_table import text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEVICES = (4, 8, 16, 32)
MODELS = ("mmt", "dlrm", "candle_uno")
ORDER = ("graphpipe", "pipedream", "piper", "sequential", "balanced", "data_parallel")
PUBLISHED = {
    ("mmt", "graphpipe"): (129, 241, 359, 979),
    ("mmt", "pipedream"): (115, 188, 278, 592),
    ("mmt", "piper"): (115, 188, 288, 608),
    ("dlrm", "graphpipe"): (4920, 10100, 12210, 13890),
    ("dlrm", "pipedream"): (4090, 7220, 9380, 9430),
    ("candle_uno", "graphpipe"): (10540, 18560, 20740, 22280),
    ("candle_uno", "pipedream"): (11470, 15130, 16890, 17950),
}
"""Samples per second on 4, 8, 16 and 32 GPUs, digitised from figure 6."""


@dataclass(frozen=True, slots=True)
class Row:
    """A plan on some devices; None where there is none, or where it was not emulated.

    Attributes:
        model: name of the workload.
        devices: how many.
        planner: who made the plan.
        note: why there is no plan.
        minibatch_size: samples of a step.
        microbatches: smallest micro-batches of a step.
        stages: of the plan.
        planned_s: seconds of a step by the planners' cost model.
        predicted_s: simulated.
        emulated_s: emulated.
        slip: what did not fit its emulated time, as part of the step.
        time_scale: real seconds that an emulated second took.
        published: samples per second in the paper.
    """

    model: str
    devices: int
    planner: str
    note: str = ""
    minibatch_size: int = 0
    microbatches: int = 0
    stages: int = 0
    planned_s: float | None = None
    predicted_s: float | None = None
    emulated_s: float | None = None
    slip: float | None = None
    time_scale: float | None = None
    published: float | None = None

    @property
    def predicted(self) -> float | None:
        """Simulated samples per second."""
        return None if self.predicted_s is None else self.minibatch_size / self.predicted_s

    @property
    def emulated(self) -> float | None:
        """Emulated samples per second."""
        return None if self.emulated_s is None else self.minibatch_size / self.emulated_s


def arguments() -> argparse.Namespace:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="of plans and results")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--planners", nargs="+", default=ORDER, choices=sorted(PLANNERS))
    parser.add_argument("--limit-s", type=float, default=300.0, help="for one search")
    parser.add_argument("--no-emulation", action="store_true", help="simulate alone")
    parser.add_argument("--slip", type=float, default=0.01, help="part of a step; else again")
    parser.add_argument("--runs", type=int, default=3, help="most emulations of a plan")
    return parser.parse_args()


def main() -> None:
    """Plans, simulates and emulates all cases."""
    given = arguments()
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in measured_rows(given):
        rows.append(row)
        print(line(row), file=sys.stderr, flush=True)
    print(f"summit; {platform.machine()}, Python {platform.python_version()}\n")
    print(render(rows))
    found = [asdict(row) | {"predicted": row.predicted, "emulated": row.emulated} for row in rows]
    text = json.dumps(found, indent=2) + "\n"
    (given.folder / "throughput.json").write_text(text, encoding="utf-8")
    draw(rows, given.folder / "throughput.png")


def measured_rows(given: argparse.Namespace) -> Iterator[Row]:
    """One row after the other."""
    for model in given.models:
        workload = workload_of(model)
        for devices in given.devices:
            cluster = cluster_preset("summit", devices)
            size = workload.minibatch_size(devices)
            request = PlanRequest(workload.graph, cluster, workload.costs_for(cluster, size), size)
            for planner in given.planners:
                yield measured(model, planner, request, given)


def measured(model: str, planner: str, request: PlanRequest, given: argparse.Namespace) -> Row:
    """The row of a planner."""
    count = request.num_devices
    published = dict(zip(DEVICES, PUBLISHED.get((model, planner), ()))).get(count)
    stem = given.folder / f"{model}_{count}_{planner}"
    plan, note = plan_of(stem, planner, request, given.limit_s)
    if plan is None:
        return Row(model, count, planner, note, published=published)
    simulation = simulate_plan(plan, request)
    run = None if given.no_emulation else emulated(plan, request, given)
    return Row(
        model,
        count,
        planner,
        "",
        request.minibatch_size,
        simulation.program.num_microbatches,
        plan.num_stages,
        evaluate_plan(plan, request).step_s,
        simulation.step_s,
        None if run is None else run.step_s,
        None if run is None else slipped(run),
        None if run is None else run.time_scale,
        published,
    )


def plan_of(
    stem: Path, planner: str, request: PlanRequest, limit_s: float
) -> tuple[Plan | None, str]:
    """The plan from the folder, or from a search; where there is none, why.

    That a search was cut off is not kept, so that a longer limit tries again.
    """
    plan_file, reason_file = stem.with_suffix(".plan.json"), stem.with_suffix(".none.txt")
    if plan_file.is_file():
        return load_plan(plan_file), ""
    if reason_file.is_file():
        return None, reason_file.read_text(encoding="utf-8").strip()
    found = search(PlanQuestion(request, planner, request.schedule), limit_s)
    if found.evaluation is None:
        if found.search_s < limit_s:
            reason_file.write_text(f"{found.failure}\n", encoding="utf-8")
        return None, found.failure
    save_plan(found.evaluation.plan, plan_file)
    return found.evaluation.plan, ""


def emulated(plan: Plan, request: PlanRequest, given: argparse.Namespace) -> EmulatedRun:
    """The emulation that slipped least, of as many as it takes."""
    runs: list[EmulatedRun] = []
    while len(runs) < given.runs and (not runs or slipped(runs[-1]) > given.slip):
        runs.append(emulate_plan(plan, request, timeout_s=300.0))
    return min(runs, key=slipped)


def slipped(run: EmulatedRun) -> float:
    """Slip as part of the step."""
    return run.slip.total_s / run.step_s


HEADER = (
    *(
        "model",
        "devices",
        "planner",
        "stages",
        "m",
        "predicted",
        "emulated",
        "error",
        "slip",
        "scale",
    ),
    *("graphpipe gains", "published", "published gain", ""),
)


def render(rows: Sequence[Row]) -> str:
    """The table, in samples per second; gains are graphpipe's throughput over that of the row."""
    best = {(row.model, row.devices): row for row in rows if row.planner == "graphpipe"}
    table = []
    for row in rows:
        reference = best.get((row.model, row.devices), row)
        table.append(
            [
                *(row.model, str(row.devices), row.planner),
                *(str(row.stages or ""), str(row.microbatches or "")),
                *(number(row.predicted), number(row.emulated)),
                percent(row.predicted_s, row.emulated_s),
                "" if row.slip is None else f"{row.slip:.2%}",
                "" if row.time_scale is None else f"{row.time_scale:.3g}",
                ratio(reference.predicted, row.predicted),
                number(row.published),
                ratio(reference.published, row.published),
                row.note if len(row.note) <= 60 else f"{row.note[:57]}...",
            ]
        )
    return text_table(HEADER, table, left={"model", "planner", ""}, max_width=220)


def line(row: Row) -> str:
    """What is shown while the benchmark runs."""
    return (
        f"{row.model} {row.devices} {row.planner}: predicted {number(row.predicted)}, emulated "
        f"{number(row.emulated)} samples/s {row.note}"
    )


def number(value: float | None) -> str:
    """A throughput as text."""
    return "" if value is None else f"{value:,.0f}"


def percent(expected: float | None, found: float | None) -> str:
    """By how much something is longer."""
    return "" if expected is None or found is None else f"{found / expected - 1:+.2%}"


def ratio(above: float | None, below: float | None) -> str:
    """A quotient as text."""
    return "" if above is None or below is None else f"{above / below:.2f}"


def curve(axes: Axes, rows: Sequence[Row], quantity: str, **style: Any) -> None:
    """A quantity of some rows against the devices, where it is known."""
    points = [(row.devices, y) for row in rows if (y := getattr(row, quantity)) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), **style)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Throughput against devices, a panel per model.

    Lines are predicted, filled markers emulated, hollow ones published.
    """
    models = list(dict.fromkeys(row.model for row in rows))
    planners = list(dict.fromkeys(row.planner for row in rows))
    with diagram(path, 4.6 * len(models), 4.4) as figure:
        panels = figure.subplots(1, len(models), squeeze=False)[0]
        for axes, model in zip(panels, models, strict=True):
            for planner, colour, marker in zip(planners, COLOURS, MARKERS):
                own = [row for row in rows if (row.model, row.planner) == (model, planner)]
                curve(axes, own, "predicted", color=colour, linewidth=1.6, label=planner)
                style = {"color": colour, "marker": marker, "linestyle": "none"}
                curve(axes, own, "emulated", **style)
                curve(axes, own, "published", **style, markerfacecolor="none", markersize=9)
            tidy(axes, "emulated V100s", "samples per second")
            axes.set_title(model)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            ticks = sorted({row.devices for row in rows})
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        panels[0].legend(frameon=False)
        figure.suptitle(
            "Throughput: predicted (lines), emulated (filled markers), published (hollow markers)"
        )


if __name__ == "__main__":
    main()
