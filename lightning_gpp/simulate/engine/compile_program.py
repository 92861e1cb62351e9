"""From a program and its costs to the arrays that are played."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from lightning_gpp.graph import FEED
from lightning_gpp.schedule import Action, Kind, Program, last_backward
from lightning_gpp.simulate.engine.compiled import (
    FINAL,
    KIND_NUMBER,
    MEET_RECEIVE,
    MEET_SEND,
    NO_TASK,
    RECEIVE,
    REDUCE,
    SEND,
    WORK,
    BucketSum,
    Compiled,
    Operations,
)
from lightning_gpp.simulate.engine.message_costs import compute_s
from lightning_gpp.simulate.engine.number_transfers import NumberedTransfers
from lightning_gpp.simulate.program_costs import ProgramCosts
from lightning_gpp.simulate.simulation import TaskKind

Sends = Literal["buffered", "rendezvous"]
"""Whether a sender goes on at once, or waits until its message has been received."""


def compile_program(
    program: Program, costs: ProgramCosts, *, sends: Sends = "buffered", prefetch: bool = False
) -> Compiled:
    """Numbers everything that happens in one step.

    Args:
        program: what every device does.
        costs: what it costs; checked already.
        sends: whether senders wait. The feed never does: it hands all of its messages over at the
            start of a step.
        prefetch: whether the host reads and copies the next mini-batch ahead.
    """
    return _Compiler(program, costs, is_rendezvous=sends == "rendezvous", prefetch=prefetch).run()


class _Compiler:
    """State while a program is compiled."""

    def __init__(
        self, program: Program, costs: ProgramCosts, *, is_rendezvous: bool, prefetch: bool
    ) -> None:
        self.program, self.costs = program, costs
        self.operations = Operations()
        self.found = NumberedTransfers(program, costs)
        self.sums_of_group: dict[int, list[BucketSum]] = {}
        for bucket in self.found.sums:
            self.sums_of_group.setdefault(bucket.group, []).append(bucket)
        self.codes = (MEET_SEND, MEET_RECEIVE) if is_rendezvous else (SEND, RECEIVE)
        self.final_groups: dict[int, tuple[int, ...]] = {}
        self.finals_of: dict[int, dict[Action, tuple[int, ...]]] = {}
        self.compute: dict[tuple[int, bool], tuple[float, int]] = {}
        has_input = costs.step.data_s > 0 or costs.step.host_link is not None
        self.tokens = (self.found.token(), self.found.token()) if prefetch and has_input else None
        others = [d for d in range(len(program.actions)) if d != program.device(FEED)]
        self.results = {d: self.found.token() for d in others} if costs.step.finish_s else {}
        self.has_turn = costs.step.turn_s > 0 and program.has_turn

    def run(self) -> Compiled:
        """All streams."""
        for device in range(len(self.program.actions)):
            if device == self.program.device(FEED):
                self.take_input()
                self.work(TaskKind.PREPARE, self.costs.step.prepare_s or None)
            self.actions(device)
            self.operations.end_stream()
        if self.tokens is not None:
            self.read_ahead(*self.tokens)
        return Compiled(
            len(self.program.actions),
            self.operations,
            self.found.transfers,
            tuple(self.found.channel_numbers),
            tuple(self.found.sums),
            self.found.sums_of_device(),
            self.final_groups,
        )

    def take_input(self) -> None:
        """The device of the feed gets the mini-batch: from the host's stream, or in its own."""
        if self.tokens is None:
            self.read()
        else:
            here, taken = self.tokens
            self.operations.add(RECEIVE, here, 0.0)
            self.send(SEND, taken)

    def finish(self, device: int) -> None:
        """What comes after the program: the device of the loss tells the others the result."""
        seconds = self.costs.step.finish_s
        if not seconds:
            return
        if device == self.program.device(FEED):
            for token in self.results.values():
                self.send(SEND, token)
        else:
            self.operations.add(RECEIVE, self.results[device], 0.0)
        self.work(TaskKind.FINISH, seconds.get(device))

    def read_ahead(self, here: int, taken: int) -> None:
        """The host's stream: the next mini-batch is begun when the last one has been taken."""
        self.read()
        self.send(SEND, here)
        self.operations.add(RECEIVE, taken, 0.0)
        self.operations.end_stream()

    def read(self) -> None:
        """Reading a mini-batch and copying it to the device."""
        step = self.costs.step
        self.work(TaskKind.DATA, step.data_s or None)
        if step.host_link is not None:
            self.work(TaskKind.COPY, step.host_link.transfer_s(step.input_bytes))

    def work(self, kind: TaskKind, seconds: float | None, action: int = -1) -> None:
        """Something that takes time on a stream; None: it is not there."""
        if seconds is not None:
            self.operations.add(WORK, 0, seconds, KIND_NUMBER[kind], action)

    def send(self, code: int, transfer: int, action: int = -1) -> None:
        """Asks for a transfer."""
        self.found.transfers.senders[transfer] = len(self.operations.codes)
        self.operations.add(code, transfer, 0.0, NO_TASK, action)

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
                self.work(TaskKind.OVERHEAD, gap_s, index)
            HANDLERS[action.kind](self, device, index, action)
        if before_update == len(self.program.actions[device]):
            self.finish(device)

    def forward(self, device: int, index: int, action: Action) -> None:
        """A forward, also of the feed."""
        seconds, number = self.seconds_and_kind(action)
        self.operations.add(WORK, 0, seconds, number, index)

    def backward(self, device: int, index: int, action: Action) -> None:
        """A backward; in some, gradients become final that are summed."""
        seconds, number = self.seconds_and_kind(action)
        groups = self.finals(device).get(action)
        if groups is None:
            self.operations.add(WORK, 0, seconds, number, index)
        else:
            self.final_groups[len(self.operations.codes)] = groups
            self.operations.add(FINAL, 0, seconds, number, index)

    def update(self, device: int, index: int, action: Action) -> None:
        """The optimizer's step, where enough mini-batches have been done for one."""
        if (action.microbatch + 1) % self.costs.step.per_update == 0:
            self.work(TaskKind.OPTIMIZER, self.costs.step.optimizer_s.get(device), index)

    def turn(self, device: int) -> None:
        """Between the two parts of the program; the others wait for the first gradients anyway."""
        if device == self.program.device(FEED):
            self.work(TaskKind.TURN, self.costs.step.turn_s)

    def seconds_and_kind(self, action: Action) -> tuple[float, int]:
        """Seconds of a compute action, and the number of its kind of task."""
        is_forward = action.kind is Kind.FORWARD
        key = action.stage, is_forward
        if key not in self.compute:
            kind = TaskKind.FORWARD if is_forward else TaskKind.BACKWARD
            kind = TaskKind.FEED if action.stage == FEED else kind
            self.compute[key] = compute_s(self.costs, action), KIND_NUMBER[kind]
        return self.compute[key]

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

    def send_message(self, device: int, index: int, action: Action) -> None:
        """The sender's part of a message."""
        transfer = self.found.number(action)
        overhead = self.costs.step.send
        if overhead.fixed_s or overhead.per_byte_s:
            seconds = overhead.seconds(self.found.transfers.size_bytes[transfer])
            self.work(TaskKind.SEND, seconds, index)
        self.send(SEND if action.stage == FEED else self.codes[0], transfer, index)

    def receive_message(self, device: int, index: int, action: Action) -> None:
        """The receiver's part of a message."""
        transfer = self.found.number(action)
        is_of_feed = action.peer == FEED and action.kind is Kind.RECEIVE_FORWARD
        code = RECEIVE if is_of_feed else self.codes[1]
        self.operations.add(code, transfer, 0.0, NO_TASK, index)
        overhead = self.costs.step.receive
        if overhead.fixed_s or overhead.per_byte_s:
            seconds = overhead.seconds(self.found.transfers.size_bytes[transfer])
            self.work(TaskKind.RECEIVE, seconds, index)

    def reduce(self, device: int, index: int, action: Action) -> None:
        """Waits for the sums of a group; of shared parameters the owner adds up by messages."""
        number, group = action.microbatch, self.program.reduce_group(action.microbatch)
        if group.stage is not None:
            for bucket in self.sums_of_group.get(number, ()):
                if self.found.transfers.senders[bucket.transfer] < 0:
                    self.found.transfers.senders[bucket.transfer] = len(self.operations.codes)
            self.operations.add(REDUCE, number, 0.0, NO_TASK, index)
            self.reduce_overhead(action, index)
            return
        send, receive = self.codes
        pairs = [p for other in group.devices if (p := self.found.shared.get((number, other)))]
        if device == group.devices[0]:
            for up, _ in pairs:
                self.operations.add(receive, up, 0.0, NO_TASK, index)
            for _, down in pairs:
                self.send(send, down, index)
        elif (number, device) in self.found.shared:
            up, down = self.found.shared[number, device]
            self.send(send, up, index)
            self.operations.add(receive, down, 0.0, NO_TASK, index)
        self.reduce_overhead(action, index)

    def reduce_overhead(self, action: Action, index: int) -> None:
        """A device's own part of the sum of a group."""
        overhead = self.costs.step.reduce
        if overhead.fixed_s or overhead.per_byte_s:
            group = action.microbatch % len(self.program.reduce_groups)
            size_bytes = sum(b.size_bytes for b in self.costs.buckets if b.group == group)
            self.work(TaskKind.REDUCE, overhead.seconds(size_bytes), index)


HANDLERS: Mapping[Kind, Callable[[_Compiler, int, int, Action], None]] = MappingProxyType(
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
"""What each kind of action becomes: (compiler, device, index on the device, action)."""
