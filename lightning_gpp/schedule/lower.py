"""From the orders of the stages to the program of the devices.

Three passes: order the compute of every stage; merge the stages of each device; add the sends
right after the compute that makes a message and the receives right before the one that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.schedule.action import Action, Kind
from lightning_gpp.schedule.merge import merge_stages
from lightning_gpp.schedule.orders import FORWARD_ONLY, schedule_steps, stage_actions
from lightning_gpp.schedule.program import Program, ReduceGroup
from lightning_gpp.schedule.validate import validate


def build_program(
    stages: StageGraph,
    *,
    devices: Sequence[int],
    num_microbatches: int,
    schedule: str = "1f1b",
    multiples: Sequence[int] | None = None,
    forward_only: bool = False,
    check: bool = True,
) -> Program:
    """The program of one mini-batch.

    Args:
        stages: the stage graph.
        devices: device of every stage, counted from 0.
        num_microbatches: smallest micro-batches in the mini-batch.
        schedule: name in :data:`~lightning_gpp.schedule.SCHEDULES`.
        multiples: micro-batch size of every stage in units of the smallest; all 1 by default.
        forward_only: leave the backwards out (validation, prediction).
        check: validate the program; a search that only compares dry runs can do without.

    Raises:
        ValueError: an argument does not fit the stage graph.
        ScheduleError: the program would not run to its end.

    >>> from lightning_gpp.graph import FEED, StageEdge, StageGraph
    >>> feed = StageEdge(FEED, 0, ("x",), has_backward=False)
    >>> chain = StageGraph(2, (feed, StageEdge(0, 1, ("h",))))
    >>> print(build_program(chain, devices=[0, 1], num_microbatches=1))
    device 0: 0RF0<-1 0F0 0SF0>1 0RB0<1 0B0
    device 1: -1F0 -1SF0>0 1RF0<0 1F0 1B0 1SB0>0
    """
    sizes = list(multiples) if multiples is not None else [1] * stages.num_stages
    _check(stages, devices, num_microbatches, sizes)
    name = FORWARD_ONLY if forward_only else schedule
    orders = {
        stage: stage_actions(stage, steps)
        for stage, steps in schedule_steps(name, stages, num_microbatches, sizes).items()
    }
    skeleton = Program(
        schedule=name,
        num_microbatches=num_microbatches,
        devices=tuple(devices),
        multiples=tuple(sizes),
        edges=stages.edges,
        actions=(),
        reduce_groups=() if forward_only else _reduce_groups(stages, devices),
    )
    orders[FEED] = _feed_order(skeleton)
    compute = merge_stages(skeleton, orders)
    program = Program(
        schedule=name,
        num_microbatches=num_microbatches,
        devices=skeleton.devices,
        multiples=skeleton.multiples,
        edges=skeleton.edges,
        actions=tuple(
            tuple(_with_messages(skeleton, actions) + _reduces(skeleton, device))
            for device, actions in enumerate(compute)
        ),
        reduce_groups=skeleton.reduce_groups,
    )
    if check:
        validate(program)
    return program


def _check(
    stages: StageGraph, devices: Sequence[int], num_microbatches: int, multiples: Sequence[int]
) -> None:
    for name, values in (("devices", devices), ("multiples", multiples)):
        if len(values) != stages.num_stages:
            raise ValueError(
                f"{name} must have one entry per stage: got {len(values)} for "
                f"{stages.num_stages} stages"
            )
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be at least 1, got {num_microbatches}")
    if min(devices) < 0:
        raise ValueError(f"devices are counted from 0, got {min(devices)}")
    for stage, multiple in enumerate(multiples):
        if multiple < 1 or num_microbatches % multiple:
            raise ValueError(
                f"stage {stage} takes {multiple} micro-batches at a time, which does not divide "
                f"num_microbatches={num_microbatches}"
            )
    for edge in stages.edges:
        small, large = sorted((multiples[edge.source], multiples[edge.target]))
        if edge.source != FEED and large % small:
            raise ValueError(
                f"stages {edge.source} and {edge.target} are joined by an edge, so the larger of "
                f"their micro-batches must be a multiple of the smaller: got {small} and {large}"
            )


def _feed_order(program: Program) -> list[Action]:
    count = program.stage_microbatches(FEED)
    order = [Action(FEED, Kind.FORWARD, i) for i in range(count)]
    if program.has_backward and any(edge.has_backward for edge in program.out_edges[FEED]):
        order += [Action(FEED, Kind.BACKWARD, i) for i in range(count)]
    return order


def _with_messages(program: Program, compute: Sequence[Action]) -> list[Action]:
    actions: list[Action] = []
    for action in compute:
        if action.kind is Kind.FORWARD:
            before = (Kind.RECEIVE_FORWARD, program.in_edges[action.stage])
            after = (Kind.SEND_FORWARD, program.out_edges[action.stage])
        else:
            before = (Kind.RECEIVE_BACKWARD, program.out_edges[action.stage])
            after = (Kind.SEND_BACKWARD, program.in_edges[action.stage])
        actions += _messages(program, action, *before)
        actions.append(action)
        actions += _messages(program, action, *after)
    return actions


def _messages(
    program: Program, action: Action, kind: Kind, edges: Sequence[StageEdge]
) -> list[Action]:
    needs_backward = kind in (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD)
    return [
        Action(
            action.stage,
            kind,
            index,
            peer=edge.target if edge.source == action.stage else edge.source,
        )
        for edge in edges
        if not program.is_local(edge) and (edge.has_backward or not needs_backward)
        for index in program.message_range(edge, action.stage, action.microbatch)
    ]


def _reduce_groups(stages: StageGraph, devices: Sequence[int]) -> tuple[ReduceGroup, ...]:
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, readers in stages.shared_parameters:
        holders = tuple(sorted({devices[stage] for stage in readers}))
        if len(holders) > 1:
            groups.setdefault(holders, []).append(name)
    return tuple(ReduceGroup(tuple(names), holders) for holders, names in sorted(groups.items()))


def _reduces(program: Program, device: int) -> list[Action]:
    stage = min(
        (stage for stage, home in enumerate(program.devices) if home == device), default=FEED
    )
    return [
        Action(stage, Kind.REDUCE, index)
        for index, group in enumerate(program.reduce_groups)
        if device in group.devices
    ]
