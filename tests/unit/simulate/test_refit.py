"""Refits of simulated steps: a plan by hand, other plans, files, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from helpers.graphs import literal_graph, profile_of
from helpers.refits import STEP

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.planner import (
    Plan,
    PlanRequest,
    Stage,
    answer,
    make_plan,
    plan_graph,
    plan_request,
)
from lightning_gpp.schedule import Program
from lightning_gpp.simulate import ProgramCosts, StepCosts, Timeline, simulate
from lightning_gpp.simulate.plan_costs import program_costs
from lightning_gpp.simulate.recorded import check_program, refit
from lightning_gpp.simulate.refit import FORMAT, Refit
from lightning_gpp.simulate.slow_devices import SlowDevice
from lightning_gpp.simulate.timeline.predicted import predicted_timeline

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
    found = FORMAT.loads(Refit, FORMAT.dumps(refit([timeline], program(plan, asked), plan, asked)))
    costs = program_costs(plan, found.request(asked), step=found.step_costs(plan))
    again = simulate(program(plan, asked), costs).step_s
    assert again == pytest.approx(timeline.step_s, rel=2e-3)
    before_s = simulate(program(plan, asked), program_costs(plan, asked)).step_s
    assert abs(before_s / timeline.step_s - 1) > 0.2


def test_the_median_step_counts() -> None:
    asked = request()
    good, _ = recorded(HALVES, asked, StepCosts())
    slow_costs = replace(asked, costs=Costs((profile_of(CHAIN, 1.0),)))
    slow, _ = recorded_with(slow_costs)
    steps = [replace(t, step=i) for i, t in enumerate([slow, slow, good, good, slow])]
    found = refit(steps[2:], program(HALVES, asked), HALVES, asked)
    assert found.steps == (2, 3, 4)
    assert found.step_s == good.step_s
    assert found.stages[0].forward_s == pytest.approx(6e-3)


def recorded_with(asked: PlanRequest) -> tuple[Timeline, ProgramCosts]:
    costs = program_costs(HALVES, asked)
    return predicted_timeline(simulate(program(HALVES, asked), costs)), costs


EIGHT = literal_graph(dict(zip("abcdefgh", ["x", *"abcdefg"])))


def in_four(pairs: tuple[int, ...]) -> Plan:
    """Two operators on each device, or replicas of all of them."""
    if not pairs:
        return Plan((Stage(0, tuple("abcdefgh"), (0, 1, 2, 3), 4),), num_microbatches=8)
    names = ["ab", "cd", "ef", "gh"]
    stages = (Stage(i, tuple(n), (pairs[i],)) for i, n in enumerate(names))
    return Plan(tuple(stages), num_microbatches=8)


IN_FOUR = plan_request(
    EIGHT, uniform_cluster(4, Link(1e9)), costs=profile_of(EIGHT, 1e-3), minibatch_size=32,
    num_microbatches=8,
)  # fmt: skip


def steps_on_a_slow_device(
    plan: Plan, times: Mapping[int, float]
) -> tuple[list[Timeline], Program]:
    """Steps in which device 2 takes so many times as long; two operators always do 1.2 times."""
    true = profile_of(EIGHT, dict.fromkeys("abcdefgh", 1e-3) | {"c": 1.2e-3, "d": 1.2e-3})
    ran, asked = plan_graph(plan, EIGHT).program(8, schedule=IN_FOUR.schedule), IN_FOUR

    def step(number: int, times: float) -> Timeline:
        slow = (SlowDevice(2, "cpu", times),) if times > 1 else ()
        known = Refit((), 0.0, (), StepCosts(), slow=slow)
        costs = program_costs(plan, known.request(replace(asked, costs=Costs((true,))), range(4)))
        return replace(predicted_timeline(simulate(ran, costs)), step=number)

    return [step(*each) for each in times.items()], ran


@pytest.mark.parametrize("devices", [(1, 2, 3, 0), ()])
def test_a_device_that_gets_slower_is_found_and_gets_less(devices: tuple[int, ...]) -> None:
    """Device 2 in steps from 9 on; the profile is wrong about two operators all the time."""
    plan, asked, ranks = in_four(devices), IN_FOUR, range(4)
    times = {3: 1.0, 6: 1.1, 9: 1.6, 12: 1.7, 15: 1.6}
    timelines, ran = steps_on_a_slow_device(plan, times)
    found = FORMAT.loads(Refit, FORMAT.dumps(refit(timelines, ran, plan, asked)))
    (one,) = found.slow
    assert (one.rank, one.since, found.steps) == (2, 9, (9, 12, 15))
    assert one.times == pytest.approx(1.6, rel=0.06)
    assert "rank 2 (cpu) is 1.5" in found.describe() and "since step 9" in found.describe()
    predicted = program_costs(plan, found.request(asked, ranks), step=found.step_costs(plan))
    assert simulate(ran, predicted).step_s == pytest.approx(found.step_s, rel=0.05)
    # rank 2 is device 1 of the question, as rank 0 is its last one
    again = found.request(asked)
    assert [device.kind for device in again.cluster.devices] == ["cpu", one.own_kind, "cpu", "cpu"]
    plan_again = answer(again, "graphpipe_exclusive")
    shares = {d: len(s.operators) for s in plan_again.stages for d in s.devices}
    assert shares[1] <= min(shares.values())
    assert not refit(timelines[:2], ran, plan, asked).slow  # neither noise nor the profile is it
    is_sure = not devices  # replicas do the same: no earlier step is needed
    assert bool(refit(timelines[2:], ran, plan, asked).slow) == is_sure


@pytest.mark.parametrize(
    ("times", "since"),
    [
        ((1.0, 3.0, 1.1, 1.0, 2.1, 2.0, 1.0, 2.2), 4),
        ((1.0, 1.1, 1.0, 1.2, 1.1, 1.0, 1.1, 3.0, 1.0, 1.2, 2.4, 2.5), 10),
        ((1.0, 3.0, 1.1, 1.0, 1.1, 2.9, 1.0, 1.2), None),
        ((1.0,) * 4 + (2.0,) * 20, 4),
        ((1.0,) * 20 + (2.0,) * 4, 20),
    ],
)
def test_steps_that_something_else_disturbs_do_not_count(
    times: tuple[float, ...], since: int | None
) -> None:
    """Other processes of a host slow a device down in some steps, and its neighbours in others."""
    plan = in_four((1, 2, 3, 0))
    timelines, ran = steps_on_a_slow_device(plan, dict(enumerate(times)))
    found = [each.since for each in refit(timelines, ran, plan, IN_FOUR).slow if each.rank == 2]
    assert found == ([] if since is None else [since])


def test_a_record_with_other_actions_is_refused() -> None:
    asked = request()
    timeline, _ = recorded(HALVES, asked, StepCosts())
    check_program(timeline, program(HALVES, asked))
    with pytest.raises(ValueError, match="its record is incomplete on device 0"):
        check_program(timeline, program(HALVES, replace(asked, schedule="gpipe")))


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
    assert found.besides.turn_s == pytest.approx(STEP.turn_s if schedule == "gpipe" else 0.0)
    assert found.besides.action_s == pytest.approx(STEP.action_s)
    assert found.besides.prepare_s == pytest.approx(STEP.prepare_s)
    assert found.finish_s == pytest.approx((5e-4, 5e-4))
    costs = program_costs(HALVES, found.request(asked), step=found.step_costs(HALVES))
    again = simulate(program(HALVES, asked), costs).step_s
    assert again == pytest.approx(timeline.step_s, rel=2e-3)
