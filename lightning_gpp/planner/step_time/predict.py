"""What a plan would do in time: the dry run of its program with the profile's durations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_gpp.cluster import Cluster, uniform_cluster
from lightning_gpp.cost import Profile
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.plan.plan_graph import plan_graph
from lightning_gpp.schedule import Action, DryRun, Kind, Program, dry_run


def stage_forward_s(operators: Sequence[str], profile: Profile) -> float:
    """Seconds of the forward of a stage for one smallest micro-batch."""
    return sum(profile.operators[name].forward_s for name in operators)


def stage_backward_s(operators: Sequence[str], profile: Profile) -> float:
    """Seconds of the backward of a stage for one smallest micro-batch."""
    return sum(profile.operators[name].backward_s for name in operators)


def predict(
    plan: Plan,
    graph: ModelGraph,
    *,
    profile: Profile,
    num_microbatches: int,
    schedule: str = "1f1b",
    cluster: Cluster | None = None,
) -> DryRun:
    """Step time, busy seconds and micro-batches in flight that a plan would have.

    Compute takes what the profile says, times the units of a micro-batch; a stage that recomputes
    runs its forward twice. A message takes its size over the link, while the sender goes on.

    Args:
        plan: stages on devices.
        graph: the model.
        profile: what its operators cost for one smallest micro-batch.
        num_microbatches: micro-batches of a mini-batch.
        schedule: name of the schedule.
        cluster: the links; the default link between all devices if not given.

    Returns:
        The dry run; micro-batches in flight by the plan's stages.

    Raises:
        ValueError: the plan does not fit the graph, or the schedule does not fit the plan.
    """
    program = plan_graph(plan, graph).program(num_microbatches, schedule=schedule, check=False)
    run = dry_run(
        program, _durations(program, plan, profile, cluster or uniform_cluster(plan.num_devices))
    )
    in_flight = {program.replica(s).stage: count for s, count in run.in_flight.items()}
    return replace(run, in_flight=in_flight)


def _durations(
    program: Program, plan: Plan, profile: Profile, cluster: Cluster
) -> Callable[[Action], float]:
    unit_s = {}
    for stage in plan.stages:
        forward_s = stage_forward_s(stage.operators, profile)
        backward_s = stage_backward_s(stage.operators, profile)
        unit_s[stage.id, Kind.FORWARD] = forward_s
        unit_s[stage.id, Kind.BACKWARD] = backward_s + (forward_s if stage.recompute else 0.0)

    def action_s(action: Action) -> float:
        if action.peer is None:
            stage = program.replica(action.stage).stage
            return program.num_units(action) * unit_s.get((stage, action.kind), 0.0)
        source, target, backward, _ = action.message
        size_bytes = program.edge[(target, source) if backward else (source, target)].size_bytes
        link = cluster.link(program.device(source), program.device(target))
        return link.transfer_s(size_bytes * program.num_units(action))

    return action_s
