"""A simulated step as a timeline, so that it can be shown and laid beside a measured one.

What a device does is a span; what is on its way is a transfer. Sends, receives and sums that cost
the device itself nothing are no tasks of the simulation; here they are spans by the rules of
measured timelines: until a message is sent its receiver *waits*, from then on it *receives*;
likewise until all devices have come to a sum of gradients, and while it goes on and nothing is left
to compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from lightning_gpp.graph import FEED
from lightning_gpp.schedule import Action, Kind, Program
from lightning_gpp.simulate.critical_path import critical_path
from lightning_gpp.simulate.simulation import Simulation
from lightning_gpp.simulate.task import Task, TaskKind
from lightning_gpp.simulate.timeline.span import Span, SpanKind
from lightning_gpp.simulate.timeline.timeline import MemoryCurve, Timeline, TimelineStage
from lightning_gpp.simulate.timeline.transfer import Transfer, TransferKind

AROUND = {
    TaskKind.DATA: SpanKind.DATA,
    TaskKind.COPY: SpanKind.DATA,
    TaskKind.PREPARE: SpanKind.PREPARE,
    TaskKind.TURN: SpanKind.LOSS,
    TaskKind.FINISH: SpanKind.FINISH,
}
"""What a device does before its actions, between the two parts of them, and after them."""


def predicted_timeline(
    simulation: Simulation,
    *,
    stages: Sequence[TimelineStage] | None = None,
    rank_of_device: Sequence[int] | None = None,
    name: str = "",
) -> Timeline:
    """The timeline of a simulation.

    Args:
        simulation: what was simulated.
        stages: what is shown of the stages of the program; their numbers by default.
        rank_of_device: rank of every device; each device is the rank of its number by default.
        name: what this prediction is called where several are shown.
    """
    program = simulation.program
    ranks = tuple(rank_of_device or range(len(program.actions)))
    walk = _SpanWalk(simulation, ranks)
    parts: defaultdict[int | None, list[Span | Transfer]] = defaultdict(list)
    for number, span in walk.spans:
        parts[number].append(span)
    transfers: list[Transfer] = []
    for index, task in enumerate(simulation.tasks):
        if task.device is None:
            transfers.append(_transfer(program, task, ranks))
            parts[index].append(transfers[-1])
    # Without what the interpreter takes between actions, which is no span.
    path = [part for step in critical_path(simulation).steps for part in parts[step.index]]
    return Timeline(
        source="predicted",
        step_s=max((task.end_s for task in simulation.tasks), default=0.0),
        devices=tuple(ranks.index(rank) for rank in range(len(ranks))),
        schedule=program.schedule.name,
        stages=tuple(_plain_stages(program, ranks) if stages is None else stages),
        spans=tuple(span for _, span in walk.spans),
        transfers=tuple(transfers),
        critical_path=tuple(path),
        memory=tuple(_memory(simulation, ranks)),
        name=name,
        num_minibatches=program.num_minibatches,
    )


class _SpanWalk:
    """Walks through what every device does.

    Args:
        simulation: what was simulated.
        ranks: of the devices.

    Attributes:
        spans: with the task that each is; None of a span that no task is.
    """

    def __init__(self, simulation: Simulation, ranks: Sequence[int]) -> None:
        self.simulation, self.program = simulation, simulation.program
        self.spans: list[tuple[int | None, Span]] = []
        self._own: defaultdict[tuple[int, Action | None], dict[TaskKind, tuple[int, Task]]]
        self._own = defaultdict(dict)
        self._message: dict[tuple[int, int, bool, int], Task] = {}
        self._sums: defaultdict[int, list[Task]] = defaultdict(list)
        for index, task in enumerate(simulation.tasks):
            action = task.action
            if task.device is not None:
                self._own[task.device, action][task.kind] = index, task
            elif action is not None and action.kind is Kind.REDUCE:
                self._sums[action.microbatch].append(task)
            elif action is not None:
                self._message[action.message] = task
        for self._device, self._rank in enumerate(ranks):
            self._now_s, self._updates = 0.0, 0
            before, after = self.program.around_turn(self._device)
            update = self.program.device_actions(self._device)[len(before) + len(after) :]
            self._around(TaskKind.DATA, TaskKind.COPY, TaskKind.PREPARE)
            self._actions(before)
            self._around(TaskKind.TURN)
            self._actions(after)
            self._around(TaskKind.FINISH)
            self._actions(update)

    def _around(self, *kinds: TaskKind) -> None:
        own = self._own[self._device, None]
        for kind in kinds:
            if kind in own:
                index, task = own[kind]
                if kind is TaskKind.FINISH and task.start_s > self._now_s:  # for the loss's device
                    self._add(SpanKind.WAIT, self._now_s, task.start_s, size_bytes=task.size_bytes)
                self._add_task(AROUND[kind], None, index, task)

    def _actions(self, actions: Sequence[Action]) -> None:
        for action in actions:
            own = self._own[self._device, action]
            if TaskKind.OVERHEAD in own:
                self._now_s = own[TaskKind.OVERHEAD][1].end_s  # idle, as Python is in reality
            HANDLERS[action.kind](self, action, own)

    def compute(self, action: Action, own: _Own) -> None:
        """A forward or backward; the user's step after the pipelined forward is a span beside."""
        ((index, task),) = (own[kind] for kind in own if kind is not TaskKind.OVERHEAD)
        loss_s = self.simulation.costs.step.loss_s
        if action.kind is Kind.BACKWARD:
            self._add_task(SpanKind.BACKWARD, action, index, task)
        elif action.stage == FEED:
            self._add_task(SpanKind.FEED, action, index, task)
        elif loss_s and action.stage == self.program.loss_stage:
            middle_s = max(task.start_s, task.end_s - loss_s)
            self._add(SpanKind.FORWARD, task.start_s, middle_s, action, index)
            self._add(SpanKind.LOSS, middle_s, task.end_s, action, index)
        else:
            self._add_task(SpanKind.FORWARD, action, index, task)

    def update(self, action: Action, own: _Own) -> None:
        """The optimizer's step, which is no action of a recorded step."""
        self._updates += (action.microbatch + 1) % self.simulation.costs.step.per_update == 0
        for index, task in own.values():
            self._add_task(SpanKind.OPTIMIZER, None, index, task)

    def send(self, action: Action, own: _Own) -> None:
        """Handing a message over."""
        size_bytes = self._message[action.message].size_bytes
        index, task = own.get(TaskKind.SEND, (None, None))
        start_s, end_s = (task.start_s, task.end_s) if task else (self._now_s, self._now_s)
        self._add(SpanKind.SEND, start_s, end_s, action, index, size_bytes)

    def receive(self, action: Action, own: _Own) -> None:
        """A wait until the message is sent, and the rest."""
        transfer = self._message[action.message]
        index, task = own.get(TaskKind.RECEIVE, (None, None))
        assert transfer.action is not None
        sender = self.program.device(transfer.action.stage)
        sent = self._own[sender, transfer.action].get(TaskKind.SEND)
        sent_s = _ready_s(transfer) if sent is None else sent[1].start_s
        end_s = (task or transfer).end_s
        self._meet(SpanKind.RECEIVE, action, sent_s, end_s, transfer.size_bytes, index)

    def reduce(self, action: Action, own: _Own) -> None:
        """Waits for the sums of a group; without any there is nothing to sum."""
        sums = self._sums[action.microbatch]
        if not sums:
            return
        last = max(sums, key=_ready_s)
        index, task = own.get(TaskKind.REDUCE, (None, None))
        end_s = self._reduced_s(sums) if task is None else task.end_s
        self._meet(SpanKind.REDUCE, action, _ready_s(last), end_s, last.size_bytes, index)

    def _reduced_s(self, sums: Sequence[Task]) -> float:
        """When all sums are there, but not after what the device does next.

        Parameters that stages share are summed by messages; its own may be over before the last.
        """
        following = [self._own[self._device, None].get(TaskKind.FINISH)]
        for action in self.program.device_actions(self._device)[-1:]:
            following.append(self._own[self._device, action].get(TaskKind.OPTIMIZER))
        next_s = [found[1].start_s for found in following if found is not None]
        return min([max(task.end_s for task in sums), *next_s])

    def _meet(
        self,
        kind: SpanKind,
        action: Action,
        met_s: float,
        end_s: float,
        size_bytes: float | None,
        index: int | None,
    ) -> None:
        """A wait until the others have come, and the rest."""
        end_s = max(self._now_s, end_s)
        met_s = min(max(self._now_s, met_s), end_s)
        if met_s > self._now_s:
            self._add(SpanKind.WAIT, self._now_s, met_s, action)
        self._add(kind, met_s, end_s, action, index, size_bytes)

    def _add_task(self, kind: SpanKind, action: Action | None, index: int, task: Task) -> None:
        self._add(kind, task.start_s, task.end_s, action, index, task.size_bytes)

    def _add(
        self,
        kind: SpanKind,
        start_s: float,
        end_s: float,
        action: Action | None = None,
        index: int | None = None,
        size_bytes: float | None = None,
    ) -> None:
        overlap = self.program.num_minibatches > 1
        has_weights = overlap and kind in (SpanKind.FORWARD, SpanKind.BACKWARD)
        span = Span(
            self._rank,
            kind,
            start_s,
            end_s,
            None if action is None else str(action),
            None if size_bytes is None else round(size_bytes),
            updates=self._updates if has_weights else None,
        )
        self.spans.append((index, span))
        self._now_s = end_s


