"""Simulated steps: by hand, and never longer than their price."""

from __future__ import annotations

import random

import numpy as np
import pytest
from helpers.spmd_brute_force import random_graph, random_machine, random_shares

from lightning_gpp.cluster import BUCKET_BYTES
from lightning_gpp.graph import TensorSpec
from lightning_gpp.spmd.costs.machine import AlphaBeta, CollectiveTimes, Machine, measured_speeds
from lightning_gpp.spmd.costs.prices import PriceList, evaluate_program
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue, ValueSource
from lightning_gpp.spmd.placement import R_SAME, R_SUMMED, shard
from lightning_gpp.spmd.program import (
    Computation,
    Move,
    SpmdProgram,
)
from lightning_gpp.spmd.search.find import find_program


@pytest.mark.parametrize("seed", range(12))
def test_halves_add_up_and_a_step_takes_its_price_at_most(seed: int) -> None:
    draw = random.Random(seed)
    graph, machine = random_graph(draw, 3), random_machine(draw, 2)
    program = find_program(graph, machine, random_shares(draw, 2)).program
    prices = PriceList(graph, machine, program.shares)
    for instruction in program.instructions:
        price = prices.of(instruction)
        halved = sum(half.compute_s.max() + half.moved_s.max() for half in price.halves)
        assert halved == pytest.approx(price.seconds, rel=1e-9, abs=1e-15)
    evaluation = evaluate_program(program, graph, machine)
    most_s = evaluation.price_s + machine.times.all_reduce.alpha_s
    assert evaluation.step_s <= most_s * (1 + 1e-9)
    assert evaluation.step_s >= 0.5 * evaluation.compute_s


def test_sums_go_on_beside_the_backward_and_devices_wait_only_where_they_meet() -> None:
    """Two layers of weights of a bucket each; the second device is half as fast."""
    width, rows = 1024, 4
    assert width * width * 4 == BUCKET_BYTES
    square, flat = TensorSpec((width, width), "float32"), TensorSpec((rows, width), "float32")
    values = [
        SpmdValue("x", flat, ValueSource.INPUT, False),
        SpmdValue("a", square, ValueSource.PARAMETER, True),
        SpmdValue("b", square, ValueSource.PARAMETER, True),
        SpmdValue("y", flat, ValueSource.OPERATOR, True),
        SpmdValue("z", flat, ValueSource.OPERATOR, True),
    ]
    flops = 12.0
    operators = [
        SpmdOperator("first", "linear", ("x", "a"), ("input", "weight"), ("y",), {}, flops),
        SpmdOperator("second", "linear", ("y", "b"), ("input", "weight"), ("z",), {}, flops),
    ]
    graph = SpmdGraph(tuple(values), tuple(operators), ())
    part = shard(0, rows)

    def summed(name: str) -> Move:
        return Move(name, R_SAME, R_SUMMED)

    def divided(operator: SpmdOperator) -> Computation:
        return Computation(operator.name, (part, R_SUMMED), (part,))

    first, second = operators
    program = SpmdProgram(
        (0.5, 0.5),
        {"a": R_SAME, "b": R_SAME},
        (
            Move("x", None, part),
            *(summed("a"), divided(first), summed("b"), divided(second)),
        ),
    )
    nothing = AlphaBeta()
    sum_s = 5.0
    all_reduce = AlphaBeta(0.0, sum_s / BUCKET_BYTES)
    times = CollectiveTimes(all_reduce, *(nothing,) * 6)
    machine = Machine(measured_speeds([6.0, 3.0]), times, np.full(2, np.inf))
    evaluation = evaluate_program(program, graph, machine)
    # Half of 12 flops: 1 s and 2 s. Forwards 4 s on the slower one; backwards the second layer
    # takes 4 s and the first one, whose input needs no gradient, 2 s.
    assert evaluation.price_s == pytest.approx(4 + 6 + 2 * sum_s)
    # The sum of b's gradient begins at 8 s beside 2 s of backward, that of a's after it, at 13 s.
    assert evaluation.step_s == pytest.approx(8 + 2 * sum_s)
