"""A plan on emulated devices, with tensors that are shapes alone."""

from __future__ import annotations

from lightning_gpp.planner import Plan, PlanRequest, plan_graph
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches
from lightning_gpp.runtime.emulation import EmulatedRun, emulate_shapes
from lightning_gpp.simulate.plan_costs import program_costs
from lightning_gpp.simulate.program_costs import ProgramCosts


def emulate_plan(
    plan: Plan,
    request: PlanRequest,
    costs: ProgramCosts | None = None,
    *,
    num_steps: int = 1,
    prefetch: bool = False,
    time_scale: float | None = None,
    timeout_s: float = 1800.0,
) -> EmulatedRun:
    """Runs a plan with the real executor, messages and sums on emulated devices.

    It is to :func:`lightning_gpp.simulate.plan_costs.simulate_plan` what a run is to a prediction:
    the same program and the same costs.

    Args:
        plan: stages on devices of the request's cluster.
        request: the model, the cluster, the costs, the mini-batch, the schedule.
        costs: what its program costs;
            :func:`~lightning_gpp.simulate.plan_costs.program_costs` if not given.
        num_steps: steps one after the other.
        prefetch: whether input is read ahead.
        time_scale: real seconds that an emulated second takes; chosen if not given.
        timeout_s: limit of every wait, in real seconds.

    Raises:
        ValueError: the plan does not fit the model, or has no number of micro-batches.
    """
    count = num_microbatches(plan, request)
    return emulate_shapes(
        plan_graph(plan, request.graph).program(count, schedule=request.schedule),
        request.graph,
        program_costs(plan, request) if costs is None else costs,
        minibatch_size=request.minibatch_size,
        num_steps=num_steps,
        prefetch=prefetch,
        time_scale=time_scale,
        timeout_s=timeout_s,
    )
