"""Maps devices of a plan to ranks, and renumbers plans by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_gpp.cluster import Cluster, Device
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.step_time.evaluate import evaluate_plan


def in_plan_order(cluster: Cluster) -> Cluster:
    """The devices by rank, that of rank 0 moved to the end.

    Plans end on the last device, the loss is there, and the loss is on rank 0
    (:func:`rank_of_device`): so neighbours of the plan are neighbours on the hosts.
    """
    first, *others = cluster.devices
    return replace(cluster, devices=(*others, first))


def rank_of_device(plan: Plan, num_ranks: int) -> tuple[int, ...]:
    """Rank of every device: the device of the loss has rank 0, the others follow in order.

    >>> from lightning_gpp.planner import Stage
    >>> rank_of_device(Plan((Stage(0, ("a",), (0,)), Stage(1, ("b",), (1,)))), num_ranks=3)
    (1, 0, 2)
    """
    others = iter(range(1, num_ranks))
    return tuple(
        0 if device == plan.device_of_loss else next(others) for device in range(num_ranks)
    )


def with_loss_on(plan: Plan, device: int, request: PlanRequest) -> Plan:
    """The plan with the loss on a device, which is that of rank 0.

    Planners put the loss beside the first replica of the last stage. A device that is like the
    other one changes places with it in all stages. Where devices are of several kinds, it matters
    which of them is rank 0: a replica there takes the loss; if there is none, outputs are sent
    there, or both devices change places, whichever is predicted to be faster.
    """
    devices, at = request.cluster.devices, plan.device_of_loss
    if device == at:
        return plan
    other = {device: at, at: device}
    exchanged = replace(plan, stages=tuple(_renumbered(stage, other) for stage in plan.stages))
    if _alike(devices[device]) == _alike(devices[at]) or request.num_minibatches > 1:
        return exchanged
    *stages, last = plan.stages
    if device in last.devices:
        places = sorted(range(len(last.devices)), key=lambda place: last.devices[place] != device)
        moved = replace(plan, stages=(*stages, _in_order(last, places)))
    else:
        moved = replace(plan, loss_device=device)
    return min((moved, exchanged), key=lambda each: _in_use(each, request))


def _in_use(plan: Plan, request: PlanRequest) -> tuple[bool, float]:
    """Whether it does not fit into memory, and seconds of a step: the least is the best."""
    found = evaluate_plan(plan, request)
    return not found.is_feasible, found.step_s


def _alike(device: Device) -> Device:
    return replace(device, name="")


def by_rank(plan: Plan, request: PlanRequest) -> tuple[Plan, PlanRequest]:
    """The same plan and question with every device numbered as the rank that it is.

    So that device 1 of a report is rank 1 of a timeline. Nothing else changes: links go by what
    devices are, not by their numbers.
    """
    ranks = rank_of_device(plan, request.num_devices)
    devices = [request.cluster.devices[ranks.index(rank)] for rank in range(len(ranks))]
    cluster = replace(request.cluster, devices=tuple(devices))
    stages = tuple(_renumbered(stage, dict(enumerate(ranks))) for stage in plan.stages)
    loss_device = None if plan.loss_device is None else 0
    ranked = replace(plan, stages=stages, loss_device=loss_device)
    return ranked, replace(request, cluster=cluster)


def with_devices_of(plan: Plan, request: PlanRequest) -> PlanRequest:
    """The question with the devices that a plan made by hand runs on, numbered as it has them.

    Args:
        plan: which rank its devices are says :func:`rank_of_device`.
        request: with devices :func:`in_plan_order`.
    """
    *others, first = request.cluster.devices
    at_hand = (first, *others)
    devices = tuple(at_hand[rank] for rank in rank_of_device(plan, request.num_devices))
    return replace(request, cluster=replace(request.cluster, devices=devices))


def _renumbered(stage: Stage, numbers: Mapping[int, int]) -> Stage:
    """A stage with its replicas in the same order, as it says who takes which samples."""
    return replace(stage, devices=tuple(numbers.get(each, each) for each in stage.devices))


def _in_order(stage: Stage, places: Sequence[int]) -> Stage:
    """A stage with its replicas in another order."""
    return replace(
        stage,
        devices=tuple(stage.devices[place] for place in places),
        shares=tuple(stage.shares[place] for place in places) if stage.shares else (),
    )


def note_of_ranks(plan: Plan, num_ranks: int) -> tuple[str, ...]:
    """A note for plans by hand whose devices have other numbers than the ranks."""
    ranks = rank_of_device(plan, num_ranks)
    if ranks == tuple(range(num_ranks)):
        return ()
    pairs = ", ".join(f"{device} is rank {rank}" for device, rank in enumerate(ranks))
    return (f"The loss is on rank 0, so of the plan's devices {pairs}.",)
