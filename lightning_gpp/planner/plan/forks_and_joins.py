"""Which stage owns the operators at which branches part and meet, and what that spares."""

from __future__ import annotations

from lightning_gpp.common.checks import short_list
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner.plan.plan import Plan

MOST_LINES = 6
"""More of them are only counted."""

MOST_NAMES = 3


WHY = {
    "Join": (
        "of",
        "the branch that ends in it sends nothing",
        "it goes with what follows it, apart from all branches",
    ),
    "Fork": (
        "read by",
        "the branch that begins in it receives nothing",
        "it goes with what leads to it",
    ),
}
"""What stands before the other stages; why, where its own is among them and where it is not."""


def forks_and_joins(plan: Plan, graph: ModelGraph) -> list[str]:
    """A sentence for every stage that owns forks or joins between stages.

    A *join* reads from several stages (its own counts), a *fork* is read in several stages.
    """
    stage_of = {name: stage.id for stage in plan.stages for name in stage.operators}
    lines = []
    for stage in plan.stages:
        for what, others in (("Join", graph.predecessors), ("Fork", graph.successors)):
            near = {name: {stage_of[other] for other in others[name]} for name in stage.operators}
            found = [name for name in stage.operators if len(near[name]) > 1]
            if found:
                met = set().union(*(near[name] for name in found))
                before, beside, apart = WHY[what]
                ids = sorted(met - {stage.id})
                stages = f"stage{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"
                lines.append(
                    f"{what}: stage {stage.id} owns {short_list(found, most=MOST_NAMES)}, "
                    f"{before} {stages}; {beside if stage.id in met else apart}."
                )
    if len(lines) > MOST_LINES:
        more = len(lines) - MOST_LINES
        lines = [*lines[:MOST_LINES], f"… and {more} more forks and joins of stages."]
    return lines
