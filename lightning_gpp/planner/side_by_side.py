"""Several pipelines beside each other: what each does on its part of the devices, and the average.

N devices make P pipelines of N / P devices with a P-th of the samples each; devices that hold the
same stages average their gradients after every mini-batch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from lightning_gpp.cluster import all_reduce_channels, all_reduce_s
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Equal pipelines beside each other.

    Attributes:
        num_pipelines: how many.
        num_devices: of each.
        pipeline: what one of them does.
        average_s: seconds to average gradients, when all have gone backward.
    """

    num_pipelines: int
    num_devices: int
    pipeline: PlanEvaluation
    average_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step of all."""
        return self.pipeline.minibatch_s + self.average_s

    @property
    def throughput(self) -> float:
        """Samples per second of all."""
        pipeline = self.pipeline
        samples = self.num_pipelines * pipeline.minibatch_size / pipeline.num_minibatches
        return samples / self.step_s


def pipeline_counts(request: PlanRequest) -> list[int]:
    """How many equal pipelines these devices and samples make.

    Devices of unequal kinds make one: pipelines that wait for each other should be alike.
    """
    if len(request.cluster.kinds) > 1:
        return [1]
    samples, least = request.minibatch_size, request.num_microbatches or 1
    return [
        count
        for count in range(1, request.num_devices + 1)
        if request.num_devices % count == 0 and samples % count == 0 and samples // count >= least
    ]


def pipeline_request(request: PlanRequest, num_pipelines: int) -> PlanRequest:
    """The question about the first of these pipelines."""
    return replace(
        request,
        cluster=request.cluster.first(request.num_devices // num_pipelines),
        minibatch_size=request.minibatch_size // num_pipelines,
    )


def side_by_side(request: PlanRequest, num_pipelines: int, pipeline: PlanEvaluation) -> SideBySide:
    """What these pipelines do together.

    Args:
        request: the question about all devices.
        num_pipelines: how many there are.
        pipeline: what a plan for the first of them does.
    """
    num_devices = request.num_devices // num_pipelines
    held: defaultdict[int, int] = defaultdict(int)
    for stage in pipeline.plan.stages:
        for device in stage.devices:
            held[device] += request.tables.parameter_bytes(stage.operators).trained_bytes
    busy_s: defaultdict[str, float] = defaultdict(float)
    for device, size_bytes in held.items():
        alike = [device + pipe * num_devices for pipe in range(num_pipelines)]
        seconds = all_reduce_s(request.cluster, alike, size_bytes)
        for channel in all_reduce_channels(request.cluster, alike):
            busy_s[channel] += seconds
    return SideBySide(num_pipelines, num_devices, pipeline, max(busy_s.values(), default=0.0))
