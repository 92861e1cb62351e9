"""What a plan would do in time: the dry run of its program with the profile's durations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_gpp.cluster import Cluster, uniform_cluster
from lightning_gpp.cost import Profile
from lightning_gpp.graph import ModelGraph, stage_graph
from lightning_gpp.planner.plan import Plan
from lightning_gpp.schedule import Action, DryRun, Kind, Program, build_program, dry_run


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

    Compute takes what the profile says, times the stage's micro-batch multiple; a message takes
    its size over the link, while the sender goes on.

    Args:
        plan: stages on devices, one device each.
        graph: the model.
        profile: what its operators cost for one micro-batch.
        num_microbatches: micro-batches of a mini-batch.
        schedule: name of the schedule.
        cluster: the links; the default link between all devices if not given.

    Raises:
        ValueError: the plan does not fit the graph, or the schedule does not fit the plan.
    """
    program = build_program(
        stage_graph(graph, plan.stage_operators),
        devices=[stage.devices[0] for stage in plan.stages],
        num_microbatches=num_microbatches,
        schedule=schedule,
        multiples=[stage.microbatch_multiple for stage in plan.stages],
        check=False,
    )
    return dry_run(
        program, _durations(program, plan, profile, cluster or uniform_cluster(plan.num_devices))
    )


def _durations(
    program: Program, plan: Plan, profile: Profile, cluster: Cluster
) -> Callable[[Action], float]:
    compute_s = {}
    for stage in plan.stages:
        size = stage.microbatch_multiple
        compute_s[stage.id, Kind.FORWARD] = size * stage_forward_s(stage.operators, profile)
        compute_s[stage.id, Kind.BACKWARD] = size * stage_backward_s(stage.operators, profile)
    message_s = {}
    for edge in program.edges:
        source, target = program.device(edge.source), program.device(edge.target)
        if source != target:
            size_bytes = edge.size_bytes * program.message_units(edge)
            message_s[edge.source, edge.target] = cluster.link(source, target).transfer_s(
                size_bytes
            )
            message_s[edge.target, edge.source] = cluster.link(target, source).transfer_s(
                size_bytes
            )

    def action_s(action: Action) -> float:
        if action.peer is not None:
            return message_s[action.stage, action.peer]
        return compute_s.get((action.stage, action.kind), 0.0)

    return action_s
