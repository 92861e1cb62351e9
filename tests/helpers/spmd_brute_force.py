"""The cheapest SPMD program by trying everything, and random small graphs to try it on.

Nothing of the search is used: values begin, are converted and are computed one action at a time, in
any number and order, and every state is visited in order of cost (Dijkstra). With limits of memory
a state has the bytes left so far as well.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator

import numpy as np

from lightning_gpp.graph import TensorSpec
from lightning_gpp.spmd.costs.machine import AlphaBeta, CollectiveTimes, Machine, measured_speeds
from lightning_gpp.spmd.costs.prices import PriceList
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue, ValueSource
from lightning_gpp.spmd.placement import R_SAME, R_SUMMED
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.search.choices import can_convert


def brute_force_s(
    graph: SpmdGraph, machine: Machine, shares: tuple[float, ...], *, limits: bool
) -> float | None:
    """Seconds of the cheapest program; None if none fits the memory."""
    theory, prices = Theory(graph, machine.num_devices), PriceList(graph, machine, shares)
    none = (0.0,) * machine.num_devices if limits else ()
    start = (0, frozenset(), frozenset(), none)
    heap = [(0.0, 0, start)]
    seen, number = set(), itertools.count(1)
    while heap:
        seconds, _, state = heapq.heappop(heap)
        if state in seen:
            continue
        seen.add(state)
        position, held, given, memory = state
        if position == len(graph.operators) and given == frozenset(graph.outputs):
            return seconds
        for more_s, left, after in _actions(graph, theory, prices, position, held, given):
            if limits:
                total = tuple(round(a + float(b), 6) for a, b in zip(memory, left))
                if any(a > b * (1 + 1e-9) for a, b in zip(total, machine.memory_bytes)):
                    continue
                after = (*after, total)
            else:
                after = (*after, ())
            if after not in seen:
                heapq.heappush(heap, (seconds + more_s, next(number), after))
    return None


def _actions(graph, theory, prices, position, held, given) -> Iterator[tuple]:
    begun = {name for name, _ in held}
    zeros = np.zeros(prices.machine.num_devices)
    # What is done for a later reader alone can as well be done later.
    needed = set(graph.outputs) - given
    if position < len(graph.operators):
        needed |= set(graph.operators[position].inputs)
    for value in graph.values:
        if value.source is ValueSource.OPERATOR or value.name in begun:
            continue
        if value.name not in needed:
            continue
        if value.source is ValueSource.INPUT:
            summed = (R_SUMMED,) if value.requires_grad else ()
            for placement in (R_SAME, *summed, *theory.shards(value.name)):
                price = prices.move(value, None, placement)
                yield (
                    price.seconds,
                    price.memory_bytes,
                    (position, held | {(value.name, placement)}, given),
                )
        else:
            shards = theory.shards(value.name) if value.requires_grad else ()
            for placement in (R_SAME, *shards):
                price = prices.stored(value, placement)
                state = (position, held | {(value.name, placement)}, given)
                yield price.seconds, price.memory_bytes, state
    for name, source in held:
        value = graph.value_of[name]
        if name not in needed:
            continue
        for target in theory.placements(name):
            new = (name, target)
            if new in held or target == source or not can_convert(value, source, target):
                continue
            price = prices.move(value, source, target)
            yield price.seconds, price.memory_bytes, (position, held | {new}, given)
        if name in graph.outputs and name not in given:
            yield prices.move(value, source, None).seconds, zeros, (position, held, given | {name})
    if position < len(graph.operators):
        operator = graph.operators[position]
        later = {name for op in graph.operators[position + 1 :] for name in op.inputs}
        later |= set(graph.outputs) - given
        for rule in theory.rules(operator):
            if not all(pair in held for pair in zip(operator.inputs, rule.inputs)):
                continue
            made = held | set(zip(operator.outputs, rule.outputs))
            kept = frozenset(pair for pair in made if pair[0] in later)
            price = prices.computation(operator, rule)
            yield price.seconds, price.memory_bytes, (position + 1, kept, given)


def random_machine(draw: random.Random, num_devices: int) -> Machine:
    """Devices of unequal speed and collectives of unrelated costs."""

    def line() -> AlphaBeta:
        return AlphaBeta(draw.choice((0.0, 1.0, 20.0)), draw.uniform(0.05, 1.5))

    return Machine(
        measured_speeds(
            [draw.uniform(1, 8) for _ in range(num_devices)],
            [draw.uniform(1, 8) for _ in range(num_devices)],
            [draw.choice((0.0, 1.0))] * num_devices,
            [draw.choice((0.0, 0.5)) for _ in range(num_devices)],
        ),
        CollectiveTimes(*(line() for _ in range(7))),
        np.full(num_devices, np.inf),
    )


def random_shares(draw: random.Random, num_devices: int) -> tuple[float, ...]:
    weights = [draw.uniform(0.2, 1) for _ in range(num_devices)]
    return tuple(weight / sum(weights) for weight in weights)


def random_graph(draw: random.Random, num_operators: int) -> SpmdGraph:
    """Layers, sums and functions of matrices, with values and parameters that are read again."""
    values: dict[str, SpmdValue] = {}
    operators: list[SpmdOperator] = []

    def add(name: str, shape: tuple[int, ...], source: ValueSource, gradient: bool) -> str:
        values[name] = SpmdValue(name, TensorSpec(shape, "float32"), source, gradient)
        return name

    rows = draw.choice((4, 6))
    widths = [draw.choice((3, 4, 6)) for _ in range(2)]
    made = [add("x", (rows, widths[0]), ValueSource.INPUT, draw.random() < 0.3)]
    weights: list[str] = []
    for number in range(num_operators):
        source = draw.choice(made[-2:])
        shape = values[source].shape
        kinds = (
            "relu",
            "add",
            "softmax",
            "mul",
            "sum",
            *("linear",) * (4 if len(weights) < 2 else 0),
        )
        kind = draw.choice(kinds)
        if kind == "linear":
            fitting = [w for w in weights if values[w].shape[1] == shape[-1]]
            if fitting and draw.random() < 0.3:
                weight = draw.choice(fitting)
            else:
                wide = (draw.choice(widths), shape[-1])
                weight = add(f"w{number}", wide, ValueSource.PARAMETER, True)
                weights.append(weight)
            inputs, arguments = (source, weight), ("input", "weight")
            shape = (*shape[:-1], values[weight].shape[0])
            attributes = {}
        elif kind in ("add", "mul"):
            fitting = [name for name in made if values[name].shape == shape]
            inputs, arguments = (source, draw.choice(fitting)), ("self", "other")
            attributes = {}
        elif kind == "sum" and len(shape) > 1 and number == num_operators - 1:
            inputs, arguments, attributes = (source,), ("self",), {"dim": (0,)}
            shape = shape[1:]
        else:
            kind = "softmax" if kind == "softmax" else "relu"
            inputs, arguments = (source,), ("self",)
            attributes = {"dim": -1} if kind == "softmax" else {}
        gradient = any(values[name].requires_grad for name in inputs)
        output = add(f"v{number}", shape, ValueSource.OPERATOR, gradient)
        flops = float(np.prod(shape) * 10) if kind == "linear" else 0.0
        operators.append(
            SpmdOperator(f"v{number}", kind, inputs, arguments, (output,), attributes, flops)
        )
        made.append(output)
    read = {name for op in operators for name in op.inputs}
    outputs = tuple(name for name in made if name not in read) or (made[-1],)
    kept = tuple(v for v in values.values() if v.name in read or v.source is ValueSource.OPERATOR)
    return SpmdGraph(kept, tuple(operators), outputs)
