"""Evaluates a plan: step time, bottleneck, and memory of every device.

All planners are compared by this one function, so that a better number is a better plan and not
another cost model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from lightning_gpp.graph import FEED
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.plan.plan_graph import plan_graph
from lightning_gpp.planner.request_tables import edge_bytes
from lightning_gpp.planner.step_time.pipeline_run import PipelineRun
from lightning_gpp.planner.step_time.stage_costs import (
    StageMemory,
    stage_memory,
    users_step_bytes,
)
from lightning_gpp.schedule.schedules import in_flight_units

Bound = Literal["compute", "communication"]


class ReplicaEvaluation(NamedTuple):
    """Costs of one replica, for its share of a micro-batch.

    Attributes:
        forward_s: seconds of a forward.
        backward_s: the same of the backward; with recomputation the second forward included.
        memory: bytes on its device.
    """

    forward_s: float
    backward_s: float
    memory: StageMemory

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s


EQUAL_PACE = 1e-3
"""Stages whose times differ by less than this part are equally slow: they print alike."""


@dataclass(frozen=True, slots=True)
class StageEvaluation:
    """Costs of one stage.

    Attributes:
        stage: the stage.
        microbatch_size: samples of one micro-batch, all replicas together.
        replicas: what each of its replicas does.
        communication_s: seconds that a replica sends per micro-batch, the one that sends most; what
            it receives does not hold up anything (:func:`lightning_gpp.cluster.channels`).
        reduce_s: seconds that the sums of the replicas' gradients go on after the last backward.
        seconds_per_sample: the time per sample (TPS) of the GraphPipe paper: what the stage takes
            of a steady pipeline.
        in_flight: its micro-batches between forward and backward at the peak.
    """

    stage: Stage
    microbatch_size: float
    replicas: tuple[ReplicaEvaluation, ...]
    communication_s: float
    reduce_s: float
    seconds_per_sample: float
    in_flight: int

    @property
    def slowest(self) -> ReplicaEvaluation:
        """The replica that takes longest for its share."""
        return max(self.replicas, key=lambda replica: replica.compute_s)

    @property
    def forward_s(self) -> float:
        """Seconds of the forward of the slowest replica for its share of a micro-batch."""
        return self.slowest.forward_s

    @property
    def backward_s(self) -> float:
        """The same of the backward; with recomputation the second forward included."""
        return self.slowest.backward_s

    @property
    def compute_s(self) -> float:
        """Seconds of its forward and backward."""
        return self.slowest.compute_s

    @property
    def memory(self) -> StageMemory:
        """Bytes on the device where it keeps most."""
        return max((one.memory for one in self.replicas), key=lambda memory: memory.total_bytes)

    def on(self, device: int) -> ReplicaEvaluation:
        """The replica on one of its devices."""
        return self.replicas[self.stage.devices.index(device)]

    @property
    def bound(self) -> Bound:
        """What limits the stage: compute or communication."""
        return "communication" if self.communication_s > self.compute_s else "compute"


@dataclass(frozen=True, slots=True)
class DeviceEvaluation:
    """Work and memory of one device in a step.

    Attributes:
        device: its index in the cluster.
        busy_s: seconds that it computes.
        memory_bytes: bytes of all its stages at the peak, and of the user's step where that runs.
        limit_bytes: its memory; None where it is not known.
        step_bytes: those of the user's step among ``memory_bytes``.
    """

    device: int
    busy_s: float
    memory_bytes: int
    limit_bytes: int | None
    step_bytes: int

    @property
    def fits(self) -> bool:
        """Whether its stages fit into its memory."""
        return self.limit_bytes is None or self.memory_bytes <= self.limit_bytes


@dataclass(frozen=True)
class PlanEvaluation:
    """Predicted time and memory of a plan.

    Attributes:
        plan: the plan.
        minibatch_size: samples of one step, or of all mini-batches that overlap.
        stages: every stage.
        devices: every device that the plan uses.
        seconds_per_sample: what the busiest device takes per sample of a steady pipeline.
        step_s: seconds of one step, warm-up and drain included.
        depth: stages on the longest path.
        num_minibatches: those that overlap, where the pipeline does not drain between them.
    """

    plan: Plan
    minibatch_size: int
    stages: tuple[StageEvaluation, ...]
    devices: tuple[DeviceEvaluation, ...]
    seconds_per_sample: float
    step_s: float
    depth: int
    num_minibatches: int = 1

    @property
    def minibatch_s(self) -> float:
        """Seconds of a mini-batch; of several between which nothing drains their mean."""
        return self.step_s / self.num_minibatches

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.minibatch_size / self.step_s

    @property
    def bottleneck(self) -> StageEvaluation:
        """The stage that takes most of a steady pipeline."""
        return max(self.stages, key=lambda stage: stage.seconds_per_sample)

    @property
    def bottlenecks(self) -> tuple[StageEvaluation, ...]:
        """Every stage that sets the pace: those as slow as the slowest, or its device's.

        Where stages share a device, and together take longer than any stage alone, they are those
        of the busiest devices.
        """
        slowest_s = self.bottleneck.seconds_per_sample
        if self.seconds_per_sample <= slowest_s * (1 + EQUAL_PACE):
            least_s = slowest_s * (1 - EQUAL_PACE)
            return tuple(found for found in self.stages if found.seconds_per_sample >= least_s)
        least_s = max(device.busy_s for device in self.devices) * (1 - EQUAL_PACE)
        busiest = {device.device for device in self.devices if device.busy_s >= least_s}
        return tuple(found for found in self.stages if busiest & {*found.stage.devices})

    @property
    def pacemaker(self) -> StageEvaluation:
        """The slowest of those stages: what bounds it bounds the pace."""
        return max(self.bottlenecks, key=lambda stage: stage.seconds_per_sample)

    @property
    def peak_memory_bytes(self) -> int:
        """Bytes on the fullest device."""
        return max(device.memory_bytes for device in self.devices)

    @property
    def rank(self) -> tuple[float, int]:
        """Shorter steps are better, then less memory."""
        return self.step_s, self.peak_memory_bytes

    @property
    def is_feasible(self) -> bool:
        """Whether every device has enough memory."""
        return all(device.fits for device in self.devices)


def evaluate_plan(plan: Plan, request: PlanRequest) -> PlanEvaluation:
    """Evaluates a plan.

    The step is what the orders of its devices take when played, with messages on their channels and
    sums of gradients beside the backward: what :func:`lightning_gpp.simulate.simulate_plan` finds.

    Args:
        plan: stages on devices of the request's cluster. Its number of micro-batches, or the
            request's, must be set.
        request: the model, the cluster, the costs, the mini-batch.

    Raises:
        ValueError: the plan does not fit the model, or has no number of micro-batches.
    """
    found = evaluate_below(plan, request, math.inf)
    assert found is not None  # no step is longer
    return found


def plan_devices(plan: Plan, request: PlanRequest) -> tuple[DeviceEvaluation, ...]:
    """Compute and memory of every device of a plan, without playing the step.

    Args:
        plan: as of :func:`evaluate_plan`.
        request: likewise.

    Raises:
        ValueError: the plan does not fit the model, or has no number of micro-batches.
    """
    run = PipelineRun(plan, request)
    return _devices(run, _stages(run))


FIRST = 16
"""So many micro-batches of the slowest stage, or those in flight if they are more, are played, and
then twice as many: the difference tells the pace of a full pipeline."""


def _about_s(run: PipelineRun, at_most_s: float) -> float:
    """Seconds of a step, extrapolated from its first micro-batches where there are many.

    With contention for channels the pace may still change later, so then all are played.
    """
    units, multiples = run.graph.units_at_a_time, run.graph.multiples
    times = run.num_microbatches // units
    few = max(FIRST, max(in_flight_units(run.stages, multiples).values()) // units)
    if times < 4 * few or not run.messages_are_alone:
        return run.step_s(at_most_s)
    found = []
    for count in (few, 2 * few):
        rest_s = (1 - count / times) * run.busiest_s()
        found.append(PipelineRun(run.plan, run.request, count * units).step_s(at_most_s - rest_s))
        if found[-1] == math.inf:
            return math.inf
    few_s, twice_s = found
    return twice_s + (times / few - 2) * (twice_s - few_s)


def evaluate_below(
    plan: Plan, request: PlanRequest, at_most_s: float, *, is_rough: bool = False
) -> PlanEvaluation | None:
    """Evaluates a plan; None if its step takes longer than a limit.

    As :func:`evaluate_plan`, but most of the plans that are too slow are not played to their end.

    Args:
        plan: the plan.
        request: the model, the cluster, the costs, the mini-batch.
        at_most_s: the longest step that is of interest.
        is_rough: whether the first of many micro-batches tell how long all take.

    Raises:
        ValueError: the plan does not fit the model, or has no number of micro-batches.
    """
    run = PipelineRun(plan, request)
    known, order = request.tables.steps, (run.num_microbatches, plan.order_pace, is_rough)
    key = plan.stages, run.stages.edges, run.devices, order
    step_s = known.get(key)
    if step_s is None:
        step_s = _about_s(run, at_most_s) if is_rough else run.step_s(at_most_s)
    if step_s > at_most_s:
        return None
    known[key] = step_s
    stages = _stages(run)
    return PlanEvaluation(
        plan=plan,
        minibatch_size=request.minibatch_size,
        stages=stages,
        devices=_devices(run, stages),
        seconds_per_sample=_busiest_device_s(stages, request.minibatch_size),
        step_s=step_s,
        depth=max(run.graph.stages.depths.values()),
        num_minibatches=request.num_minibatches,
    )


def _stages(run: PipelineRun) -> tuple[StageEvaluation, ...]:
    """What the stages of a plan do; the step is not played."""
    request, found = run.request, []
    for stage, sent_s in zip(run.plan.stages, run.sent_s()):
        size = run.unit_size * stage.microbatch_multiple
        replicas = _replicas(run, stage)
        reduce_s = run.sums(stage).after_s
        busy_s = max(*(replica.compute_s for replica in replicas), sent_s)
        per_sample_s = busy_s / size + reduce_s / request.minibatch_size
        in_flight = run.in_flight[stage.id]
        found.append(
            StageEvaluation(stage, size, replicas, sent_s, reduce_s, per_sample_s, in_flight)
        )
    return tuple(found)


def _replicas(run: PipelineRun, stage: Stage) -> tuple[ReplicaEvaluation, ...]:
    """What the replicas of a stage do; equal ones are looked at once."""
    request, in_flight = run.request, run.in_flight[stage.id]
    edges = [edge for edge in run.graph.stages.edges if edge.target == stage.id]
    each = [*zip(stage.replica_multiples, run.computes[stage.id])]
    found = {}
    for units, compute in dict.fromkeys(each):
        read_bytes = 0.0
        if stage.recompute:  # what it reads is kept for the second forward
            sizes = (request.tables.edge_bytes(edge.values) for edge in edges)
            read_bytes = sum(size.held(run.unit_size * units) for size in sizes)
        memory = stage_memory(request, stage, compute, in_flight, read_bytes)
        ahead_bytes = run.ahead_bytes(stage, units)
        memory = replace(memory, fixed_bytes=memory.fixed_bytes + ahead_bytes)
        found[units, compute] = ReplicaEvaluation(compute.forward_s, compute.backward_s, memory)
    return tuple([found[one] for one in each])


def _busiest_device_s(stages: Sequence[StageEvaluation], minibatch_size: int) -> float:
    """Seconds per sample, as those of a stage, of the device that takes longest."""
    per_device: dict[int, float] = {}
    for found in stages:
        size, reduce_s = found.microbatch_size, found.reduce_s / minibatch_size
        for device, replica in zip(found.stage.devices, found.replicas):
            own_s = max(replica.compute_s, found.communication_s) / size + reduce_s
            per_device[device] = per_device.get(device, 0.0) + own_s
    return max(per_device.values())


def _devices(run: PipelineRun, stages: Sequence[StageEvaluation]) -> tuple[DeviceEvaluation, ...]:
    request, most = run.request, max(run.in_flight.values())
    step_bytes = {run.graph.devices[FEED][0]: users_step_bytes(request, run.unit_size, most)}
    busy_s: dict[int, float] = {}
    memory_bytes = dict(step_bytes)
    for found in stages:
        count = request.minibatch_size / found.microbatch_size
        for device, replica in zip(found.stage.devices, found.replicas):
            busy_s[device] = busy_s.get(device, 0.0) + count * replica.compute_s
            total_bytes = memory_bytes.get(device, 0) + replica.memory.total_bytes
            memory_bytes[device] = total_bytes
    limits = [device.memory_bytes for device in request.cluster.devices]
    return tuple(
        DeviceEvaluation(
            device, busy_s[device], memory_bytes[device], limits[device], step_bytes.get(device, 0)
        )
        for device in sorted(busy_s)
    )


def border_bytes(plan: Plan, request: PlanRequest) -> float:
    """Activations and gradients that go from one stage's devices to another's in a step."""
    placed, graph, total = plan_graph(plan, request.graph), request.graph, 0.0
    for edge in placed.stages.edges:
        if edge.source >= 0 and placed.devices[edge.source] != placed.devices[edge.target]:
            sizes = edge_bytes(graph, edge.values, has_backward=edge.has_backward)
            size = request.minibatch_size
            total += sizes.forward(size) + sizes.backward(size)
    return total


def message_bytes(plan: Plan, request: PlanRequest) -> float:
    """Bytes of the messages between stages, and of the all-reduces of replicas.

    Where stages share some devices and not all, what stays on one of them counts as well.
    """
    total = border_bytes(plan, request)
    for stage in plan.stages:
        _, trained_bytes = request.tables.parameter_bytes(stage.operators)
        total += 2 * (len(stage.devices) - 1) * trained_bytes
    return total
