"""Random plans of random model graphs, for property tests."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st

from helpers.graphs import profiles
from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner import Plan, PlanRequest, Stage, plan_request, validate_plan

ORDER_PACES = st.sampled_from([None, 0.0, 0.25, 1.0])
SLOW = Link(bandwidth_bytes_per_s=1e8, latency_s=1e-4)


@st.composite
def plans(draw: st.DrawFn, graph: ModelGraph, *, is_chain: bool) -> Plan:
    """A topological order cut into stages, one device each, with micro-batch multiples."""
    names = [operator.name for operator in graph]
    num_stages = draw(st.integers(1, min(4, len(names))))
    borders = sorted(
        draw(
            st.lists(
                st.integers(1, max(1, len(names) - 1)),
                min_size=num_stages - 1,
                max_size=num_stages - 1,
                unique=True,
            )
        )
    )
    pieces = zip([0, *borders], [*borders, len(names)], strict=True)
    return Plan(
        tuple(
            Stage(i, tuple(names[a:b]), (i,), microbatch_multiple=draw(st.sampled_from([1, 2, 4])))
            for i, (a, b) in enumerate(pieces)
        ),
        num_microbatches=draw(st.sampled_from([4, 8])),
        is_chain=is_chain,
        order_pace=draw(ORDER_PACES),
    )


def is_valid(plan: Plan, graph: ModelGraph) -> bool:
    """Whether a plan can run a model."""
    try:
        validate_plan(plan, graph, plan.num_devices)
    except ValueError:
        return False
    return True


@st.composite
def questions(
    draw: st.DrawFn, graph: ModelGraph, schedule: str, *, is_chain: bool
) -> tuple[Plan, PlanRequest]:
    """A plan of a graph, and a question on slow links that it answers."""
    plan = draw(plans(graph, is_chain=is_chain))
    assume(is_valid(plan, graph))
    assert plan.num_microbatches is not None
    profile = draw(profiles(graph))
    request = plan_request(
        graph,
        uniform_cluster(plan.num_devices, SLOW, kind=profile.device),
        costs=profile,
        minibatch_size=4 * plan.num_microbatches,
        schedule=schedule,
    )
    return plan, request


def without_feed_gradients(graph: ModelGraph) -> ModelGraph:
    """Without gradients that go back to the feed, which the dry runs of tests do not time."""
    return replace(graph, inputs=tuple(replace(i, requires_grad=False) for i in graph.inputs))
