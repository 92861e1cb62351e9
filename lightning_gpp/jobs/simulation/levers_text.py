"""Levers and speed-ups as tables."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.common.text_table import text_table, wrapped
from lightning_gpp.common.units_of_measure import number_text, seconds_text
from lightning_gpp.jobs.simulation.simulated import Simulated
from lightning_gpp.jobs.simulation.speedup import Speedups
from lightning_gpp.simulate.what_if.levers import Lever

LEAST_GAIN = 5e-4
"""Gains below this part of the throughput would read +0.0 %."""


def describe_levers(found: Sequence[Lever], title: str, *, max_width: int = 100) -> str:
    """What changes would buy, that which buys most first.

    Args:
        found: the levers, ranked.
        title: what they are of.
        max_width: columns of the terminal.
    """
    rows = [
        [
            lever.name,
            gain_text(lever.gain),
            "" if lever.step_s is None else seconds_text(lever.step_s),
            "" if lever.samples_per_s is None else number_text(lever.samples_per_s),
            lever.note,
        ]
        for lever in found
    ]
    header = ["change", "gain", "step", "samples/s", "note"]
    has_notes = any(row[-1] for row in rows)
    if not has_notes:
        header, rows = header[:-1], [row[:-1] for row in rows]
    table = text_table(
        header,
        rows,
        left=["change", "note"],
        flexible="note" if has_notes else None,
        max_width=max_width,
    )
    return f"{title}\n{table}"


def gain_text(gain: float | None) -> str:
    """By how much a throughput grows.

    >>> gain_text(0.5), gain_text(0.0001), gain_text(-0.125), gain_text(None)
    ('+50.0 %', 'nothing', '-12.5 %', '')
    """
    if gain is None:
        return ""
    return f"{100 * gain:+.1f} %" if abs(gain) >= LEAST_GAIN else "nothing"


def describe_what_if(before: Simulated, after: Simulated, *, max_width: int = 100) -> str:
    """A step before and after a change."""
    header = ["what if", "plan", "stages", "step", "samples/s", "gain"]
    rows = [
        [
            found.name,
            found.case.plan.planner,
            str(found.case.plan.num_stages),
            seconds_text(found.step_s),
            number_text(found.samples_per_s),
            "" if found is before else gain_text(found.samples_per_s / before.samples_per_s - 1),
        ]
        for found in (before, after)
    ]
    return text_table(
        header, rows, left=["what if", "plan"], flexible="what if", max_width=max_width
    )


def describe_speedups(found: Speedups, *, max_width: int = 100) -> str:
    """Speed-up against the number of devices, a column for every way to train."""
    columns = found.speedups()
    counts = sorted({count for column in columns.values() for count in column})
    rows = [
        [str(count), *(_speedup(column.get(count)) for column in columns.values())]
        for count in counts
    ]
    title = (
        "Speed-up against one device that hides nothing (samples per second; as many samples for "
        "every device): the planner's plans, and pure data parallelism (S-SGD)."
    )
    table = text_table(["devices", *columns], rows)
    return "\n".join([wrapped([title], max_width), table, *(_notes(found, max_width))])


def _notes(found: Speedups, max_width: int) -> list[str]:
    return [wrapped(found.notes, max_width)] if found.notes else []


def _speedup(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"
