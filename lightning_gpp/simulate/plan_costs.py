"""The costs of a plan, and its simulation.

The quantities are those by which planners judge
(:mod:`lightning_gpp.planner.step_time.stage_costs`,
:mod:`lightning_gpp.planner.step_time.gradients`), and so is the step
(tests/property/test_judge.py). In more detail than there, every replica computes at the pace of its
own device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_gpp.planner import Plan, PlanRequest
from lightning_gpp.planner.request_tables import edge_bytes
from lightning_gpp.planner.step_time.gradients import in_buckets, stage_gradients
from lightning_gpp.planner.step_time.pipeline_run import PipelineRun
from lightning_gpp.planner.step_time.stage_costs import stage_memory, users_step_bytes
from lightning_gpp.schedule.lower import reduce_groups
from lightning_gpp.simulate.program_costs import (
    Bucket,
    MessageBytes,
    ProgramCosts,
    StageCosts,
    StepCosts,
)
from lightning_gpp.simulate.simulation import Simulation, simulate


def simulate_plan(
    plan: Plan, request: PlanRequest, costs: ProgramCosts | None = None
) -> Simulation:
    """Simulates one step of a plan.

    Args:
        plan: stages on devices of the request's cluster.
        request: the model, the cluster, the costs, the mini-batch, the schedule.
        costs: costs of its program; by default those of :func:`program_costs`.

    Raises:
        ValueError: the plan does not fit the model, or has no number of micro-batches.
    """
    run = PipelineRun(plan, request)
    program = run.graph.program(run.num_microbatches, schedule=request.schedule, check=False)
    return simulate(program, costs or program_costs(plan, request))


def program_costs(
    plan: Plan, request: PlanRequest, *, step: StepCosts | None = None
) -> ProgramCosts:
    """The costs of a plan's program.

    Args:
        plan: stages on devices of the request's cluster.
        request: the model, the cluster, the costs, the mini-batch.
        step: costs of a step outside of the program; zero by default.

    Raises:
        ValueError: the plan does not fit the model, or has no number of micro-batches.
    """
    run, besides, forward, backward = PipelineRun(plan, request), step or StepCosts(), {}, {}
    unit_size = run.unit_size
    for edge in run.replica_edges:
        size = edge_bytes(request.graph, edge.values, has_backward=edge.has_backward)
        pair = edge.source, edge.target
        forward[pair] = MessageBytes(size.per_sample * unit_size, size.fixed)
        if edge.has_backward:
            backward[pair] = MessageBytes(size.gradient_per_sample * unit_size, size.gradient_fixed)
    *stages, loss = _stage_costs(run)
    step_bytes = users_step_bytes(request, unit_size, max(run.in_flight.values()))
    loss = replace(  # with the user's step after the pipelined forward
        loss,
        forward_s=loss.forward_s + besides.loss_s,
        backward_s=loss.backward_s + besides.loss_backward_s,
        fixed_bytes=loss.fixed_bytes + step_bytes,
    )
    buckets = tuple(_buckets(run))
    return ProgramCosts(
        request.cluster,
        (*stages, loss),
        forward,
        backward,
        buckets,
        besides,
        feeds_ahead=request.feeds_ahead,
    )


def _stage_costs(run: PipelineRun) -> Iterator[StageCosts]:
    """Of every replica of every stage; the stage of the loss costs nothing if it is one."""
    request = run.request
    for stage, computes in zip(run.plan.stages, run.computes):
        edges = [edge for edge in run.graph.stages.edges if edge.target == stage.id]
        for units, one in zip(stage.replica_multiples, computes):
            share = run.unit_size * units
            read_bytes = sum(edge_bytes(request.graph, e.values).held(share) for e in edges)
            memory = stage_memory(request, stage, one, run.in_flight[stage.id], 0.0)
            ahead_bytes = run.ahead_bytes(stage, units)
            yield StageCosts(
                one.forward_s,
                one.backward_s,
                memory.fixed_bytes + ahead_bytes,
                read_bytes if stage.recompute else one.activation_bytes,
                one.activation_bytes if stage.recompute else 0.0,
            )
    if len(run.graph.devices) > run.plan.num_stages:
        yield StageCosts(0.0, 0.0)


def _buckets(run: PipelineRun) -> Iterator[Bucket]:
    """The sums of every reduce group in the order in which they begin."""
    request = run.request
    for index, group in enumerate(reduce_groups(run.graph.stages, run.graph.devices)):
        if group.stage is None:
            parameters = [request.graph.parameter[name] for name in group.parameters]
            if size_bytes := sum(p.size_bytes for p in parameters if p.requires_grad):
                yield Bucket(index, size_bytes)
            continue
        stage = run.plan.stages[group.stage]
        gradients = stage_gradients(request, stage, run.unit_size, group.parameters)
        for piece in in_buckets(gradients):
            yield Bucket(index, piece.size_bytes, gradients.part(piece))
