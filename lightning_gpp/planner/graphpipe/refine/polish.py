"""Small repairs of a plan: single units go from its slowest stage to a neighbour.

The search takes whole branches, or the ends of branches that spare a device; two branches on one
device, and a join with room for a layer of either, it does not see. So of the best plan the first
and last units of the slowest stage are tried in the stages that they exchange values with, as long
as the step becomes shorter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, StageEvaluation, evaluate_plan
from lightning_gpp.planner.units.units import UnitGraph

MOST_MOVES = 12
"""Moves of one plan that are evaluated."""


def polished(
    evaluation: PlanEvaluation, units: UnitGraph, request: PlanRequest
) -> list[PlanEvaluation]:
    """A plan and the plans on the way to a faster slowest stage, the shortest step first.

    A first move may make the step longer and a second one shorter than it was, so the moves go on
    as long as a stage that is slowest becomes faster.
    """
    found = [evaluation]
    at: PlanEvaluation | None = evaluation
    while at is not None and len(found) <= MOST_MOVES:
        new = [
            evaluate_plan(plan, request) for plan in islice(_moves(at, units, request), MOST_MOVES)
        ]
        at = min((e for e in new if e.is_feasible), key=lambda one: one.step_s, default=None)
        found += [one for one in new if one.is_feasible]
    return sorted(found, key=lambda one: one.step_s)


def _moves(evaluation: PlanEvaluation, units: UnitGraph, request: PlanRequest) -> Iterator[Plan]:
    """Plans with one unit of the slowest stage in another stage that stays faster than it was.

    The other stage has one device and micro-batches of the same size. Where the slowest one has
    replicas, what a unit exchanges is split by samples from then on; so it must be possible. Units
    that make the outputs stay where the loss is.
    """
    stages = evaluation.stages
    slowest = evaluation.bottleneck
    home = {name: found.stage.id for found in stages for name in found.stage.operators}
    stage_of = [home[names[0]] for names in units.operators]
    own = [unit for unit, stage in enumerate(stage_of) if stage == slowest.stage.id]
    has_replicas = slowest.stage.num_replicas > 1
    for unit in own if len(own) > 1 else ():
        is_bound = has_replicas and not _is_cuttable(units.operators[unit], request)
        if unit in units.finals or is_bound:
            continue
        before = max((stage_of[source] for source in units.predecessors[unit]), default=0)
        after = min((stage_of[t] for t in units.successors[unit]), default=len(stages) - 1)
        for target in {before, after} - {slowest.stage.id}:
            # The ids of stages are topological: nothing may flow from a later to an earlier one.
            if before <= target <= after and _may_take_in(stages[target], slowest):
                names = units.operators[unit]
                more_s = _seconds(names, stages[target], request)
                if stages[target].seconds_per_sample + more_s < slowest.seconds_per_sample:
                    yield _moved(evaluation.plan, names, slowest.stage.id, target, request)


def _is_cuttable(names: tuple[str, ...], request: PlanRequest) -> bool:
    """Whether all that some operators read and make can be cut by samples."""
    values = request.graph.values
    for operator in (request.graph.operator[name] for name in names):
        exchanged = (*operator.inputs, *(value.name for value in operator.outputs))
        if not all(values[name].is_cuttable for name in exchanged):
            return False
    return True


def _may_take_in(target: StageEvaluation, source: StageEvaluation) -> bool:
    """Whether a stage may take operators of another one, whatever they are."""
    same_size = target.stage.microbatch_multiple == source.stage.microbatch_multiple
    return same_size and target.stage.num_replicas == 1 and not target.stage.recompute


def _seconds(names: tuple[str, ...], stage: StageEvaluation, request: PlanRequest) -> float:
    """Seconds per sample that operators would take in a stage."""
    share = stage.microbatch_size / stage.stage.num_replicas
    kind = request.cluster.devices[stage.stage.devices[0]].kind
    costs = request.profile(share, kind).operators
    return sum(costs[n].forward_s + costs[n].backward_s for n in names) / stage.microbatch_size


def _moved(
    plan: Plan, names: tuple[str, ...], source: int, target: int, request: PlanRequest
) -> Plan:
    stages = list(plan.stages)
    left = tuple(name for name in stages[source].operators if name not in names)
    stages[source] = replace(stages[source], operators=left)
    taken = {*stages[target].operators, *names}
    more = tuple(operator.name for operator in request.graph if operator.name in taken)
    stages[target] = replace(stages[target], operators=more)
    return replace(plan, stages=tuple(stages))
