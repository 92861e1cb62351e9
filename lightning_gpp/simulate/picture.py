"""A timeline as a picture: one row per rank, time to the right.

Every stage of a rank has a lane of its own in the rank's row; what is not of a stage (messages,
waiting, the optimizer) takes the whole row. Colours are those of Okabe and Ito ("Color Universal
Design", 2008), which people with any colour vision can tell apart.

matplotlib is imported when a picture is made. Figures are made without pyplot and in matplotlib's
default style, so the user's figures, backend and style stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_gpp.simulate.shares import shares
from lightning_gpp.simulate.timeline import Span, SpanKind, Timeline, TimelineStage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Paint:
    """How some kinds of spans are drawn, and what the legend says."""

    kinds: tuple[SpanKind, ...]
    colour: str
    legend: str
    text: str = "black"

    @property
    def in_lane(self) -> bool:
        """Whether it belongs to a stage's lane; else it takes the whole row."""
        return all(kind.category.is_compute for kind in self.kinds) and not self.is_step

    @property
    def is_step(self) -> bool:
        """Whether it is the user's step."""
        return SpanKind.LOSS in self.kinds


PAINTS = (
    Paint((SpanKind.FORWARD,), "#0072B2", "forward", text="white"),
    Paint((SpanKind.BACKWARD,), "#E69F00", "backward"),
    Paint((SpanKind.FEED, SpanKind.LOSS), "#56B4E9", "your step around the forward"),
    Paint(
        (SpanKind.SEND, SpanKind.RECEIVE, SpanKind.REDUCE, SpanKind.FLUSH),
        "#009E73",
        "communication",
    ),
    Paint((SpanKind.WAIT,), "#C8C8C8", "wait"),
    Paint(
        (
            *(SpanKind.DATA, SpanKind.PREPARE, SpanKind.FINISH),
            *(SpanKind.OPTIMIZER, SpanKind.VALIDATION),
        ),
        "#CC79A7",
        "data, optimizer",
    ),
)
"""Every kind of span is in one of them."""

IDLE_COLOUR = "#F4F4F4"

DPI = 150
LANE_IN = 0.40
ROW_GAP_IN = 0.14
LEFT_IN, RIGHT_IN, TOP_IN = 1.45, 0.95, 0.80
AXIS_IN, LEGEND_IN, STAGE_LINE_IN = 0.55, 0.35, 0.21
NUMBER_PT, TEXT_PT, TITLE_PT = 8.0, 10.0, 13.0
DIGIT_WIDTH = 0.64
"""Width of a digit in units of the font size."""


def write_picture(timeline: Timeline, path: Path) -> None:
    """Writes a PNG of a timeline."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = timeline_figure(timeline)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=DPI)


def timeline_figure(timeline: Timeline) -> Figure:
    """The picture as a matplotlib figure, which belongs to no window and not to pyplot."""
    import matplotlib.style
    from matplotlib.figure import Figure

    rows = _Rows.of(timeline)
    lines = _stage_lines(timeline.stages, columns := 1 if len(timeline.stages) <= 4 else 2)
    width_in = _width_in(timeline)
    below_in = AXIS_IN + LEGEND_IN + STAGE_LINE_IN * len(lines) + 0.1
    height_in = TOP_IN + rows.height_in + below_in
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white")
        axes = figure.add_axes(
            (
                LEFT_IN / width_in,
                below_in / height_in,
                (width_in - LEFT_IN - RIGHT_IN) / width_in,
                rows.height_in / height_in,
            )
        )
        draw_timeline(timeline, axes)
        left = LEFT_IN / width_in
        figure.text(left, 1 - 0.30 / height_in, _title(timeline), size=TITLE_PT, weight="bold")
        figure.text(left, 1 - 0.56 / height_in, _subtitle(timeline), size=TEXT_PT, color="#444444")
        _draw_legend(figure, timeline, y=(below_in - AXIS_IN) / height_in, x=left)
        for number, line in enumerate(lines):
            y = (below_in - AXIS_IN - LEGEND_IN - STAGE_LINE_IN * (number + 0.5)) / height_in
            for column, text in enumerate(line):
                x = left + column * (1 - left) / columns
                figure.text(x, y, text, size=TEXT_PT - 1, va="center", color="#222222")
    return figure


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where the rows of ranks and the lanes of stages are, in inches from the top.

    Attributes:
        row: rank -> (top, height).
        lane: stage -> (top, height).
    """

    row: Mapping[int, tuple[float, float]]
    lane: Mapping[int, tuple[float, float]]
    height_in: float

    @classmethod
    def of(cls, timeline: Timeline) -> _Rows:
        row, lane = {}, {}
        top = ROW_GAP_IN / 2
        for rank in range(timeline.num_ranks):
            stages = timeline.stages_of(rank)
            row[rank] = (top, LANE_IN * max(1, len(stages)))
            for number, stage in enumerate(stages):
                lane[stage.id] = (top + number * LANE_IN, LANE_IN)
            top += row[rank][1] + ROW_GAP_IN
        return cls(row, lane, top - ROW_GAP_IN / 2)

    def place(self, span: Span, paint: Paint) -> tuple[float, float]:
        """(top, height) of a span."""
        if paint.in_lane and span.stage is not None and span.stage in self.lane:
            return self.lane[span.stage]
        return self.row[span.rank]  # also for the backward of the feed, which is of no stage


