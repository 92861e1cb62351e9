"""The throughput experiment of GraphPipe (arXiv 2406.17145, figure 6), simulated and emulated.

MMT, DLRM and CANDLE-Uno on 4 to 32 emulated V100s of the ``summit`` cluster, planned by every
planner: samples per second as the simulator predicts them, and as the real executor, messages and
sums make them on emulated devices (one thread for each of up to 32, tensors that are shapes alone).
Beside them the published figures, read off the image to 1 or 2 %.

    python benchmarks/paper_throughput.py --folder out        # table, throughput.png
    python benchmarks/paper_throughput.py --folder out --models mmt --devices 4 8

A search that does not end within ``--limit-s`` is said to have been cut off. Costs are estimated
(roofline of the V100's data sheet), mini-batches are those of the workloads, so published and
simulated samples per second compare in their ratios, not in their size.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.threads.emulate import emulate_plan
from matplotlib.figure import Figure
from measuring import parser, quiet
from planners import question, workload

from lightning_gpp.common.text_table import text_table
from lightning_gpp.jobs.search import OutOfTimeError, call_within
from lightning_gpp.planner import PLANNERS, Plan, PlanRequest, answer
from lightning_gpp.simulate.plan_costs import simulate_plan

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
MARKERS = ("o", "s", "^", "D", "v", "P")
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

Row = dict[str, Any]
"""``model``, ``devices``, ``planner``; where they are known ``note`` (why there is no plan),
``stages``, ``published``, ``predicted``, ``emulated`` (samples per second), ``error``, ``slip``."""


def rows(given: argparse.Namespace) -> Iterator[Row]:
    """One row after the other."""
    for model in given.models:
        for devices in given.devices:
            request = question(workload(model), devices, 0, "summit")
            for planner in given.planners:
                published = dict(zip(DEVICES, PUBLISHED.get((model, planner), ()))).get(devices)
                row = {"model": model, "devices": devices, "planner": planner}
                yield row | {"published": published} | measured(planner, request, given.limit_s)


def measured(planner: str, request: PlanRequest, limit_s: float) -> Row:
    """What a planner's plan does."""
    try:
        plan, note = call_within(limit_s, searched, planner, request)
    except OutOfTimeError as error:
        plan, note = None, str(error)
    if plan is None:
        return {"note": note}
    predicted_s = simulate_plan(plan, request).step_s
    emulated_s, slip_s = emulate_plan(plan, request)
    return {
        "stages": plan.num_stages,
        "predicted": request.minibatch_size / predicted_s,
        "emulated": request.minibatch_size / emulated_s,
        "error": emulated_s / predicted_s - 1,
        "slip": slip_s / emulated_s,
    }


def searched(planner: str, request: PlanRequest) -> tuple[Plan | None, str]:
    """A planner's plan, or why there is none; called in a process of its own."""
    try:
        return answer(request, planner), ""
    except ValueError as error:
        return None, str(error)


def render(table: Sequence[Row]) -> str:
    """The table, in samples per second; gains are graphpipe's throughput over that of the row."""
    best = {(row["model"], row["devices"]): row for row in table if row["planner"] == ORDER[0]}
    lines = []
    for row in table:
        reference = best.get((row["model"], row["devices"]), row)
        lines.append(
            [
                *(str(row.get(key, "")) for key in ("model", "devices", "planner", "stages")),
                *(text(row, key, ",.0f") for key in ("predicted", "emulated")),
                *(text(row, key, "+.2%") for key in ("error", "slip")),
                gain(reference, row, "predicted"),
                text(row, "published", ",.0f"),
                gain(reference, row, "published"),
                row.get("note", "")[:60],
            ]
        )
    header = ("model", "devices", "planner", "stages", "predicted", "emulated", "error", "slip")
    header = (*header, "graphpipe gains", "published", "published gain", "")
    return text_table(header, lines, left={"model", "planner", ""}, max_width=220)


def text(row: Row, key: str, form: str) -> str:
    """A number as text, if it is known."""
    return "" if row.get(key) is None else format(row[key], form)


def gain(reference: Row, row: Row, key: str) -> str:
    """A quotient as text."""
    above, below = reference.get(key), row.get(key)
    return "" if above is None or below is None else f"{above / below:.2f}"


def draw(table: Sequence[Row], path: Path) -> None:
    """Throughput against devices, a panel per model.

    Lines are predicted, filled markers emulated, hollow ones published.
    """
    models = list(dict.fromkeys(row["model"] for row in table))
    planners = list(dict.fromkeys(row["planner"] for row in table))
    figure = Figure((4.6 * len(models), 4.4), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        for planner, colour, marker in zip(planners, COLOURS, MARKERS):
            own = [row for row in table if (row["model"], row["planner"]) == (model, planner)]
            points = {"color": colour, "marker": marker, "linestyle": "none"}
            for key, style in (
                ("predicted", {"color": colour, "linewidth": 1.6, "label": planner}),
                ("emulated", points),
                ("published", points | {"markerfacecolor": "none", "markersize": 9}),
            ):
                known = [row for row in own if row.get(key) is not None]
                axes.plot([r["devices"] for r in known], [r[key] for r in known], **style)
        ticks = sorted({row["devices"] for row in table})
        axes.set(title=model, xlabel="emulated V100s", ylabel="samples per second")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panels[0].legend(frameon=False)
    figure.suptitle(
        "Throughput: predicted (lines), emulated (filled markers), published (hollow markers)"
    )
    figure.savefig(path, dpi=130)


def main() -> None:
    """Plans, simulates and emulates all cases."""
    arguments = parser(__doc__)
    arguments.add_argument("--folder", type=Path, required=True, help="of the picture")
    arguments.add_argument("--models", nargs="+", default=MODELS)
    arguments.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    arguments.add_argument("--planners", nargs="+", default=ORDER, choices=sorted(PLANNERS))
    arguments.add_argument("--limit-s", type=float, default=300.0, help="for one search")
    given = arguments.parse_args()
    quiet()
    given.folder.mkdir(parents=True, exist_ok=True)
    table = []
    for row in rows(given):
        table.append(row)
        print(row, file=sys.stderr, flush=True)
    print(f"summit; {platform.machine()}, Python {platform.python_version()}\n\n{render(table)}")
    draw(table, given.folder / "throughput.png")


if __name__ == "__main__":
    main()
