"""What a plan costs, and its simulation.

The quantities are those by which planners judge
(:mod:`lightning_gpp.planner.step_time.stage_costs`,
:mod:`lightning_gpp.planner.step_time.gradients`), and so is the step
(tests/property/test_judge.py). In more detail than there, every replica computes at the pace of its
own device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from lightning_gpp.cluster import BUCKET_BYTES, AllReduce, all_reduce_s
from lightning_gpp.planner import Plan, PlanRequest
from lightning_gpp.planner.edge_bytes import edge_bytes, input_bytes
from lightning_gpp.planner.plan.plan_graph import PlanGraph, plan_graph
from lightning_gpp.planner.step_time.gradients import Rule, in_buckets, stage_gradients
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches
from lightning_gpp.planner.step_time.stage_costs import kind_compute, stage_memory
from lightning_gpp.planner.step_time.users_step import users_step_bytes
from lightning_gpp.schedule import ReduceGroup, reduce_groups
from lightning_gpp.schedule.replicas import expand
from lightning_gpp.simulate.engine.run import simulate
from lightning_gpp.simulate.program_costs import (
    Bucket,
    MessageBytes,
    ProgramCosts,
    StageCosts,
    StepCosts,
)
from lightning_gpp.simulate.simulation import Simulation
from lightning_gpp.simulate.ssgd.gradient_merging import MERGING

Overlap = Literal["at_end", "one_at_end", "wait_free", "merged", "optimal", "buckets"]
"""How the gradients of replicas are cut into sums: as :data:`MERGING` has it, or ``"buckets"`` of
so many bytes, as our runtime does it (here of whole operators, there of parameters)."""


def simulate_plan(
    plan: Plan,
    request: PlanRequest,
    costs: ProgramCosts | None = None,
    *,
    num_steps: int = 1,
    prefetch: bool = False,
) -> Simulation:
    """When everything in a step of a plan happens.

    Args:
        plan: stages on devices of the request's cluster.
        request: the model, the cluster, the costs, the mini-batch, the schedule.
        costs: what its program costs; :func:`program_costs` if not given.
        num_steps: steps one after the other.
        prefetch: whether input is read ahead.

    Raises:
        ValueError: the plan does not fit the model, or has no number of micro-batches.
    """
    pipeline = plan_graph(plan, request.graph)
    count = num_microbatches(plan, request)
    return simulate(
        pipeline.program(count, schedule=request.schedule, check=False),
        program_costs(plan, request) if costs is None else costs,
        num_steps=num_steps,
        prefetch=prefetch,
    )


def program_costs(
    plan: Plan,
    request: PlanRequest,
    *,
    overlap: Overlap = "buckets",
    all_reduce: AllReduce = "ring",
    bucket_bytes: float = BUCKET_BYTES,
    step: StepCosts | None = None,
) -> ProgramCosts:
    """What the program of a plan costs.

    Args:
        plan: stages on devices of the request's cluster.
        request: the model, the cluster, the costs, the mini-batch.
        overlap: how the gradients of replicas are cut into sums.
        all_reduce: how they are summed.
        bucket_bytes: a bucket of ``overlap="buckets"`` is closed when it has so many bytes.
        step: what a step costs besides; nothing if not given.

    Raises:
        ValueError: the plan does not fit the model, has no number of micro-batches, or ``overlap``
            is unknown.
    """
    if overlap not in get_args(Overlap):
        raise ValueError(f"unknown overlap {overlap!r}; known: {', '.join(get_args(Overlap))}")
    pipeline = plan_graph(plan, request.graph)
    unit_size = request.minibatch_size / num_microbatches(plan, request)
    expansion = expand(pipeline.stages, pipeline.devices, pipeline.multiples, pipeline.shares)
    forward, backward = {}, {}
    for edge in expansion.edges:
        size = edge_bytes(request.graph, edge.values, has_backward=edge.has_backward)
        pair = edge.source, edge.target
        forward[pair] = MessageBytes(size.per_sample * unit_size, size.fixed)
        if edge.has_backward:
            backward[pair] = MessageBytes(size.gradient_per_sample * unit_size, size.gradient_fixed)
    merge = in_buckets(bucket_bytes) if overlap == "buckets" else MERGING[overlap]
    how = _Sums(plan, request, unit_size, merge, all_reduce, cuts_layers=overlap == "buckets")
    groups = reduce_groups(pipeline.stages, pipeline.devices)
    besides = step or StepCosts()
    count = num_microbatches(plan, request)
    in_flight = request.order.peak_in_flight(pipeline.stages, count, pipeline.multiples)
    *stages, loss = _stage_costs(plan, request, pipeline, unit_size, in_flight)
    held_bytes = users_step_bytes(request, unit_size, max(in_flight.values()))
    return ProgramCosts(
        request.cluster,
        (*stages, _with_users_step(loss, besides, held_bytes)),
        forward,
        backward,
        tuple(b for index, group in enumerate(groups) for b in how.buckets(index, group)),
        besides,
        all_reduce,
    )


def _with_users_step(loss: StageCosts, step: StepCosts, held_bytes: int) -> StageCosts:
    """The stage of the loss, with the user's step after the pipelined forward."""
    return replace(
        loss,
        forward_s=loss.forward_s + step.loss_s,
        backward_s=loss.backward_s + step.loss_backward_s,
        fixed_bytes=loss.fixed_bytes + held_bytes,
    )


