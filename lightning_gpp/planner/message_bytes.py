"""Bytes that devices send in a step of a plan."""

from __future__ import annotations

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.edge_bytes import edge_bytes
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.plan.plan_graph import plan_graph


def border_bytes(plan: Plan, request: PlanRequest) -> float:
    """Activations and gradients that go from one stage's devices to another's in a step."""
    placed, graph, total = plan_graph(plan, request.graph), request.graph, 0.0
    for edge in placed.stages.edges:
        if edge.source >= 0 and placed.devices[edge.source] != placed.devices[edge.target]:
            sizes = edge_bytes(graph, edge.values, has_backward=edge.has_backward)
            size = request.minibatch_size
            total += sizes.forward(size) + sizes.backward(size)
    return total


def message_bytes(plan: Plan, request: PlanRequest) -> float:
    """What goes from stage to stage, and the replicas' sums of gradients, in rings.

    Where stages share some devices and not all, what stays on one of them counts as well.
    """
    total = border_bytes(plan, request)
    for stage in plan.stages:
        _, trained_bytes = request.tables.parameter_bytes(stage.operators)
        total += 2 * (len(stage.devices) - 1) * trained_bytes
    return total
