"""The stage graph of a plan as a PNG: boxes in layers by depth, with bars for time and memory.

Branches stand side by side, replicas of a stage are stacked boxes, the bottleneck has a mark.
Colours are those of Okabe and Ito ("Color Universal Design", 2008), lightened where text stands on
them. matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_gpp.common.units_of_measure import (
    bytes_text,
    count_text,
    devices_text,
    number_text,
    percent_text,
    samples_text,
    seconds_text,
    stages_text,
)
from lightning_gpp.graph import StageEdge
from lightning_gpp.graph.operator_names import summarize_operators
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, StageEvaluation
from lightning_gpp.reports.plan.describe import load_text, shares_text, sized_stages
from lightning_gpp.reports.plan.layers import Box, Point, lay_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 120
TEXT_PT, SMALL_PT, TITLE_PT = 8.0, 7.0, 12.0
CHARACTER_IN = 0.602 * TEXT_PT / 72
"""Width of a character of DejaVu Sans Mono."""

LINE_IN, PADDING_IN, STACK_IN = 0.155, 0.06, 0.05
HEAD_IN, FOOT_IN, SIDE_IN = 0.62, 0.42, 0.25
MOST_STACKED = 3
TEXT_WIDTH, NARROW_WIDTH, CROWDED = 30, 20, 6
"""Characters in a box, and where more boxes than these are side by side."""

MOST_LINES = 2
"""Lines for the operators of a stage."""

TIME_COLOURS = {"compute": "#9CCBEA", "communication": "#8FD6BE"}
MEMORY_COLOUR, BAR_COLOUR = "#E6BBD4", "#F4F4F4"
BOTTLENECK_COLOUR, BOTTLENECK_BAR_COLOUR = "#D55E00", "#E19A62"
EDGE_COLOUR, ORDER_COLOUR = "#555555", "#AAAAAA"
LEGEND_WIDTH = 105
LEGEND = {
    "time per sample: compute": TIME_COLOURS["compute"],
    "communication": TIME_COLOURS["communication"],
    "the bottleneck": BOTTLENECK_COLOUR,
    "share of the device's memory": MEMORY_COLOUR,
}


@dataclass(frozen=True, slots=True)
class _Labels:
    """What is in the box of a stage.

    Attributes:
        lines: text; the first line is bold.
        bars: text, share and colour of the bars below.
        num_behind: boxes that stick out behind.
    """

    lines: Sequence[str]
    bars: Sequence[tuple[str, float, str]] = ()
    num_behind: int = 0
    is_bottleneck: bool = False

    @property
    def size_in(self) -> Point:
        """Width and height, the stack behind it included."""
        most = max(map(len, [*self.lines, *(text for text, _, _ in self.bars)]))
        stack_in = STACK_IN * self.num_behind
        height_in = LINE_IN * (len(self.lines) + len(self.bars)) + 3 * PADDING_IN
        return (most + 2) * CHARACTER_IN + stack_in, height_in + stack_in


def write_plan_picture(
    path: Path, evaluation: PlanEvaluation, request: PlanRequest, *, model: str = ""
) -> None:
    """Writes a PNG of a plan: boxes of stages with their time and memory, the bottleneck marked.

    Args:
        path: of the file.
        evaluation: of the plan.
        request: the question that it answers.
        model: its name.
    """
    plan_figure(evaluation, request, model=model).savefig(path, dpi=DPI)


def plan_figure(evaluation: PlanEvaluation, request: PlanRequest, *, model: str = "") -> Figure:
    """The picture as a matplotlib figure, which belongs to no window and not to pyplot."""
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    stages = sized_stages(evaluation.plan, request)
    width = TEXT_WIDTH
    if max(Counter(stages.depths.values()).values()) > CROWDED:
        width = NARROW_WIDTH
    contents = [_content(found, evaluation, request, width) for found in evaluation.stages]
    if stages.num_stages > len(contents):
        contents.append(_Labels([f"loss · device {evaluation.plan.device_of_loss}"]))
    layout = lay_out(stages, [content.size_in for content in contents])
    title, subtitle = _title(evaluation, request, model), _subtitle(evaluation)
    texts_in = CHARACTER_IN * max(len(title) * TITLE_PT / TEXT_PT, len(subtitle), LEGEND_WIDTH)
    width_in = max(layout.width_in, texts_in) + 2 * SIDE_IN
    height_in = layout.height_in + HEAD_IN + FOOT_IN
    with matplotlib.style.context("default"):
        figure = Figure((width_in, height_in), facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        left_in = (width_in - layout.width_in) / 2
        axes.set_xlim(-left_in, width_in - left_in)
        axes.set_ylim(height_in - HEAD_IN, -HEAD_IN)
        figure.text(SIDE_IN / width_in, 1 - 0.30 / height_in, title, size=TITLE_PT, weight="bold")
        y = 1 - 0.50 / height_in
        figure.text(SIDE_IN / width_in, y, subtitle, size=TEXT_PT, color="#444444")
        for edge, way in layout.ways:
            _draw_edge(axes, edge, way)
        for stage, content in enumerate(contents):
            _draw_box(axes, layout.boxes[stage], content)
        figure.legend(
            handles=[Patch(facecolor=colour, label=text) for text, colour in LEGEND.items()],
            loc="lower left",
            bbox_to_anchor=(SIDE_IN / width_in, 0.1 / height_in),
            ncols=len(LEGEND),
            frameon=False,
            prop={"family": "monospace", "size": SMALL_PT},
            borderpad=0,
            borderaxespad=0,
        )
    return figure


def _title(evaluation: PlanEvaluation, request: PlanRequest, model: str) -> str:
    plan = evaluation.plan
    return (
        f"{model or 'Model'} on {count_text(len(evaluation.devices), 'device')} "
        f"({', '.join(request.cluster.kinds)}): plan {plan.planner!r}, "
        f"{count_text(plan.num_stages, 'stage')}, depth {evaluation.depth}"
    )


def _subtitle(evaluation: PlanEvaluation) -> str:
    pace = [found.stage.id for found in evaluation.bottlenecks]
    samples = count_text(evaluation.minibatch_size // evaluation.num_minibatches, "sample")
    return (
        f"predicted step {seconds_text(evaluation.minibatch_s)} for {samples}, "
        f"{number_text(evaluation.throughput)} samples/s; "
        f"bottleneck: {stages_text(pace)} ({evaluation.pacemaker.bound})"
    )


def _content(
    found: StageEvaluation, evaluation: PlanEvaluation, request: PlanRequest, width: int
) -> _Labels:
    stage, is_bottleneck = found.stage, found in evaluation.bottlenecks
    operators = textwrap.wrap(summarize_operators(request.graph, stage.operators), width)
    if len(operators) > MOST_LINES:
        operators[MOST_LINES - 1 :] = [f"{operators[MOST_LINES - 1][: width - 1]}…"]
    lines = [f"stage {stage.id} · {devices_text(stage.devices)}", *operators]
    batch = f"micro-batch {samples_text(found.microbatch_size)}, {found.in_flight} in flight"
    lines += textwrap.wrap(batch, width)
    if stage.num_replicas > 1:
        shares = f": {shares_text(found)} samples" if len(set(stage.shares)) > 1 else ""
        lines += textwrap.wrap(f"{stage.num_replicas} replicas{shares}", width)
    if stage.recompute:
        lines.append("recompute")
    limits = [request.cluster.devices[device].memory_bytes for device in stage.devices]
    limit = min((limit for limit in limits if limit is not None), default=None)
    used = found.memory.total_bytes
    memory = bytes_text(used) + (f" · {percent_text(used, limit)}" if limit else "")
    time = f"{seconds_text(found.seconds_per_sample)} · {load_text(found, evaluation)}"
    load = found.seconds_per_sample / evaluation.bottleneck.seconds_per_sample
    colour = BOTTLENECK_BAR_COLOUR if is_bottleneck else TIME_COLOURS[found.bound]
    bars = (time, load, colour), (memory, used / limit if limit else 0.0, MEMORY_COLOUR)
    behind = min(stage.num_replicas, MOST_STACKED) - 1
    return _Labels(lines, bars, behind, is_bottleneck)


def _draw_box(axes: Axes, box: Box, content: _Labels) -> None:
    from matplotlib.patches import Rectangle

    stack_in = STACK_IN * content.num_behind
    x, y, width, height = box[0], box[1] + stack_in, box[2] - stack_in, box[3] - stack_in
    for number in range(content.num_behind, -1, -1):
        offset = STACK_IN * number
        frame = Rectangle(
            (x + offset, y - offset),
            width,
            height,
            facecolor="#EEEEEE" if number else "white",
            edgecolor=BOTTLENECK_COLOUR if content.is_bottleneck else "black",
            linewidth=2.2 if content.is_bottleneck else 0.9,
            gid="box",
        )
        axes.add_patch(frame)
    y += PADDING_IN + LINE_IN / 2
    look: dict[str, Any] = {
        "size": TEXT_PT,
        "family": "monospace",
        "ha": "center",
        "va": "center_baseline",
    }
    for number, text in enumerate(content.lines):
        axes.text(x + width / 2, y, text, weight="normal" if number else "bold", **look)
        y += LINE_IN
    y += PADDING_IN / 2
    for text, share, colour in content.bars:
        for part, face in ((1.0, BAR_COLOUR), (min(1.0, share), colour)):
            corner, long = (x + PADDING_IN, y - LINE_IN / 2), (width - 2 * PADDING_IN) * part
            axes.add_patch(Rectangle(corner, long, LINE_IN, facecolor=face))
        axes.text(x + width / 2, y, text, **look)
        y += LINE_IN + PADDING_IN / 2


def _draw_edge(axes: Axes, edge: StageEdge, points: Sequence[Point]) -> None:
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Line

    corners, codes = [points[0]], [Line.MOVETO]
    for start, end in pairwise(points):
        middle = (start[1] + end[1]) / 2
        corners += [(start[0], middle), (end[0], middle), end]
        codes += [Line.CURVE4] * 3
    is_order = not edge.values
    arrow = FancyArrowPatch(
        path=Line(corners, codes),
        arrowstyle="-|>,head_length=3,head_width=1.5",
        color=ORDER_COLOUR if is_order else EDGE_COLOUR,
        linewidth=0.9,
        linestyle=":" if is_order or not edge.has_backward else "-",
        gid="edge",
    )
    axes.add_patch(arrow)
    if edge.values:
        x, y = ((a + b) / 2 for a, b in zip(*points[:2]))
        look: dict[str, Any] = {"size": SMALL_PT, "family": "monospace", "color": EDGE_COLOUR}
        around = {"facecolor": "white", "linewidth": 0, "pad": 0.5}
        text = bytes_text(edge.size_bytes)
        axes.text(x, y, text, va="center", ha="center", bbox=around, **look)
