"""Unequal devices taken as equal: all as slow as the slowest kind, with the smallest memory.

The search gives every stage devices of one kind. Where kinds differ little, stages whose replicas
are of several kinds may be faster, up to the whole model on all devices; the plans for equal
devices have them.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.planner.base import PlanRequest


def as_if_equal(request: PlanRequest) -> PlanRequest:
    """The same question for devices of the slowest kind."""
    size = request.microbatch_sizes[len(request.microbatch_sizes) // 2]

    def work_s(kind: str) -> float:
        costs = request.profile(size, kind).operators.values()
        return sum(cost.forward_s + cost.backward_s for cost in costs)

    slowest = max(request.cluster.kinds, key=work_s)
    known = [d.memory_bytes for d in request.cluster.devices if d.memory_bytes is not None]
    devices = tuple(
        replace(device, kind=slowest, memory_bytes=min(known, default=None))
        for device in request.cluster.devices
    )
    return replace(request, cluster=replace(request.cluster, devices=devices))