def _stage_costs(
    plan: Plan,
    request: PlanRequest,
    pipeline: PlanGraph,
    unit_size: float,
    in_flight: Mapping[int, int],
) -> Iterator[StageCosts]:
    """Of every replica of every stage; the stage of the loss costs nothing if it is one."""
    inputs = input_bytes(request.graph, pipeline.stages)
    for number, devices in enumerate(pipeline.devices):
        for device, units in zip(devices, pipeline.shares[number]):
            if number == plan.num_stages:
                yield StageCosts(0.0, 0.0)
                continue
            stage = plan.stages[number]
            share = unit_size * units
            read_bytes = sum(size.held(share) for size in inputs[number])
            compute = kind_compute(request, stage, share, request.cluster.devices[device].kind)
            yield StageCosts(
                compute.forward_s,
                compute.backward_s,
                stage_memory(request, stage, compute, in_flight[number], 0.0).fixed_bytes,
                read_bytes if stage.recompute else compute.activation_bytes,
                compute.activation_bytes if stage.recompute else 0.0,
            )


@dataclass(frozen=True, slots=True)
class _Sums:
    """How the gradients of a plan are summed.

    Attributes:
        plan: the plan.
        request: the model and its costs.
        unit_size: samples of a smallest micro-batch.
        merge: cuts gradients into sums.
        all_reduce: how they are summed.
        cuts_layers: whether gradients of one layer may be in several sums, as the runtime has it.
    """

    plan: Plan
    request: PlanRequest
    unit_size: float
    merge: Rule
    all_reduce: AllReduce
    cuts_layers: bool

    def buckets(self, index: int, group: ReduceGroup) -> Iterator[Bucket]:
        """The sums of a reduce group in the order in which they begin."""
        if group.stage is None:
            parameters = [self.request.graph.parameter[name] for name in group.parameters]
            if size_bytes := sum(p.size_bytes for p in parameters if p.requires_grad):
                yield Bucket(index, size_bytes)
            return
        stage = self.plan.stages[group.stage]
        gradients = stage_gradients(
            self.request,
            stage,
            self.unit_size,
            group.parameters,
            cuts_layers=self.cuts_layers,
        )
        for piece in self.merge(gradients, partial(self._sum_s, group.devices)):
            yield Bucket(index, piece.size_bytes, gradients.part(piece))

    def _sum_s(self, devices: Sequence[int], size_bytes: float) -> float:
        return all_reduce_s(self.request.cluster, devices, size_bytes, self.all_reduce)
