"""A program as a person reads it: what lies where, what moves where and why, who does how much."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lightning_gpp.common.text_table import text_table, wrapped
from lightning_gpp.common.units_of_measure import (
    bytes_text,
    indices_text,
    percent_text,
    seconds_text,
)
from lightning_gpp.spmd.costs.judge import message_bytes
from lightning_gpp.spmd.costs.machine import Machine
from lightning_gpp.spmd.costs.prices import FORWARD, PriceList
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
    SpmdProgram,
    bytes_in_bucket,
)
from lightning_gpp.spmd.rules.theory import Theory

T = TypeVar("T")

MOST_ALTERNATIVES = 5

METHODS = {
    Method.PADDED: ", padded",
    Method.GROUPED: ", each part by itself",
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
    found, shares = plan.evaluation, plan.program.shares
    rows: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for device, (busy_s, memory) in enumerate(zip(found.busy_s, found.memory_bytes, strict=True)):
        share = f"{100 * shares[device]:.2f} %"
        what = (*kinds[device : device + 1], share, seconds_text(busy_s), bytes_text(memory))
        rows[what].append(device)
    header = ["devices", *(["kind"] if kinds else []), "share", "computes", "holds"]
    return text_table(header, [[indices_text(d), *row] for row, d in rows.items()], left=["kind"])


def storage_table(program: SpmdProgram, graph: SpmdGraph) -> str:
    """How parameters and buffers are kept."""
    groups: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for name, place in program.storage.items():
        words = f"in shards of dimension {place.dim}, {place.units} units"
        kept = words if place.is_shard else "whole on every device"
        groups[kept].append((graph.value_of[name].size_bytes, name))
    rows = [
        [kept, str(len(of)), bytes_text(sum(size for size, _ in of)), max(of)[1]]
        for kept, of in groups.items()
    ]
    return text_table(["kept", "number", "bytes", "largest"], rows, left=["kept", "largest"])


def computation_table(
    program: SpmdProgram, graph: SpmdGraph, machine: Machine, max_width: int = 100
) -> str:
    """Operators by how they are divided, and what those cost that no rule divides."""
    prices, theory = PriceList(graph, machine, program.shares), Theory(graph, machine.num_devices)
    groups: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for each in program.instructions:
        if isinstance(each, Computation):
            operator, how = graph.operator_of[each.operator], _divided(each)
            rules = theory.rules(operator)
            if all(p.is_replicated for rule in rules for p in (*rule.inputs, *rule.outputs)):
                how += ": no rule divides it"
            groups[how].append((prices.of(each).seconds, operator.kind))
    rows = []
    for how, found, takes in _longest_first(groups):
        kinds = Counter(kind for _, kind in found).most_common()
        which = ", ".join(f"{count} {kind}" for kind, count in kinds)
        rows.append([how, str(len(found)), takes, which])
    left = ["outputs", "which"]
    header = ["outputs", "operators", "takes", "which"]
    return text_table(header, rows, left=left, flexible="which", max_width=max_width)


def _longest_first(groups: Mapping[T, list[Any]]) -> list[tuple[T, list[Any], str]]:
    """Groups of tuples that begin with seconds, and what each takes; the longest first."""
    seconds = {key: sum(each for each, *_ in group) for key, group in groups.items()}
    ranked = sorted(groups, key=seconds.__getitem__, reverse=True)
    return [(key, groups[key], seconds_text(seconds[key])) for key in ranked]


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
    """Collectives by what they do, the longest first."""
    prices = PriceList(graph, machine, program.shares)
    groups: defaultdict[tuple[str, str, str], list[tuple[float, int, str]]] = defaultdict(list)
    for each in program.instructions:
        if seconds := sum(half.move_s for half in prices.of(each).halves):
            name, size = each.operator if isinstance(each, Computation) else each.value, 0
            if not isinstance(each, Computation):
                size = graph.value_of[name].size_bytes
            groups[_move(program, graph, each)].append((seconds, size, name))
    if not groups:
        return "nothing"
    rows = []
    for (what, change, how), found, takes in _longest_first(groups):
        numbers = str(len(found)), bytes_text(sum(size for _, size, _ in found))
        longest = f"{how}{'; longest' * (len(found) > 1)}: {max(found)[2]}"
        rows.append([what, change, *numbers, takes, longest])
    left = ["of", "from → to", "how"]
    header = ["of", "from → to", "number", "bytes", "takes", "how"]
    return text_table(header, rows, left=left, flexible="how", max_width=max_width)


def _move(program: SpmdProgram, graph: SpmdGraph, each: Instruction) -> tuple[str, str, str]:
    """Of what something moves, from where to where, and how forwards and backwards."""
    if isinstance(each, Computation):
        gathered = f"inputs and gradients gathered{METHODS.get(each.method, '')}, not its sum"
        return "gradient of a weight", "S → R=", gathered
    what = graph.value_of[each.value].source.value.replace("operator", "activation")
    if not isinstance(each, Conversion):
        ends = [str(each.placement), "rank 0"]
        order = reversed(ends) if isinstance(each, ReceiveInput) else ends
        return what, " → ".join(order), "the step runs at rank 0"
    source, target = each.source, each.target
    backward = "nothing"
    if graph.value_of[each.value].requires_grad:
        backward = _done(target.dual, source.dual, each.backward_method)
    buckets = " in buckets" if bytes_in_bucket(program, each, graph) else ""
    how = f"forward {_done(source, target, each.method)}, backward {backward}{buckets}"
    return what, f"{source} → {target}", how


def _done(source: Placement, target: Placement, method: Method) -> str:
    """What is done to change a placement."""
    if name := FORWARD.get((source.kind, target.kind)):
        return name + METHODS.get(method, "")
    return "own part" if target.is_shard else "nothing"


def next_best_table(plan: SpmdPlan, graph: SpmdGraph, machine: Machine) -> str:
    """What the other programs that were met lost by; those that read alike once."""
    best_s = plan.evaluation.step_s
    rows: dict[tuple[str, ...], None] = {}
    for program, found in plan.tried:
        shares = program.shares
        sharded = sum(placement.is_shard for placement in program.storage.values())
        row = (
            seconds_text(found.step_s),
            f"+{percent_text(found.step_s - best_s, best_s)}",
            seconds_text(found.compute_s),
            seconds_text(found.move_s),
            bytes_text(message_bytes(program, graph, machine)),
            f"{100 * min(shares):.2f} to {100 * max(shares):.2f} %",
            f"{sharded} of {len(program.storage)}",
        )
        rows[row] = None
    header = ["takes", "more", "computing", "exchanges", "sends", "shares", "in shards"]
    return text_table(header, [*rows][: 1 + MOST_ALTERNATIVES])
