"""Turns a simulated step into a timeline, comparable with a measured one.

What a device does is a span; what is on its way is a transfer. Sends, receives and sums that cost
the device itself nothing are no tasks of the simulation; here they are spans by the rules of
measured timelines: until a message is sent its receiver *waits*, from then on it *receives*;
likewise until all devices have come to a sum of gradients, and while it goes on and nothing is left
to compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_gpp.schedule import Action, Kind, Program
from lightning_gpp.simulate.simulation import Simulation, critical_path
from lightning_gpp.simulate.task import Task
from lightning_gpp.simulate.timeline.span import Span, SpanKind, Transfer, TransferKind
from lightning_gpp.simulate.timeline.timeline import MemoryCurve, Timeline, TimelineStage

APART = (SpanKind.SEND, SpanKind.RECEIVE, SpanKind.REDUCE, SpanKind.OVERHEAD)
"""Tasks of a device that are no spans for themselves."""


def predicted_timeline(
    simulation: Simulation,
    *,
    stages: Sequence[TimelineStage] | None = None,
    rank_of_device: Sequence[int] | None = None,
) -> Timeline:
    """The timeline of a simulated step.

    Args:
        simulation: the simulated step.
        stages: how to show the stages of the program; by default by their numbers.
        rank_of_device: rank of every device; by default equal to the device.
    """
    program = simulation.program
    ranks = tuple(rank_of_device or range(len(program.actions)))
    if stages is None:
        homes = map(program.device, range(program.num_stages))
        stages = [TimelineStage(stage, ranks[home]) for stage, home in enumerate(homes)]
    walk = _SpanWalk(simulation)
    parts: defaultdict[int | None, list[Span | Transfer]] = defaultdict(list)
    spans, transfers = list[Span](), list[Transfer]()
    for device, rank in enumerate(ranks):
        for index, span in walk.spans(device, rank):
            spans.append(span)
            parts[index].append(span)
    for index, task in enumerate(simulation.tasks):
        if task.device is None:
            transfers.append(_transfer(program, task, ranks))
            parts[index].append(transfers[-1])
    # Without what the interpreter takes between actions, which is no span.
    path = [part for step in critical_path(simulation) for part in parts[step.index]]
    return Timeline(
        source="predicted",
        step_s=max((task.end_s for task in simulation.tasks), default=0.0),
        devices=tuple(ranks.index(rank) for rank in range(len(ranks))),
        schedule=program.schedule.name,
        stages=tuple(stages),
        spans=tuple(spans),
        transfers=tuple(transfers),
        critical_path=tuple(path),
        memory=tuple(_memory(simulation, ranks)),
        num_minibatches=program.num_minibatches,
    )


class _Piece(NamedTuple):
    """A span to be; its task, by number, is None where it is none."""

    task: int | None
    kind: SpanKind
    start_s: float
    end_s: float
    size_bytes: float | None = None


class _SpanWalk:
    """Walks through what devices do."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._program = simulation, simulation.program
        self._own: defaultdict[tuple[int, Action | None], dict[SpanKind, tuple[int, Task]]]
        self._own = defaultdict(dict)
        self._message: dict[tuple[int, int, bool, int], Task] = {}
        self._sums: defaultdict[int, list[Task]] = defaultdict(list)
        for index, task in enumerate(simulation.tasks):
            action = task.action
            if task.device is not None:
                assert isinstance(task.kind, SpanKind)
                self._own[task.device, action][task.kind] = index, task
            elif action is not None and action.kind is Kind.REDUCE:
                self._sums[action.microbatch].append(task)
            elif action is not None:
                self._message[action.message] = task

    def spans(self, device: int, rank: int) -> Iterator[tuple[int | None, Span]]:
        """The spans of a device, with the index of the task that each is."""
        program, now_s, updates = self._program, 0.0, 0
        before, after = program.around_turn(device)
        update = program.device_actions(device)[len(before) + len(after) :]
        per_update = self._simulation.costs.step.per_update
        items: list[Action | SpanKind] = [SpanKind.DATA, SpanKind.PREPARE, *before, SpanKind.LOSS]
        items += [*after, SpanKind.FINISH, *update]
        for item in items:
            action = item if isinstance(item, Action) else None
            if action is not None and action.kind is Kind.STEP:
                updates += (action.microbatch + 1) % per_update == 0
            for piece in self._pieces(device, item, now_s):
                task, kind, start_s, now_s, size_bytes = piece
                has_weights = kind in (SpanKind.FORWARD, SpanKind.BACKWARD)
                is_step = action is None or action.kind is Kind.STEP  # no action of recorded steps
                yield (
                    task,
                    Span(
                        rank,
                        kind,
                        start_s,
                        now_s,
                        None if is_step else str(action),
                        None if size_bytes is None else round(size_bytes),
                        updates=updates if has_weights and program.num_minibatches > 1 else None,
                    ),
                )

    def _pieces(self, device: int, item: Action | SpanKind, now_s: float) -> Iterator[_Piece]:
        """What an action is on a device that has been free since ``now_s``, or what is around."""
        if isinstance(item, SpanKind):
            found = self._own[device, None].get(item)
            own = {} if found is None else {item: found}
        else:
            own = self._own[device, item]
            if SpanKind.OVERHEAD in own:
                now_s = own[SpanKind.OVERHEAD][1].end_s  # idle, as Python is in reality
            if item.kind.is_send:
                yield self._send(item, own.get(SpanKind.SEND), now_s)
            elif item.kind.is_receive:
                yield from self._receive(item, own.get(SpanKind.RECEIVE), now_s)
            elif item.kind is Kind.REDUCE:
                yield from self._reduce(device, item, own.get(SpanKind.REDUCE), now_s)
        loss_s = self._simulation.costs.step.loss_s
        for kind, (index, task) in own.items():
            if kind is SpanKind.FINISH and task.start_s > now_s:  # for the device of the loss
                yield _Piece(None, SpanKind.WAIT, now_s, task.start_s)
            if kind in APART:
                continue
            end_s = task.end_s
            is_loss = isinstance(item, Action) and item.stage == self._program.loss_stage
            if kind is SpanKind.FORWARD and loss_s and is_loss:  # the user's step is part of it
                end_s = max(task.start_s, end_s - loss_s)
            yield _Piece(index, kind, task.start_s, end_s)
            if end_s < task.end_s:
                yield _Piece(index, SpanKind.LOSS, end_s, task.end_s)

    def _send(self, action: Action, own: tuple[int, Task] | None, now_s: float) -> _Piece:
        """Handing a message over."""
        size_bytes = self._message[action.message].size_bytes
        if own is None:
            return _Piece(None, SpanKind.SEND, now_s, now_s, size_bytes)
        return _Piece(own[0], SpanKind.SEND, own[1].start_s, own[1].end_s, size_bytes)

    def _receive(
        self, action: Action, own: tuple[int, Task] | None, now_s: float
    ) -> Iterator[_Piece]:
        """A wait until the message is sent, and the rest."""
        transfer = self._message[action.message]
        assert transfer.action is not None
        sender = self._program.device(transfer.action.stage)
        sent = self._own[sender, transfer.action].get(SpanKind.SEND)
        sent_s = _ready_s(transfer) if sent is None else sent[1].start_s
        index, task = own or (None, transfer)
        rest = _Piece(index, SpanKind.RECEIVE, sent_s, task.end_s, transfer.size_bytes)
        return _met(rest, now_s)

    def _reduce(
        self, device: int, action: Action, own: tuple[int, Task] | None, now_s: float
    ) -> Iterator[_Piece]:
        """Waits for the sums of a group; without any there is nothing to sum.

        A sum does not last longer than until what the device does next: of parameters that stages
        share, which are summed by messages, its own may be over before the last.
        """
        if sums := self._sums[action.microbatch]:
            last = max(sums, key=_ready_s)
            following = [self._own[device, None].get(SpanKind.FINISH)]
            for step in self._program.device_actions(device)[-1:]:
                following.append(self._own[device, step].get(SpanKind.OPTIMIZER))
            next_s = [found[1].start_s for found in following if found is not None]
            index, end_s = None, min([max(task.end_s for task in sums), *next_s])
            if own is not None:
                index, end_s = own[0], own[1].end_s
            rest = _Piece(index, SpanKind.REDUCE, _ready_s(last), end_s, last.size_bytes)
            yield from _met(rest, now_s)


