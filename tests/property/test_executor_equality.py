"""Programs of random stage graphs give the losses and gradients of one device."""

from __future__ import annotations

import torch
from helpers.stage_dags import ToyStages, run_on_threads, stage_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.schedule import SCHEDULES, Program, build_program, dry_run


@given(
    stages=stage_graphs(),
    data=st.data(),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    num_microbatches=st.sampled_from([1, 2, 4, 8]),
)
@settings(deadline=None)
def test_program_trains_like_one_device(stages, data, schedule, num_microbatches):
    multiples = data.draw(
        st.lists(
            st.sampled_from([m for m in (1, 2, 4) if num_microbatches % m == 0]),
            min_size=stages.num_stages,
            max_size=stages.num_stages,
        )
    )
    devices = data.draw(
        st.lists(st.integers(0, 3), min_size=stages.num_stages, max_size=stages.num_stages)
    )
    sizes = data.draw(
        st.lists(st.integers(1, 3), min_size=num_microbatches, max_size=num_microbatches)
    )
    program = build_program(
        stages,
        devices=devices,
        num_microbatches=num_microbatches,
        schedule=schedule,
        multiples=multiples,
    )
    assert Program.from_json(program.to_json()) == program
    toy = ToyStages(stages)
    x = torch.randn(sum(sizes), 3, dtype=torch.float64, requires_grad=True)

    boundary = run_on_threads(program, toy, x, sizes)
    gradients = [weight.grad for weight in toy.weights]
    x_gradient = x.grad
    for weight in toy.weights:
        weight.grad = None
    x.grad = None
    loss = toy.loss(x)
    loss.backward()

    torch.testing.assert_close(sum(boundary.losses), loss.item(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x_gradient, x.grad, rtol=1e-10, atol=1e-12)
    for weight, gradient in zip(toy.weights, gradients, strict=True):
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-10, atol=1e-12)


@given(stages=stage_graphs(), num_microbatches=st.integers(1, 9))
@settings(deadline=None)
def test_in_flight_follows_depth(stages, num_microbatches):
    program = build_program(
        stages, devices=range(stages.num_stages), num_microbatches=num_microbatches
    )
    seen = dry_run(program)
    for stage, depth in stages.depths.items():
        assert seen.in_flight[stage] == min(depth, num_microbatches)
    assert seen.step_s >= max(seen.busy_s)
