"""The planner ``data_parallel``: the whole model on every device, with all-reduced gradients.

Synchronous SGD without a pipeline, as PyTorch's DDP or Horovod run it: every device takes an equal
share of the mini-batch, or, where devices are of unequal speed and that is faster, one by its speed
(:mod:`lightning_gpp.planner.levelled`). What the DAG model of S-SGD describes (Shi et al., arXiv
1805.03812), and what pipelines are to be compared with.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner.base import DoesNotFitError, PlanRequest, does_not_fit
from lightning_gpp.planner.levelled import levelled
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.plan.plan_graph import validate_plan
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_plan

NAME = "data_parallel"

WORTHWHILE = 0.99
"""More micro-batches than needed must shorten the step to this part of what it was."""


def data_parallel(request: PlanRequest) -> Plan:
    """One stage with a replica on every device, however many there are.

    A device computes its share of the mini-batch at once, or, where that is clearly faster or the
    memory asks for it, in several micro-batches of which it adds up the gradients.

    Raises:
        ValueError: the devices cannot share the mini-batch, an operator does not allow replicas,
            or the model does not fit into the memory of one device.
    """
    if (refusal := _refusal(request)) is not None:
        raise ValueError(refusal)
    best = _best(request, request.named(NAME), by_speed=True)
    if best is None:
        text = does_not_fit(request, f"no plan of {NAME} fits")
        raise DoesNotFitError(f"{text}; or divide the model: planner=graphpipe")
    return best.plan


def shared_by_all(
    request: PlanRequest, name: str, *, by_speed: bool = False
) -> PlanEvaluation | None:
    """The plan of :func:`data_parallel` for a search that looks at others, too; None without one.

    Args:
        request: the question.
        name: of the planner that asks.
        by_speed: whether the shares may be unequal.
    """
    if _refusal(request) is not None or not _may_have_replicas(request.graph):
        return None
    return _best(request, name, by_speed=by_speed)


def _may_have_replicas(graph: ModelGraph) -> bool:
    """Whether what goes in and out can be cut by samples, and nothing is changed on the way."""
    exchanged = (*(item.value for item in graph.inputs), *(graph.values[n] for n in graph.outputs))
    has_state = any(operator.state for operator in graph)
    return not has_state and all(value.is_cuttable for value in exchanged)


def _best(request: PlanRequest, name: str, *, by_speed: bool) -> PlanEvaluation | None:
    """The quickest plan that fits into memory, with as few micro-batches as are of use."""
    best: PlanEvaluation | None = None
    for plan in _plans(request, name, by_speed=by_speed):
        validate_plan(plan, request.graph, request.num_devices)
        found = evaluate_plan(plan, request)
        if found.is_feasible and (best is None or found.step_s < WORTHWHILE * best.step_s):
            best = found
    return best


def _refusal(request: PlanRequest) -> str | None:
    """Why the devices cannot share the mini-batch; None where they can."""
    count, most = request.num_devices, request.max_replicas
    if request.num_microbatches is not None and request.num_microbatches % count:
        wrong = f"num_microbatches must be a multiple of {count}, got {request.num_microbatches}"
    elif most is not None and most < count:
        wrong = f"max_replicas must not be less, got {most}"
    elif request.minibatch_size < count:
        wrong = f"a mini-batch must have a sample for each, got {request.minibatch_size}"
    else:
        return None
    return (
        f"{NAME} puts a replica on each of {count} devices: {wrong}; change that or the number of "
        "devices, or use another planner"
    )


def _plans(request: PlanRequest, name: str, *, by_speed: bool) -> Iterator[Plan]:
    """Candidates: micro-batches per device, with and without recomputation, shares by speed."""
    operators = tuple(operator.name for operator in request.graph)
    devices = tuple(range(request.num_devices))
    recomputes = (False, True) if request.may_recompute else (False,)
    for count in _microbatches_per_device(request):
        for recompute in recomputes:
            stage = Stage(0, operators, devices, len(devices), recompute)
            plan = Plan((stage,), name, num_microbatches=count * len(devices))
            yield plan
            unequal = levelled(plan, request) if by_speed else None
            if unequal is not None:
                yield unequal


def _microbatches_per_device(request: PlanRequest) -> list[int]:
    """The number that is fixed, or 1 and those that make micro-batches of a power of two samples.

    Where devices do not get equally many samples, the powers of two instead.
    """
    count = request.num_devices
    if request.num_microbatches is not None:
        return [request.num_microbatches // count]
    share, rest = divmod(request.minibatch_size, count)
    powers = [2**power for power in range(share.bit_length())]
    if rest:
        return powers
    whole = [share // size for size in reversed(powers) if not share % size]
    return list(dict.fromkeys([1, *whole]))
