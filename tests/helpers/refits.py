"""Random plans with costs, to be simulated and refitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from helpers.graphs import MICROBATCH_SIZE, model_graphs
from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner import (
    Plan,
    PlanRequest,
    Stage,
    plan_graph,
    plan_request,
    validate_plan,
)
from lightning_gpp.schedule import SCHEDULES, Program
from lightning_gpp.simulate import StepCosts
from lightning_gpp.simulate.program_costs import Overhead

STEP = StepCosts(
    data_s=2e-3,
    prepare_s=1e-3,
    feed_s=3e-4,
    loss_s=2e-4,
    turn_s=4e-3,
    send=Overhead(5e-5, 1e-10),
    receive=Overhead(2e-5, 0.0),
    action_s=1e-5,
)
"""What a step costs besides, with everything in it."""

LINK = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-4)


@dataclass(frozen=True)
class Question:
    """A plan, what it was made from, and another profile of the same model."""

    plan: Plan
    request: PlanRequest
    program: Program
    other_profile: Profile


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """Stages that recompute or not, on devices of their own or shared, in both schedules."""
    graph = draw(model_graphs(with_state=False))
    plan = draw(_plans(graph))
    try:
        validate_plan(plan, graph, plan.num_devices)
    except ValueError:
        assume(False)
    request = plan_request(
        graph,
        uniform_cluster(plan.num_devices, LINK),
        costs=Costs((draw(_profiles(graph)),)),
        minibatch_size=MICROBATCH_SIZE * (plan.num_microbatches or 1),
        schedule=draw(st.sampled_from(sorted(SCHEDULES))),
    )
    placed = plan_graph(plan, graph)
    program = placed.program(plan.num_microbatches or 1, schedule=request.schedule)
    return Question(plan, request, program, draw(_profiles(graph)))


@st.composite
def _plans(draw: st.DrawFn, graph: ModelGraph) -> Plan:
    names = [operator.name for operator in graph]
    num_stages = draw(st.integers(1, min(4, len(names))))
    borders: list[Any] = sorted(
        draw(st.permutations(range(1, len(names))))[: num_stages - 1] if len(names) > 1 else []
    )
    pieces = zip([0, *borders], [*borders, len(names)], strict=True)
    devices = [*range(num_stages)]
    if num_stages > 1 and draw(st.booleans()):
        devices[-1] = 0  # two stages on one device
    return Plan(
        tuple(
            Stage(i, tuple(names[a:b]), (devices[i],), recompute=draw(st.booleans()))
            for i, (a, b) in enumerate(pieces)
        ),
        num_microbatches=draw(st.sampled_from([1, 4])),
    )


def _profiles(graph: ModelGraph) -> st.SearchStrategy[Profile]:
    seconds = st.sampled_from([0.0, 1e-5, 1e-4, 3e-4, 1e-3])
    operators = st.fixed_dictionaries(
        {o.name: st.builds(OpProfile, forward_s=seconds, backward_s=seconds) for o in graph}
    ).filter(lambda found: any(each.forward_s or each.backward_s for each in found.values()))
    return st.builds(Profile, operators=operators, microbatch_size=st.just(MICROBATCH_SIZE))
