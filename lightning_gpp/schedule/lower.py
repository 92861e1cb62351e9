"""Lowering: from the orders of stages to the program of devices.

Five passes: order the compute of every stage; give every replica of a stage that order; merge the
stages of each device; add the sends right after the compute that makes a message and the receives
right before the one that needs it; after the last backward of a mini-batch on a device add the sums
of gradients and the update of the parameters.

Where all forwards come first, a stage sends the message with the longest way to go first
(:class:`.PathLengths`); otherwise in the order of the stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.schedule.action import Action, Kind
from lightning_gpp.schedule.dry_run import dry_run
from lightning_gpp.schedule.merge import path_lengths
from lightning_gpp.schedule.numbering import Numbering
from lightning_gpp.schedule.program import Program
from lightning_gpp.schedule.program_parts import ReduceGroup, Replica
from lightning_gpp.schedule.schedules import ONE_F_ONE_B, Schedule, find_schedule

Edges = Mapping[int, Sequence[StageEdge]]
"""Stage (or feed) -> edges."""


def build_program(
    stages: StageGraph,
    *,
    devices: Sequence[int | Sequence[int]],
    num_microbatches: int,
    schedule: str | Schedule = ONE_F_ONE_B,
    shares: Sequence[Sequence[int]] | None = None,
    holders: Sequence[Sequence[int]] | None = None,
    order_pace: float | None = None,
    check: bool = True,
) -> Program:
    """Builds the program of one mini-batch, or of overlapping mini-batches of one micro-batch each.

    Args:
        stages: the stage graph.
        devices: device of every stage, counted from 0, or the devices of its replicas. The last
            stage, where the loss is, has one.
        num_microbatches: smallest micro-batches; each is a mini-batch where the schedule does not
            drain between them.
        schedule: the order, or its name in :data:`~lightning_gpp.schedule.SCHEDULES`.
        shares: micro-batch size of every replica, in units of the smallest; one by default.
        holders: devices that hold the parameters of every stage, where more do than run it here.
        order_pace: which of several works a shared device does first; that of a plan.
        check: look whether it runs to its end; a search that only compares can do without.

    Raises:
        ValueError: an argument does not fit the stage graph.
        ScheduleError: the program would not run to its end.

    >>> from lightning_gpp.graph import FEED, StageEdge, StageGraph
    >>> feed = StageEdge(FEED, 0, ("x",), has_backward=False)
    >>> chain = StageGraph(2, (feed, StageEdge(0, 1, ("h",))))
    >>> print(build_program(chain, devices=[0, 1], num_microbatches=1))
    device 0: 0RF0<-1 0F0 0SF0>1 0RB0<1 0B0 0S0
    device 1: -1F0 -1SF0>0 1RF0<0 1F0 1B0 1SB0>0 1S0
    """
    homes = [(entry,) if isinstance(entry, int) else tuple(entry) for entry in devices]
    units = [tuple(own) for own in shares] if shares else [(1,) * len(home) for home in homes]
    _check(num_microbatches, [*map(sum, units)])
    found = find_schedule(schedule) if isinstance(schedule, str) else schedule
    numbering = Numbering(stages, homes, units, num_microbatches, found, order_pace)
    skeleton = Program(
        schedule=found,
        num_microbatches=num_microbatches,
        devices=tuple(device for home in homes for device in home),
        multiples=tuple(size for own in units for size in own),
        edges=numbering.replica_edges,
        actions=(),
        reduce_groups=reduce_groups(stages, holders or homes) if found.has_backward else (),
        replicas=tuple(
            Replica(stage, index, len(home))
            for stage, home in enumerate(homes)
            for index in range(len(home))
        ),
    )
    updated = {*skeleton.devices}.union(*(holders or homes))
    program = replace(skeleton, actions=tuple(_actions(skeleton, numbering, updated)))
    if check:
        dry_run(program)
    return program


def _check(num_microbatches: int, multiples: Sequence[int]) -> None:
    """What plans do not look at by themselves."""
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be at least 1, got {num_microbatches}")
    for stage, multiple in enumerate(multiples):
        if num_microbatches % multiple:
            raise ValueError(
                f"stage {stage} takes {multiple} micro-batches at a time, which does not divide "
                f"the {num_microbatches} of a mini-batch"
            )


def _actions(
    program: Program, numbering: Numbering, updated: Set[int]
) -> Iterator[tuple[Action, ...]]:
    """The actions of every device, those included that only update parameters."""
    action, lines = numbering.actions(), numbering.lines()
    if program.schedule.flushes:
        lines[program.device(FEED)][:0] = range(numbering.first_feed, len(action))
    lines += [[] for _ in range(len(lines), max(updated) + 1)]
    for device, line in enumerate(lines):
        compute = [action[number] for number in line]
        yield tuple(_lowered(program, device, compute, has_update=device in updated))


def _lowered(
    program: Program, device: int, compute: Sequence[Action], *, has_update: bool
) -> list[Action]:
    """The actions of a device: every mini-batch ends with its sums and the update."""
    last = {program.minibatch(a): a for a in compute if a.kind is Kind.BACKWARD}
    ends = set(last.values())
    sends = _sends(program)
    num_ended = 0
    actions: list[Action] = []
    for action in compute:
        is_forward = action.kind is Kind.FORWARD
        actions += _messages(program, action, _KINDS[is_forward, True])
        actions.append(action)
        to = sends[not is_forward][action.stage]
        actions += _messages(program, action, _KINDS[is_forward, False], to)
        if action in ends:
            actions += _update(program, device, num_ended)
            num_ended += 1
    if has_update and program.has_backward:
        for minibatch in range(num_ended, program.num_minibatches):  # it computes nothing
            actions += _update(program, device, minibatch)
    return actions


_KINDS = {
    (True, True): Kind.RECEIVE_FORWARD,
    (True, False): Kind.SEND_FORWARD,
    (False, True): Kind.RECEIVE_BACKWARD,
    (False, False): Kind.SEND_BACKWARD,
}
"""Whether an action is a forward, and whether it needs the message."""


def _sends(program: Program) -> tuple[Edges, Edges]:
    """Stage (or feed) -> the edges that leave it and those that enter it, in the order of sends."""
    if not program.schedule.forwards_first:
        return program.out_edges, program.in_edges
    lengths = path_lengths(program.multiples, program.edges)
    left = {FEED: 0.0, **dict(enumerate(lengths.backward))}  # the way ends at the feed
    return (
        {
            stage: sorted(edges, key=lambda edge: -lengths.forward[edge.target])
            for stage, edges in program.out_edges.items()
        },
        {
            stage: sorted(edges, key=lambda edge: -left[edge.source])
            for stage, edges in program.in_edges.items()
        },
    )


def _messages(
    program: Program, action: Action, kind: Kind, edges: Sequence[StageEdge] | None = None
) -> list[Action]:
    """What an action needs from other devices, or what others need of it."""
    return [
        Action(action.stage, kind, index, peer=source if kind.is_receive else target)
        for edge, (source, target, _, index) in program.exchanged(
            action, is_needed=kind.is_receive, edges=edges
        )
        if not program.is_local(edge)
    ]


def reduce_groups(stages: StageGraph, devices: Sequence[Sequence[int]]) -> tuple[ReduceGroup, ...]:
    """The parameters that are on several devices.

    Those of one stage with replicas are a group each, the last stage first, as their gradients
    come; those that different stages share are grouped by their devices.

    Args:
        stages: says which stages read which parameter.
        devices: of every stage, one per replica.
    """
    replicated: dict[int, list[str]] = {}
    shared: dict[tuple[int, ...], list[str]] = {}
    for name, readers in stages.parameter_readers:
        holders = tuple(sorted({device for stage in readers for device in devices[stage]}))
        if len(readers) == 1 and len(holders) > 1:
            replicated.setdefault(readers[0], []).append(name)
        elif len(holders) > 1:
            shared.setdefault(holders, []).append(name)
    groups = [
        ReduceGroup(tuple(names), tuple(sorted(devices[stage])), stage)
        for stage, names in sorted(replicated.items(), reverse=True)
    ]
    groups += [ReduceGroup(tuple(names), holders) for holders, names in sorted(shared.items())]
    return tuple(groups)


def _update(program: Program, device: int, minibatch: int) -> list[Action]:
    """The end of a mini-batch on a device: sums of gradients, then the step of the optimizer."""
    mine = [stage for stage, home in enumerate(program.devices) if home == device]
    everywhere = range(program.num_stages)
    first = min(mine, default=0)
    reduces = [
        Action(
            next(
                (s for s in (*mine, *everywhere) if program.replica(s).stage == group.stage), first
            ),
            Kind.REDUCE,
            index + minibatch * len(program.reduce_groups),
        )
        for index, group in enumerate(program.reduce_groups)
        if device in group.devices
    ]
    stage = reduces[0].stage if reduces and not mine else first  # the device runs none itself
    return [*reduces, Action(stage, Kind.STEP, minibatch)]
