"""The interpreter of programs: runs one device's actions on real tensors.

It contains no schedule logic. Micro-batches of a stage are *flights*; what they hand to other
stages waits in an outbox, from which sends take it, or consumers on the same device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.graph import FEED, StageEdge
from lightning_gpp.runtime.payload import Payload, copies, pack, pack_gradients, unpack
from lightning_gpp.runtime.pieces import cut, join
from lightning_gpp.runtime.stage_run import Flight, StageCode, run_forward
from lightning_gpp.runtime.transport import Tag, Transport
from lightning_gpp.schedule import Action, Kind, Program

_REDUCE = -2


class Boundary(Protocol):
    """Where the pipeline meets the user's step; only the rank of the loss needs one."""

    def start(self, microbatch: int) -> Mapping[str, Tensor]:
        """The arguments of the pipelined forward for one micro-batch of the loss stage."""

    def finish(self, microbatch: int, outputs: Mapping[str, Any]) -> Tensor | None:
        """Takes the model's outputs; returns the weighted loss when training."""


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """When an action ran, on the machine's monotonic clock (``time.monotonic_ns``).

    Work on a GPU is waited for at the end of each recorded action, so that the times are those of
    the work and not those of its launch.

    Attributes:
        action: what ran.
        start_ns: when it began.
        end_ns: when it was done.
        size_bytes: tensors in the message that was sent or received; None for other actions.
        loss_start_ns: when the user's step went on with the model's outputs, in forwards of the
            loss stage; from there to ``end_ns`` it is the user's own code.
    """

    action: Action
    start_ns: int
    end_ns: int
    size_bytes: int | None = None
    loss_start_ns: int | None = None


@dataclass(slots=True)
class Executor:
    """Runs programs on one rank.

    Attributes:
        transport: how to reach the other ranks.
        rank_of_device: rank of every device of the plan.
        stages: code of the stages on this rank.
        output_names: values that the model returns; the loss stage returns them all.
        batch_dims: value name -> dimension of the samples for each of its tensors.
        shared: parameters by canonical name, for the reduce groups.
        timeout_s: limit of every wait.
        on_record: gets a record of every action when set.
    """

    transport: Transport
    rank_of_device: Sequence[int]
    stages: Mapping[int, StageCode]
    output_names: tuple[str, ...] = ()
    batch_dims: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    shared: Mapping[str, Parameter] = field(default_factory=dict)
    timeout_s: float = 1800.0
    on_record: Callable[[ActionRecord], None] | None = None

    def run(
        self,
        program: Program,
        unit_sizes: Sequence[int],
        *,
        training: bool,
        boundary: Boundary | None = None,
    ) -> None:
        """Runs this rank's part of a program once.

        Args:
            program: the program of all devices.
            unit_sizes: samples of each of the smallest micro-batches.
            training: whether modules are in training mode (dropout, running statistics).
            boundary: the user's step, on the rank of the loss.
        """
        if len(unit_sizes) != program.num_microbatches:
            raise ValueError(
                f"the program has {program.num_microbatches} micro-batches, got sizes of "
                f"{len(unit_sizes)}"
            )
        step = _Step(self, program, unit_sizes, training, boundary)
        device = self.rank_of_device.index(self.transport.rank)
        actions = program.actions[device] if device < len(program.actions) else ()
        for action in actions:
            if self.on_record is None:
                step.perform(action)
            else:
                self.on_record(step.perform_timed(action))
        self.transport.flush()


