"""A simulation as text: the step, what devices and channels do, the critical path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from lightning_gpp.common.text_table import text_table, wrapped
from lightning_gpp.common.units_of_measure import (
    bytes_text,
    count_text,
    indices_text,
    number_text,
    percent_text,
    seconds_text,
)
from lightning_gpp.jobs.simulation.simulated import Simulated
from lightning_gpp.reports.plan.explain import joined_rows
from lightning_gpp.simulate.simulation import TaskKind
from lightning_gpp.simulate.usage import ChannelUsage, DeviceUsage

MOST_CHANNELS = 6
"""Channels that the table shows."""

KIND_TEXTS: Mapping[TaskKind, str] = MappingProxyType(
    {
        TaskKind.TRANSFER: "messages",
        TaskKind.REDUCE: "sums of gradients",
        TaskKind.FEED: "your step before the forward",
        TaskKind.TURN: "your step after the forward",
        TaskKind.DATA: "reading input",
        TaskKind.COPY: "copying input",
        TaskKind.PREPARE: "cutting input",
        TaskKind.FINISH: "joining results",
        TaskKind.OVERHEAD: "the interpreter",
        TaskKind.SEND: "sending",
        TaskKind.RECEIVE: "receiving",
    }
)
"""What people call kinds of tasks whose own name says less."""


def describe_simulation(found: Simulated, *, max_width: int = 100) -> Iterator[str]:
    """Texts that say how long a step takes, and why."""
    yield wrapped([_step(found), _path(found), *_hidden(found)], max_width)
    yield describe_devices(found)
    if found.usage.channels:
        yield describe_channels(found)


def _step(found: Simulated) -> str:
    in_a_row = found.case.request.num_minibatches
    samples = count_text(round(found.case.samples / in_a_row), "sample")
    bubble = percent_text(found.usage.bubble_share, 1)
    text = (
        f"Simulated step: {seconds_text(found.step_s)} for {samples}, "
        f"{number_text(found.samples_per_s)} samples/s; bubble {bubble}"
    )
    if in_a_row > 1:
        text += f" (the mean of {in_a_row} that overlap; what follows is of all of them)"
    if found.num_steps > 1:
        text += f" (the last of {found.num_steps} steps in a row; what follows is of all of them)"
    return f"{text}."


def _path(found: Simulated) -> str:
    path = found.path
    shares = sorted(path.kind_shares.items(), key=lambda item: item[1], reverse=True)
    texts = [
        f"{KIND_TEXTS.get(kind, kind.value)} {percent_text(share, 1)}"
        for kind, share in shares
        if share > 0
    ]
    text = f"Critical path: {', '.join(texts)}"
    if path.channel_s > 0:
        waited = percent_text(path.channel_s, path.duration_s)
        text += f"; of this, {waited} waiting for a channel that others occupy"
    return f"{text}."


def _hidden(found: Simulated) -> Iterator[str]:
    """How much of what is on its way is hidden behind what its receivers do."""
    for kind in (TaskKind.TRANSFER, TaskKind.REDUCE):
        transfers = [one for one in found.usage.transfers if one.kind is kind]
        total_s = sum(one.duration_s for one in transfers)
        if not total_s:
            continue
        exposed_s = min(total_s, sum(one.exposed_s for one in transfers))
        name = KIND_TEXTS[kind]
        yield (
            f"{name[0].upper()}{name[1:]}: {len(transfers)}, together {seconds_text(total_s)} on "
            f"their way; {percent_text(total_s - exposed_s, total_s)} of that is hidden behind "
            f"what their receivers do, for {seconds_text(exposed_s)} they stand still."
        )


def describe_devices(found: Simulated) -> str:
    """What every device does; neighbours of which everything reads the same share a row."""
    stages: dict[int, list[int]] = {}
    for stage in found.case.plan.stages:
        for device in stage.devices:
            stages.setdefault(device, []).append(stage.id)
    header = ["device", "stage", "computes", "other", "waits", "peak\nmemory", "of its\nmemory"]
    rows = [
        [str(one.device), indices_text(stages.get(one.device, [])), *_device_cells(one)]
        for one in found.usage.devices
    ]
    return text_table(header, joined_rows(rows))


def _device_cells(one: DeviceUsage) -> list[str]:
    limit = one.limit_bytes
    return [
        percent_text(one.compute_s, one.total_s),
        percent_text(one.other_s, one.total_s),
        percent_text(max(0.0, one.idle_s), one.total_s),
        bytes_text(one.peak_bytes),
        "" if limit is None else percent_text(one.peak_bytes, limit),
    ]


def describe_channels(found: Simulated) -> str:
    """The busiest channels."""
    channels = found.usage.channels
    shown, others = channels[:MOST_CHANNELS], channels[MOST_CHANNELS:]
    header = ["channel", "busy", "", "bytes", "waited\nfor"]
    table = text_table(header, [_channel_row(one) for one in shown], left=["channel"])
    if not others:
        return table
    most = percent_text(others[0].busy_s, others[0].total_s)
    return f"{table}\n{count_text(len(others), 'channel')} more, busy for at most {most}"


def _channel_row(one: ChannelUsage) -> list[str]:
    return [
        one.name,
        seconds_text(one.busy_s),
        percent_text(one.busy_s, one.total_s),
        bytes_text(one.size_bytes),
        seconds_text(one.waited_s),
    ]
