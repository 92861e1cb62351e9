"""A program as a person reads it: what lies where, what moves where and why, who does how much."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from lightning_gpp.common.text_table import text_table, wrapped
from lightning_gpp.common.units_of_measure import (
    bytes_text,
    indices_text,
    percent_text,
    seconds_text,
)
from lightning_gpp.spmd.costs.message_bytes import message_bytes
from lightning_gpp.spmd.costs.moves import FORWARD
from lightning_gpp.spmd.costs.prices import Machine, PriceList
from lightning_gpp.spmd.gradient_buckets import bytes_in_bucket
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.placement import PARTIAL, Placement
from lightning_gpp.spmd.plan import SpmdPlan
from lightning_gpp.spmd.program import (
    Computation,
    Conversion,
    Instruction,
    Method,
    Option,
    ReceiveInput,
    ReturnOutput,
    SpmdProgram,
)
from lightning_gpp.spmd.rules.theory import Theory

MOST_ALTERNATIVES = 5

COLLECTIVES = {
    "gather": "all-gather",
    "scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "exchange": "all-to-all",
}

METHODS = {
    Method.PADDED: ", padded",
    Method.GROUPED: ", each part by itself",
    Method.SCATTER_GATHER: " (as reduce-scatter and all-gather)",
}

LEGEND = (
    "R=: whole on every device. R: the same, but of its gradient each device has a summand. "
    "S0/64: dimension 0, dealt to the devices in 64 equal units. P: a summand on every device. "
    "Padded: shards are sent at the size of the largest."
)


def explain_plan(
    plan: SpmdPlan,
    graph: SpmdGraph,
    machine: Machine,
    *,
    kinds: Sequence[str] = (),
    max_width: int = 100,
) -> str:
    """All tables of a plan.

    Args:
        plan: the plan.
        graph: the model.
        machine: the devices that it is for.
        kinds: of the devices, one each; not said if not given.
        max_width: columns of the terminal.
    """
    program = plan.program
    parts = [
        wrapped(_head(plan), max_width),
        "Devices\n" + device_table(plan, kinds),
        "Parameters and buffers\n" + storage_table(program, graph),
        "What the devices compute\n" + computation_table(program, graph, machine, max_width),
        "What moves between devices\n" + move_table(program, graph, machine, max_width),
        wrapped([LEGEND], max_width),
        "Next best programs (the first one is this)\n" + next_best_table(plan, graph, machine),
    ]
    return "\n\n".join(parts)


def _head(plan: SpmdPlan) -> list[str]:
    found = plan.evaluation
    beside_s = found.price_s - found.step_s
    rest = f"; {seconds_text(beside_s)} of this goes on side by side"
    if beside_s <= 0:
        late = seconds_text(-beside_s)
        rest = f"; the last sum of gradients, which fills no bucket, takes {late} longer"
    lines = [
        f"A step takes {seconds_text(found.step_s)}: {seconds_text(found.compute_s)} computing, "
        f"{seconds_text(found.move_s)} exchanges{rest}."
    ]
    if plan.least_s is None:
        return [*lines, "The program was found with other shares than its own: no bound is known."]
    least = seconds_text(plan.least_s)
    return [*lines, f"With these shares no program takes less than {least} without overlap."]


def device_table(plan: SpmdPlan, kinds: Sequence[str] = ()) -> str:
    """What every device does: its share, its computing, its memory; equal ones in one row."""
    found = plan.evaluation
    rows: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for device, (busy_s, memory) in enumerate(zip(found.busy_s, found.memory_bytes, strict=True)):
        share = f"{100 * plan.program.shares[device]:.2f} %"
        what = (*kinds[device : device + 1], share, seconds_text(busy_s), bytes_text(memory))
        rows[what].append(device)
    return text_table(
        ["devices", *(["kind"] if kinds else []), "share", "computes", "holds"],
        [[indices_text(devices), *row] for row, devices in rows.items()],
        left=["kind"],
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
    ('whole on every device', 'in shards of dimension 0, 12 units')
    """
    if placement.is_shard:
        return f"in shards of dimension {placement.dim}, {placement.units} units"
    words = {
        "R=": "whole on every device",
        "R": "whole on every device, gradients summed",
        "P": "summands",
    }
    return words[str(placement)]


def computation_table(
    program: SpmdProgram, graph: SpmdGraph, machine: Machine, max_width: int = 100
) -> str:
    """Operators by how they are divided, and what those cost that no rule divides."""
    prices, theory = PriceList(graph, machine, program.shares), Theory(graph, machine.num_devices)
    groups: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for each in program.instructions:
        if isinstance(each, Computation):
            operator = graph.operator_of[each.operator]
            has_rules = any(
                not placement.is_replicated
                for rule in theory.rules(operator)
                for placement in (*rule.inputs, *rule.outputs)
            )
            how = _divided(each) if has_rules else f"{_divided(each)}: no rule divides it"
            groups[how].append((prices.of(each).seconds, operator.kind))
    ranked = sorted(groups.items(), key=lambda group: -sum(seconds for seconds, _ in group[1]))
    rows = [
        [
            how,
            str(len(found)),
            seconds_text(sum(seconds for seconds, _ in found)),
            ", ".join(f"{n} {kind}" for kind, n in Counter(k for _, k in found).most_common()),
        ]
        for how, found in ranked
    ]
    header = ["outputs", "operators", "takes", "which"]
    return text_table(
        header, rows, left=["outputs", "which"], flexible="which", max_width=max_width
    )