def draw_timeline(timeline: Timeline, axes: Axes) -> None:
    """Draws the rows into axes; x is milliseconds, y inches from the top.

    The bars of one colour in one row or lane are one collection, whose gid is
    ``"<legend>/<rank>/<stage or row>"``.
    """
    rows = _Rows.of(timeline)
    width_in = axes.get_position().width * axes.figure.get_figure(root=True).get_figwidth()
    axes.set_xlim(0, max(timeline.step_s, 1e-9) * 1e3)
    axes.set_ylim(rows.height_in, 0)
    for top, height in rows.row.values():
        axes.broken_barh([(0, timeline.step_s * 1e3)], (top, height), facecolor=IDLE_COLOUR)
    for paint in PAINTS:
        _draw_bars(timeline, rows, paint, axes)
    for span, paint in _numbered(timeline, width_in):
        top, height = rows.place(span, paint)
        axes.text(
            (span.start_s + span.end_s) / 2 * 1e3,
            top + height / 2,
            str(span.microbatch),
            size=NUMBER_PT,
            color=paint.text,
            ha="center",
            va="center_baseline",
        )
    _draw_names(timeline, rows, axes)
    _draw_minibatches(timeline, axes)
    axes.set_xlabel("time since the step began (ms)", size=TEXT_PT)
    axes.tick_params(axis="x", labelsize=TEXT_PT - 1)
    axes.set_yticks([])
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "left", "right"]].set_visible(False)


def _draw_bars(timeline: Timeline, rows: _Rows, paint: Paint, axes: Axes) -> None:
    bars: dict[tuple[str, float, float], list[tuple[float, float]]] = {}
    for span in timeline.spans:
        if span.kind in paint.kinds:
            top, height = rows.place(span, paint)
            place = span.stage if paint.in_lane and span.stage in rows.lane else "row"
            gid = f"{paint.legend}/{span.rank}/{place}"
            bars.setdefault((gid, top, height), []).append(
                (span.start_s * 1e3, span.duration_s * 1e3)
            )
    for (gid, top, height), ranges in bars.items():
        edge = {"edgecolor": "white", "linewidth": 0.4} if paint.in_lane else {"linewidth": 0}
        axes.broken_barh(ranges, (top, height), facecolor=paint.colour, gid=gid, zorder=2, **edge)


def _numbered(timeline: Timeline, width_in: float) -> Iterator[tuple[Span, Paint]]:
    """The spans whose bars are wide enough for the number of their micro-batch."""
    points_per_s = width_in * 72 / max(timeline.step_s, 1e-9)
    for paint in PAINTS:
        if paint.in_lane:
            for span in timeline.spans:
                needed = (len(str(span.microbatch)) + 0.5) * DIGIT_WIDTH * NUMBER_PT
                if span.kind in paint.kinds and span.duration_s * points_per_s >= needed:
                    yield span, paint


