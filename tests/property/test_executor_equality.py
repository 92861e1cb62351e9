"""Programs of random stage graphs give the losses and gradients of one device."""

from __future__ import annotations

import itertools
from itertools import accumulate

import torch
from helpers.plan_cases import ORDER_PACES
from helpers.stage_dags import (
    ToyStages,
    comparing_loss,
    compute_actions,
    run_on_threads,
    stage_graphs,
)
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.graph import StageGraph
from lightning_gpp.planner.plan.plan_graph import chained
from lightning_gpp.schedule import SCHEDULES, Kind, Program, build_program, dry_run
from lightning_gpp.schedule.schedules import in_flight_microbatches

IN_PARTS = [("gpipe", 1), ("gpipe", 2)]
"""All forwards, a loss of the whole batch, and all backwards, once or twice."""


@st.composite
def divisions(draw: st.DrawFn, multiple: int, count: int) -> tuple[int, ...]:
    """Shares of at least one."""
    inner = draw(st.permutations(range(1, multiple)))[: count - 1]
    ends = [0, *sorted(inner), multiple]
    return tuple(end - start for start, end in itertools.pairwise(ends))


@st.composite
def placements(draw: st.DrawFn, num_stages: int, num_microbatches: int) -> tuple[list, list]:
    """Devices and shares of the replicas of every stage."""
    homes, shares = [], []
    for _ in range(num_stages):
        multiple = draw(st.sampled_from([m for m in (1, 2, 4, 8) if num_microbatches % m == 0]))
        count = draw(st.integers(1, min(4, multiple)))
        homes.append(tuple(draw(st.permutations(range(4)))[:count]))
        shares.append(draw(divisions(multiple, count)))
    return homes, shares


def placed(toy: ToyStages, homes: list, shares: list) -> tuple[StageGraph, list, list]:
    """With a stage of the loss after a last stage that has replicas."""
    if len(homes[-1]) == 1:
        return toy.stages, homes, shares
    return toy.with_loss_stage(), [*homes, homes[-1][:1]], [*shares, (sum(shares[-1]),)]


@given(
    stages=stage_graphs(),
    data=st.data(),
    mode=st.sampled_from([*((schedule, 0) for schedule in sorted(SCHEDULES)), *IN_PARTS]),
    num_microbatches=st.sampled_from([1, 2, 4, 8]),
    is_chain=st.booleans(),
)
def test_program_trains_like_one_device(stages, data, mode, num_microbatches, is_chain):
    schedule, num_backwards = mode
    count = stages.num_stages
    weight_of = data.draw(
        st.lists(st.integers(0, count - 1), min_size=count, max_size=count) | st.none()
    )
    toy = ToyStages(chained(stages) if is_chain else stages, weight_of)
    stages, homes, shares = placed(toy, *data.draw(placements(count, num_microbatches)))
    sizes = data.draw(
        st.lists(st.integers(1, 3), min_size=num_microbatches, max_size=num_microbatches)
    )
    program = build_program(
        stages,
        devices=homes,
        num_microbatches=num_microbatches,
        schedule=schedule,
        shares=shares,
        order_pace=data.draw(ORDER_PACES),
    )
    x = torch.randn(sum(sizes), 3, dtype=torch.float64, requires_grad=True)

    boundary = run_on_threads(program, toy, x, sizes, num_backwards=num_backwards)
    gradients = {name: weight.grad for name, weight in toy.weights.items()}
    x_gradient = x.grad
    for weight in toy.weights.values():
        weight.grad = None
    x.grad = None
    loss = comparing_loss(toy.output(x)) if num_backwards else toy.loss(x)
    loss.backward()

    torch.testing.assert_close(sum(boundary.losses), loss.item(), rtol=1e-12, atol=1e-12)
    expected = x.grad * max(1, num_backwards)  # nothing clears it in between
    torch.testing.assert_close(x_gradient, expected, rtol=1e-10, atol=1e-12)
    for name, weight in toy.weights.items():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-10, atol=1e-12)


@given(
    stages=stage_graphs(),
    data=st.data(),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    num_microbatches=st.sampled_from([6, 12, 24]),
)
def test_programs_with_replicas_complete(stages, data, schedule, num_microbatches):
    """No deadlock, every unit once forward and once backward, in flight as the plan counts."""
    homes, shares = [], []
    for _ in range(stages.num_stages):
        multiple = data.draw(st.sampled_from([1, 2, 6, 6]))
        home = data.draw(st.permutations(range(6)))
        count = data.draw(st.integers(1, multiple))
        homes.append(tuple(home[:count]))
        shares.append(data.draw(divisions(multiple, count)))
    stages, homes, shares = placed(ToyStages(stages), homes, shares)
    multiples = list(map(sum, shares))
    program = build_program(
        stages,
        devices=homes,
        num_microbatches=num_microbatches,
        schedule=schedule,
        shares=shares,
        order_pace=data.draw(ORDER_PACES),
    )
    in_flight = in_flight_microbatches(stages, num_microbatches, multiples)
    for stage in range(program.num_stages):
        assert program.replica(stage).count == len(homes[program.replica(stage).stage])
        if schedule == "1f1b":
            assert most_held(program, stage) <= in_flight[program.replica(stage).stage]
    for stage, home in enumerate(homes):
        units = sorted(
            unit
            for action in compute_actions(program)
            if program.replica(action.stage).stage == stage and action.kind is Kind.FORWARD
            for unit in program.units(action.stage, action.microbatch)
        )
        assert units == list(range(num_microbatches)), (stage, home)
    for pair, parts in program.parts.items():
        for part in parts:
            carried = set(range(part.start, part.stop))
            assert carried == (
                set(program.units(pair[0], part.source_microbatch))
                & set(program.units(pair[1], part.target_microbatch))
            )


@given(stages=stage_graphs(), num_microbatches=st.integers(1, 9))
def test_in_flight_follows_depth(stages, num_microbatches):
    program = build_program(
        stages, devices=range(stages.num_stages), num_microbatches=num_microbatches
    )
    for stage, depth in stages.depths.items():
        assert most_held(program, stage) == min(depth, num_microbatches)
    assert dry_run(program).step_s >= 3 * num_microbatches


def most_held(program: Program, stage: int) -> int:
    """Micro-batches between forward and backward at the peak."""
    actions = program.actions[program.device(stage)]
    own = [a for a in actions if a.kind.is_compute and a.stage == stage]
    return max(accumulate(1 if a.kind is Kind.FORWARD else -1 for a in own))
