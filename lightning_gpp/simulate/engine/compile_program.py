"""From a program and its costs to the work that is played."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType

from lightning_gpp.cluster import all_reduce_channels, all_reduce_s, channels
from lightning_gpp.engine.work import Sum, Work
from lightning_gpp.graph import FEED
from lightning_gpp.schedule import Action, Kind, Program, ScheduleError, last_backward
from lightning_gpp.simulate.engine.compiled import WAIT, Compiled, Shown
from lightning_gpp.simulate.engine.message_costs import MessageCosts, compute_s, message_costs
from lightning_gpp.simulate.program_costs import Bucket, ProgramCosts
from lightning_gpp.simulate.simulation import TaskKind


def compile_program(program: Program, costs: ProgramCosts, *, prefetch: bool = False) -> Compiled:
    """Numbers everything that happens in one step.

    Args:
        program: what every device does.
        costs: what it costs; checked already.
        prefetch: whether the host reads and copies the next mini-batch ahead.
    """
    return _Compiler(program, costs, prefetch=prefetch).run()


@dataclass(slots=True)
class _Transfer:
    """A message, or a token between lines that takes no time.

    Attributes:
        seconds: how long it takes.
        shown: what it is; its action comes with its sender.
        sender: the item behind which it leaves; -1 before there is one.
        receiver: the item that waits for it; likewise.
    """

    seconds: float = 0.0
    shown: Shown = WAIT
    sender: int = -1
    receiver: int = -1


class _Compiler:
    """State while a program is compiled."""

    def __init__(self, program: Program, costs: ProgramCosts, *, prefetch: bool) -> None:
        self.program, self.costs = program, costs
        self.work = Work()
        self.found = Compiled(self.work, len(program.actions))
        self.sent: list[list[_Transfer]] = []
        self.received: list[tuple[_Transfer, Action | None]] = []  # the next item waits for these
        self.messages: dict[tuple[int, int, bool, int], _Transfer] = {}
        self.shared: dict[tuple[int, int, int], _Transfer] = {}
        self.edges: dict[tuple[int, int, bool], MessageCosts] = {}
        self.sizes: dict[tuple[int, int, bool, int], tuple[float, Shown]] = {}
        self.compute: dict[tuple[int, bool], tuple[float, TaskKind]] = {}
        self.channel_numbers: dict[str, int] = {}
        self.lasts: dict[tuple[int, int], int] = {}
        self.summed: dict[int, list[int]] = {}
        self.waits: list[tuple[int, _Transfer, Action | None]] = []
        self.reduces: dict[int, Action] = {}
        self.finals_of: dict[int, dict[Action, tuple[int, ...]]] = {}
        has_input = costs.step.data_s > 0 or costs.step.host_link is not None
        self.tokens = (_Transfer(), _Transfer()) if prefetch and has_input else None
        others = [d for d in range(len(program.actions)) if d != program.device(FEED)]
        self.results = {d: _Transfer() for d in others} if costs.step.finish_s else {}
        self.has_turn = costs.step.turn_s > 0 and program.has_turn

    def run(self) -> Compiled:
        """All lines."""
        for device in range(len(self.program.actions)):
            self.begin_line()
            if device == self.program.device(FEED):
                self.take_input()
                self.task(TaskKind.PREPARE, self.costs.step.prepare_s or None)
            self.actions(device)
            self.end_line()
        if self.tokens is not None:
            self.begin_line()
            self.read_ahead(*self.tokens)
            self.end_line()
        never = self.item(WAIT)  # of what nobody waits for, or nobody begins
        self.work.lines[-1].pop()
        self.join_messages(never)
        self.sums(never)
        self.work.num_channels = len(self.channel_numbers)
        for item, message, action in self.waits:
            self.found.waits.setdefault(item, []).append((message.sender, action))
        return self.found

    # Items ------------------------------------------------------------------------------------

    def begin_line(self) -> None:
        """What follows is of the next device, or of the host."""
        self.found.first_items.append(len(self.found.items))
        self.work.lines.append([])

    def end_line(self) -> None:
        """What has been received is waited for."""
        if self.received:
            self.item(WAIT)

    def item(self, shown: Shown, seconds: float = 0.0) -> int:
        """Something that takes time on a line, or waits; returns its number."""
        number = len(self.found.items)
        self.found.items.append(shown)
        self.work.seconds.append(seconds)
        self.work.missing.append(len(self.received))
        self.work.lines[-1].append(number)
        self.sent.append([])
        for message, action in self.received:
            message.receiver = number
            self.waits.append((number, message, action))
        self.received.clear()
        return number

    def task(self, kind: TaskKind, seconds: float | None, action: Action | None = None) -> None:
        """Something that takes time on a line; None: it is not there."""
        if seconds is not None:
            self.item(Shown(kind, action), seconds)

    def send(self, message: _Transfer, action: Action | None = None) -> None:
        """A message leaves when what comes before it is done."""
        if self.received or not self.work.lines[-1]:
            self.item(WAIT)
        message.sender, message.shown = len(self.sent) - 1, message.shown._replace(action=action)
        self.sent[-1].append(message)

    def receive(self, message: _Transfer, action: Action | None = None) -> None:
        """What follows waits for a message."""
        self.received.append((message, action))

    # Around the actions -----------------------------------------------------------------------

    def take_input(self) -> None:
        """The device of the feed gets the mini-batch: from the host's line, or in its own."""
        if self.tokens is None:
            self.read()
        else:
            here, taken = self.tokens
            self.receive(here)
            self.send(taken)

    def finish(self, device: int) -> None:
        """What comes after the program: the device of the loss tells the others the result."""
        seconds = self.costs.step.finish_s
        if not seconds:
            return
        if device == self.program.device(FEED):
            for token in self.results.values():
                self.send(token)
        else:
            self.receive(self.results[device])
        self.task(TaskKind.FINISH, seconds.get(device))

    def read_ahead(self, here: _Transfer, taken: _Transfer) -> None:
        """The host's line: the next mini-batch is begun when the last one has been taken."""
        self.read()
        self.send(here)
        self.receive(taken)

    def read(self) -> None:
        """Reading a mini-batch and copying it to the device; both occupy the host's side."""
        step, name = self.costs.step, self.costs.cluster.devices[self.program.devices[-1]].name
        if step.data_s:
            self.item(Shown(TaskKind.DATA, None, channels=(f"{name} host",)), step.data_s)
        if step.host_link is not None:
            shown = Shown(TaskKind.COPY, None, step.input_bytes, (f"{name} copy",))
            self.item(shown, step.host_link.transfer_s(step.input_bytes))

    # Actions ----------------------------------------------------------------------------------

    def actions(self, device: int) -> None:
        """The actions of a device."""
        gap_s = self.costs.step.action_s
        turn = len(self.program.forward_half(device)) if self.has_turn else -1
        before_update = len(self.program.before_update(device))
        for index, action in enumerate(self.program.actions[device]):
            if index == before_update:
                self.finish(device)
            elif index == turn:
                self.turn(device)
            elif gap_s and index and action.kind is not Kind.STEP:
                self.task(TaskKind.OVERHEAD, gap_s, action)
            HANDLERS[action.kind](self, device, action)
        if before_update == len(self.program.actions[device]):
            self.finish(device)

    def forward(self, device: int, action: Action) -> None:
        """A forward, also of the feed."""
        seconds, kind = self.seconds_and_kind(action)
        self.item(Shown(kind, action), seconds)

    def backward(self, device: int, action: Action) -> None:
        """A backward; in some, gradients become final that are summed."""
        seconds, kind = self.seconds_and_kind(action)
        item = self.item(Shown(kind, action), seconds)
        for number in self.finals(device).get(action, ()):
            self.lasts[number, device] = item

    def update(self, device: int, action: Action) -> None:
        """The optimizer's step, where enough mini-batches have been done for one."""
        if (action.microbatch + 1) % self.costs.step.per_update == 0:
            self.task(TaskKind.OPTIMIZER, self.costs.step.optimizer_s.get(device), action)

    def turn(self, device: int) -> None:
        """Between the two parts of the program; the others wait for the first gradients anyway."""
        if device == self.program.device(FEED):
            self.task(TaskKind.TURN, self.costs.step.turn_s)

    def seconds_and_kind(self, action: Action) -> tuple[float, TaskKind]:
        """Seconds of a compute action, and the kind of its task."""
        is_forward = action.kind is Kind.FORWARD
        key = action.stage, is_forward
        if key not in self.compute:
            kind = TaskKind.FORWARD if is_forward else TaskKind.BACKWARD
            kind = TaskKind.FEED if action.stage == FEED else kind
            self.compute[key] = compute_s(self.costs, action), kind
        return self.compute[key]

    def send_message(self, device: int, action: Action) -> None:
        """The sender's part of a message."""
        message, overhead = self.message(action), self.costs.step.send
        if overhead.fixed_s or overhead.per_byte_s:
            self.task(TaskKind.SEND, overhead.seconds(message.shown.size_bytes or 0.0), action)
        self.send(message, action)

    def receive_message(self, device: int, action: Action) -> None:
        """The receiver's part of a message."""
        message, overhead = self.message(action), self.costs.step.receive
        self.receive(message, action)
        if overhead.fixed_s or overhead.per_byte_s:
            self.task(TaskKind.RECEIVE, overhead.seconds(message.shown.size_bytes or 0.0), action)

    def message(self, action: Action) -> _Transfer:
        """The message that an action sends or receives.

        Raises:
            ScheduleError: the program has no such message.
        """
        key = source, target, is_gradient, index = action.message
        if key not in self.messages:
            pair = (target, source) if is_gradient else (source, target)
            edge = self.program.edge.get(pair)
            if (
                edge is None
                or self.program.is_local(edge)
                or (is_gradient and not (edge.has_backward and self.program.has_backward))
                or index >= len(self.program.parts[pair])
            ):
                raise ScheduleError(f"{action} is of no message between two devices of the program")
            units = self.program.parts[pair][index].num_units
            self.messages[key] = _Transfer(*self.sized(source, target, is_gradient, units))
        return self.messages[key]

    def sized(self, source: int, target: int, is_gradient: bool, units: int) -> tuple[float, Shown]:
        """Seconds of a message, and what it is."""
        key = source, target, is_gradient, units
        if key not in self.sizes:
            ends = key[:3]
            if ends not in self.edges:
                costs = message_costs(
                    self.program, self.costs, source, target, is_gradient=is_gradient
                )
                self.edges[ends] = costs
            edge = self.edges[ends]
            shown = Shown(TaskKind.TRANSFER, None, edge.size.of(units), edge.channels)
            self.sizes[key] = edge.transfer_s(units), shown
        return self.sizes[key]

    # Sums of gradients ------------------------------------------------------------------------

    def finals(self, device: int) -> dict[Action, tuple[int, ...]]:
        """Last backward -> the sums whose gradients are final in it, as their actions count."""
        if device not in self.finals_of:
            found: dict[Action, tuple[int, ...]] = {}
            for number, minibatch, group in self.program.sums():
                if group.stage is not None and device in group.devices:
                    final = last_backward(self.program, device, group.stage, minibatch)
                    if final is not None:
                        found[final] = (*found.get(final, ()), number)
            self.finals_of[device] = found
        return self.finals_of[device]

    def reduce(self, device: int, action: Action) -> None:
        """Waits for the sums of a group; of shared parameters the owner adds up by messages."""
        number, group = action.microbatch, self.program.reduce_group(action.microbatch)
        if group.stage is not None:
            self.begin_sums(device, self.program.minibatch(action))
            self.reduces.setdefault(number, action)
            waiting = self.item(Shown(None, action))
            self.summed.setdefault(number, []).append(waiting)
        else:
            self.add_up(device, number, group.devices, action)
        overhead = self.costs.step.reduce
        if overhead.fixed_s or overhead.per_byte_s:
            size_bytes = sum(bucket.size_bytes for bucket in self.buckets(number))
            self.task(TaskKind.REDUCE, overhead.seconds(size_bytes), action)

    def begin_sums(self, device: int, minibatch: int) -> None:
        """Of a mini-batch's sums a device begins those that it has no gradients of, too."""
        size = len(self.program.reduce_groups)
        for index, group in enumerate(self.program.reduce_groups):
            key = minibatch * size + index, device
            if group.stage is not None and device in group.devices and key not in self.lasts:
                self.lasts[key] = self.item(WAIT)

    def add_up(self, device: int, number: int, devices: Sequence[int], action: Action) -> None:
        """The sum of parameters that stages share: ``Executor.reduce_shared`` in the runtime."""
        size_bytes = sum(bucket.size_bytes for bucket in self.buckets(number))
        if not size_bytes:
            return
        owner, *others = devices
        if device == owner:
            for other in others:
                self.receive(self.part_of_sum(number, other, owner, size_bytes), action)
            for other in others:
                self.send(self.part_of_sum(number, owner, other, size_bytes), action)
        else:
            self.send(self.part_of_sum(number, device, owner, size_bytes), action)
            self.receive(self.part_of_sum(number, owner, device, size_bytes), action)

    def part_of_sum(self, number: int, source: int, target: int, size_bytes: float) -> _Transfer:
        """A message with gradients of parameters that stages share, or with their sum."""
        key = number, source, target
        if key not in self.shared:
            cluster = self.costs.cluster
            names = channels(cluster, source, target)
            seconds = cluster.link(source, target).transfer_s(size_bytes)
            self.shared[key] = _Transfer(seconds, Shown(TaskKind.REDUCE, None, size_bytes, names))
        return self.shared[key]

    def buckets(self, number: int) -> list[Bucket]:
        """The buckets that REDUCE actions of a number are of."""
        index = number % len(self.program.reduce_groups)
        return [bucket for bucket in self.costs.buckets if bucket.group == index]

    def sums(self, never: int) -> None:
        """The sums of replicated stages, in the order in which devices begin them."""
        cluster, algorithm = self.costs.cluster, self.costs.all_reduce
        groups, first_port = self.program.reduce_groups, self.work.num_ports
        self.work.num_ports += len(groups)
        summing = [
            device for group in groups if group.stage is not None for device in group.devices
        ]
        are_alone = cluster.has_private_channels and len(set(summing)) == len(summing)
        for minibatch in range(self.program.num_minibatches):
            for index, buckets in groupby(self.costs.buckets, key=lambda bucket: bucket.group):
                devices = groups[index].devices
                if groups[index].stage is None:
                    continue
                number = index + minibatch * len(groups)
                names = all_reduce_channels(cluster, devices, algorithm)
                last = tuple(self.lasts.get((number, device), never) for device in devices)
                waiting = tuple(self.summed.get(number, ()))
                for item in waiting:
                    self.work.missing[item] += 1
                sums = []
                for one in buckets:
                    seconds = all_reduce_s(cluster, devices, one.size_bytes, algorithm)
                    sums.append((one.ready_fraction, seconds))
                    shown = Shown(TaskKind.REDUCE, self.reduces.get(number), one.size_bytes, names)
                    self.found.sums.append(shown)
                shared = () if are_alone else self.numbered(names)
                how = tuple(sums), first_port + index, shared, waiting
                self.work.sums.append(Sum(devices, last, *how))

    # Messages ---------------------------------------------------------------------------------

    def join_messages(self, never: int) -> None:
        """Every item sends its messages; those over links of one device need no queue."""
        are_alone = self.costs.cluster.has_private_channels
        ports: dict[tuple[str, ...] | int, int] = {}
        for number, sent in enumerate(self.sent):
            sends = []
            for message in sent:
                names = message.shown.channels
                shared = () if are_alone else self.numbered(names)
                port = ports.setdefault(names or self.found.line(number), len(ports))
                target = message.receiver if message.receiver >= 0 else never
                sends.append((target, message.seconds, port, shared))
                self.found.messages.append(message.shown)
            self.work.sends.append(tuple(sends))
        self.work.num_ports = len(ports)

    def numbered(self, names: Sequence[str]) -> tuple[int, ...]:
        """Channels by number."""
        numbers = self.channel_numbers
        return tuple(numbers.setdefault(name, len(numbers)) for name in names)


HANDLERS: Mapping[Kind, Callable[[_Compiler, int, Action], None]] = MappingProxyType(
    {
        Kind.FORWARD: _Compiler.forward,
        Kind.BACKWARD: _Compiler.backward,
        Kind.SEND_FORWARD: _Compiler.send_message,
        Kind.RECEIVE_FORWARD: _Compiler.receive_message,
        Kind.SEND_BACKWARD: _Compiler.send_message,
        Kind.RECEIVE_BACKWARD: _Compiler.receive_message,
        Kind.REDUCE: _Compiler.reduce,
        Kind.STEP: _Compiler.update,
    }
)
"""What each kind of action becomes: (compiler, device, action)."""
