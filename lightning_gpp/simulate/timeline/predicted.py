"""A simulated step as a timeline, so that it can be shown and laid beside a measured one.

What a device does is a span; what is on its way is a transfer. Sends, receives and sums that cost
the device itself nothing are no tasks of the simulation; here they are spans by the rules of
measured timelines: until a message is sent its receiver *waits*, from then on it *receives*;
likewise until all devices have come to a sum of gradients, and while it goes on and nothing is left
to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from lightning_gpp.graph import FEED
from lightning_gpp.schedule import Action, Kind, Program
from lightning_gpp.simulate.critical_path import critical_path
from lightning_gpp.simulate.simulation import Simulation, Task, TaskKind
from lightning_gpp.simulate.timeline.span import Span, SpanKind
from lightning_gpp.simulate.timeline.timeline import MemoryCurve, PathPart, Timeline, TimelineStage
from lightning_gpp.simulate.timeline.transfer import Transfer, TransferKind

_BEFORE = {
    TaskKind.DATA: SpanKind.DATA,
    TaskKind.COPY: SpanKind.DATA,
    TaskKind.PREPARE: SpanKind.PREPARE,
}
"""What a device does before its actions."""

_BETWEEN = {TaskKind.TURN: SpanKind.LOSS}
"""What it does between the forward and the backward part of them."""

_AFTER = {TaskKind.FINISH: SpanKind.FINISH}
"""What it does after them, before the update."""

_TRANSFERS = {
    TaskKind.TRANSFER: TransferKind.MESSAGE,
    TaskKind.REDUCE: TransferKind.SUM,
    TaskKind.DATA: TransferKind.COPY,
    TaskKind.COPY: TransferKind.COPY,
}
"""What a task of no device is."""


def predicted_timeline(
    simulation: Simulation,
    *,
    stages: Sequence[TimelineStage] | None = None,
    rank_of_device: Sequence[int] | None = None,
    name: str = "",
) -> Timeline:
    """The timeline of a simulation; of several simulated steps it holds them all.

    Args:
        simulation: what was simulated.
        stages: what is shown of the stages of the program; their numbers by default.
        rank_of_device: rank of every device; each device is the rank of its number by default.
        name: what this prediction is called where several are shown.
    """
    program = simulation.program
    ranks = tuple(rank_of_device or range(len(program.actions)))
    found = _Tasks.of(simulation)
    spans = [
        item
        for device in range(len(ranks))
        for item in _DeviceWalk(simulation, found, device, ranks[device]).spans()
    ]
    transfers = list(_transfers(simulation, ranks))
    return Timeline(
        source="predicted",
        step_s=max((task.end_s for task in simulation.tasks), default=0.0),
        devices=tuple(ranks.index(rank) for rank in range(len(ranks))),
        schedule=program.schedule.name,
        stages=tuple(stages) if stages is not None else _plain_stages(program, ranks),
        spans=tuple(span for _, span in spans),
        transfers=tuple(transfer for _, transfer in transfers),
        critical_path=_path(
            simulation,
            [
                *((task, PathPart(span=i)) for i, (task, _) in enumerate(spans)),
                *((task, PathPart(transfer=i)) for i, (task, _) in enumerate(transfers)),
            ],
        ),
        memory=tuple(_memory(simulation, ranks)),
        name=name,
        num_minibatches=program.num_minibatches,
    )


_Own = Mapping[TaskKind, tuple[int, Task]]
"""Tasks of a device in one action, with their indices."""

_NumberedSpan = tuple[int | None, Span]
"""Index of a task, and the span that it is; None of a span that no task is."""


@dataclass(frozen=True)
class _Tasks:
    """The tasks of a simulation by what they are of.

    Attributes:
        own: (device, step, action) -> (index, task) of the device, of each kind one.
        around: (device, step) -> (index, task) of those of no action.
        message: (step, message) -> its transfer.
        sums: (step, reduce group) -> the sums of its buckets.
        num_steps: steps that were simulated.
    """

    own: Mapping[tuple[int, int, Action], _Own]
    around: Mapping[tuple[int, int], Sequence[tuple[int, Task]]]
    message: Mapping[tuple[int, tuple[int, int, bool, int]], Task]
    sums: Mapping[tuple[int, int], Sequence[Task]]
    num_steps: int

    @classmethod
    def of(cls, simulation: Simulation) -> _Tasks:
        own: dict[tuple[int, int, Action], dict[TaskKind, tuple[int, Task]]] = {}
        around: dict[tuple[int, int], list[tuple[int, Task]]] = {}
        message: dict[tuple[int, tuple[int, int, bool, int]], Task] = {}
        sums: dict[tuple[int, int], list[Task]] = {}
        for index, task in enumerate(simulation.tasks):
            action = task.action
            if task.device is not None and action is not None:
                own.setdefault((task.device, task.step, action), {})[task.kind] = index, task
            elif task.device is not None:
                around.setdefault((task.device, task.step), []).append((index, task))
            elif action is not None and action.kind is Kind.REDUCE:
                sums.setdefault((task.step, action.microbatch), []).append(task)
            elif action is not None:
                message[task.step, action.message] = task
        steps = 1 + max((task.step for task in simulation.tasks), default=-1)
        return cls(own, around, message, sums, steps)


@dataclass
class _DeviceWalk:
    """Walks through what one device does.

    Attributes:
        simulation: what was simulated.
        tasks: all of its tasks.
        device: which device.
        rank: its rank.
        now_s: where the walk is.
        updates: of the device's parameters so far.
    """

    simulation: Simulation
    tasks: _Tasks
    device: int
    rank: int
    now_s: float = field(default=0.0, init=False)
    updates: int = field(default=0, init=False)

    def spans(self) -> Iterator[_NumberedSpan]:
        """All spans in the order of time."""
        program = self.simulation.program
        before, after = program.around_turn(self.device)
        update = program.device_actions(self.device)[len(before) + len(after) :]
        for step in range(self.tasks.num_steps):
            yield from self._around(step, _BEFORE)
            for action in before:
                yield from self._action(step, action)
            yield from self._around(step, _BETWEEN)
            for action in after:
                yield from self._action(step, action)
            yield from self._around(step, _AFTER)
            for action in update:
                yield from self._action(step, action)

    def _around(self, step: int, kinds: Mapping[TaskKind, SpanKind]) -> Iterator[_NumberedSpan]:
        for index, task in self.tasks.around.get((self.device, step), ()):
            if task.kind not in kinds:
                continue
            if task.kind is TaskKind.FINISH and task.start_s > self.now_s:  # for the loss's device
                yield None, self._span(SpanKind.WAIT, self.now_s, task.start_s, None, task)
            yield self._task(index, task, kinds[task.kind])

    def _action(self, step: int, action: Action) -> Iterator[_NumberedSpan]:
        own = self.tasks.own.get((self.device, step, action), {})
        if TaskKind.OVERHEAD in own:
            self.now_s = own[TaskKind.OVERHEAD][1].end_s  # idle, as Python is in measured steps
        yield from HANDLERS[action.kind](self, step, action, own)

    def compute(self, step: int, action: Action, own: _Own) -> Iterator[_NumberedSpan]:
        """A forward or backward; the user's step after the pipelined forward is a span beside."""
        for kind, (index, task) in own.items():
            if kind is not TaskKind.OVERHEAD:
                yield from self._compute(index, task, action)

    def _compute(self, index: int, task: Task, action: Action) -> Iterator[_NumberedSpan]:
        kind = SpanKind.FEED if action.stage == FEED else SpanKind.FORWARD
        if action.kind is Kind.BACKWARD:
            kind = SpanKind.BACKWARD
        loss_s = self.simulation.costs.step.loss_s
        if (
            kind is SpanKind.FORWARD
            and loss_s
            and action.stage == self.simulation.program.loss_stage
        ):
            middle_s = max(task.start_s, task.end_s - loss_s)
            yield index, self._span(kind, task.start_s, middle_s, action, task)
            yield index, self._span(SpanKind.LOSS, middle_s, task.end_s, action, task)
            self.now_s = task.end_s
        else:
            yield self._task(index, task, kind)

    def _task(self, index: int, task: Task, kind: SpanKind) -> _NumberedSpan:
        self.now_s = task.end_s
        return index, self._span(kind, task.start_s, task.end_s, task.action, task)

    def update(self, step: int, action: Action, own: _Own) -> Iterator[_NumberedSpan]:
        """The optimizer's step, which is no action of a recorded step."""
        self.updates += (action.microbatch + 1) % self.simulation.costs.step.per_update == 0
        for index, task in own.values():
            self.now_s = task.end_s
            yield index, self._span(SpanKind.OPTIMIZER, task.start_s, task.end_s, None, task)

    def send(self, step: int, action: Action, own: _Own) -> Iterator[_NumberedSpan]:
        """Handing a message over."""
        transfer = self.tasks.message[step, action.message]
        index, task = own.get(TaskKind.SEND, (None, None))
        start_s = self.now_s if task is None else task.start_s
        end_s = start_s if task is None else task.end_s
        self.now_s = end_s
        yield index, self._span(SpanKind.SEND, start_s, end_s, action, transfer)

    def receive(self, step: int, action: Action, own: _Own) -> Iterator[_NumberedSpan]:
        """A wait until the message is sent, and the rest."""
        transfer = self.tasks.message[step, action.message]
        index, task = own.get(TaskKind.RECEIVE, (None, None))
        end_s = transfer.end_s if task is None else task.end_s
        assert transfer.action is not None
        sender = self.simulation.program.device(transfer.action.stage)
        sent = self.tasks.own.get((sender, step, transfer.action), {}).get(TaskKind.SEND)
        sent_s = _ready_s(transfer) if sent is None else sent[1].start_s
        yield from self._meet(SpanKind.RECEIVE, action, sent_s, end_s, transfer, index)

    def reduce(self, step: int, action: Action, own: _Own) -> Iterator[_NumberedSpan]:
        """Waits for the sums of a group; without any there is nothing to sum."""
        sums = self.tasks.sums.get((step, action.microbatch), ())
        if not sums:
            return
        last = max(sums, key=_ready_s)
        index, task = own.get(TaskKind.REDUCE, (None, None))
        end_s = self._reduced_s(step, sums) if task is None else task.end_s
        yield from self._meet(SpanKind.REDUCE, action, _ready_s(last), end_s, last, index)

    def _reduced_s(self, step: int, sums: Sequence[Task]) -> float:
        """When all sums are there, but not after what the device does next.

        Parameters that stages share are summed by messages; its own may be over before the last.
        """
        around = self.tasks.around.get((self.device, step), ())
        next_s = [task.start_s for _, task in around if task.kind in _AFTER]
        for update in self.simulation.program.device_actions(self.device)[-1:]:
            own = self.tasks.own.get((self.device, step, update), {})
            next_s += [
                task.start_s for kind, (_, task) in own.items() if kind is TaskKind.OPTIMIZER
            ]
        return min([max(task.end_s for task in sums), *next_s])

    def _meet(
        self,
        kind: SpanKind,
        action: Action,
        met_s: float,
        end_s: float,
        task: Task,
        index: int | None,
    ) -> Iterator[_NumberedSpan]:
        """A wait until the others have come, and the rest."""
        end_s = max(self.now_s, end_s)
        met_s = min(max(self.now_s, met_s), end_s)
        if met_s > self.now_s:
            yield None, self._span(SpanKind.WAIT, self.now_s, met_s, action, task, is_wait=True)
        yield index, self._span(kind, met_s, end_s, action, task)
        self.now_s = end_s

    def _span(
        self,
        kind: SpanKind,
        start_s: float,
        end_s: float,
        action: Action | None,
        task: Task,
        *,
        is_wait: bool = False,
    ) -> Span:
        size_bytes = None if is_wait or task.size_bytes is None else round(task.size_bytes)
        text = None if action is None else str(action)
        updates = None
        if kind in _WITH_WEIGHTS and self.simulation.program.num_minibatches > 1:
            updates = self.updates
        return Span(self.rank, kind, start_s, end_s, text, size_bytes, task.step, updates)


