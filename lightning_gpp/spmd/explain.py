"""A program as text: each device's part, and what is exchanged."""

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
    SpmdProgram,
    bytes_in_bucket,
)
from lightning_gpp.spmd.search.find import SpmdPlan


def explain_plan(
    plan: SpmdPlan,
    graph: SpmdGraph,
    machine: Machine,
    *,
    kinds: Sequence[str],
    max_width: int = 100,
) -> str:
    """Explains a program: its time, the devices' parts, the collectives.

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
        "What moves between devices\n" + move_table(plan.program, graph, machine),
    ]
    return "\n\n".join(parts)


def device_table(plan: SpmdPlan, kinds: Sequence[str]) -> str:
    """Share, compute and memory of every device; equal devices share a row."""
    found, shares = plan.evaluation, plan.program.shares
    rows: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for device, (busy_s, memory) in enumerate(zip(found.busy_s, found.memory_bytes, strict=True)):
        share = f"{100 * shares[device]:.2f} %"
        rows[kinds[device], share, seconds_text(busy_s), bytes_text(memory)].append(device)
    header = ["devices", "kind", "share", "computes", "holds"]
    return text_table(header, [[indices_text(d), *row] for row, d in rows.items()], left=["kind"])


def move_table(program: SpmdProgram, graph: SpmdGraph, machine: Machine) -> str:
    """Collectives of a step, those that take longest first; most go forwards and backwards."""
    prices, groups = PriceList(graph, machine, program.shares), dict[str, list[tuple[float, int]]]()
    for each in program.instructions:
        if isinstance(each, Computation):
            continue
        value, ends = graph.value_of[each.value], (each.source, each.target)
        duals = [end and end.dual for end in reversed(ends)]
        buckets = " in buckets" if bytes_in_bucket(program, each, graph) else ""
        names = collective(*ends), f"{collective(*duals)}{buckets}"
        for name, half in zip(names, prices.of(each).halves):
            if half.move_s:
                shown = str(name).replace("root", "scatter or gather")
                groups.setdefault(shown, []).append((half.move_s, value.size_bytes))
    rows = []
    for name, group in sorted(groups.items(), key=lambda pair: -sum(s for s, _ in pair[1])):
        seconds, size_bytes = map(sum, zip(*group))
        rows.append([name, str(len(group)), bytes_text(size_bytes), seconds_text(seconds)])
    header = ["collective", "number", "bytes", "takes"]
    return text_table(header, rows, left=["collective"]) if rows else "nothing"
