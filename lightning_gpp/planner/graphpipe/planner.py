"""The planner ``graphpipe_exclusive``: the published space, where stages own their devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.data_parallel import shared_by_all
from lightning_gpp.planner.graphpipe.choose.choice import Choice
from lightning_gpp.planner.graphpipe.choose.infeasible import infeasible_error
from lightning_gpp.planner.graphpipe.choose.result import SearchResult
from lightning_gpp.planner.graphpipe.place.climb import BUDGET, climb_from
from lightning_gpp.planner.graphpipe.place.deals import best_deals
from lightning_gpp.planner.graphpipe.place.judged import DraftJudge
from lightning_gpp.planner.graphpipe.place.own_homes import OwnHomes
from lightning_gpp.planner.graphpipe.place.unit_tables import UnitTables
from lightning_gpp.planner.graphpipe.problem import Problem, branching, linear, search_units
from lightning_gpp.planner.graphpipe.space.equal_devices import as_if_equal
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_plan

NAME = "graphpipe_exclusive"


def graphpipe_exclusive(request: PlanRequest) -> Plan:
    """The plan with the shortest predicted step.

    Stages form a graph, own their devices, have replicas in powers of two (or the whole model has
    one on every device), and may leave devices unused.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    return search_exclusive(request).best


def search_exclusive(request: PlanRequest) -> SearchResult:
    """The search of :func:`graphpipe_exclusive`, with what it looked at.

    Beside the series-parallel tree it searches the model as a chain of units, as ``sequential``
    does, where branches may be divided at any place; the stages still wait only for what they
    need.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    own = _RequestSearch(request)
    if not own.found:
        raise infeasible_error(request, _tight)
    best = own.found[0]
    notes = _notes(own.problem, best)
    return SearchResult(best.plan, notes, rank=lambda: own.choice.ranked(own.found))


class _RequestSearch:
    """The search of one request.

    Attributes:
        problem: the model with its branches.
        choice: what was looked at.
        found: plans that fit into memory, the shortest step first.
    """

    def __init__(self, request: PlanRequest) -> None:
        units = search_units(request)
        self.problem = branching(request, units)
        name = f"{NAME} (estimated)" if request.is_estimated else NAME
        self.choice = Choice(request, name, is_chain=False)
        self.choice.search(
            one for problem in self.problem.with_sums_both_ways() for one in _in_both_forms(problem)
        )
        if not self.choice.finish():
            self.choice.search_tight(_chain(self.problem))
        found = self.choice.finish()
        best = found[:1]
        if len(request.cluster.kinds) > 1:
            best = _sorted([*best, *_as_if_equal(request)])
        climbed = _climbed([*best, *found], request, name)
        self.found = _sorted([*climbed, *_on_odd_devices(request, name)])


def _in_both_forms(problem: Problem) -> Iterator[Problem]:
    """The model in a line, and where it has branches with them."""
    prices = problem.prices
    yield linear(problem.request, problem.units, prices.order, known=prices)
    if problem.layout.root.blocks:
        yield problem


def _climbed(
    found: Sequence[PlanEvaluation], request: PlanRequest, name: str
) -> list[PlanEvaluation]:
    """What a climb finds whose stages own their devices.

    Args:
        found: plans, of which it starts from the best for every choice of replicas.
        request: the question.
        name: of the planner.
    """
    judge = DraftJudge(UnitTables(request), name, BUDGET)
    starts: dict[tuple[int, ...], PlanEvaluation] = {}
    for one in _sorted(found):
        starts.setdefault(tuple(stage.num_replicas for stage in one.plan.stages), one)
    for one in starts.values():
        judge.show(one)
    climb_from(judge, [*judge.shown, *best_deals(judge, may_share=False)], OwnHomes)
    return judge.found


def _on_odd_devices(request: PlanRequest, name: str) -> Iterator[PlanEvaluation]:
    """The whole model on all devices where their number is no power of two, as the search has."""
    count = request.num_devices
    if count not in request.replica_counts(count):
        shared = shared_by_all(request, name)
        if shared is not None:
            yield shared


def _as_if_equal(request: PlanRequest) -> Iterator[PlanEvaluation]:
    """The best plan for equal devices, on the unequal ones."""
    for equal in _RequestSearch(as_if_equal(request)).found[:1]:
        found = evaluate_plan(equal.plan, request)
        if found.is_feasible:
            yield found


def _sorted(found: Iterable[PlanEvaluation]) -> list[PlanEvaluation]:
    return sorted(found, key=lambda one: (one.step_s, one.peak_memory_bytes))


def _chain(tree: Problem) -> Problem:
    """The model as a chain of which all divisions are tried, for what hardly fits into memory."""
    order = tree.prices.order
    return linear(tree.request, tree.units, order, known=tree.prices, tries_all=True)


def _tight(request: PlanRequest) -> Iterator[Problem]:
    """The problems of which one has a plan where any plan is found."""
    tree = branching(request, search_units(request))
    yield _chain(tree)
    yield tree


def _notes(problem: Problem, best: PlanEvaluation) -> tuple[str, ...]:
    notes = []
    if problem.layout.root.blocks and best.plan.num_stages > 1:
        notes.append(
            "a join is in the stage of the branch's end, or of what follows it, whichever leaves "
            "the fewest devices to the rest; a fork likewise"
        )
    if spare := problem.request.num_devices - len(best.devices):
        idle = "1 device stays" if spare == 1 else f"{spare} devices stay"
        notes.append(f"{idle} idle: plans with more devices were not faster")
    if problem.added:
        names = problem.units.operators
        one, other = problem.added[0]
        notes.append(
            f"the model is not series-parallel: the search puts {len(problem.added)} pairs of "
            f"operators in an order that the model does not ask for ({names[one][-1]} before "
            f"{names[other][0]}, …)"
        )
    return tuple(notes)
