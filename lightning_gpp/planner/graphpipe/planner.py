"""The planners ``graphpipe``, ``graphpipe_exclusive``, ``sequential`` and ``balanced``.

All of them climb from divisions of the model in a line and from equal work for groups of devices.
``graphpipe_exclusive`` stays in the published space, in which stages own their devices.
``graphpipe`` goes beyond the paper: from there it climbs among plans whose stages share devices.

``sequential`` is the ablation of the paper (section 7.4): the same as ``graphpipe_exclusive``, but
every stage waits for the one before it, so that branches never run in parallel. ``balanced`` has
one stage on every device, and asks nobody for memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightning_gpp.planner.base import DoesNotFitError, PlanRequest, does_not_fit
from lightning_gpp.planner.data_parallel import shared_by_all
from lightning_gpp.planner.graphpipe.climb import (
    BUDGET,
    NEAR,
    best_deals,
    climb_by_exchange,
    climb_from,
    climb_from_others,
    climb_in_turn,
    merge_stages,
    share_by_speed,
)
from lightning_gpp.planner.graphpipe.draft import Draft, DraftStage, UnitTables
from lightning_gpp.planner.graphpipe.homes import OwnHomes
from lightning_gpp.planner.graphpipe.judge import FEW_DEVICES, DraftJudge
from lightning_gpp.planner.graphpipe.line import narrow_starts, show_lines
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_plan

SUMS_MATTER, SUMS_SHARE, FEW = 0.12, 0.5, 8
"""Where a sum goes on for such a part of the step after the last backward, a second search takes
sums to need such a part of their time; so many of its best plans are climbed from."""

AS_GOOD = 1.005
"""A step so many times as long is as good if its plan has fewer stages: the judge and the simulator
agree on most plans to less than one per cent."""


def graphpipe(request: PlanRequest, budget: int = 2 * BUDGET) -> Plan:
    """The plan with the shortest predicted step, whose stages may share devices.

    Where the pipeline does not drain stages own their devices: every stage more on the way to the
    loss is one update more between a forward and its backward, which a few per cent of the step are
    not worth.

    Args:
        request: the question.
        budget: looks of the climb of stages that share devices, by default twice those of another
            part, as there is more to choose; on few devices it is doubled.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    if not request.order.flushes:
        return replace(graphpipe_exclusive(request), planner=request.named("graphpipe"))
    judge, ways, others = climbed(request, budget)
    climb_by_exchange(judge, BUDGET // 4 * _patience(request))
    climb_past_sums(judge)
    for way in ways:
        climb_from_others(judge, way, BUDGET // 2 * _patience(request))
    judge.allow(BUDGET // 4)
    others_s = judge.check(others)
    merge_stages(judge, min(AS_GOOD * judge.best_s, others_s))
    return _best(judge)


def graphpipe_exclusive(request: PlanRequest) -> Plan:
    """The plan with the shortest predicted step whose stages own their devices.

    Stages form a graph, have replicas in powers of two (or the whole model has one on every
    device), and may leave devices unused.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    name = request.named("graphpipe_exclusive")
    judge = exclusive_plans(request, name, _chains(request, name))
    for way in other_ways(judge):
        judge.show(way.found[0])
    share_by_speed(judge, judge.found, OwnHomes)
    judge.check(())
    return _best(judge)


def sequential(request: PlanRequest) -> Plan:
    """The chain of stages with the shortest predicted step.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    judge = _chains(request, request.named("sequential"))
    show_lines(judge)
    _climb_exclusively(judge, BUDGET)
    judge.check(())
    return _best(judge)


def _chains(request: PlanRequest, name: str) -> DraftJudge:
    """A judge of chains that has seen none."""
    return DraftJudge(UnitTables(request), name, BUDGET, is_chain=True)


def balanced(request: PlanRequest) -> Plan:
    """One stage per device, all devices used, whether it fits into memory or not.

    Micro-batches are those asked for, or twice as many as devices, which fill the pipeline.

    Raises:
        ValueError: there are more devices than units that can be separated.
    """
    count = request.num_microbatches or min(2 * request.num_devices, request.minibatch_size)
    devices = tuple(replace(device, memory_bytes=None) for device in request.cluster.devices)
    cluster = replace(request.cluster, devices=devices)
    asked = replace(request, cluster=cluster, num_microbatches=count, max_replicas=1)
    tables, num_devices = UnitTables(asked), request.num_devices
    if tables.num_units < num_devices:
        together = len(request.graph) - tables.num_units
        because = f" ({together} more must stay with others: common state)" if together else ""
        raise ValueError(
            f"{num_devices} devices need as many stages, but the model has only "
            f"{tables.num_units} operators that can be separated{because}; use at most "
            f"{tables.num_units} devices, or make the model's leaf modules smaller"
        )
    judge = DraftJudge(tables, request.named("balanced"), BUDGET // 2, least_devices=num_devices)
    for _, draft in judge.promising(_equal_counts(tables, count), math.inf):
        judge.step_s(draft, math.inf)
    show_lines(judge)
    _climb_exclusively(judge, BUDGET // 2)
    return _best(judge)


def _equal_counts(tables: UnitTables, num_microbatches: int) -> Iterator[Draft]:
    """As many units for every device, in the order of the model, and depth first."""
    num_devices = tables.request.num_devices
    for order in (tables.model_order, range(tables.num_units)):
        units = [0] * num_devices
        for number, at in enumerate(order):
            units[number * num_devices // tables.num_units] |= 1 << at
        stages = (DraftStage(own, (device,)) for device, own in enumerate(units))
        yield Draft(tuple(stages), num_microbatches)


def exclusive_plans(
    request: PlanRequest, name: str, chains: DraftJudge | None = None
) -> DraftJudge:
    """A judge that has seen what the search finds for stages that own their devices.

    Args:
        request: the question.
        name: of the planner.
        chains: a judge of chains, to see what :func:`sequential` does: its plan is among those
            found, as stages that wait for more than they need are faster now and then.
    """
    tables = UnitTables(request) if chains is None else chains.tables
    judge = DraftJudge(tables, name, BUDGET, beside=chains)
    show_lines(judge, *([] if chains is None else [chains]))
    shared = shared_by_all(request, name)
    for found in (*_as_if_equal(request, name), *([] if shared is None else [shared])):
        judge.show(found)
    _climb_exclusively(judge, BUDGET * _patience(request))
    if chains is not None:
        if chains.best_s <= NEAR * judge.best_s or request.num_devices <= FEW_DEVICES:
            _climb_exclusively(chains, BUDGET)
        if chains.best is not None:
            judge.show(chains.best)
    return judge


def other_ways(judge: DraftJudge) -> list[DraftJudge]:
    """Judges of further plans whose stages own their devices, where these differ from the best.

    One climbs from divisions cut where a single value crosses, the other lets the stages of the
    best plan exchange branches. On many devices this takes too long.
    """
    tables, found = judge.tables, list[DraftJudge]()
    if tables.request.num_devices > FEW_DEVICES:
        return found
    starts = narrow_starts(tables)
    if len({*starts}) < len(starts):  # not every place is narrow
        narrow = DraftJudge(tables, judge.name, BUDGET // 2, beside=judge)
        show_lines(narrow, starts=starts)
        narrow.allow(BUDGET // 2)
        climb_from(narrow, narrow.drafts(narrow.found[:FEW]), homes=OwnHomes)
        found.append(narrow)
    if judge.best is not None:
        exchange = DraftJudge(tables, judge.name, beside=judge)
        exchange.show(judge.best)
        climb_by_exchange(exchange, BUDGET // 4, OwnHomes)
        found.append(exchange)
    return [one for one in found if one.best is not None and one.best != judge.best]


def _climb_exclusively(judge: DraftJudge, budget: int) -> None:
    """Climbs from what a judge has seen, and from deals, to stages that own their devices."""
    judge.allow(budget)
    climb_from(judge, judge.drafts(judge.found), best_deals(judge, may_share=False), OwnHomes)


def _patience(request: PlanRequest) -> int:
    """The factor on a climb's budget: on few devices each candidate takes less time."""
    return 2 if request.num_devices <= FEW_DEVICES else 1


def _as_if_equal(request: PlanRequest, name: str) -> Iterator[PlanEvaluation]:
    """The best plan for equal devices on the unequal ones.

    All as slow as the slowest kind, with the smallest memory. The search gives every stage devices
    of one kind; where kinds differ little, stages whose replicas are of several kinds may be
    faster, up to the whole model on all devices.
    """
    cluster = request.cluster
    if len(cluster.kinds) == 1:
        return
    slowest = request.slowest_kind(request.microbatch_sizes[len(request.microbatch_sizes) // 2])
    known = [d.memory_bytes for d in cluster.devices if d.memory_bytes is not None]
    devices = tuple(
        replace(device, kind=slowest, memory_bytes=min(known, default=None))
        for device in cluster.devices
    )
    equal = replace(request, cluster=replace(cluster, devices=devices))
    best = exclusive_plans(equal, name).best
    found = None if best is None else evaluate_plan(best.plan, request)
    if found is not None and found.is_feasible:
        yield found


def climbed(
    request: PlanRequest, budget: int
) -> tuple[DraftJudge, list[DraftJudge], list[PlanEvaluation]]:
    """A judge that has seen what the climbs find; others to climb from; plans of other planners.

    Args:
        request: the question.
        budget: looks of the climb of stages that share devices. The search with fewer is the
            beginning of the search with more, so more never end in a worse plan.
    """
    name = request.named("graphpipe")
    chains = _chains(request, name)
    judge = exclusive_plans(request, name, chains)
    ways = other_ways(judge)
    for way in ways:
        way.allow(BUDGET * _patience(request))
        climb_from(way, way.drafts(way.found[:FEW]))
    ways.insert(0, chains)
    exclusive, shared = judge.found, shared_by_all(request, name)
    others = [one for one in (judge.best, shared) if one is not None]
    if request.num_devices <= min(FEW_DEVICES, judge.tables.num_units):
        others.append(evaluate_plan(replace(balanced(request), planner=name), request))
    climb_in_turn(judge)
    looks = budget * _patience(request)
    judge.allow(looks)
    _climb(judge, others)
    share_by_speed(judge, exclusive, OwnHomes)
    share_by_speed(judge, judge.found)
    return judge, ways, [*others, *(one.best for one in ways if one.best is not None)]


def climb_past_sums(judge: DraftJudge) -> None:
    """Climbs from the best plans for shorter sums of gradients, where sums hold up the step.

    More replicas of a large layer are often better only once the other stages have made room for
    them. With all sums shorter, a climb takes the one move before the other. What it finds for
    stages that own their devices, and for others, is climbed from with the true sums.

    Args:
        judge: takes note of the best plans.
    """
    best, request = judge.best, judge.tables.request
    if best is None or max(one.reduce_s for one in best.stages) < SUMS_MATTER * best.step_s:
        return
    own = exclusive_plans(replace(request, sums_share=SUMS_SHARE), judge.name)
    starts = own.found[:FEW]
    for one in judge.found[:FEW]:
        own.show(evaluate_plan(one.plan, own.tables.request))
    own.allow(BUDGET)
    climb_from(own, own.drafts(own.found[:FEW]))
    found = [evaluate_plan(one.plan, request) for one in (*starts, *own.found[:FEW])]
    for one in found:
        judge.show(one)
    judge.allow(BUDGET)
    climb_from(judge, judge.drafts(found))


def search_on_all(request: PlanRequest, num_devices: int) -> Plan | None:
    """The best plan on so many devices at least; None where none fits into memory."""
    name = request.named("graphpipe")
    judge = DraftJudge(UnitTables(request), name, BUDGET, least_devices=num_devices)
    show_lines(judge)
    judge.allow(BUDGET)
    _climb(judge, judge.found)
    return None if judge.best is None else judge.best.plan


def _climb(judge: DraftJudge, starts: Iterable[PlanEvaluation]) -> None:
    """Climbs from plans that fit into memory, and from deals."""
    fitting = [one for one in starts if one.is_feasible]
    for one in fitting:
        judge.show(one)
    climb_from(judge, judge.drafts(fitting), best_deals(judge))


def _best(judge: DraftJudge) -> Plan:
    """The best plan that a judge has seen.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    if judge.best is None:
        request = judge.tables.request
        raise DoesNotFitError(does_not_fit(request, "no division of the model into stages fits"))
    return judge.best.plan
