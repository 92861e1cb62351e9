"""A simulation as text: the step, what devices and channels do, what changes would bring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
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
from lightning_gpp.jobs.table import cell, describe_rows
from lightning_gpp.simulate.task import TaskKind
from lightning_gpp.simulate.what_if import Case, Lever

MOST_CHANNELS = 6
"""Channels that the table shows."""

LEAST_GAIN = 5e-4
"""Gains below this part of the throughput would read +0.0 %."""

KIND_TEXTS: Mapping[TaskKind, str] = MappingProxyType(
    {
        TaskKind.TRANSFER: "messages",
        TaskKind.REDUCE: "all-reduce",
        TaskKind.FEED: "your step before the forward",
        TaskKind.TURN: "your step after the forward",
        TaskKind.DATA: "reading input",
        TaskKind.COPY: "copying input",
        TaskKind.PREPARE: "splitting input",
        TaskKind.FINISH: "joining results",
        TaskKind.OVERHEAD: "Python",
        TaskKind.SEND: "sending",
        TaskKind.RECEIVE: "receiving",
    }
)
"""What people call kinds of tasks whose own name says less."""


def describe_simulation(case: Case, *, max_width: int = 100) -> Iterator[str]:
    """Texts that say how long a step takes, and why."""
    yield wrapped([_step(case), _path(case)], max_width)
    yield describe_devices(case)
    if case.usage.channels:
        yield describe_channels(case)


def _step(case: Case) -> str:
    in_a_row = case.request.num_minibatches
    samples = count_text(round(case.request.minibatch_size / in_a_row), "sample")
    bubble = percent_text(case.usage.bubble_share, 1)
    text = (
        f"Simulated step: {seconds_text(case.step_s)} for {samples}, "
        f"{number_text(case.samples_per_s)} samples/s; bubble {bubble}"
    )
    if in_a_row > 1:
        text += f" (the mean of {in_a_row} that overlap; what follows is for all of them)"
    return f"{text}."


def _path(case: Case) -> str:
    path = case.path
    shares = sorted(path.kind_shares.items(), key=lambda item: item[1], reverse=True)
    texts = [
        f"{KIND_TEXTS.get(kind, kind.value)} {percent_text(share, 1)}"
        for kind, share in shares
        if share > 0
    ]
    text = f"Critical path: {', '.join(texts)}"
    if path.channel_s > 0:
        waited = percent_text(path.channel_s, path.duration_s)
        text += f"; of this, {waited} waiting for a busy channel"
    return f"{text}."


def describe_devices(case: Case) -> str:
    """What every device does; neighbours of which everything reads the same share a row."""
    stages: dict[int, list[int]] = {}
    for stage in case.plan.stages:
        for device in stage.devices:
            stages.setdefault(device, []).append(stage.id)
    header = ["device", "stage", "computes", "other", "waits", "peak\nmemory", "of its\nmemory"]
    rows = [
        [
            str(one.device),
            indices_text(stages.get(one.device, [])),
            percent_text(one.compute_s, one.total_s),
            percent_text(one.other_s, one.total_s),
            percent_text(max(0.0, one.bubble_s - one.other_s), one.total_s),
            bytes_text(one.peak_bytes),
            "" if one.limit_bytes is None else percent_text(one.peak_bytes, one.limit_bytes),
        ]
        for one in case.usage.devices
    ]
    return text_table(header, joined_rows(rows))


def joined_rows(rows: Sequence[list[str]]) -> list[list[str]]:
    """Neighbouring rows of which all but the device (the first cell) is the same, made one."""
    groups: list[tuple[list[str], list[int]]] = []
    for row in rows:
        if groups and groups[-1][0][1:] == row[1:]:
            groups[-1][1].append(int(row[0]))
        else:
            groups.append((row, [int(row[0])]))
    return [[indices_text(devices), *row[1:]] for row, devices in groups]


def describe_channels(case: Case) -> str:
    """The busiest channels."""
    channels = case.usage.channels
    shown, others = channels[:MOST_CHANNELS], channels[MOST_CHANNELS:]
    columns = {
        "channel": cell("name"),
        "busy": cell("busy_s", seconds_text),
        "": lambda row: percent_text(row["busy_s"], row["total_s"]),
        "bytes": cell("size_bytes", bytes_text),
        "waited\nfor": cell("waited_s", seconds_text),
    }
    table = describe_rows([asdict(one) for one in shown], columns, left=["channel"])
    if not others:
        return table
    most = percent_text(others[0].busy_s, others[0].total_s)
    return f"{table}\n{count_text(len(others), 'channel')} more, busy for at most {most}"


def describe_levers(found: Sequence[Lever], *, max_width: int = 100) -> str:
    """What changes would buy, that which buys most first."""
    columns = {
        "change": cell("name"),
        "gain": cell("gain", gain_text),
        "step": cell("step_s", seconds_text),
        "samples/s": cell("samples_per_s", number_text),
        "note": cell("note"),
    }
    rows = [asdict(lever) for lever in found]
    left = ["change", "note"]
    return describe_rows(rows, columns, left=left, flexible="note", max_width=max_width)


def gain_text(gain: float) -> str:
    """By how much a throughput grows.

    >>> gain_text(0.5), gain_text(0.0001), gain_text(-0.125)
    ('+50.0 %', 'nothing', '-12.5 %')
    """
    return f"{100 * gain:+.1f} %" if abs(gain) >= LEAST_GAIN else "nothing"


def describe_changes(worlds: Mapping[str, Case], *, max_width: int = 100) -> str:
    """A step before and after a change."""
    before = next(iter(worlds.values()))
    rows = [
        {
            "what if": name,
            "plan": case.plan.planner,
            "stages": case.plan.num_stages,
            "step": case.step_s,
            "samples/s": case.samples_per_s,
            "gain": None if case is before else case.samples_per_s / before.samples_per_s - 1,
        }
        for name, case in worlds.items()
    ]
    writes = {"step": seconds_text, "samples/s": number_text, "gain": gain_text}
    columns = {name: cell(name, writes.get(name, str)) for name in rows[0]}
    left = ["what if", "plan"]
    return describe_rows(rows, columns, left=left, flexible="what if", max_width=max_width)


def describe_speedups(found: Mapping[str, Any], *, max_width: int = 100) -> str:
    """Speed-up against the number of devices, a column for every way to train."""
    columns = found["speedup"]
    rows = [
        [str(count), *("none" if c[count] is None else f"{c[count]:.2f}" for c in columns.values())]
        for count in next(iter(columns.values()))
    ]
    title = (
        "Speed-up against one device without overlap (samples per second, equally many samples "
        "per device): the planner's plans, and data parallelism (S-SGD)."
    )
    notes = [wrapped(found["notes"], max_width)] if found["notes"] else []
    return "\n".join([wrapped([title], max_width), text_table(["devices", *columns], rows), *notes])
