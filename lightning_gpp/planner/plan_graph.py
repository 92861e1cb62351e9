"""The stage graph of a plan, with the stages and edges that the pipeline itself adds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_gpp.graph import ModelGraph, StageEdge, StageGraph, stage_graph
from lightning_gpp.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class PlanGraph:
    """The stages of a plan as the pipeline runs them.

    Where the last stage has replicas, a stage without operators follows it on the device of its
    first replica: the outputs of all replicas come together there, and the loss is computed there.

    Attributes:
        stages: the stage graph, the stage of the loss included.
        devices: devices of every stage.
        multiples: smallest micro-batches that every stage, all replicas together, takes at a time.
    """

    stages: StageGraph
    devices: tuple[tuple[int, ...], ...]
    multiples: tuple[int, ...]


def plan_graph(plan: Plan, graph: ModelGraph) -> PlanGraph:
    """The stage graph of a plan.

    Raises:
        ValueError: the plan does not fit the model.
    """
    operators = list(plan.stage_operators)
    devices = [stage.devices for stage in plan.stages]
    multiples = [stage.microbatch_multiple for stage in plan.stages]
    last = plan.stages[-1]
    if last.num_replicas > 1:
        operators.append(())
        devices.append(last.devices[:1])
        multiples.append(last.microbatch_multiple)
    stages = stage_graph(graph, operators)
    if plan.is_chain:
        stages = chained(stages)
    return PlanGraph(stages, tuple(devices), tuple(multiples))


def chained(stages: StageGraph) -> StageGraph:
    """The stage graph with an edge from every stage to the next, empty where there was none.

    >>> [(edge.source, edge.target) for edge in chained(StageGraph(3, ())).edges]
    [(0, 1), (1, 2)]
    """
    edges = dict(stages.edge)
    for source in range(stages.num_stages - 1):
        pair = source, source + 1
        # Backwards wait for each other too, also where the data needs no gradient.
        edges[pair] = replace(edges.get(pair, StageEdge(*pair, values=())), has_backward=True)
    return replace(stages, edges=tuple(edges[pair] for pair in sorted(edges)))
