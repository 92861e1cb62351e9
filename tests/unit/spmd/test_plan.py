"""Shares, plans and baselines."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from helpers.spmd_brute_force import random_graph, random_machine, random_shares

from lightning_gpp.cluster import DeviceKind, Link, uniform_cluster
from lightning_gpp.graph import TensorSpec
from lightning_gpp.spmd.costs.machine import (
    Machine,
    collective_times,
    device_speeds,
    measured_speeds,
)
from lightning_gpp.spmd.costs.prices import PricedProgram, PriceList
from lightning_gpp.spmd.explain import explain_plan
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue, ValueSource
from lightning_gpp.spmd.plan import BASELINES, best_shares, plan_baseline, plan_hap
from lightning_gpp.spmd.search.find import NoProgramFitsError, find_program
from lightning_gpp.strategy.spmd.planners import HapPlanner


def layers(samples: int, width: int, count: int = 2) -> SpmdGraph:
    """``x -> linear -> relu -> linear -> ...``, without biases."""
    spec = TensorSpec((samples, width), "float32")
    values = [SpmdValue("x", spec, ValueSource.INPUT, False)]
    operators, before = [], "x"
    for number in range(count):
        weight, made, active = f"w{number}", f"y{number}", f"z{number}"
        square = TensorSpec((width, width), "float32")
        values.append(SpmdValue(weight, square, ValueSource.PARAMETER, True))
        values += [SpmdValue(n, spec, ValueSource.OPERATOR, True) for n in (made, active)]
        flops = 2.0 * samples * width**2
        operators += [
            SpmdOperator(
                *(made, "linear", (before, weight), ("input", "weight"), (made,)), flops=flops
            ),
            SpmdOperator(active, "relu", (made,), ("self",), (active,)),
        ]
        before = active
    return SpmdGraph(tuple(values), tuple(operators), (before,))


def machine(*flops_per_s: float, link: Link | None = None, memory: float = np.inf) -> Machine:
    cluster = uniform_cluster(len(flops_per_s), link or Link(1e9, 1e-6))
    return Machine(
        measured_speeds(flops_per_s), collective_times(cluster), np.full(len(flops_per_s), memory)
    )


@pytest.mark.parametrize("seed", range(12))
def test_no_shares_on_a_grid_are_better(seed: int) -> None:
    """The linear program's shares, before rounding, against all in steps of one percent."""
    draw = random.Random(seed)
    graph, machine_ = random_graph(draw, 3), random_machine(draw, 2)
    program = find_program(graph, machine_, random_shares(draw, 2)).program

    def seconds(shares):
        """Devices wait for each other at collectives, and at the end."""
        priced = PricedProgram(program, PriceList(graph, machine_, shares, in_units=False))
        now, has_sums = np.zeros(2), False
        for half, waiting_bytes in priced.halves_in_order():
            has_sums = has_sums or waiting_bytes > 0
            if half.move_s and not waiting_bytes:
                now[:] = now.max() + half.move_s
            now += half.compute_s
        now = np.full(2, now.max()) if has_sums else now
        return sum((half.compute_s for half in priced.updates), now).max()

    units = [p.units for p in program.placements if p.is_shard]
    if not units:
        return
    found = seconds(best_shares(program, graph, machine_))
    least = 1 / min(units)
    grid = [step / 100 for step in range(1, 100) if least <= step / 100 <= 1 - least]
    assert found <= min(seconds((one, 1 - one)) for one in grid) * (1 + 1e-3)


def test_a_device_of_twice_the_speed_gets_twice_the_samples() -> None:
    plan = plan_hap(layers(300, 8), machine(1e6, 2e6, link=Link(1e12)))
    assert plan.program.shares == pytest.approx((1 / 3, 2 / 3), abs=0.01)
    assert plan.least_s == pytest.approx(plan.evaluation.price_s)


@pytest.mark.parametrize("name", list(BASELINES))
def test_no_baseline_is_faster(name: str) -> None:
    graph, machine_ = layers(64, 16), machine(1e9, 3e9)
    baseline = plan_baseline(graph, machine_, name)
    plan = plan_hap(graph, machine_)
    assert plan.evaluation.step_s <= baseline.evaluation.step_s * (1 + 1e-9)
    sharded = [placement.is_shard for placement in baseline.program.storage.values()]
    assert all(sharded) if name == "ZeRO" else not any(sharded)


@pytest.mark.parametrize("has_shares", [False, True])
def test_memory_that_nothing_fits_is_an_error(has_shares: bool) -> None:
    text = r"needs \d+\.\d kB on device 1 .*, which has 1.0 kB; use more or larger devices"
    small = dataclasses.replace(machine(1e9, 1e9), memory_bytes=np.array([1e9, 1e3]))
    with pytest.raises(NoProgramFitsError, match=text):
        HapPlanner(small, has_shares)(layers(64, 16), (0.5, 0.5), None)


def test_short_memory_divides_what_is_cheaper_whole() -> None:
    """Over a slow link both devices do everything, unless they have not the memory."""
    graph, slow = layers(16, 64), Link(1e3)
    free = plan_hap(graph, machine(1e9, 1e9, link=slow))
    assert not any(placement.is_shard for placement in free.program.storage.values())
    short = machine(1e9, 1e9, link=slow, memory=0.7 * free.evaluation.memory_bytes.max())
    plan = plan_hap(graph, short)
    assert plan.evaluation.fits(short)
    assert plan.evaluation.step_s > free.evaluation.step_s


def test_a_plan_is_explained() -> None:
    graph, machine_ = layers(64, 16), machine(1e9, 3e9)
    plan = plan_hap(graph, machine_)
    text = explain_plan(plan, graph, machine_, kinds=["old", "new"], max_width=80)
    shares = plan.program.shares
    for part in (
        *("A step takes", f"0  old   {100 * shares[0]:.2f} %", f"1  new   {100 * shares[1]:.2f} %"),
        *("whole on every device", "all-reduce in buckets"),
    ):
        assert " ".join(part.split()) in " ".join(text.split()), text
    assert max(map(len, text.split("\n"))) <= 80


def test_devices_that_are_alike_get_alike() -> None:
    kind = DeviceKind("toy", {"float32": 1e9}, 1e9)
    cluster = dataclasses.replace(uniform_cluster(2, kind="toy"), device_kinds=(kind,))
    assert device_speeds(cluster).shares == (0.5, 0.5)