@dataclass(slots=True)
class _Step:
    """State of one run of a program on one rank."""

    executor: Executor
    program: Program
    unit_sizes: Sequence[int]
    training: bool
    boundary: Boundary | None
    flights: dict[tuple[int, int], Flight] = field(default_factory=dict)
    outbox: dict[Tag, Payload] = field(default_factory=dict)
    inbox: dict[Tag, Payload] = field(default_factory=dict)
    loss_start_ns: int | None = None

    def perform_timed(self, action: Action) -> ActionRecord:
        """Runs one action and says when."""
        size_bytes = self.outbox[action.message].num_bytes if action.kind.is_send else None
        self.loss_start_ns = None
        start_ns = time.monotonic_ns()
        self.perform(action)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        end_ns = time.monotonic_ns()
        if action.kind.is_receive:
            size_bytes = self.inbox[action.message].num_bytes
        return ActionRecord(action, start_ns, end_ns, size_bytes, self.loss_start_ns)

    def perform(self, action: Action) -> None:
        """Runs one action."""
        match action.kind:
            case Kind.FORWARD:
                self.forward(action.stage, action.microbatch)
            case Kind.BACKWARD:
                self.backward(action.stage, action.microbatch)
            case Kind.REDUCE:
                self.reduce(action)
            case _ if action.kind.is_send:
                self.executor.transport.send(
                    self.outbox.pop(action.message),
                    target=self.rank_of(action.peer),
                    tag=action.message,
                )
            case _:
                self.inbox[action.message] = self.receive(
                    self.rank_of(action.peer), action.message, action
                )

    def rank_of(self, stage: int | None) -> int:
        assert stage is not None
        return self.executor.rank_of_device[self.program.device(stage)]

    def receive(self, source: int, tag: Tag, action: Action) -> Payload:
        return self.executor.transport.receive(
            source=source,
            tag=tag,
            timeout_s=self.executor.timeout_s,
            purpose=f"stage {action.stage}, action {action}",
        )

    # Forward ---------------------------------------------------------------------------------

    def forward(self, stage: int, microbatch: int) -> None:
        if stage == FEED:
            assert self.boundary is not None
            arguments = dict(self.boundary.start(microbatch))
            flight = Flight({}, arguments)
        else:
            inputs: dict[str, Any] = {}
            for edge in self.program.in_edges[stage]:
                inputs |= self.arrived(edge, microbatch)
            flight = run_forward(self.executor.stages[stage], inputs, training=self.training)
        for edge in self.program.out_edges[stage]:
            self.depart(edge, microbatch, flight)
        if stage == self.program.loss_stage and self.boundary is not None:
            known = flight.inputs | flight.outputs
            outputs = {name: known[name] for name in self.executor.output_names}
            for name in self.executor.output_names:
                if name in flight.inputs:  # the user may change it in place; a leaf may not change
                    outputs[name] = copies(outputs[name])
            self.loss_start_ns = time.monotonic_ns()
            flight.loss = self.boundary.finish(microbatch, outputs)
        if self.program.has_backward:
            self.flights[stage, microbatch] = flight

    def arrived(self, edge: StageEdge, microbatch: int) -> dict[str, Any]:
        """The values of one micro-batch of the consumer, joined from their messages."""
        messages = self.program.message_range(edge, edge.target, microbatch)
        box = self.outbox if self.program.is_local(edge) else self.inbox
        payloads = [box.pop((edge.source, edge.target, False, index)) for index in messages]
        if len(payloads) > 1:
            payloads = [self.joined(edge, payloads, self.sizes(edge, messages))]
        return dict(zip(edge.values, unpack(payloads[0]), strict=True))

    def depart(self, edge: StageEdge, microbatch: int, flight: Flight) -> None:
        """Puts the values of one micro-batch of the producer into the outbox."""
        payload = pack([flight.outputs[name] for name in edge.values])
        if self.program.has_backward and not edge.has_backward and any(payload.requires_grad):
            raise RuntimeError(
                f"{', '.join(edge.values)} for stage {edge.target} requires a gradient now, but "
                "did not when the model was captured, so none would flow back. If it is made by "
                "trainable layers before the pipelined forward, let the first step that runs "
                "make it the same way (Trainer(num_sanity_val_steps=0), for example)."
            )
        messages = self.program.message_range(edge, edge.source, microbatch)
        pieces = self.cut_up(edge, payload, self.sizes(edge, messages))
        for index, piece in zip(messages, pieces, strict=True):
            self.outbox[edge.source, edge.target, False, index] = piece

    # Backward --------------------------------------------------------------------------------

    def backward(self, stage: int, microbatch: int) -> None:
        flight = self.flights.pop((stage, microbatch))
        for edge in self.program.out_edges[stage]:
            if edge.has_backward:
                flight.add_gradients(edge.values, self.returned(edge, microbatch))
        keep = flight.loss is not None and any(
            edge.has_backward for edge in self.program.out_edges[FEED]
        )
        flight.backward(retain_graph=keep)
        for edge in self.program.in_edges[stage]:
            if edge.has_backward:
                self.give_back(edge, microbatch, flight)

    def returned(self, edge: StageEdge, microbatch: int) -> list[Tensor | None]:
        """The gradients for one micro-batch of the producer, joined from their messages."""
        messages = self.program.message_range(edge, edge.source, microbatch)
        box = self.outbox if self.program.is_local(edge) else self.inbox
        payloads = [box.pop((edge.target, edge.source, True, index)) for index in messages]
        if len(payloads) > 1:
            payloads = [self.joined(edge, payloads, self.sizes(edge, messages))]
        return payloads[0].tensors

    def give_back(self, edge: StageEdge, microbatch: int, flight: Flight) -> None:
        """Puts the gradients for one micro-batch of the consumer into the outbox."""
        payload = pack_gradients(flight.input_gradients(edge.values))
        messages = self.program.message_range(edge, edge.target, microbatch)
        pieces = self.cut_up(edge, payload, self.sizes(edge, messages))
        for index, piece in zip(messages, pieces, strict=True):
            self.outbox[edge.target, edge.source, True, index] = piece

    # Micro-batches of different sizes --------------------------------------------------------

    def sizes(self, edge: StageEdge, messages: range) -> list[int]:
        """Samples in each of some messages of an edge."""
        units = self.program.message_units(edge)
        return [sum(self.unit_sizes[index * units : (index + 1) * units]) for index in messages]

    def dims(self, edge: StageEdge, count: int) -> list[tuple[str, int | None]]:
        """(value name, batch dimension) of every tensor of an edge."""
        known = self.executor.batch_dims
        dims = [(name, dim) for name in edge.values for dim in known.get(name, (None,))]
        if len(dims) != count:
            raise ValueError(
                f"edge {edge.source}->{edge.target} carries {count} tensors where the captured "
                f"model has {len(dims)}; stages with different microbatch_multiple need a fixed "
                "number of tensors"
            )
        return dims

    def cut_up(self, edge: StageEdge, payload: Payload, sizes: Sequence[int]) -> list[Payload]:
        """A payload of several messages as one payload per message."""
        if len(sizes) == 1:
            return [payload]
        columns: list[Sequence[Tensor | None]] = []
        for tensor, (name, dim) in zip(
            payload.tensors, self.dims(edge, len(payload.tensors)), strict=True
        ):
            columns.append([None] * len(sizes) if tensor is None else cut(tensor, sizes, dim, name))
        return [
            Payload([column[i] for column in columns], payload.requires_grad, payload.structure)
            for i in range(len(sizes))
        ]

    def joined(self, edge: StageEdge, payloads: Sequence[Payload], sizes: Sequence[int]) -> Payload:
        """Several payloads as one; what is not a tensor must be equal in all."""
        first = payloads[0]
        if any(payload.structure != first.structure for payload in payloads):
            raise ValueError(
                f"edge {edge.source}->{edge.target} carries values that differ between "
                "micro-batches and are not tensors; give the stages the same microbatch_multiple"
            )
        dims = self.dims(edge, len(first.tensors))
        tensors = [
            join([payload.tensors[i] for payload in payloads], sizes, dim, name)
            for i, (name, dim) in enumerate(dims)
        ]
        return Payload(tensors, first.requires_grad, first.structure)

    # Shared parameters -----------------------------------------------------------------------

    def reduce(self, action: Action) -> None:
        """Sums the gradients of shared parameters: the owner adds up and answers with the sum."""
        group = self.program.reduce_groups[action.microbatch]
        parameters = [self.executor.shared[name] for name in group.parameters]
        ranks = [self.executor.rank_of_device[device] for device in group.devices]
        transport = self.executor.transport
        up: Tag = (_REDUCE, action.microbatch, 0, 0)
        down: Tag = (_REDUCE, action.microbatch, 1, 0)
        gradients: list[Tensor | None] = [parameter.grad for parameter in parameters]
        if transport.rank != ranks[0]:
            transport.send(pack(gradients), target=ranks[0], tag=up)
            gradients = unpack(self.receive(ranks[0], down, action))
        else:
            for rank in ranks[1:]:
                gradients = _added(gradients, unpack(self.receive(rank, up, action)))
            for rank in ranks[1:]:
                transport.send(pack(gradients), target=rank, tag=down)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _added(
    gradients: Sequence[Tensor | None], others: Sequence[Tensor | None]
) -> list[Tensor | None]:
    return [
        other if own is None else own if other is None else own + other
        for own, other in zip(gradients, others, strict=True)
    ]
