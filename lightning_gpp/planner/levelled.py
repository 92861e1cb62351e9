r"""Shares by speed: replicas on devices of different kinds that end at the same time.

A replica on device :math:`i` takes :math:`a_i + b_i x_i` seconds for the forward and the backward
of :math:`x_i` samples: a fixed time (launches) and a time per sample. Of a micro-batch of :math:`N`
samples, the shares that end first solve the linear program (HAP's for a model that is sharded over
unequal devices, arXiv 2401.05965, of one stage)

.. math:: \min T \quad \text{where} \quad a_i + b_i x_i \le T, \quad \sum_i x_i = N,
    \quad x_i \ge 1.

Whole samples are given out one by one, each to the replica that ends first with it: no whole shares
end earlier, as what can be done until :math:`T` is done in the order in which it can end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_gpp.cost.work import Line
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches
from lightning_gpp.planner.step_time.stage_costs import kind_compute


def whole_level(lines: Sequence[Line], total: int) -> tuple[int, ...]:
    """The whole shares of at least 1 that end first.

    Args:
        lines: seconds of every replica by its samples.
        total: samples, at least as many as there are replicas.

    >>> device, other = Line(per_sample=1.0), Line(per_sample=3.0)
    >>> whole_level([device, other, other, other], 32)  # of 16 and 5 1/3
    (17, 5, 5, 5)
    """
    shares = [1] * len(lines)
    ends_s = [(line.at(2), number) for number, line in enumerate(lines)]
    heapq.heapify(ends_s)
    for _ in range(total - len(lines)):
        _, first = ends_s[0]
        shares[first] += 1
        heapq.heapreplace(ends_s, (lines[first].at(shares[first] + 1), first))
    return tuple(shares)


def levelled(plan: Plan, request: PlanRequest) -> Plan | None:
    """A plan with shares by speed, in whole samples.

    Stages on the same devices with the same micro-batches take the same shares, so that they hand
    nothing to each other.

    Args:
        plan: whose replicas take any shares.
        request: the question.

    Returns:
        None where no replicas are on devices of different kinds.
    """
    together: dict[tuple[tuple[int, ...], int], list[Stage]] = {}
    for stage in plan.stages:
        if _is_mixed(stage, request):
            together.setdefault((stage.devices, stage.microbatch_multiple), []).append(stage)
    if not together:
        return None
    count = num_microbatches(plan, request)
    factor = max(1, request.minibatch_size // count)
    unit_size = request.minibatch_size / (count * factor)
    shares_of = {
        (devices, multiple): _shares(request, some, devices, multiple * factor, unit_size)
        for (devices, multiple), some in together.items()
    }
    stages = []
    for stage in plan.stages:
        shares = shares_of.get((stage.devices, stage.microbatch_multiple))
        if shares is None:
            shares = tuple(share * factor for share in stage.shares)
        elif len(set(shares)) == 1:
            shares = ()
        multiple = stage.microbatch_multiple * factor
        stages.append(replace(stage, microbatch_multiple=multiple, shares=shares))
    return _reduced(tuple(stages), count * factor, plan)


def _reduced(stages: Sequence[Stage], count: int, plan: Plan) -> Plan:
    """A plan with other stages and as few smallest micro-batches as they need."""
    most = math.gcd(count, *(units for stage in stages for units in stage.replica_multiples))
    fewer = tuple(
        replace(
            stage,
            microbatch_multiple=stage.microbatch_multiple // most,
            shares=tuple(share // most for share in stage.shares),
        )
        for stage in stages
    )
    return replace(plan, stages=fewer, num_microbatches=count // most)


def mixed_homes(plan: Plan, request: PlanRequest) -> Iterator[tuple[int, ...]]:
    """The groups of devices of different kinds that stages have replicas on, each once."""
    yield from dict.fromkeys(s.devices for s in plan.stages if _is_mixed(s, request))


def _is_mixed(stage: Stage, request: PlanRequest) -> bool:
    devices = request.cluster.devices
    return len({devices[device].kind for device in stage.devices}) > 1


def _shares(
    request: PlanRequest,
    stages: Sequence[Stage],
    devices: Sequence[int],
    units: int,
    unit_size: float,
) -> tuple[int, ...]:
    """Whole shares by the time that some stages take together."""
    kinds = [request.cluster.devices[device].kind for device in devices]
    line_of = {kind: _line(request, stages, kind, units, unit_size) for kind in set(kinds)}
    if not all(line.per_sample for line in line_of.values()):  # nothing to gain
        factor = units // stages[0].microbatch_multiple
        return tuple(factor * share for share in stages[0].replica_multiples)
    return whole_level([line_of[kind] for kind in kinds], units)


def _line(
    request: PlanRequest, stages: Sequence[Stage], kind: str, units: int, unit_size: float
) -> Line:
    """Seconds by units on a kind of device: the line through one unit and all of them."""

    def seconds(count: int) -> float:
        found = (kind_compute(request, stage, unit_size * count, kind) for stage in stages)
        return sum(compute.forward_s + compute.backward_s for compute in found)

    one_s, all_s = seconds(1), seconds(units)
    per_unit_s = max(0.0, all_s - one_s) / max(1, units - 1)
    return Line(per_sample=per_unit_s, fixed=max(0.0, one_s - per_unit_s))
