"""What a plan costs, and its simulation.

The quantities are those by which planners judge
(:mod:`lightning_gpp.planner.step_time.stage_costs`,
:mod:`lightning_gpp.planner.step_time.gradients`), and so is the step
(tests/property/test_judge.py). In more detail than there, every replica computes at the pace of its
own device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

from lightning_gpp.cluster import AllReduce, all_reduce_s
from lightning_gpp.planner import Plan, PlanRequest
from lightning_gpp.planner.plan.plan_graph import PlanGraph, plan_graph
from lightning_gpp.planner.request_tables import edge_bytes, input_bytes
from lightning_gpp.planner.step_time.gradients import BUCKETS, Rule, stage_gradients
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches
from lightning_gpp.planner.step_time.stage_costs import kind_compute, stage_memory, users_step_bytes
from lightning_gpp.schedule import reduce_groups
from lightning_gpp.schedule.replicas import expand
from lightning_gpp.simulate.program_costs import (
    Bucket,
    MessageBytes,
    ProgramCosts,
    StageCosts,
    StepCosts,
)
from lightning_gpp.simulate.simulation import Simulation, simulate
from lightning_gpp.simulate.ssgd import MERGING

Overlap = Literal["at_end", "wait_free", "merged", "buckets"]
"""How the gradients of replicas are cut into sums: as :data:`MERGING` has it, or into the buckets
of our runtime (here of whole operators, there of parameters)."""

RULES: Mapping[str, Rule] = {**MERGING, "buckets": BUCKETS}


def simulate_plan(
    plan: Plan, request: PlanRequest, costs: ProgramCosts | None = None
) -> Simulation:
    """When everything in a step of a plan happens.

    Args:
        plan: stages on devices of the request's cluster.
        request: the model, the cluster, the costs, the mini-batch, the schedule.
        costs: what its program costs; :func:`program_costs` if not given.

    Raises:
        ValueError: the plan does not fit the model, or has no number of micro-batches.
    """
    count = num_microbatches(plan, request)
    program = plan_graph(plan, request.graph).program(count, schedule=request.schedule, check=False)
    return simulate(program, costs or program_costs(plan, request))


def program_costs(
    plan: Plan,
    request: PlanRequest,
    *,
    overlap: Overlap = "buckets",
    all_reduce: AllReduce = "ring",
    step: StepCosts | None = None,
) -> ProgramCosts:
    """What the program of a plan costs.

    Args:
        plan: stages on devices of the request's cluster.
        request: the model, the cluster, the costs, the mini-batch.
        overlap: how the gradients of replicas are cut into sums.
        all_reduce: how they are summed.
        step: what a step costs besides; nothing if not given.

    Raises:
        ValueError: the plan does not fit the model, has no number of micro-batches, or ``overlap``
            is unknown.
    """
    if overlap not in RULES:
        raise ValueError(f"unknown overlap {overlap!r}; known: {', '.join(get_args(Overlap))}")
    pipeline, count = plan_graph(plan, request.graph), num_microbatches(plan, request)
    unit_size, besides = request.minibatch_size / count, step or StepCosts()
    expansion = expand(pipeline.stages, pipeline.devices, pipeline.multiples, pipeline.shares)
    forward, backward = {}, {}
    for edge in expansion.edges:
        size = edge_bytes(request.graph, edge.values, has_backward=edge.has_backward)
        pair = edge.source, edge.target
        forward[pair] = MessageBytes(size.per_sample * unit_size, size.fixed)
        if edge.has_backward:
            backward[pair] = MessageBytes(size.gradient_per_sample * unit_size, size.gradient_fixed)
    in_flight = request.order.peak_in_flight(pipeline.stages, count, pipeline.multiples)
    *stages, loss = _stage_costs(plan, request, pipeline, unit_size, in_flight)
    loss = replace(  # with the user's step after the pipelined forward
        loss,
        forward_s=loss.forward_s + besides.loss_s,
        backward_s=loss.backward_s + besides.loss_backward_s,
        fixed_bytes=loss.fixed_bytes
        + users_step_bytes(request, unit_size, max(in_flight.values())),
    )
    buckets = _buckets(plan, request, pipeline, unit_size, overlap, all_reduce)
    return ProgramCosts(
        request.cluster, (*stages, loss), forward, backward, tuple(buckets), besides, all_reduce
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


def _buckets(
    plan: Plan,
    request: PlanRequest,
    pipeline: PlanGraph,
    unit_size: float,
    overlap: Overlap,
    all_reduce: AllReduce,
) -> Iterator[Bucket]:
    """The sums of every reduce group in the order in which they begin."""
    for index, group in enumerate(reduce_groups(pipeline.stages, pipeline.devices)):
        if group.stage is None:
            parameters = [request.graph.parameter[name] for name in group.parameters]
            if size_bytes := sum(p.size_bytes for p in parameters if p.requires_grad):
                yield Bucket(index, size_bytes)
            continue
        gradients = stage_gradients(
            request,
            plan.stages[group.stage],
            unit_size,
            group.parameters,
            cuts_layers=overlap == "buckets",  # as the runtime does
        )
        sum_s = partial(all_reduce_s, request.cluster, group.devices, algorithm=all_reduce)
        for piece in RULES[overlap](gradients, sum_s):
            yield Bucket(index, piece.size_bytes, gradients.part(piece))
