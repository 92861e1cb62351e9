"""Converts a program and its costs to work that can be played."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import NamedTuple

from lightning_gpp.cluster import all_reduce_channels, all_reduce_s, channels
from lightning_gpp.engine.work import How, Send, Sum, Work
from lightning_gpp.graph import FEED
from lightning_gpp.schedule import Action, Kind, Program
from lightning_gpp.simulate.program_costs import Overhead, ProgramCosts, compute_s, message_costs
from lightning_gpp.simulate.task import TaskKind
from lightning_gpp.simulate.timeline.span import SpanKind, TransferKind


class Shown(NamedTuple):
    """What an item, a message or an all-reduce of a step is, for people.

    Attributes:
        kind: the kind of its task; None of what is not shown: what waits alone, and tokens.
        action: the action that it is, or belongs to.
        size_bytes: of a message or a sum.
        channels: that a message or a sum occupies, by name.
    """

    kind: TaskKind | None
    action: Action | None
    size_bytes: float | None = None
    channels: tuple[str, ...] = ()


WAIT = Shown(None, None)
"""Of an item that waits alone."""


@dataclass(slots=True, eq=False)
class WorkMessage:
    """A message, or a token between lines that takes no time.

    Attributes:
        seconds: how long it takes.
        shown: what it is; its action comes with its sender.
        receiver: the item that waits for it; -1 before there is one.
    """

    seconds: float = 0.0
    shown: Shown = WAIT
    receiver: int = -1


class ProgramWork:
    """One step of a program as work, and the meaning of its numbers.

    Args:
        program: what every device does.
        costs: what it costs; checked already.

    Attributes:
        work: what is played.
        items: what every item is.
        devices: of every item.
        messages: what every message is, in the order of the items that send them.
        sums: what every bucket of a sum is.
    """

    def __init__(self, program: Program, costs: ProgramCosts) -> None:
        self.program, self.costs, self.work = program, costs, Work()
        self.items: list[Shown] = []
        self.devices: list[int] = []
        self.messages: list[Shown] = []
        self.sums: list[Shown] = []
        self._sent: list[list[WorkMessage]] = []
        # What the next item waits for.
        self._received: list[WorkMessage] = []
        self._messages: dict[tuple[int, int, bool, int], WorkMessage] = {}
        self._sized, self._part_of_sum = cache(self._size), cache(self._new_part_of_sum)
        self._channels: dict[str, int] = {}
        self._lasts: dict[tuple[int, int], int] = {}
        self._summed: defaultdict[int, list[int]] = defaultdict(list)
        self._reduces: dict[int, Action] = {}
        self._finals: defaultdict[tuple[int, Action], list[int]] = defaultdict(list)
        for number, minibatch, group in program.sums():
            for device in group.devices if group.stage is not None else ():
                assert group.stage is not None
                final = program.last_backward(device, group.stage, minibatch)
                if final is not None:
                    self._finals[device, final].append(number)
        feed_device = program.device(FEED)
        others = [d for d in range(len(program.actions)) if d != feed_device]
        self._results = {d: WorkMessage() for d in others} if costs.step.finish_s else {}
        for device in range(len(program.actions)):
            self.work.lines.append([])
            if device == feed_device:
                self._read()
            self._actions(device)
            if self._received:
                self._item(WAIT)
        never = self._item(WAIT)  # of what nobody waits for, or nobody begins
        self.work.lines[-1].pop()
        self._join_messages(never)
        self._add_sums(never)
        self.work.num_channels = len(self._channels)

    def _item(self, shown: Shown, seconds: float = 0.0) -> int:
        """Something that takes time on a line, or waits; returns its number."""
        number = len(self.items)
        self.items.append(shown)
        self.devices.append(len(self.work.lines) - 1)
        self.work.seconds.append(seconds)
        self.work.missing.append(len(self._received))
        self.work.lines[-1].append(number)
        self._sent.append([])
        for message in self._received:
            message.receiver = number
        self._received = []
        return number

    def _task(self, kind: TaskKind, seconds: float | None, action: Action | None = None) -> None:
        """Something that takes time on a line; None: it is not there."""
        if seconds is not None:
            self._item(Shown(kind, action), seconds)

    def _overhead(self, kind: TaskKind, costs: Overhead, size: float, action: Action) -> None:
        """What a message or a sum takes the device itself."""
        if costs.fixed_s or costs.per_byte_s:
            self._item(Shown(kind, action), costs.seconds(size))

    def _send(self, message: WorkMessage, action: Action | None = None) -> None:
        """A message leaves when what comes before it is done."""
        if self._received or not self.work.lines[-1]:
            self._item(WAIT)
        message.shown = message.shown._replace(action=action)
        self._sent[-1].append(message)

    def _read(self) -> None:
        """Reading a mini-batch, cutting it."""
        self._task(SpanKind.DATA, self.costs.step.data_s or None)
        self._task(SpanKind.PREPARE, self.costs.step.prepare_s or None)

    def _finish(self, device: int) -> None:
        """What comes after the program: the device of the loss tells the others the result."""
        seconds = self.costs.step.finish_s
        if not seconds:
            return
        if device in self._results:
            self._received.append(self._results[device])
        else:
            for token in self._results.values():
                self._send(token)
        self._task(SpanKind.FINISH, seconds.get(device))

    def _actions(self, device: int) -> None:
        program, step = self.program, self.costs.step
        has_turn = step.turn_s > 0 and program.has_turn
        turn = len(program.forward_half(device)) if has_turn else -1
        before_update = len(program.before_update(device))
        for index, action in enumerate(program.actions[device]):
            if index == before_update:
                self._finish(device)
            elif index == turn:  # the other devices wait for the first gradients anyway
                at_loss = device == program.device(FEED)
                self._task(SpanKind.LOSS, step.turn_s if at_loss else None)
            elif step.action_s and index and action.kind is not Kind.STEP:
                self._task(SpanKind.OVERHEAD, step.action_s, action)
            HANDLERS[action.kind](self, device, action)
        if before_update == len(program.actions[device]):
            self._finish(device)

    def _compute(self, device: int, action: Action) -> None:
        """A forward or a backward; in some, gradients become final that are summed."""
        kind = SpanKind.FEED if action.stage == FEED else SpanKind.FORWARD
        kind = SpanKind.BACKWARD if action.kind is Kind.BACKWARD else kind
        item = self._item(Shown(kind, action), compute_s(self.costs, action))
        for number in self._finals.get((device, action), ()):
            self._lasts[number, device] = item

    def _exchange(self, device: int, action: Action) -> None:
        """The sender's or the receiver's part of a message."""
        message, step = self._message(action), self.costs.step
        size_bytes = message.shown.size_bytes or 0.0
        if action.kind.is_send:
            self._overhead(SpanKind.SEND, step.send, size_bytes, action)
            self._send(message, action)
        else:
            self._received.append(message)
            self._overhead(SpanKind.RECEIVE, step.receive, size_bytes, action)

    def _update(self, device: int, action: Action) -> None:
        """The optimizer, once all gradients of an update are there."""
        step = self.costs.step
        if (action.microbatch + 1) % step.per_update == 0:
            self._task(SpanKind.OPTIMIZER, step.optimizer_s.get(device), action)

    def _message(self, action: Action) -> WorkMessage:
        """The message that an action sends or receives."""
        key = source, target, is_gradient, index = action.message
        if key not in self._messages:
            pair = (target, source) if is_gradient else (source, target)
            units = self.program.parts[pair][index].num_units
            self._messages[key] = WorkMessage(*self._sized(source, target, is_gradient, units))
        return self._messages[key]

    def _size(self, source: int, target: int, is_gradient: bool, units: int) -> tuple[float, Shown]:
        """Seconds of a message, and what it is."""
        costs = message_costs(self.program, self.costs, source, target, is_gradient=is_gradient)
        shown = Shown(TransferKind.MESSAGE, None, costs.size.of(units), costs.channels)
        is_there = source == FEED and self.costs.feeds_ahead
        return 0.0 if is_there else costs.transfer_s(units), shown

    def _reduce(self, device: int, action: Action) -> None:
        """Waits for the sums of a group; of shared parameters the owner adds up by messages."""
        number, groups = action.microbatch, self.program.reduce_groups
        group, index = self.program.reduce_group(number), number % len(groups)
        size_bytes = sum(one.size_bytes for one in self.costs.buckets if one.group == index)
        if group.stage is not None:
            first = self.program.minibatch(action) * len(groups)
            for other, each in enumerate(groups, first):  # also those it has no gradients of
                key = other, device
                if each.stage is not None and device in each.devices and key not in self._lasts:
                    self._lasts[key] = self._item(WAIT)
            self._reduces.setdefault(number, action)
            self._summed[number].append(self._item(Shown(None, action)))
        elif size_bytes:
            self._add_up(device, number, group.devices, size_bytes, action)
        self._overhead(SpanKind.REDUCE, self.costs.step.reduce, size_bytes, action)

    def _add_up(
        self, device: int, number: int, devices: Sequence[int], size: float, action: Action
    ) -> None:
        """The sum of parameters that stages share: ``Executor.reduce_shared`` in the runtime."""
        owner, *others = devices
        if device == owner:
            for other in others:
                self._received.append(self._part_of_sum(number, other, owner, size))
            for other in others:
                self._send(self._part_of_sum(number, owner, other, size), action)
        else:
            self._send(self._part_of_sum(number, device, owner, size), action)
            self._received.append(self._part_of_sum(number, owner, device, size))

    def _new_part_of_sum(self, number: int, source: int, target: int, size: float) -> WorkMessage:
        """Gradients of parameters that stages share, or their sum; one of each number and ends."""
        cluster = self.costs.cluster
        shown = Shown(TransferKind.SUM, None, size, channels(cluster, source, target))
        return WorkMessage(cluster.link(source, target).transfer_s(size), shown)

    def _add_sums(self, never: int) -> None:
        """The sums of replicated stages, in the order in which devices begin them."""
        cluster = self.costs.cluster
        groups, first_port = self.program.reduce_groups, self.work.num_ports
        self.work.num_ports += len(groups)
        summing = [d for group in groups if group.stage is not None for d in group.devices]
        are_alone = cluster.has_private_channels and len(set(summing)) == len(summing)
        for minibatch in range(self.program.num_minibatches):
            for index, buckets in groupby(self.costs.buckets, key=lambda bucket: bucket.group):
                devices = groups[index].devices
                if groups[index].stage is None:
                    continue
                number = index + minibatch * len(groups)
                names = all_reduce_channels(cluster, devices)
                last = tuple(self._lasts.get((number, device), never) for device in devices)
                waiting = tuple(self._summed[number])
                for item in waiting:
                    self.work.missing[item] += 1
                sums = []
                for one in buckets:
                    seconds = all_reduce_s(cluster, devices, one.size_bytes)
                    sums.append((one.ready_fraction, seconds))
                    action = self._reduces.get(number)
                    self.sums.append(Shown(TransferKind.SUM, action, one.size_bytes, names))
                shared = () if are_alone else self._numbered(names)
                how = first_port + index, shared, waiting, min(devices)
                self.work.sums.append(Sum(devices, last, tuple(sums), *how))

    def _join_messages(self, never: int) -> None:
        """Every item sends its messages; those over links of one device need no queue."""
        are_alone = self.costs.cluster.has_private_channels
        ports: dict[tuple[str, ...] | int, int] = {}
        hows: dict[How, int] = {}
        for number, sent in enumerate(self._sent):
            sends: list[Send] = []
            for message in sent:
                names = message.shown.channels
                shared = () if are_alone else self._numbered(names)
                port = ports.setdefault(names or self.devices[number], len(ports))
                target = message.receiver if message.receiver >= 0 else never
                how = message.seconds, port, shared
                sends.append((target, hows.setdefault(how, len(hows))))
                self.messages.append(message.shown)
            self.work.sends.append(tuple(sends))
        self.work.num_ports, self.work.hows = len(ports), [*hows]

    def _numbered(self, names: Sequence[str]) -> tuple[int, ...]:
        numbers = self._channels
        return tuple(numbers.setdefault(name, len(numbers)) for name in names)


HANDLERS: Mapping[Kind, Callable[[ProgramWork, int, Action], None]] = {
    **dict.fromkeys((Kind.FORWARD, Kind.BACKWARD), ProgramWork._compute),
    **dict.fromkeys((Kind.SEND_FORWARD, Kind.SEND_BACKWARD), ProgramWork._exchange),
    **dict.fromkeys((Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD), ProgramWork._exchange),
    Kind.REDUCE: ProgramWork._reduce,
    Kind.STEP: ProgramWork._update,
}
"""What each kind of action is in the work of a step."""
