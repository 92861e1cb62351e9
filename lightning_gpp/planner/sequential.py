"""The planner ``sequential``: GraphPipe's own search on the model as a chain.

The ablation of GraphPipe (arXiv 2406.17145, section 7.4): the same cost model, micro-batch sizes,
replicas and memory limits, but the operators stand in one line and every stage waits for the one
before it, so that branches never run in parallel. It is the dynamic program alone: the local search
with which ``graphpipe`` ends is not part of the ablation.
"""

from __future__ import annotations

from lightning_gpp.graph.series_parallel import leaves
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.graphpipe.choose.choice import Choice
from lightning_gpp.planner.graphpipe.choose.infeasible import infeasible_error
from lightning_gpp.planner.graphpipe.choose.result import SearchResult
from lightning_gpp.planner.graphpipe.problem import Problem, branching, linear, search_units
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
    units = search_units(request)
    branches = branching(request, units)
    problem = linear(request, units, tuple(leaves(branches.tree)))
    name = f"{NAME} (estimated)" if request.is_estimated else NAME
    choice = Choice(request, name, is_chain=True)
    choice.search(problem.with_sums_both_ways())
    if not choice.finish():
        choice.search_tight(_chain(request))
    found = choice.finish()
    if not found:
        raise infeasible_error(request, lambda changed: [_chain(changed)])
    return SearchResult(found[0].plan, rank=lambda: choice.ranked(found))


def _chain(request: PlanRequest) -> Problem:
    """The chain, with all its divisions tried, for what hardly fits into memory."""
    units = search_units(request)
    order = tuple(leaves(branching(request, units).tree))
    return linear(request, units, order, tries_all=True)
