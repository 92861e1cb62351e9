"""Refits of simulated steps: a plan by hand, other plans, files, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.graphs import literal_graph, profile_of
from helpers.refits import STEP

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.planner import Plan, PlanRequest, Stage, make_plan, plan_graph, plan_request
from lightning_gpp.schedule import Program
from lightning_gpp.simulate import ProgramCosts, SpanKind, StepCosts, Timeline, simulate
from lightning_gpp.simulate.plan_costs import program_costs
from lightning_gpp.simulate.refit.from_timelines import refit, refit_windows
from lightning_gpp.simulate.refit.refit import Refit
from lightning_gpp.simulate.timeline.predicted import predicted_timeline
from lightning_gpp.simulate.timeline.windows import pace_s, windows_of

#   a ─▶ b ─▶ c ─▶ d
CHAIN = literal_graph({"a": "x", "b": "a", "c": "b", "d": "c"})
LINK = Link(bandwidth_bytes_per_s=1e6, latency_s=2e-4)
HALVES = Plan((Stage(0, ("a", "b"), (0,)), Stage(1, ("c", "d"), (1,))), num_microbatches=8)
PAIR = Plan(
    (
        Stage(0, ("a", "b", "c"), (0, 1), microbatch_multiple=2),
        Stage(1, ("d",), (2,), microbatch_multiple=2),
    ),
    num_microbatches=8,
)


def request(costs: Profile | Costs | None = None, num_devices: int = 2) -> PlanRequest:
    return plan_request(
        CHAIN,
        uniform_cluster(num_devices, LINK),
        costs=costs or profile_of(CHAIN, {"a": 1e-3, "b": 1e-3, "c": 1e-3, "d": 1e-3}),
        minibatch_size=32,
    )


def program(plan: Plan, asked: PlanRequest) -> Program:
    return plan_graph(plan, CHAIN).program(plan.num_microbatches or 1, schedule=asked.schedule)


TRUE = profile_of(CHAIN, {"a": 5e-3, "b": 1e-3, "c": 1e-3, "d": 1e-3})
"""The first operator is five times slower than the profile says."""


def recorded(plan: Plan, asked: PlanRequest, step: StepCosts) -> tuple[Timeline, ProgramCosts]:
    """A step with the true costs, and these."""
    costs = program_costs(plan, replace(asked, costs=Costs((TRUE,))), step=step)
    return predicted_timeline(simulate(program(plan, asked), costs)), costs


def full_step(plan: Plan) -> StepCosts:
    devices = range(plan.num_devices)
    return replace(
        STEP,
        optimizer_s={device: 1e-3 + device * 1e-4 for device in devices},
        finish_s=dict.fromkeys(devices, 5e-4),
    )


@pytest.mark.parametrize("plan", [HALVES, PAIR])
def test_the_refitted_prediction_is_the_recorded_step(plan: Plan) -> None:
    asked = request(num_devices=plan.num_devices)
    step = full_step(plan)
    timeline, _ = recorded(plan, asked, step)
    found = refit([timeline], program(plan, asked), plan, asked)
    costs = program_costs(plan, found.request(asked), step=found.step_costs(plan))
    again = simulate(program(plan, asked), costs).step_s
    assert again == pytest.approx(timeline.step_s, rel=2e-3)
    before_s = simulate(program(plan, asked), program_costs(plan, asked)).step_s
    assert abs(before_s / timeline.step_s - 1) > 0.2


def test_windows_that_overlap_are_refitted_to_what_made_them() -> None:
    """A gap between actions, unequal optimizers, the user's step in forwards."""
    plan = replace(HALVES, num_microbatches=1)
    asked = replace(request(), max_replicas=1).scheduled("1f1b-async")
    whole = plan_graph(plan, CHAIN).program(12, schedule=asked.schedule)
    step = replace(STEP, data_s=0.0, prepare_s=0.0, optimizer_s={0: 3e-3, 1: 1e-3})
    true = replace(asked, costs=Costs((TRUE,)))

    def windows(asked: PlanRequest, step: StepCosts) -> Timeline:
        costs = program_costs(plan, asked, step=step)
        return windows_of(predicted_timeline(simulate(whole, costs)), whole, range(4, 9))

    timeline = windows(true, step)
    found = refit_windows([replace(timeline, step=4)], whole, plan, asked)
    assert (found.schedule, found.num_microbatches, found.minibatch_size) == ("1f1b-async", 1, 32)
    assert found.steps == (4,) and found.step_s == pytest.approx(pace_s(timeline))
    assert (found.feed_s, found.loss_s) == pytest.approx((step.feed_s, step.loss_s))
    assert found.action_s == pytest.approx(step.action_s)
    for device in found.devices:
        between_s = step.optimizer_s[device.device] + step.action_s
        assert device.optimizer_s == pytest.approx(between_s, abs=1.1 * step.action_s)
    found = Refit.from_json(found.to_json())
    again = windows(found.request(asked), found.step_costs(plan))
    assert again.step_s == pytest.approx(timeline.step_s, rel=5e-3)
    for one, other in zip(again.spans, timeline.spans, strict=True):
        if one.kind in (SpanKind.FORWARD, SpanKind.BACKWARD):
            assert one.duration_s == pytest.approx(other.duration_s)
    assert abs(windows(asked, step).step_s / timeline.step_s - 1) > 0.2


