"""What to say where no division into stages fits into the devices' memory."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.cluster import Cluster
from lightning_gpp.common.units_of_measure import bytes_text
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.does_not_fit import HOLD_FEWER, HOLDS_FEW, DoesNotFitError
from lightning_gpp.planner.graphpipe.exclusive import chains
from lightning_gpp.planner.graphpipe.unit_tables import UnitTables

STEP, MOST_STEPS = 1.02, 64
"""Memory that is tried grows by this factor, and so often."""


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
    """Whether the search finds a plan."""
    return chains(UnitTables(request), "", takes_first=True).best is not None


def _smallest_memory(request: PlanRequest) -> int | None:
    """Bytes per device with which the search finds a plan, a few per cent more at most.

    As it climbs to plans that lack less, it finds the last of them where that fits.
    """
    closest = chains(UnitTables(request), "").closest
    if closest is None:
        return None
    _, needed, _ = closest
    for _ in range(MOST_STEPS):
        if _fits(_with_memory(request, needed)):
            return needed
        needed = int(needed * STEP) + 1
    return None


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


def _with_memory(request: PlanRequest, memory_bytes: int) -> PlanRequest:
    devices = tuple(
        replace(device, memory_bytes=memory_bytes) for device in request.cluster.devices
    )
    return replace(request, cluster=replace(request.cluster, devices=devices))


def _with_devices(request: PlanRequest, count: int) -> PlanRequest:
    first = request.cluster.devices[0]
    devices = tuple(replace(first, name=f"{first.name}.{index}") for index in range(count))
    cluster = Cluster(devices, request.cluster.slowest_link)
    return replace(request, cluster=cluster)