_Own = Mapping[TaskKind, tuple[int, Task]]
"""Tasks of a device in one action, with their indices."""

HANDLERS: Mapping[Kind, Callable[[_SpanWalk, Action, _Own], None]] = {
    Kind.FORWARD: _SpanWalk.compute,
    Kind.BACKWARD: _SpanWalk.compute,
    Kind.SEND_FORWARD: _SpanWalk.send,
    Kind.RECEIVE_FORWARD: _SpanWalk.receive,
    Kind.SEND_BACKWARD: _SpanWalk.send,
    Kind.RECEIVE_BACKWARD: _SpanWalk.receive,
    Kind.REDUCE: _SpanWalk.reduce,
    Kind.STEP: _SpanWalk.update,
}
"""What each kind of action is in a picture: (walk, action, its tasks)."""


def _ready_s(task: Task) -> float:
    """When a message was sent, or all devices had come to a sum."""
    return task.start_s if task.ready_s is None else task.ready_s


def _transfer(program: Program, task: Task, ranks: Sequence[int]) -> Transfer:
    action = task.action
    assert action is not None
    if action.kind is Kind.REDUCE:
        ends: tuple[int, ...] = program.reduce_group(action.microbatch).devices
    else:
        assert action.peer is not None
        ends = program.device(action.stage), program.device(action.peer)
    return Transfer(
        kind=TransferKind.SUM if task.kind is TaskKind.REDUCE else TransferKind.MESSAGE,
        start_s=task.start_s,
        end_s=task.end_s,
        channels=task.channels,
        ranks=tuple(ranks[device] for device in ends),
        action=str(action),
        size_bytes=None if task.size_bytes is None else round(task.size_bytes),
    )


def _plain_stages(program: Program, ranks: Sequence[int]) -> Iterator[TimelineStage]:
    """Stages of which nothing is known but of what they are a replica."""
    for stage in range(program.num_stages):
        replica = program.replica(stage)
        label = str(replica) if replica.count > 1 else ""
        yield TimelineStage(stage, ranks[program.device(stage)], label)


def _memory(simulation: Simulation, ranks: Sequence[int]) -> Iterator[MemoryCurve]:
    for device, curve in simulation.device_memory.items():
        yield MemoryCurve(
            rank=ranks[device],
            times_s=tuple(time_s for time_s, _ in curve),
            used_bytes=tuple(used_bytes for _, used_bytes in curve),
            limit_bytes=simulation.costs.cluster.devices[device].memory_bytes,
        )
