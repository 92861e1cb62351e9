"""Which stage owns the operators at which branches part and meet, and what that spares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_gpp.common.checks import short_list
from lightning_gpp.graph import ModelGraph, OpNode
from lightning_gpp.planner.plan.plan import Plan

MOST_LINES = 6
"""More of them are only counted."""

MOST_NAMES = 3


def forks_and_joins(plan: Plan, graph: ModelGraph) -> list[str]:
    """A sentence for every stage that owns forks or joins between stages.

    A *join* reads from several stages (its own counts), a *fork* is read in several stages.
    """
    stage_of = {name: stage.id for stage in plan.stages for name in stage.operators}
    lines = []
    for stage in plan.stages:
        operators = [graph.operator[name] for name in stage.operators]
        lines += _joins(stage.id, operators, graph, stage_of)
        lines += _forks(stage.id, operators, graph, stage_of)
    if len(lines) > MOST_LINES:
        more = len(lines) - MOST_LINES
        lines = [*lines[:MOST_LINES], f"… and {more} more forks and joins of stages."]
    return lines


def _joins(
    stage: int, operators: Sequence[OpNode], graph: ModelGraph, stage_of: dict[str, int]
) -> list[str]:
    sources = {o.name: {stage_of[p] for p in graph.predecessors[o.name]} for o in operators}
    joins = [operator for operator in operators if len(sources[operator.name]) > 1]
    if not joins:
        return []
    met = set().union(*(sources[operator.name] for operator in joins))
    why = (
        "the branch that ends in it sends nothing"
        if stage in met
        else "it goes with what follows it, apart from all branches"
    )
    return [f"Join: stage {stage} owns {_names(joins)}, of {_stages(met - {stage})}; {why}."]


def _forks(
    stage: int, operators: Sequence[OpNode], graph: ModelGraph, stage_of: dict[str, int]
) -> list[str]:
    targets = {o.name: {stage_of[s] for s in graph.successors[o.name]} for o in operators}
    forks = [operator for operator in operators if len(targets[operator.name]) > 1]
    if not forks:
        return []
    read = set().union(*(targets[operator.name] for operator in forks))
    why = (
        "the branch that begins in it receives nothing"
        if stage in read
        else "it goes with what leads to it"
    )
    return [f"Fork: stage {stage} owns {_names(forks)}, read by {_stages(read - {stage})}; {why}."]


def _stages(stages: Iterable[int]) -> str:
    ids = sorted(stages)
    return f"stage{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"


def _names(operators: Sequence[OpNode]) -> str:
    return short_list([operator.name for operator in operators], most=MOST_NAMES)
