"""A simulation as text: the step, what devices and channels do, the critical path."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpp.jobs.simulated import Simulated
from lightning_gpp.jobs.simulation_use import ChannelUse, StepUse
from lightning_gpp.planner.explain import joined_rows
from lightning_gpp.planner.text_table import text_table, wrapped
from lightning_gpp.planner.units_of_measure import (
    bytes_text,
    count_text,
    indices_text,
    number_text,
    percent_text,
    seconds_text,
)

MOST_CHANNELS = 6
"""Channels that the table shows."""


def describe_simulation(found: Simulated, *, max_width: int = 100) -> Iterator[str]:
    """Texts that say how long a step takes, and why."""
    use = found.use
    yield wrapped([*_step(found), *_path(use), *_hidden(use)], max_width)
    yield describe_devices(found)
    if use.channels:
        yield describe_channels(use, max_width=max_width)


def _step(found: Simulated) -> list[str]:
    samples = count_text(round(found.case.samples), "sample")
    return [
        f"Simulated step: {seconds_text(found.step_s)} for {samples}, "
        f"{number_text(found.samples_per_s)} samples/s; devices compute "
        f"{percent_text(1 - found.use.bubble_fraction, 1)} of it (bubble "
        f"{percent_text(found.use.bubble_fraction, 1)}).",
    ]


def _path(use: StepUse) -> list[str]:
    parts = sorted(use.path_s.items(), key=lambda item: item[1], reverse=True)
    texts = [
        f"{name} {seconds_text(seconds)} ({percent_text(seconds, use.step_s)})"
        for name, seconds in parts
        if seconds > 0
    ]
    return [f"Critical path: {', '.join(texts)}."]


def _hidden(use: StepUse) -> list[str]:
    """Of everything that is on its way beside computing, what the step waits for."""
    found = []
    for group, total_s in use.transfer_s.items():
        shown_s = min(total_s, use.path_s.get(group, 0.0))
        found.append(
            f"{group[0].upper()}{group[1:]}: {seconds_text(total_s)} on the way in all; the step "
            f"waits {seconds_text(shown_s)} for them, the rest is hidden."
        )
    return found


def describe_devices(found: Simulated) -> str:
    """What every device does in a step; neighbours of which everything reads the same share a row.

    Args:
        found: the simulation.
    """
    use = found.use
    stages: dict[int, list[int]] = {}
    for stage in found.case.plan.stages:
        for device in stage.devices:
            stages.setdefault(device, []).append(stage.id)
    limits = [device.memory_bytes for device in found.case.request.cluster.devices]
    groups = [g for g in dict.fromkeys(GROUPS_SHOWN) if any(d.get(g) for d in use.devices.values())]
    rows = []
    for device, seconds in use.devices.items():
        waits_s = use.step_s - sum(seconds.values())
        limit = limits[device]
        rows.append(
            [
                str(device),
                indices_text(stages.get(device, [])),
                *(percent_text(seconds.get(group, 0.0), use.step_s) for group in groups),
                percent_text(max(0.0, waits_s), use.step_s),
                bytes_text(use.peak_bytes[device]),
                "" if limit is None else percent_text(use.peak_bytes[device], limit),
            ]
        )
    names = [NARROW.get(group, group) for group in groups]
    header = ["device", "stage", *names, "waits", "peak\nmemory", "of its\nmemory"]
    return text_table(header, joined_rows(rows))


GROUPS_SHOWN = (
    *("forward", "backward", "your step", "sending and receiving", "input", "optimizer"),
)
NARROW = {"sending and receiving": "sends,\nreceives", "your step": "your\nstep"}


def describe_channels(use: StepUse, *, max_width: int = 100) -> str:
    """The busiest channels."""
    shown, others = use.channels[:MOST_CHANNELS], use.channels[MOST_CHANNELS:]
    rows = [_channel_row(channel, use) for channel in shown]
    header = ["channel", "busy", "", "transfers", "bytes"]
    table = text_table(header, rows, left=["channel"], max_width=max_width)
    if not others:
        return table
    most = percent_text(others[0].busy_s, use.step_s)
    return f"{table}\n{count_text(len(others), 'channel')} more, busy for at most {most}"


def _channel_row(channel: ChannelUse, use: StepUse) -> list[str]:
    return [
        channel.name,
        seconds_text(channel.busy_s),
        percent_text(channel.busy_s, use.step_s),
        str(channel.num_transfers),
        bytes_text(channel.size_bytes),
    ]
