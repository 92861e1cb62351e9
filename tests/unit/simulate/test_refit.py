"""Refits of simulated steps: a plan by hand, other plans, files, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.graphs import literal_graph, profile_of
from helpers.refits import STEP
from omegaconf import OmegaConf

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.graph import graph_to_json
from lightning_gpp.jobs.problem.problem_of import problem_of
from lightning_gpp.jobs.simulate import with_recorded
from lightning_gpp.planner import Plan, PlanRequest, Stage, make_plan, plan_graph, plan_request
from lightning_gpp.schedule import Program
from lightning_gpp.simulate import ProgramCosts, Span, SpanKind, StepCosts, Timeline, simulate
from lightning_gpp.simulate.plan_costs import program_costs
from lightning_gpp.simulate.program_costs import Overhead
from lightning_gpp.simulate.refit.fit import fit_link
from lightning_gpp.simulate.refit.from_timelines import refit, refit_windows
from lightning_gpp.simulate.refit.recorded import Message
from lightning_gpp.simulate.refit.refit import Refit, load_refit
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
    costs = program_costs(plan, found.request(asked), step=found.step_costs(plan, CHAIN))
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
    again = windows(found.request(asked), found.step_costs(plan, CHAIN))
    assert again.step_s == pytest.approx(timeline.step_s, rel=5e-3)
    for one, other in zip(again.spans, timeline.spans, strict=True):
        if one.kind in (SpanKind.FORWARD, SpanKind.BACKWARD):
            assert one.duration_s == pytest.approx(other.duration_s)
    assert abs(windows(asked, step).step_s / timeline.step_s - 1) > 0.2


def test_links_and_overheads_are_read_off_messages() -> None:
    asked = request()
    step = replace(STEP, send=Overhead(5e-5, 1e-7), receive=Overhead(2e-5))
    timeline, _ = recorded(HALVES, asked, step)
    wrong = replace(asked, cluster=uniform_cluster(2, Link(LINK.bandwidth_bytes_per_s, 5e-3)))
    found = refit([timeline], program(HALVES, asked), HALVES, wrong)
    assert found.receive.fixed_s == pytest.approx(2e-5)
    (link,) = found.links.values()
    size_bytes = 4 * 16 * 4
    assert link.transfer_s(size_bytes) == pytest.approx(LINK.transfer_s(size_bytes))
    assert found.send.seconds(size_bytes) == pytest.approx(step.send.seconds(size_bytes))
    assert found.cluster(wrong.cluster).host_link == link


@pytest.mark.parametrize("bytes_per_s", [1e3, 1e4, 1e30])
def test_messages_that_queue_do_not_count_as_receiving(bytes_per_s: float) -> None:
    link = Link(bytes_per_s, 2e-4)
    asked = replace(request(), cluster=uniform_cluster(2, link))
    timeline, _ = recorded(HALVES, asked, StepCosts())
    found = refit([timeline], program(HALVES, asked), HALVES, asked)
    assert found.receive == Overhead()
    assert found.links["host"].transfer_s(256) == pytest.approx(link.transfer_s(256))


@pytest.mark.parametrize("seconds", [1.0, 1.0 - 1e-12, 0.5])
def test_messages_of_one_size_are_never_free_of_bytes(seconds: float) -> None:
    """Where latency came out a little below 0, larger messages took no longer."""
    messages = [Message(0, 1, 1e3, send_s=0.0, sent_s=0.0, asked_s=0.0, received_s=seconds)]
    found = fit_link([messages], Overhead(), Link(1e3), {(0, 1)})
    assert found is not None and found.transfer_s(2e3) == pytest.approx(2 * seconds)


def test_a_link_that_nothing_limits_is_fitted_to_one() -> None:
    """A rounded bandwidth of a little more than any link may have was refused."""
    messages = [
        Message(0, 1, size_bytes, send_s=0.0, sent_s=0.0, asked_s=0.0, received_s=seconds)
        for size_bytes, seconds in ((1e3, 0.999e-27), (2e3, 1.999e-27))
    ]
    apart = [[message] for message in messages]
    found = fit_link(apart, Overhead(), Link(1e30), {(0, 1)})
    assert found is not None and found.bandwidth_bytes_per_s == pytest.approx(1e30)


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
        match="action 6 of device 0 was 0RB0<1, in the program it is",
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


def test_the_optimizer_of_another_plan_goes_by_what_devices_hold() -> None:
    asked = request()
    timeline, _ = recorded(
        HALVES, asked, replace(full_step(HALVES), optimizer_s={0: 2e-3, 1: 2e-3})
    )
    found = refit([timeline], program(HALVES, asked), HALVES, asked)
    other = Plan((Stage(0, ("a",), (0,)), Stage(1, ("b", "c", "d"), (1,))), num_microbatches=8)
    step = found.step_costs(other, CHAIN)
    assert step.optimizer_s == pytest.approx({0: 1e-3, 1: 3e-3})


def test_files_say_what_is_wrong_with_them(tmp_path: Path) -> None:
    asked = request()
    timeline, _ = recorded(HALVES, asked, full_step(HALVES))
    found = refit([timeline], program(HALVES, asked), HALVES, asked)
    assert Refit.from_json(found.to_json()) == found
    path = tmp_path / "refit.json"
    path.write_text(found.to_json())
    assert load_refit(path) == found
    path.write_text(found.to_json().replace('"data_s"', '"data_ms"'))
    with pytest.raises(ValueError, match=r"refit\.json: unknown key 'data_ms'"):
        load_refit(path)


def test_a_planning_job_takes_a_refit_for_its_costs(tmp_path: Path) -> None:
    asked = request()
    timeline, _ = recorded(HALVES, asked, full_step(HALVES))
    found = refit([timeline], program(HALVES, asked), HALVES, asked)
    (tmp_path / "refit.json").write_text(found.to_json())
    (tmp_path / "graph.json").write_text(graph_to_json(CHAIN))
    config = OmegaConf.create(
        {
            "graph": str(tmp_path / "graph.json"),
            "graph_options": None,
            "costs": str(tmp_path / "refit.json"),
            "cluster": {
                "_target_": "lightning_gpp.cluster.this_machine.cpu_cluster",
                "num_devices": 2,
            },
            "minibatch_size": 32,
            "num_microbatches": None,
            "schedule": "1f1b",
            "recompute": False,
        }
    )
    problem = problem_of(config, tmp_path)
    assert "refitted to steps as simulated recorded on cpu" in problem.describe(max_width=500)
    share = problem.request.profile(4, "cpu").operators
    assert share["a"].forward_s + share["b"].forward_s == pytest.approx(6e-3)
    (link,) = found.links.values()
    assert problem.request.cluster.host_link == link
    assert problem.refit == found  # job=simulate takes from it what a step costs besides


def test_what_is_given_of_a_step_counts_before_what_was_recorded() -> None:
    recorded = StepCosts(data_s=2.0, turn_s=3.0, optimizer_s={0: 1.0})
    found = with_recorded(StepCosts(data_s=1.0), recorded)
    assert found == replace(recorded, data_s=1.0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_users_step_is_read_off_where_it_runs_once(schedule: str) -> None:
    asked = replace(request(), schedule=schedule)
    timeline, _ = recorded(HALVES, asked, full_step(HALVES))
    found = refit([timeline], program(HALVES, asked), HALVES, asked)
    assert found.turn_s == pytest.approx(STEP.turn_s if schedule == "gpipe" else 0.0)
    assert found.action_s == pytest.approx(STEP.action_s)
    assert found.prepare_s == pytest.approx(STEP.prepare_s)
    assert [device.finish_s for device in found.devices] == pytest.approx([5e-4, 5e-4])
    costs = program_costs(HALVES, found.request(asked), step=found.step_costs(HALVES, CHAIN))
    again = simulate(program(HALVES, asked), costs).step_s
    assert again == pytest.approx(timeline.step_s, rel=2e-3)


def test_waits_of_other_ranks_for_the_users_step_are_no_gaps() -> None:
    """Recorded steps have them; simulated ones wait at the first receive of the second part."""
    asked = replace(request(), schedule="gpipe")
    timeline, _ = recorded(HALVES, asked, replace(full_step(HALVES), turn_s=4e-3))
    spans = list(timeline.spans)
    index, wait = next(
        (i, s) for i, s in enumerate(spans) if s.kind is SpanKind.WAIT and s.action == "0RB0<1"
    )
    middle_s = (wait.start_s + wait.end_s) / 2
    spans[index] = replace(wait, start_s=middle_s)
    spans.append(Span(wait.rank, SpanKind.WAIT, wait.start_s, middle_s))
    measured = replace(timeline, spans=tuple(spans), critical_path=())
    found = refit([measured], program(HALVES, asked), HALVES, asked)
    assert found.action_s == pytest.approx(STEP.action_s)
    assert found.turn_s == pytest.approx(4e-3)
