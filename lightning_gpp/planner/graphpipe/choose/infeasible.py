"""What to say where no division into stages fits into the devices' memory."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.cluster import Cluster
from lightning_gpp.common.units_of_measure import bytes_text
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.does_not_fit import HOLD_FEWER, HOLDS_FEW, DoesNotFitError
from lightning_gpp.planner.graphpipe.choose.limits import Divisions
from lightning_gpp.planner.graphpipe.place.unit_tables import UnitTables
from lightning_gpp.planner.graphpipe.problem import Problem


def infeasible_error(request: PlanRequest) -> DoesNotFitError:
    """The error of a question without a plan; its text says what would make it feasible."""
    return DoesNotFitError(lambda: _text(request))


def _text(request: PlanRequest) -> str:
    limits = {d.memory_bytes for d in request.cluster.devices if d.memory_bytes is not None}
    remedies = []
    if request.holds_all and _fits(replace(request, schedule=HOLDS_FEW)):
        remedies.append(HOLD_FEWER)
    if not request.may_recompute and _fits(replace(request, may_recompute=True)):
        remedies.append(
            "recomputation would do (may_recompute=True; recompute=true on the command line)"
        )
    if (needed := _smallest_memory(request)) is not None:
        size = f"{bytes_text(needed)} ({needed} bytes)"
        remedies.append(f"{request.num_devices} devices need {size} of memory each")
    if (count := _fewest_devices(request)) is not None:
        first = request.cluster.devices[0].name
        like = f" like {first}" if len(request.cluster.kinds) > 1 or len(limits) > 1 else ""
        remedies.append(f"with the memory they have, {count} devices{like} would do")
    return (
        f"no division of the model into stages fits into the memory of {request.num_devices} "
        f"devices ({bytes_text(min(limits, default=0))} on the smallest); "
        + ("; ".join(remedies) or "no memory and no number of devices that was tried would do")
    )


def _fits(request: PlanRequest) -> bool:
    """Whether there is a division with any micro-batch size, however slow."""
    problem = Problem(UnitTables(request), tries_all=True)
    return any(
        Divisions(problem.space(size)).at(float("inf")) is not None
        for size in request.microbatch_sizes
    )


def _smallest_memory(request: PlanRequest) -> int | None:
    """Bytes per device with which a plan exists, to a few per cent."""
    if not _fits(_with_memory(request, None)):
        return None
    limits = (device.memory_bytes for device in request.cluster.devices)
    low = min(limit for limit in limits if limit is not None)
    high = 2 * low + 1
    while not _fits(_with_memory(request, high)):
        low, high = high, 2 * high
    while high > max(low + 1, 1.02 * low):
        middle = int((low * high) ** 0.5) + 1
        if _fits(_with_memory(request, middle)):
            high = middle
        else:
            low = middle
    return high


def _fewest_devices(request: PlanRequest) -> int | None:
    """Devices like the first one with which a plan exists."""
    low, high = request.num_devices, request.num_devices
    most = len(request.graph)
    while high < most:
        low, high = high, min(2 * high, most)
        if _fits(_with_devices(request, high)):
            break
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(_with_devices(request, middle)):
            high = middle
        else:
            low = middle
    return high


def _with_memory(request: PlanRequest, memory_bytes: int | None) -> PlanRequest:
    devices = tuple(
        replace(device, memory_bytes=memory_bytes) for device in request.cluster.devices
    )
    return replace(request, cluster=replace(request.cluster, devices=devices))


def _with_devices(request: PlanRequest, count: int) -> PlanRequest:
    first = request.cluster.devices[0]
    devices = tuple(replace(first, name=f"{first.name}.{index}") for index in range(count))
    cluster = Cluster(devices, request.cluster.slowest_link)
    return replace(request, cluster=cluster)
