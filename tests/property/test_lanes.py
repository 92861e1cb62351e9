"""Of replicas that do the same, only later than one another, the last one stands for all."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
from helpers.graphs import model_graphs, profiles
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_gpp.cluster import ClusterLayout, HostGroup, Link
from lightning_gpp.cost import Costs
from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.graph import StageEdge
from lightning_gpp.planner import Plan, Stage, evaluate_plan, plan_request
from lightning_gpp.planner.plan.plan_graph import validate_plan
from lightning_gpp.planner.step_time import pipeline_run
from lightning_gpp.planner.step_time.lanes import Flow, stand_ins
from lightning_gpp.schedule import SCHEDULES
from lightning_gpp.schedule.numbering import Share, messages
from lightning_gpp.simulate import simulate_plan

GROUPS = [(0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3, 4, 5, 6, 7), (3, 2, 1, 0), (0, 1), (6,)]
TWO_HOSTS = ClusterLayout((HostGroup("any", 4),), Link(1e9, 1e-5), Link(1e7, 1e-4)).cluster(8)


def test_replicas_beside_the_loss_are_not_like_the_others() -> None:
    there, back = messages(Share((1,) * 4, 2), Share((1,) * 4, 2))
    to_loss, from_loss = messages(Share((1,) * 4, 2), Share((4,), 2))
    flows = [
        Flow(StageEdge(0, 1, ("a",)), there, 0, 1),
        Flow(StageEdge(0, 1, ("a",)), back, 1, 0, is_gradient=True),
        Flow(StageEdge(1, 2, ("b",)), to_loss, 1, 2),
        Flow(StageEdge(1, 2, ("b",)), from_loss, 2, 1, is_gradient=True),
    ]
    homes = [(0, 1, 2, 3), (4, 5, 6, 7), (4,)]
    kinds = [["any"] * len(home) for home in homes]
    found = stand_ins(homes, kinds, flows, lambda sender, receiver: sender == receiver)
    assert found == [[0, 3, 3, 3], [0, 3, 3, 3], [0]]


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@given(st.data())
def test_a_step_takes_as_long_as_with_all_replicas(schedule: str, data: st.DataObject) -> None:
    graph = data.draw(model_graphs(min_operators=3))
    costs = Costs((replace(data.draw(profiles(graph)), device="any"),))
    request = plan_request(graph, TWO_HOSTS, minibatch_size=32, costs=costs, schedule=schedule)
    names = [operator.name for operator in graph]
    cuts = data.draw(st.sets(st.integers(1, len(names) - 1), max_size=3))
    borders = [0, *sorted(cuts), len(names)]
    stages = tuple(
        Stage(
            number,
            tuple(names[start:stop]),
            data.draw(st.sampled_from(GROUPS)),
            data.draw(st.sampled_from([8, 8, 16])),
        )
        for number, (start, stop) in enumerate(zip(borders, borders[1:]))
    )
    plan = Plan(stages, num_microbatches=32)
    try:
        validate_plan(plan, graph, request.num_devices)
    except ValueError:  # the model cannot be cut so
        assume(False)
    with patch.object(pipeline_run, "FEW_ITEMS", 0):
        found = evaluate_plan(plan, request)
    assert found.step_s == pytest.approx(simulate_plan(plan, request).step_s, rel=ROUNDING)