def test_the_median_step_counts_and_warming_up_does_not() -> None:
    asked = request()
    good, _ = recorded(HALVES, asked, StepCosts())
    slow_costs = replace(asked, costs=Costs((profile_of(CHAIN, 1.0),)))
    slow, _ = recorded_with(slow_costs)
    steps = [replace(t, step=i) for i, t in enumerate([slow, slow, good, good, slow])]
    found = refit(steps, program(HALVES, asked), HALVES, asked)
    assert found.steps == (2, 3, 4)
    assert found.step_s == good.step_s
    assert found.stages[0].forward_s == pytest.approx(6e-3)
    with pytest.raises(ValueError, match="needs a recorded step from step 2 on"):
        refit(steps[:2], program(HALVES, asked), HALVES, asked)


def recorded_with(asked: PlanRequest) -> tuple[Timeline, ProgramCosts]:
    costs = program_costs(HALVES, asked)
    return predicted_timeline(simulate(program(HALVES, asked), costs)), costs


def test_a_timeline_of_another_program_is_refused_by_name() -> None:
    asked = request()
    timeline, _ = recorded(HALVES, asked, StepCosts())
    gpipe = replace(asked, schedule="gpipe")
    with pytest.raises(
        ValueError,
        match="another program: device 0 ran other actions; take the plan",
    ):
        refit([timeline], program(HALVES, gpipe), HALVES, gpipe)
    three = request(num_devices=3)
    with pytest.raises(ValueError, match="another program: it has 2 stages"):
        refit([timeline], program(PAIR, three), PAIR, three)


def test_costs_of_another_model_are_refused() -> None:
    asked = request()
    timeline, _ = recorded(HALVES, asked, StepCosts())
    found = refit([timeline], program(HALVES, asked), HALVES, asked)
    other = Costs((Profile({"z": OpProfile(1.0)}, 4),))
    with pytest.raises(ValueError, match="of another model: the costs know nothing of a, b, c"):
        found.request(replace(asked, graph=literal_graph({"z": "x"}), costs=other))


def test_a_slow_stage_changes_the_next_plan() -> None:
    asked = request()
    before = planned(asked)
    assert before.stages[0].operators == ("a", "b")
    timeline, _ = recorded(HALVES, asked, StepCosts())
    better = refit([timeline], program(HALVES, asked), HALVES, asked).request(asked)
    # a and b were recorded as one stage: both are 3 times slower than in the profile
    assert better.costs.profiles[0].operators["b"].forward_s == pytest.approx(3e-3)
    assert planned(better).stages[0].operators == ("a",)


def planned(asked: PlanRequest) -> Plan:
    return make_plan(CHAIN, asked.cluster, costs=asked.costs, minibatch_size=32, planner="balanced")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_users_step_is_read_off_where_it_runs_once(schedule: str) -> None:
    asked = replace(request(), schedule=schedule)
    timeline, _ = recorded(HALVES, asked, full_step(HALVES))
    found = refit([timeline], program(HALVES, asked), HALVES, asked)
    assert found.turn_s == pytest.approx(STEP.turn_s if schedule == "gpipe" else 0.0)
    assert found.action_s == pytest.approx(STEP.action_s)
    assert found.prepare_s == pytest.approx(STEP.prepare_s)
    assert [device.finish_s for device in found.devices] == pytest.approx([5e-4, 5e-4])
    costs = program_costs(HALVES, found.request(asked), step=found.step_costs(HALVES))
    again = simulate(program(HALVES, asked), costs).step_s
    assert again == pytest.approx(timeline.step_s, rel=2e-3)