def _met(rest: _Piece, now_s: float) -> Iterator[_Piece]:
    """A wait until the others have come, and the rest."""
    end_s = max(now_s, rest.end_s)
    met_s = min(max(now_s, rest.start_s), end_s)
    if met_s > now_s:
        yield _Piece(None, SpanKind.WAIT, now_s, met_s)
    yield rest._replace(start_s=met_s, end_s=end_s)


def _ready_s(task: Task) -> float:
    """When a message was sent, or all devices had come to a sum."""
    return task.start_s if task.ready_s is None else task.ready_s


def _transfer(program: Program, task: Task, ranks: Sequence[int]) -> Transfer:
    action = task.action
    assert action is not None and isinstance(task.kind, TransferKind)
    if action.kind is Kind.REDUCE:
        ends: tuple[int, ...] = program.reduce_group(action.microbatch).devices
    else:
        assert action.peer is not None
        ends = program.device(action.stage), program.device(action.peer)
    return Transfer(
        kind=task.kind,
        start_s=task.start_s,
        end_s=task.end_s,
        channels=task.channels,
        ranks=tuple(ranks[device] for device in ends),
        action=str(action),
        size_bytes=None if task.size_bytes is None else round(task.size_bytes),
        waited_s=task.start_s - _ready_s(task),
    )


def _memory(simulation: Simulation, ranks: Sequence[int]) -> Iterator[MemoryCurve]:
    for device, curve in simulation.device_memory.items():
        times_s, used_bytes = zip(*curve)
        limit_bytes = simulation.costs.cluster.devices[device].memory_bytes
        yield MemoryCurve(ranks[device], times_s, used_bytes, limit_bytes)