_WITH_WEIGHTS = (SpanKind.FORWARD, SpanKind.BACKWARD)

HANDLERS: Mapping[Kind, Callable[[_DeviceWalk, int, Action, _Own], Iterator[_NumberedSpan]]] = (
    MappingProxyType(
        {
            Kind.FORWARD: _DeviceWalk.compute,
            Kind.BACKWARD: _DeviceWalk.compute,
            Kind.SEND_FORWARD: _DeviceWalk.send,
            Kind.RECEIVE_FORWARD: _DeviceWalk.receive,
            Kind.SEND_BACKWARD: _DeviceWalk.send,
            Kind.RECEIVE_BACKWARD: _DeviceWalk.receive,
            Kind.REDUCE: _DeviceWalk.reduce,
            Kind.STEP: _DeviceWalk.update,
        }
    )
)
"""What each kind of action is in a picture: (device, step, action, its tasks)."""


def _ready_s(task: Task) -> float:
    """When a message was sent, or all devices had come to a sum."""
    return task.start_s if task.ready_s is None else task.ready_s


def _transfers(simulation: Simulation, ranks: Sequence[int]) -> Iterator[tuple[int, Transfer]]:
    for index, task in enumerate(simulation.tasks):
        if task.device is None:
            yield (
                index,
                Transfer(
                    kind=_TRANSFERS[task.kind],
                    start_s=task.start_s,
                    end_s=task.end_s,
                    channels=task.channels,
                    ranks=tuple(ranks[d] for d in _ends(simulation.program, task.action)),
                    action=None if task.action is None else str(task.action),
                    size_bytes=None if task.size_bytes is None else round(task.size_bytes),
                    minibatch=task.step,
                ),
            )


