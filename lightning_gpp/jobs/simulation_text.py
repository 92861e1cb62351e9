"""A simulation as text: the step, the use of devices and channels, the gain of changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_gpp.common.text_table import text_table, wrapped
from lightning_gpp.common.units_of_measure import (
    bytes_text,
    count_text,
    indices_text,
    number_text,
    percent_text,
    seconds_text,
)
from lightning_gpp.jobs.table import Row, cell, describe_rows
from lightning_gpp.reports.step.paint import path_text
from lightning_gpp.simulate import shares
from lightning_gpp.simulate.what_if import Case

MOST_CHANNELS = 6
"""Channels that the table shows."""

LEAST_GAIN = 5e-4
"""Gains below this part of the throughput would read +0.0 %."""


def describe_simulation(case: Case, *, max_width: int = 100) -> Iterator[str]:
    """Texts that say how long a step takes, and why."""
    in_a_row = case.request.num_minibatches
    samples = count_text(round(case.request.minibatch_size / in_a_row), "sample")
    step = (
        f"Simulated step: {seconds_text(case.step_s)} for {samples}, "
        f"{number_text(case.samples_per_s)} samples/s; "
        f"bubble {percent_text(shares(case.timeline).bubble_share, 1)}"
    )
    if in_a_row > 1:
        step += f" (the mean of {in_a_row} that overlap; what follows is for all of them)"
    yield wrapped([f"{step}.", f"C{path_text(case.timeline)[1:]}."], max_width)
    yield describe_devices(case)
    if case.timeline.transfers:
        yield describe_channels(case)


def describe_devices(case: Case) -> str:
    """A row for every device; neighbours with equal values share a row."""
    stages: dict[int, list[int]] = {}
    for stage in case.plan.stages:
        for device in stage.devices:
            stages.setdefault(device, []).append(stage.id)
    header = [
        "device",
        "stage",
        "computes",
        "sends,\nother",
        "waits",
        "peak\nmemory",
        "of its\nmemory",
    ]
    rows: list[tuple[list[int], tuple[str, ...]]] = []
    for device, found in enumerate(shares(case.timeline).ranks):
        memory = case.timeline.memory[device]
        waits_s = found.seconds["wait"] + found.seconds["idle"]
        texts = (
            indices_text(stages.get(device, [])),
            percent_text(found.step_s - found.bubble_s, found.step_s),
            percent_text(found.bubble_s - waits_s, found.step_s),
            percent_text(waits_s, found.step_s),
            bytes_text(memory.peak_bytes),
            percent_text(memory.peak_bytes, memory.limit_bytes) if memory.limit_bytes else "",
        )
        if rows and rows[-1][1] == texts:
            rows[-1][0].append(device)
        else:
            rows.append(([device], texts))
    return text_table(header, [[indices_text(devices), *texts] for devices, texts in rows])


def channels_of(case: Case) -> list[dict[str, Any]]:
    """The traffic of every channel, the busiest first."""
    found: dict[str, dict[str, Any]] = {}
    for one in case.timeline.transfers:
        for name in one.channels:
            empty = {"name": name, "busy_s": 0.0, "size_bytes": 0, "waited_s": 0.0}
            channel = found.setdefault(name, empty)
            channel["busy_s"] += one.duration_s
            channel["size_bytes"] += one.size_bytes or 0
            channel["waited_s"] += one.waited_s
    return sorted(found.values(), key=lambda channel: -channel["busy_s"])


def describe_channels(case: Case) -> str:
    """The busiest channels."""
    channels, total_s = channels_of(case), case.timeline.step_s
    shown, others = channels[:MOST_CHANNELS], channels[MOST_CHANNELS:]
    columns = {
        "channel": cell("name"),
        "busy": cell("busy_s", seconds_text),
        "": cell("busy_s", lambda busy_s: percent_text(busy_s, total_s)),
        "bytes": cell("size_bytes", bytes_text),
        "waited\nfor": cell("waited_s", seconds_text),
    }
    table = describe_rows(shown, columns, left=["channel"])
    if not others:
        return table
    most = percent_text(others[0]["busy_s"], total_s)
    return f"{table}\n{count_text(len(others), 'channel')} more, busy for at most {most}"


def describe_changes(rows: Sequence[Row], *, max_width: int = 100) -> str:
    """The gain of every change, in a row each."""
    columns = {
        "change": cell("name"),
        "gain": cell("gain", gain_text),
        "step": cell("step_s", seconds_text),
        "samples/s": cell("samples_per_s", number_text),
    }
    return describe_rows(rows, columns, left=["change"], max_width=max_width)


def gain_text(gain: float) -> str:
    """By how much a throughput grows.

    >>> gain_text(0.5), gain_text(0.0001), gain_text(-0.125)
    ('+50.0 %', 'nothing', '-12.5 %')
    """
    return f"{100 * gain:+.1f} %" if abs(gain) >= LEAST_GAIN else "nothing"


def describe_speedups(found: Mapping[str, Any], *, max_width: int = 100) -> str:
    """Speed-up against the number of devices, a column for every way to train."""
    columns = found["speedup"]
    rows = [
        [str(count), *(f"{c[count]:.2f}" if count in c else "" for c in columns.values())]
        for count in columns["naive"]
    ]
    title = (
        "Speed-up: samples per second, relative to one device; samples per device are the same in "
        "every row. This plan is for all devices. The other columns are data parallelism with "
        "all-reduces after the backward (naive; pre-fetch: data are read ahead), during it "
        "(wait-free), or during it and merged (merged)."
    )
    notes = [wrapped(found["notes"], max_width)] if found["notes"] else []
    return "\n".join([wrapped([title], max_width), text_table(["devices", *columns], rows), *notes])
