"""The planner's function, and the same search with its alternatives."""

from __future__ import annotations

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.evaluate import PlanEvaluation
from lightning_gpp.planner.graphpipe.climb import climbed
from lightning_gpp.planner.graphpipe.division import Divider
from lightning_gpp.planner.graphpipe.infeasible import infeasible_error
from lightning_gpp.planner.graphpipe.polish import polished
from lightning_gpp.planner.graphpipe.problem import Problem, branching, linear, search_units
from lightning_gpp.planner.graphpipe.result import Choice, SearchResult
from lightning_gpp.planner.plan import Plan

NAME = "graphpipe"


def graphpipe(request: PlanRequest) -> Plan:
    """The plan with the shortest predicted step.

    Stages form a graph, have replicas in powers of two, and may leave devices unused.

    Raises:
        ValueError: no plan fits into the devices' memory.
    """
    return search_plans(request).best


def search_plans(request: PlanRequest) -> SearchResult:
    """The search of :func:`graphpipe`, with what it looked at.

    Beside the series-parallel tree it searches the model as a chain of units, as ``sequential``
    does, where branches may be divided at any place; the stages still wait only for what they
    need.

    Raises:
        ValueError: no plan fits into the devices' memory.
    """
    units = search_units(request)
    problem = branching(request, units)
    name = f"{NAME} (estimated)" if request.is_estimated else NAME
    choice = Choice(request, problem)
    problems = [problem]
    if problem.layout.root.blocks:  # the chain first: it is quick, and a bound for the rest
        order = problem.prices.order
        problems.insert(0, linear(request, units, order, known=problem.prices))
    for one in reversed(problems):
        choice.search_alike(one, name, is_chain=False)
    for one in problems:
        choice.search(one, name, is_chain=False)
    found = choice.finish()
    if not found:
        raise infeasible_error(problem)
    found = climbed(
        polished(found[0], units, request), found, Divider(problem, name, is_chain=False)
    )
    notes = _notes(problem, found[0])
    return SearchResult(found[0].plan, notes, rank=lambda: choice.ranked(found))


def _notes(problem: Problem, best: PlanEvaluation) -> tuple[str, ...]:
    notes = []
    if problem.layout.root.blocks and best.plan.num_stages > 1:
        notes.append(
            "a join is in the stage of the branch's end, or of what follows it, whichever leaves "
            "the fewest devices to the rest; a fork likewise"
        )
    if spare := problem.request.num_devices - len(best.devices):
        notes.append(f"{spare} devices stay idle: plans that use them were not faster")
    if problem.added:
        names = problem.units.operators
        one, other = problem.added[0]
        notes.append(
            f"the model is not series-parallel: the search puts {len(problem.added)} pairs of "
            f"operators in an order that the model does not ask for ({names[one][-1]} before "
            f"{names[other][0]}, …)"
        )
    return tuple(notes)