def _draw_names(timeline: Timeline, rows: _Rows, axes: Axes) -> None:
    """Ranks and stages at the left, bubble shares at the right."""
    from matplotlib.transforms import offset_copy

    beside = axes.get_yaxis_transform()
    figure = axes.figure.get_figure(root=True)
    far_left = offset_copy(beside, figure, x=-LEFT_IN + 0.15, units="inches")
    left = offset_copy(beside, figure, x=-0.1, units="inches")
    for rank, (top, height) in rows.row.items():
        axes.text(
            0, top + height / 2, f"rank {rank}", transform=far_left, size=TEXT_PT, va="center"
        )
    for stage, (top, height) in rows.lane.items():
        axes.text(
            0,
            top + height / 2,
            f"stage {stage}",
            transform=left,
            size=TEXT_PT - 1,
            ha="right",
            va="center",
            color="#444444",
        )
    right = offset_copy(beside, figure, x=0.1, units="inches")
    axes.text(1, -0.04, "bubble", transform=right, size=TEXT_PT - 1, va="bottom", color="#444444")
    for rank, seconds in enumerate(shares(timeline).ranks):
        top, height = rows.row[rank]
        text = f"{seconds.bubble_share:.0%}".replace("%", " %")
        axes.text(1, top + height / 2, text, transform=right, size=TEXT_PT, va="center")


def _draw_minibatches(timeline: Timeline, axes: Axes) -> None:
    """A line where each further mini-batch of an accumulated step begins."""
    starts: dict[int, float] = {}
    for span in timeline.spans:
        if span.minibatch:
            known_s = starts.get(span.minibatch, span.start_s)
            starts[span.minibatch] = min(known_s, span.start_s)
    for start_s in starts.values():
        axes.axvline(start_s * 1e3, color="black", linewidth=1, linestyle="--", zorder=3)


def _draw_legend(figure: Figure, timeline: Timeline, *, x: float, y: float) -> None:
    from matplotlib.patches import Patch

    present = {span.kind for span in timeline.spans}
    patches = [
        Patch(facecolor=paint.colour, label=paint.legend)
        for paint in PAINTS
        if present.intersection(paint.kinds)
    ]
    patches.append(Patch(facecolor=IDLE_COLOUR, edgecolor="#BBBBBB", label="idle"))
    figure.legend(
        handles=patches,
        loc="upper left",
        bbox_to_anchor=(x, y),
        ncols=len(patches),
        frameon=False,
        fontsize=TEXT_PT - 1,
        borderpad=0,
        borderaxespad=0,
        columnspacing=1.4,
        handlelength=1.3,
    )


def _width_in(timeline: Timeline) -> float:
    """Wider for more micro-batches, so that their numbers find room."""
    return min(24.0, max(12.0, 12.0 + 0.3 * (_num_microbatches(timeline) - 8)))


def _num_microbatches(timeline: Timeline) -> int:
    """Most micro-batches that a stage runs forward in the step."""
    counts = [0] * len(timeline.stages)
    for span in timeline.spans:
        if span.kind is SpanKind.FORWARD and span.stage is not None:
            counts[span.stage] += 1
    return max(counts, default=0)


def _title(timeline: Timeline) -> str:
    step = "" if timeline.step is None else f" {timeline.step}"
    bubble = f"{shares(timeline).bubble_share:.0%}".replace("%", " %")
    text = f"{timeline.source} step{step}: {timeline.step_s * 1e3:.4g} ms, bubble {bubble}"
    return text[0].upper() + text[1:]


def _subtitle(timeline: Timeline) -> str:
    minibatches = 1 + max((span.minibatch for span in timeline.spans), default=0)
    parts = [
        f"schedule {timeline.schedule}",
        f"{_count(len(timeline.stages), 'stage')} on {_count(timeline.num_ranks, 'rank')}",
        _count(_num_microbatches(timeline) // minibatches, "micro-batch")
        + (f" in each of {minibatches} mini-batches" if minibatches > 1 else ""),
    ]
    if error_s := max(timeline.clock_error_s, default=0.0):
        parts.append(f"clocks agree within {error_s * 1e3:.2g} ms")
    return "  ·  ".join(parts)


def _count(number: int, noun: str) -> str:
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def _stage_lines(stages: Sequence[TimelineStage], columns: int) -> list[list[str]]:
    """What the stages are, in lines of one or two columns."""
    most = 110 // columns
    texts = [f"stage {stage.id}: {stage.label}" for stage in stages if stage.label]
    texts = [text if len(text) <= most else f"{text[: most - 1]}…" for text in texts]
    num_lines = -(-len(texts) // columns)
    return [texts[number::num_lines] for number in range(num_lines)]
