"""A program as a person reads it: who does how much, and what moves where and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lightning_gpp.common.text_table import text_table, wrapped
from lightning_gpp.common.units_of_measure import bytes_text, indices_text, seconds_text
from lightning_gpp.spmd.costs.machine import Machine
from lightning_gpp.spmd.costs.prices import PriceList, collective
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.program import (
    Computation,
    Move,
    SpmdProgram,
    bytes_in_bucket,
)
from lightning_gpp.spmd.search.find import SpmdPlan

LEGEND = (
    "R=: whole on every device. R: the same, but of its gradient each device has a summand. "
    "S0/64: dimension 0, divided over the devices in 64 equal units. P: a summand on every device."
)


def explain_plan(
    plan: SpmdPlan,
    graph: SpmdGraph,
    machine: Machine,
    *,
    kinds: Sequence[str],
    max_width: int = 100,
) -> str:
    """What a plan takes, the devices, and the collectives.

    Args:
        plan: the plan.
        graph: the model.
        machine: the devices that it is for.
        kinds: of the devices, one each.
        max_width: columns of the terminal.
    """
    found, stored = plan.evaluation, plan.program.storage.values()
    text = [
        f"A step takes {seconds_text(found.step_s)}: {seconds_text(found.compute_s)} computing and "
        f"{seconds_text(found.move_s)} exchanges, in part side by side.",
        f"{sum(placement.is_shard for placement in stored)} of {len(stored)} parameters and "
        "buffers are kept in shards, the others whole on every device.",
    ]
    if plan.least_s is not None:
        least = seconds_text(plan.least_s)
        text.insert(1, f"With these shares no program takes less than {least} without overlap.")
    parts = [
        wrapped(text, max_width),
        "Devices\n" + device_table(plan, kinds),
        "What moves between devices\n" + move_table(plan.program, graph, machine, max_width),
        wrapped([LEGEND], max_width),
    ]
    return "\n\n".join(parts)


def device_table(plan: SpmdPlan, kinds: Sequence[str]) -> str:
    """What every device does: its share, its computing, its memory; equal ones in one row."""
    found, shares = plan.evaluation, plan.program.shares
    rows: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for device, (busy_s, memory) in enumerate(zip(found.busy_s, found.memory_bytes, strict=True)):
        share = f"{100 * shares[device]:.2f} %"
        rows[kinds[device], share, seconds_text(busy_s), bytes_text(memory)].append(device)
    header = ["devices", "kind", "share", "computes", "holds"]
    return text_table(header, [[indices_text(d), *row] for row, d in rows.items()], left=["kind"])


def move_table(
    program: SpmdProgram, graph: SpmdGraph, machine: Machine, max_width: int = 100
) -> str:
    """Collectives by what they do, the longest first."""
    prices = PriceList(graph, machine, program.shares)
    groups: defaultdict[tuple[str, str, str], list[tuple[float, int]]] = defaultdict(list)
    for each in program.instructions:
        seconds = sum(half.move_s for half in prices.of(each).halves)
        if seconds and not isinstance(each, Computation):
            size_bytes = graph.value_of[each.value].size_bytes
            groups[_move(program, graph, each)].append((seconds, size_bytes))
    rows = []
    for key, group in sorted(groups.items(), key=lambda pair: -sum(s for s, _ in pair[1])):
        what, change, how = key
        seconds, size_bytes = map(sum, zip(*group))
        numbers = str(len(group)), bytes_text(size_bytes), seconds_text(seconds)
        rows.append([what, change, *numbers, how])
    header = ["of", "from → to", "number", "bytes", "takes", "how"]
    left = ["of", "from → to", "how"]
    table = text_table(header, rows, left=left, flexible="how", max_width=max_width)
    return table if rows else "nothing"


def _move(program: SpmdProgram, graph: SpmdGraph, each: Move) -> tuple[str, str, str]:
    """Of what something moves, from where to where, and how forwards and backwards."""
    value, source, target = graph.value_of[each.value], each.source, each.target
    what = value.source.value.replace("operator", "activation")
    change = " → ".join(str(end or "rank 0") for end in (source, target))
    if source is None or target is None:
        return what, change, "the step runs at rank 0"
    backward = collective(target.dual, source.dual) if value.requires_grad else None
    buckets = " in buckets" if bytes_in_bucket(program, each, graph) else ""
    forward = collective(source, target) or "nothing"
    return what, change, f"forward {forward}, backward {backward or 'nothing'}{buckets}"
