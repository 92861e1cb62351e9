"""How large the messages of a plan are, for pictures of it."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.graph import FEED, StageGraph
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.edge_bytes import edge_bytes
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.plan.plan_graph import plan_graph
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches


def sized_stages(plan: Plan, request: PlanRequest) -> StageGraph:
    """The stage graph of a plan, the one of the loss included, with the bytes of its messages.

    A message carries the activations of one micro-batch of the smaller side, all replicas together.
    """
    pipeline = plan_graph(plan, request.graph)
    unit_size = request.minibatch_size / num_microbatches(plan, request)
    edges = []
    for edge in pipeline.stages.edges:
        source = pipeline.stages.num_stages - 1 if edge.source == FEED else edge.source
        units = min(pipeline.multiples[source], pipeline.multiples[edge.target])
        size_bytes = edge_bytes(request.graph, edge.values).forward(units * unit_size)
        edges.append(replace(edge, size_bytes=round(size_bytes)))
    return replace(pipeline.stages, edges=tuple(edges))