def _divided(computation: Computation) -> str:
    """How the outputs of an operator lie."""
    for placement in computation.outputs:
        if placement.is_shard:
            factors = computation.option is Option.SUFFICIENT_FACTORS
            return f"shards of dimension {placement.dim}{', factors gathered' * factors}"
    return "summands" if PARTIAL in computation.outputs else "whole on every device"


def move_table(
    program: SpmdProgram, graph: SpmdGraph, machine: Machine, max_width: int = 100
) -> str:
    """Collectives by what they do and for whom, the longest first."""
    prices = PriceList(graph, machine, program.shares)
    groups: defaultdict[tuple[str, str, str], list[tuple[float, int, str]]] = defaultdict(list)
    for place, instruction in enumerate(program.instructions):
        seconds = sum(half.move_s for half in prices.of(instruction).halves)
        if isinstance(instruction, Computation):
            name, size = instruction.operator, 0
        else:
            name, size = instruction.value, graph.value_of[instruction.value].size_bytes
        if seconds:
            key = (_what(instruction, graph), _change(instruction), _why(program, graph, place))
            groups[key].append((seconds, size, name))
    if not groups:
        return "nothing"
    ranked = sorted(groups.items(), key=lambda group: -sum(seconds for seconds, *_ in group[1]))
    rows = [
        [
            *(what, change, str(len(found)), bytes_text(sum(size for _, size, _ in found))),
            seconds_text(sum(seconds for seconds, *_ in found)),
            f"{why}; longest: {max(found)[2]}" if len(found) > 1 else f"{why}: {max(found)[2]}",
        ]
        for (what, change, why), found in ranked
    ]
    header = ["of", "from → to", "number", "bytes", "takes", "how and why"]
    left = ["of", "from → to", "how and why"]
    return text_table(header, rows, left=left, flexible="how and why", max_width=max_width)


def _what(instruction: Instruction, graph: SpmdGraph) -> str:
    if isinstance(instruction, Computation):
        return "gradient of a weight"
    return graph.value_of[instruction.value].source.value.replace("operator", "activation")


def _change(instruction: Instruction) -> str:
    if isinstance(instruction, Conversion):
        return f"{instruction.source} → {instruction.target}"
    if isinstance(instruction, ReceiveInput):
        return f"rank 0 → {instruction.placement}"
    if isinstance(instruction, ReturnOutput):
        return f"{instruction.placement} → rank 0"
    return "S → R="


def _why(program: SpmdProgram, graph: SpmdGraph, place: int) -> str:
    """What is done forwards and backwards, and the rule that reads what it makes."""
    instruction = program.instructions[place]
    if isinstance(instruction, Computation):
        return f"inputs and gradients gathered{METHODS.get(instruction.method, '')}, not its sum"
    if not isinstance(instruction, Conversion):
        return "the step runs at rank 0"
    source, target = instruction.source, instruction.target
    names = _done(source, target), _done(target.dual, source.dual)
    ways = instruction.method, instruction.backward_method
    forward, backward = (name + METHODS.get(way, "") for name, way in zip(names, ways, strict=True))
    if ways[1] is Method.NONE and not graph.value_of[instruction.value].requires_grad:
        backward = "nothing"
    if bytes_in_bucket(program, instruction, graph):
        backward += " in buckets"
    return f"forward {forward}, backward {backward}, for {_reader(program, place)}"


def _done(source: Placement, target: Placement) -> str:
    """What is done to change a placement."""
    if name := FORWARD.get((source.kind, target.kind)):
        return COLLECTIVES[name]
    return "own part" if target.is_shard else "nothing"


def _reader(program: SpmdProgram, place: int) -> str:
    """Who wants what a conversion makes."""
    for later in program.instructions[place + 1 :]:
        if isinstance(later, Computation):
            return f"outputs that are {_divided(later)}"
        if not isinstance(later, Conversion):
            break
    return "the result"


def next_best_table(plan: SpmdPlan, graph: SpmdGraph, machine: Machine) -> str:
    """What the other programs that were met lost by; those that read alike once."""
    best_s = plan.evaluation.step_s
    rows = []
    for program, found in plan.tried:
        shares = program.shares
        sharded = sum(placement.is_shard for placement in program.storage.values())
        rows.append(
            (
                seconds_text(found.step_s),
                f"+{percent_text(found.step_s - best_s, best_s)}",
                seconds_text(found.compute_s),
                seconds_text(found.move_s),
                bytes_text(message_bytes(program, graph, machine)),
                f"{100 * min(shares):.2f} to {100 * max(shares):.2f} %",
                f"{sharded} of {len(program.storage)}",
            )
        )
    unlike = [*dict.fromkeys(rows)]
    header = ["takes", "more", "computing", "exchanges", "sends", "shares", "in shards"]
    return text_table(header, unlike[: 1 + MOST_ALTERNATIVES])
