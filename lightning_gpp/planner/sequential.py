"""The planner ``sequential``: GraphPipe's own search on the model as a chain.

The ablation of GraphPipe (arXiv 2406.17145, section 7.4): the same cost model, micro-batch sizes,
replicas and memory limits, but the operators stand in one line and every stage waits for the one
before it, so that branches never run in parallel. It is the dynamic program alone: the local search
with which ``graphpipe`` ends is not part of the ablation.
"""

from __future__ import annotations

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.graphpipe.choose.choice import divided
from lightning_gpp.planner.graphpipe.choose.result import SearchResult
from lightning_gpp.planner.graphpipe.place.unit_tables import UnitTables
from lightning_gpp.planner.graphpipe.planner import result_of
from lightning_gpp.planner.graphpipe.problem import Problem
from lightning_gpp.planner.plan.plan import Plan

NAME = "sequential"


def sequential(request: PlanRequest) -> Plan:
    """The chain of stages with the shortest predicted step.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    return search_chains(request).best


def search_chains(request: PlanRequest) -> SearchResult:
    """The search of :func:`sequential`, with what it looked at.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    name = f"{NAME} (estimated)" if request.is_estimated else NAME
    return result_of(divided(Problem(UnitTables(request)), name, is_chain=True))
