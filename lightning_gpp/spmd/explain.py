"""A program as a person reads it: what lies where, what moves where and why, who does how much."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from lightning_gpp.spmd.costs.prices import Machine, PriceList
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.plan import SpmdPlan
from lightning_gpp.spmd.program import Computation, Conversion, Instruction, SpmdProgram
from lightning_gpp.text_table import text_table
from lightning_gpp.units_of_measure import bytes_text, percent_text, seconds_text


def explain_plan(plan: SpmdPlan, graph: SpmdGraph, machine: Machine) -> str:
    """All tables of a plan.

    Args:
        plan: the plan.
        graph: the model.
        machine: the devices that it is for.
    """
    program = plan.program
    evaluation = plan.evaluation
    head = (
        f"A step takes {seconds_text(evaluation.step_s)}: computing "
        f"{seconds_text(evaluation.compute_s)}, moving {seconds_text(evaluation.move_s)}, "
        f"{seconds_text(max(0.0, evaluation.price_s - evaluation.step_s))} of it side by side. "
        + _bound_text(plan)
    )
    parts = [
        head,
        "Devices\n" + device_table(program, graph, machine),
        "Parameters and buffers\n" + storage_table(program, graph),
        "What moves between devices\n" + move_table(program, graph, machine),
        "Next best programs\n" + next_best_table(plan),
    ]
    return "\n\n".join(parts)


def _bound_text(plan: SpmdPlan) -> str:
    if plan.least_s is None:
        return "The program was found with other shares than its own."
    least = seconds_text(plan.least_s)
    return f"With these shares no program takes less than {least}, one thing after the other."


def device_table(program: SpmdProgram, graph: SpmdGraph, machine: Machine) -> str:
    """What every device does: its shares, its computing, its memory; equal ones in one row."""
    prices = PriceList(graph, machine, program.shares)
    busy_s = memory = np.zeros(machine.num_devices)
    for name, placement in program.storage.items():
        memory = memory + prices.stored(graph.value_of[name], placement).memory_bytes
    for instruction in program.instructions:
        price = prices.of(instruction)
        memory = memory + price.memory_bytes
        busy_s = busy_s + sum(half.compute_s for half in price.halves)
    rows: Counter[tuple[str, ...]] = Counter()
    for device in range(machine.num_devices):
        shares = " ".join(f"{100 * vector[device]:.2f} %" for vector in program.shares)
        rows[shares, seconds_text(busy_s[device]), bytes_text(memory[device])] += 1
    return text_table(
        ["devices", "share", "computes", "holds"],
        [[str(count), *row] for row, count in rows.items()],
    )


def storage_table(program: SpmdProgram, graph: SpmdGraph) -> str:
    """How parameters and buffers are kept."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, placement in program.storage.items():
        groups[placement_text(placement)].append(name)
    rows = [
        [
            kept,
            str(len(names)),
            bytes_text(sum(graph.value_of[name].size_bytes for name in names)),
            max(names, key=lambda name: graph.value_of[name].size_bytes),
        ]
        for kept, names in groups.items()
    ]
    return text_table(["kept", "number", "bytes", "largest"], rows, left=["kept", "largest"])


def placement_text(placement: Placement) -> str:
    """A placement in words.

    >>> from lightning_gpp.spmd.placement import R_SAME, shard
    >>> placement_text(R_SAME), placement_text(shard(0, 12))
    ('whole on every device', 'rows of dimension 0 in 12 units')
    """
    if placement.is_shard:
        return f"rows of dimension {placement.dim} in {placement.units} units"
    words = {
        "R=": "whole on every device",
        "R": "whole on every device, gradients summed",
        "P": "summands",
    }
    return words[str(placement)]


def move_table(program: SpmdProgram, graph: SpmdGraph, machine: Machine) -> str:
    """Collectives by what they do and for whom, the longest first."""
    prices = PriceList(graph, machine, program.shares)
    groups: defaultdict[tuple[str, str, str], list[tuple[float, int, str]]] = defaultdict(list)
    for place, instruction in enumerate(program.instructions):
        seconds = sum(half.move_s for half in prices.of(instruction).halves)
        if isinstance(instruction, Computation):
            name, size = instruction.operator, 0
            key = ("gradient of a weight", "gathered factors", instruction.method.value)
        else:
            name, size = instruction.value, graph.value_of[instruction.value].size_bytes
            key = (_what(instruction, graph), _change(instruction), _reason(program, place))
        if seconds:
            groups[key].append((seconds, size, name))
    rows = [
        [
            what,
            change,
            reason,
            str(len(found)),
            bytes_text(sum(size for _, size, _ in found)),
            seconds_text(sum(seconds for seconds, _, _ in found)),
            max(found)[2],
        ]
        for (what, change, reason), found in groups.items()
    ]
    totals = {
        (what, change, reason): sum(seconds for seconds, _, _ in found)
        for (what, change, reason), found in groups.items()
    }
    rows.sort(key=lambda row: -totals[row[0], row[1], row[2]])
    header = ["of", "from → to", "because", "number", "bytes", "takes", "longest"]
    return text_table(header, rows, left=["of", "from → to", "because", "longest"])


def _what(instruction: Instruction, graph: SpmdGraph) -> str:
    assert not isinstance(instruction, Computation)
    return graph.value_of[instruction.value].source.value.replace("operator", "activation")


def _change(instruction: Instruction) -> str:
    if isinstance(instruction, Conversion):
        methods = [m.value for m in (instruction.method, instruction.backward_method)]
        return f"{instruction.source} → {instruction.target} ({methods[0]}, back {methods[1]})"
    assert not isinstance(instruction, Computation)
    is_input = type(instruction).__name__ == "ReceiveInput"
    return (
        f"{'rank 0 → ' if is_input else ''}{instruction.placement}{'' if is_input else ' → rank 0'}"
    )


def _reason(program: SpmdProgram, place: int) -> str:
    """The rule that reads what a conversion makes."""
    instruction = program.instructions[place]
    if not isinstance(instruction, Conversion):
        return "the step runs at rank 0"
    for later in program.instructions[place + 1 :]:
        if isinstance(later, Computation):
            return later.note
        if not isinstance(later, Conversion):
            break
    return "it is returned"


def next_best_table(plan: SpmdPlan) -> str:
    """What the other programs that were met lost by; those that read alike once."""
    best_s = plan.evaluation.step_s
    rows = []
    for program, seconds in plan.tried:
        shares = program.shares[0]
        spread = f"{100 * min(shares):.2f} … {100 * max(shares):.2f} %"
        sharded = sum(placement.is_shard for placement in program.storage.values())
        rows.append(
            [
                seconds_text(seconds),
                percent_text(seconds - best_s, best_s),
                spread,
                f"{sharded} of {len(program.storage)}",
            ]
        )
    unlike = [list(row) for row in dict.fromkeys(map(tuple, rows))]
    return text_table(["takes", "more", "shares", "parameters in shards"], unlike)
