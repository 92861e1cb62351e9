"""The order of stages that people listed in any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner.units.dag import find_cycle, topological_order
from lightning_gpp.planner.units.units import output_makers

Reach = dict[str, dict[int, str]]
"""Operator -> stages whose values reach it, each with one value that left the stage on the way."""


def ordered_stages(
    graph: ModelGraph, stage_of: Mapping[str, int], labels: Sequence[str]
) -> list[int]:
    """The positions of the stages in topological order, close to the order in which they came.

    Operators in no stage hand on what they read. The last stage is one that an output comes from.

    Args:
        graph: the model.
        stage_of: operator name -> position of its stage; operators may be absent.
        labels: what to call the stages in errors.

    Raises:
        ValueError: stages depend on each other in a circle, or no stage can be the last one.
    """
    reach = _reach(graph, stage_of)
    handed: dict[tuple[int, int], str] = {}
    for name, stage in stage_of.items():
        for source, value in reach[name].items():
            if source != stage:
                handed.setdefault((source, stage), value)
    successors: dict[int, set[int]] = {stage: set() for stage in range(len(labels))}
    for source, target in handed:
        successors[source].add(target)
    if cycle := find_cycle(successors):
        raise ValueError(_cycle_text(cycle, handed, labels))
    last = _last_stage(graph, stage_of, reach, successors)
    if last is None:
        sinks = [labels[stage] for stage, targets in successors.items() if not targets]
        raise ValueError(
            f"plan: {', '.join(sinks)} would come last, but no output of the model is made there, "
            f"and the loss is computed in the last stage; join it with the stage of "
            f"{' or '.join(output_makers(graph))}"
        )
    for stage in successors:
        if stage != last:
            successors[stage].add(last)
    return topological_order(successors)


def _reach(graph: ModelGraph, stage_of: Mapping[str, int]) -> Reach:
    reach: Reach = {}
    for operator in graph:
        reached: dict[int, str] = {}
        reach[operator.name] = reached
        for value in operator.inputs:
            producer = graph.producer.get(value)
            if producer is None:
                continue
            if producer in stage_of:
                reached.setdefault(stage_of[producer], value)
            else:
                for stage, first in reach[producer].items():
                    reached.setdefault(stage, first)
    return reach


def _last_stage(
    graph: ModelGraph,
    stage_of: Mapping[str, int],
    reach: Reach,
    successors: Mapping[int, set[int]],
) -> int | None:
    sinks = {stage for stage, targets in successors.items() if not targets}
    makers = output_makers(graph)
    sources = [{stage_of[name]} if name in stage_of else set(reach[name]) for name in makers]
    if not all(sources) or not makers:  # an output made of the inputs alone can be made anywhere
        return max(sinks)
    return max(sinks.intersection(*[set().union(*sources)]), default=None)


def _cycle_text(
    cycle: Sequence[int], handed: Mapping[tuple[int, int], str], labels: Sequence[str]
) -> str:
    steps = [
        f"{labels[source]} hands {handed[source, target]!r} to {labels[target]}"
        for source, target in zip(cycle, [*cycle[1:], cycle[0]])
    ]
    return (
        f"plan: stages depend on each other in a circle: {'; '.join(steps)}; put what lies between "
        "into one stage, or split one of them"
    )
