"""The evaluation of plans: the same step as the dry run of the program, on any stage graph."""

from __future__ import annotations

import pytest
from helpers.graphs import literal_graph, model_graphs, profile_of
from helpers.orders import most_in_flight
from helpers.plan_cases import questions, without_feed_gradients
from helpers.stage_dags import stage_graphs
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.planner import Plan, Stage, plan_request
from lightning_gpp.planner.plan.plan_graph import plan_graph
from lightning_gpp.planner.request_tables import edge_bytes
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_below, evaluate_plan
from lightning_gpp.schedule import SCHEDULES, Action, Kind, build_program, dry_run


@given(st.data(), st.sampled_from(sorted(SCHEDULES)), st.booleans())
def test_the_step_is_that_of_the_program(data, schedule, is_chain):
    graph = without_feed_gradients(data.draw(model_graphs(with_state=False)))
    plan, request = data.draw(questions(graph, schedule, is_chain=is_chain))
    found = evaluate_plan(plan, request)
    assume(not plan_graph(plan, graph).stages.shared_parameters)  # a dry run does not sum
    assert found.step_s == pytest.approx(dry_run_s(found, plan, request), rel=1e-9)
    assert found.step_s >= request.minibatch_size * found.seconds_per_sample * (1 - 1e-9)


@given(st.data(), st.floats(0.5, 1.5))
def test_evaluating_below_a_step_gives_the_same_or_nothing(data, fraction):
    graph = without_feed_gradients(data.draw(model_graphs(with_state=False)))
    plan, request = data.draw(questions(graph, "1f1b", is_chain=False))
    found = evaluate_plan(plan, request)
    limit_s = fraction * found.step_s
    expected = found if found.step_s <= limit_s else None
    assert evaluate_below(plan, request, limit_s) == expected
    assert evaluate_below(plan, request, found.step_s) == found


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_the_first_of_many_micro_batches_tell_how_long_all_take(schedule):
    graph = literal_graph(dict(zip("abcd", "xabc")))
    stages = tuple(Stage(at, (name,), (at,)) for at, name in enumerate("abcd"))
    plan = Plan(stages, num_microbatches=1024)
    options = {"minibatch_size": 1024, "costs": profile_of(graph), "schedule": schedule}
    request = plan_request(graph, uniform_cluster(4, Link(1e9)), **options)
    rough = evaluate_below(plan, request, 1e9, is_rough=True)
    played = sum(len(frame.missing) for frame in request.tables.frames.values())
    assert played < 0.1 * 2 * 4 * 1024
    assert rough.step_s == pytest.approx(evaluate_plan(plan, request).step_s, rel=1e-3)
    assert evaluate_below(plan, request, 0.5 * rough.step_s, is_rough=True) is None


@given(stage_graphs(), st.data(), st.sampled_from(sorted(SCHEDULES)))
def test_the_peak_is_that_of_the_steps(stages, data, schedule):
    multiples = [data.draw(st.sampled_from([1, 2, 4])) for _ in range(stages.num_stages)]
    arguments = stages, data.draw(st.sampled_from([4, 8, 16])), multiples
    steps = SCHEDULES[schedule].steps(*arguments)
    expected = {stage: most_in_flight(order) for stage, order in steps.items()}
    assert SCHEDULES[schedule].peak_in_flight(*arguments) == expected


def dry_run_s(found: PlanEvaluation, plan: Plan, request) -> float:
    """The step by the program, with the durations of the evaluation."""
    pipeline = plan_graph(plan, request.graph)
    edges = {(edge.source, edge.target): edge for edge in pipeline.stages.edges}
    program = build_program(
        pipeline.stages,
        devices=[devices[0] for devices in pipeline.devices],
        num_microbatches=plan.num_microbatches,
        schedule=request.schedule,
        shares=[(size,) for size in pipeline.multiples],
    )

    def message_s(action: Action) -> float:
        sender, receiver, is_gradient, _ = action.message
        ends = program.device(sender), program.device(receiver)
        if ends[0] == ends[1]:
            return 0.0
        edge = edges[(receiver, sender) if is_gradient else (sender, receiver)]
        sizes = edge_bytes(request.graph, edge.values, has_backward=edge.has_backward)
        samples = program.num_units(action) * request.minibatch_size / plan.num_microbatches
        size_bytes = (sizes.backward if is_gradient else sizes.forward)(samples)
        return request.cluster.link(*ends).transfer_s(size_bytes)

    def action_s(action: Action) -> float:
        if action.kind.is_send:
            return message_s(action)
        if not action.kind.is_compute or action.stage < 0:
            return 0.0
        stage = found.stages[action.stage]
        return stage.forward_s if action.kind is Kind.FORWARD else stage.backward_s

    return dry_run(program, action_s).step_s


#   a ──▶ b      1 s forward and 2 s backward each, for 4 samples
CHAIN = literal_graph({"a": "x", "b": "a"})


def chain_request(**options):
    arguments = {"minibatch_size": 16, "costs": profile_of(CHAIN, 1.0)} | options
    cluster = arguments.pop("cluster", uniform_cluster(4, Link(1e30)))
    return plan_request(CHAIN, cluster, **arguments)


def test_a_balanced_chain_by_hand():
    plan = Plan((Stage(0, ("a",), (0,)), Stage(1, ("b",), (1,))), num_microbatches=4)
    found = evaluate_plan(plan, chain_request())
    assert found.step_s == pytest.approx((4 + 1) * 3.0)  # (micro-batches + stages - 1) times F + B
    assert found.seconds_per_sample == pytest.approx(3.0 / 4)
    assert [stage.in_flight for stage in found.stages] == [2, 1]
    assert [stage.memory.activation_bytes for stage in found.stages] == [200, 100]
    # 1000 bytes of parameters, gradients, and two values of Adam
    assert found.stages[0].memory.total_bytes == 4000 + 200
    assert (found.depth, found.is_feasible, found.throughput) == (2, True, pytest.approx(16 / 15))


def test_replicas_share_a_micro_batch_and_sum_their_gradients():
    plan = Plan((Stage(0, ("a", "b"), (0, 1), microbatch_multiple=2),), num_microbatches=8)
    slow = uniform_cluster(2, Link(1000.0))
    found = evaluate_plan(plan, chain_request(cluster=slow, optimizer_values=0))
    (stage,) = found.stages
    assert (stage.microbatch_size, stage.forward_s, stage.backward_s) == (4.0, 1.0, 2.0)
    assert stage.reduce_s == pytest.approx(2 * (1000 / 1000.0))  # two rounds of half of 2000 bytes
    assert stage.in_flight == 2  # the outputs of both come together for the loss
    assert found.step_s >= 4 * 3.0 + stage.reduce_s