def _ends(program: Program, action: Action | None) -> tuple[int, ...]:
    """The devices between which something goes."""
    if action is None:
        return (program.device(program.loss_stage),)
    if action.kind is Kind.REDUCE:
        return program.reduce_group(action.microbatch).devices
    assert action.peer is not None
    return program.device(action.stage), program.device(action.peer)


def _path(
    simulation: Simulation, parts: Sequence[tuple[int | None, PathPart]]
) -> tuple[PathPart, ...]:
    """The critical path without what the interpreter takes between actions, which is no span."""
    parts_of: dict[int, list[PathPart]] = {}
    for task, part in parts:
        if task is not None:
            parts_of.setdefault(task, []).append(part)
    steps = critical_path(simulation).steps
    return tuple(part for step in steps for part in parts_of.get(step.index, ()))


def _plain_stages(program: Program, ranks: Sequence[int]) -> tuple[TimelineStage, ...]:
    """Stages of which nothing is known but of what they are a replica."""
    replicas = [program.replica(stage) for stage in range(program.num_stages)]
    return tuple(
        TimelineStage(
            stage, ranks[program.device(stage)], str(replica) if replica.count > 1 else ""
        )
        for stage, replica in enumerate(replicas)
    )


def _memory(simulation: Simulation, ranks: Sequence[int]) -> Iterator[MemoryCurve]:
    for device, curve in sorted(simulation.device_memory.items()):
        yield MemoryCurve(
            rank=ranks[device],
            times_s=tuple(time_s for time_s, _ in curve),
            used_bytes=tuple(used_bytes for _, used_bytes in curve),
            limit_bytes=simulation.costs.cluster.devices[device].memory_bytes,
        )
