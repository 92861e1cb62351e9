"""A sweep as a diagram: step time and throughput against what was swept.

One parameter of numbers is a curve; names, and several parameters, are groups of bars.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_gpp.jobs.figures import COLOURS, MARKERS, diagram, tidy
from lightning_gpp.jobs.sweeps.swept_job import SweptJob

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = "sweep.png"
STEP, THROUGHPUT = "step_s", "samples_per_s"
BAR_GROUP = 0.8
"""Width of a group of bars; groups are 1 apart."""

LOG_FROM = 8
"""Curves over a range of at least this factor have a logarithmic axis."""

Series = Mapping[str, Mapping[str, SweptJob]]
"""Name of a series ("" for the only one) -> value of the parameter below the axis -> job."""


def write_sweep_picture(jobs: Sequence[SweptJob], folder: Path) -> Path | None:
    """Writes the diagram of the jobs that say how long a step takes; None where fewer than two do.

    Args:
        jobs: of the sweep.
        folder: of the sweep.
    """
    timed = [job for job in jobs if {STEP, THROUGHPUT} <= job.metrics.keys()]
    varied = varied_overrides(timed)
    if len(timed) < 2 or not varied:
        return None
    axis = _axis(timed, varied)
    series = _series(timed, axis, [name for name in varied if name != axis])
    is_curve = len(varied) == 1 and all(_number(job.overrides[axis]) is not None for job in timed)
    path = folder / FILE
    with diagram(path, max(9.0, 0.35 * len(timed) + 4), 4.2) as figure:
        figure.suptitle(_shared(timed, varied), size=10, color="#444444")
        step_axes, throughput_axes = figure.subplots(1, 2, gridspec_kw={"wspace": 0.08})
        for axes, metric, label, scale in (
            (step_axes, STEP, "step, ms", 1e3),
            (throughput_axes, THROUGHPUT, "samples per second", 1.0),
        ):
            draw = _curve if is_curve else _bars
            draw(axes, series, metric, scale)
            tidy(axes, axis, label)
            axes.set_ylim(bottom=0)
        if len(series) > 1:
            handles, labels = step_axes.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return path


def varied_overrides(jobs: Sequence[SweptJob]) -> list[str]:
    """The overrides that are not the same in all jobs, in their order."""
    names = dict.fromkeys(name for job in jobs for name in job.overrides)
    return [name for name in names if len({job.overrides.get(name) for job in jobs}) > 1]


def _shared(jobs: Sequence[SweptJob], varied: Sequence[str]) -> str:
    """What all jobs have in common."""
    overrides = jobs[0].overrides.items()
    return " ".join(f"{name}={value}" for name, value in overrides if name not in varied)


def _axis(jobs: Sequence[SweptJob], varied: Sequence[str]) -> str:
    """The parameter below the axis: that of numbers with the most values, or of names."""

    def rank(name: str) -> tuple[bool, int]:
        values = {job.overrides.get(name, "") for job in jobs}
        return all(_number(value) is not None for value in values), len(values)

    return max(varied, key=rank)


def _series(jobs: Sequence[SweptJob], axis: str, others: Sequence[str]) -> Series:
    found: dict[str, dict[str, SweptJob]] = {}
    for job in jobs:
        name = ", ".join(f"{other}={job.overrides.get(other, '')}" for other in others)
        found.setdefault(name, {})[job.overrides.get(axis, "")] = job
    return found


def _curve(axes: Axes, series: Series, metric: str, scale: float) -> None:
    (jobs,) = series.values()
    points = sorted((_number(value) or 0.0, job.metrics[metric]) for value, job in jobs.items())
    x, y = [x for x, _ in points], [y * scale for _, y in points]
    axes.plot(x, y, color=COLOURS[0], marker=MARKERS[0], clip_on=False, zorder=3)
    if x[0] > 0 and x[-1] / x[0] >= LOG_FROM:
        axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{value:g}" for value in x])
    axes.minorticks_off()


def _bars(axes: Axes, series: Series, metric: str, scale: float) -> None:
    values = list(dict.fromkeys(value for jobs in series.values() for value in jobs))
    if all(_number(value) is not None for value in values):
        values.sort(key=lambda value: _number(value) or 0.0)
    width = BAR_GROUP / len(series)
    for number, (name, jobs) in enumerate(series.items()):
        x = [place for place, value in enumerate(values) if value in jobs]
        heights = [jobs[values[place]].metrics[metric] * scale for place in x]
        offset = (number - (len(series) - 1) / 2) * width
        axes.bar(
            [place + offset for place in x],
            heights,
            0.95 * width,
            color=COLOURS[number % len(COLOURS)],
            label=name,
        )
    longest = max(map(len, values))
    axes.set_xticks(
        range(len(values)),
        values,
        rotation=30 if longest * len(values) > 45 else 0,
        ha="right" if longest * len(values) > 45 else "center",
    )


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
