"""Random plans of random model graphs, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner import Plan, Stage, validate_plan


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
    )


def is_valid(plan: Plan, graph: ModelGraph) -> bool:
    """Whether a plan can run a model."""
    try:
        validate_plan(plan, graph, plan.num_devices)
    except ValueError:
        return False
    return True
