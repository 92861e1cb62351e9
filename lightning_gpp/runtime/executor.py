"""The interpreter of programs: runs one device's actions on real tensors.

It contains no schedule logic. Micro-batches of a stage are *flights*; what they hand to other
stages goes through the :class:`~lightning_gpp.runtime.handover.Handover`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.graph import FEED, StageEdge
from lightning_gpp.runtime.handover import Handover
from lightning_gpp.runtime.pace import Pace
from lightning_gpp.runtime.payload import Payload, copies, pack, pack_gradients, unpack
from lightning_gpp.runtime.stage_run import Flight, StageCode, run_forward
from lightning_gpp.runtime.sums.reduction import GradientReduction
from lightning_gpp.runtime.sums.sums import Sums
from lightning_gpp.runtime.transport.transport import Tag, Transport
from lightning_gpp.runtime.value_pieces import Cutter
from lightning_gpp.schedule import Action, Kind, Program, ReduceGroup

SHARED_GRADIENTS = -2
"""First number of the tags of messages with gradients of parameters that different stages share."""


class Boundary(Protocol):
    """Where the pipeline meets the user's step; only the rank of the loss needs one."""

    def start(self, microbatch: int) -> Mapping[str, Tensor]:
        """The arguments of the pipelined forward for one micro-batch of the loss stage."""

    def finish(self, microbatch: int, outputs: Mapping[str, Any]) -> Tensor | None:
        """Takes the model's outputs; returns the weighted loss where the backward starts at it.

        Without a loss the backward starts at the gradients of the outputs.
        """

    def output_gradients(self, microbatch: int) -> Mapping[str, Sequence[Tensor | None]]:
        """Output name -> gradients of its tensors, where :meth:`finish` gave no loss."""


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
            loss stage that have a loss of their own; from there to ``end_ns`` it is the user's own
            code.
    """

    action: Action
    start_ns: int
    end_ns: int
    size_bytes: int | None = None
    loss_start_ns: int | None = None


@dataclass(slots=True)
class Executor:
    """Runs programs on one rank, as a whole or in two parts with the user's step in between.

    Attributes:
        transport: how to reach the other ranks.
        rank_of_device: rank of every device of the plan.
        stages: code of the stages on this rank, by their id in the plan.
        output_names: values that the model returns; the loss stage returns them all.
        cutter: cuts and joins values where stages take other numbers of samples.
        shared: parameters by canonical name, for the reduce groups.
        sums: sums the gradients of replicas; not needed where no stage has replicas.
        timeout_s: limit of every wait.
        on_record: gets a record of every action when set.
        pace: makes the actions last as long as those of an emulated device, when set.
    """

    transport: Transport
    rank_of_device: Sequence[int]
    stages: Mapping[int, StageCode]
    output_names: tuple[str, ...] = ()
    cutter: Cutter = field(default_factory=Cutter)
    shared: Mapping[str, Parameter] = field(default_factory=dict)
    sums: Sums | None = None
    timeout_s: float = 1800.0
    on_record: Callable[[ActionRecord], None] | None = None
    pace: Pace | None = None

    def run(
        self,
        program: Program,
        unit_sizes: Sequence[int],
        *,
        training: bool,
        boundary: Boundary | None = None,
        errors: list[str] | None = None,
    ) -> None:
        """Runs this rank's part of a program once.

        Args:
            program: the program of all devices.
            unit_sizes: samples of each of the smallest micro-batches.
            training: whether modules are in training mode (dropout, running statistics).
            boundary: the user's step, on the rank of the loss.
            errors: gets those of this rank's forwards, if that is to be found out: no rank stops.
        """
        self.begin(program, unit_sizes, training=training, boundary=boundary, errors=errors).whole()

    def begin(
        self,
        program: Program,
        unit_sizes: Sequence[int],
        *,
        training: bool,
        boundary: Boundary | None = None,
        errors: list[str] | None = None,
    ) -> Run:
        """A run of a program on this rank, of which nothing is done yet; see :meth:`run`."""
        if len(unit_sizes) != program.num_microbatches:
            raise ValueError(
                f"the program has {program.num_microbatches} micro-batches, got sizes of "
                f"{len(unit_sizes)}"
            )
        device = self.rank_of_device.index(self.transport.rank)
        handover = Handover(program, unit_sizes, self.cutter)
        return Run(self, program, handover, device, training, boundary, errors)


@dataclass(slots=True)
class Run:
    """One run of a program on one rank: what it holds between its actions.

    Attributes:
        executor: whose.
        program: what runs.
        handover: messages made and received.
        device: of this rank.
        training: whether modules are in training mode.
        boundary: the user's step, on the rank of the loss.
        errors: see :meth:`Executor.run`.
        flights: micro-batches between forward and backward, by stage and number.
    """

    executor: Executor
    program: Program
    handover: Handover
    device: int
    training: bool
    boundary: Boundary | None
    errors: list[str] | None = None
    flights: dict[tuple[int, int], Flight] = field(default_factory=dict)
    loss_start_ns: int | None = None
    keeps_flights: bool = False
    _reduction: GradientReduction | None = None
    _put_back: dict[int, Callable[[], None]] = field(default_factory=dict)

    def whole(self) -> None:
        """Runs everything in one go."""
        self.perform_all(self.program.device_actions(self.device), has_sums=True)

    def forward_half(self) -> None:
        """Runs all forwards, up to the outputs of the model."""
        self.perform_all(self.program.forward_half(self.device), has_sums=False)

    def backward_half(self, *, retain: bool) -> None:
        """Runs all backwards, from the gradients of the outputs.

        Args:
            retain: whether they can be run again.
        """
        self.keeps_flights = retain
        self.perform_all(self.program.backward_half(self.device), has_sums=True)

    def perform_all(self, actions: Sequence[Action], *, has_sums: bool) -> None:
        """Runs actions one after the other, at the pace of the rank if it has one.

        Args:
            actions: of this device.
            has_sums: whether the sums of gradients are among them.
        """
        pace, on_record = self.executor.pace, self.executor.on_record
        self._reduction = self._new_reduction() if has_sums else None
        run = nullcontext() if pace is None else pace.run(self.program, self.device, has_sums)
        with run:
            for action in actions:
                if on_record is None:
                    self.perform(action)
                else:
                    on_record(self.perform_timed(action))
            self.executor.transport.flush()

    def _new_reduction(self) -> GradientReduction | None:
        if all(group.stage is None for group in self.program.reduce_groups):
            return None
        executor = self.executor
        assert executor.sums is not None, "stages with replicas need sums of their gradients"
        return GradientReduction(
            self.program, self.device, executor.rank_of_device, executor.shared, executor.sums
        )

    def perform_timed(self, action: Action) -> ActionRecord:
        """Runs one action and says when."""
        boxes = self.handover
        size_bytes = boxes.outbox[action.message].num_bytes if action.kind.is_send else None
        self.loss_start_ns = None
        start_ns = time.monotonic_ns()
        self.perform(action)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        end_ns = time.monotonic_ns()
        if action.kind.is_receive:
            size_bytes = boxes.inbox[action.message].num_bytes
        return ActionRecord(action, start_ns, end_ns, size_bytes, self.loss_start_ns)

    def perform(self, action: Action) -> None:
        """Runs one action, at the pace of the rank if it has one."""
        pace = self.executor.pace
        if pace is None:
            self._work(action)
            return
        with pace.action(action):
            self._work(action)
        self.loss_start_ns = None  # only a forward as a whole has an emulated time

    def _work(self, action: Action) -> None:
        """Does what an action says."""
        match action.kind:
            case Kind.FORWARD if self.errors is not None:
                self._try_forward(action.stage, action.microbatch, self.errors)
            case Kind.FORWARD:
                self._forward(action.stage, action.microbatch)
            case Kind.BACKWARD:
                with self._reduction.watching(action) if self._reduction else nullcontext():
                    self._backward(action.stage, action.microbatch)
            case Kind.REDUCE:
                self._reduce(action)
            case _ if action.kind.is_send:
                self.executor.transport.send(
                    self.handover.outbox.pop(action.message),
                    target=self._rank_of(action.peer),
                    tag=action.message,
                )
            case _:
                self.handover.inbox[action.message] = self._receive(
                    self._rank_of(action.peer), action.message, action
                )

    def _rank_of(self, stage: int | None) -> int:
        assert stage is not None
        return self.executor.rank_of_device[self.program.device(stage)]

    def _receive(self, source: int, tag: Tag, action: Action) -> Payload:
        return self.executor.transport.receive(
            source=source,
            tag=tag,
            timeout_s=self.executor.timeout_s,
            purpose=self._purpose(action),
        )

    def _purpose(self, action: Action) -> str:
        """What an action is for, for errors."""
        return f"{self.program.replica(action.stage)}, action {action}"

    # Forward ---------------------------------------------------------------------------------

    def _try_forward(self, stage: int, microbatch: int, errors: list[str]) -> None:
        """A forward whose error is noted; whoever waits for its values gets none and fails too."""
        try:
            self._forward(stage, microbatch)
        except Exception as error:  # user code may raise anything
            errors.append(f"{type(error).__name__}: {error}")
            for edges in self.program.out_groups[stage]:
                self.handover.put_nothing(edges, stage, microbatch)

    def _forward(self, stage: int, microbatch: int) -> None:
        if stage == FEED:
            assert self.boundary is not None
            arguments = dict(self.boundary.start(microbatch))
            flight = Flight({}, arguments)
        else:
            inputs: dict[str, Any] = {}
            for edges in self.program.in_groups[stage]:
                payload = self.handover.take(edges, stage, microbatch, backward=False)
                inputs |= zip(edges[0].values, unpack(payload), strict=True)
            code = self.executor.stages[self.program.replica(stage).stage]
            self._keep_state(stage, code)
            flight = run_forward(
                code, inputs, training=self.training, has_backward=self.program.has_backward
            )
        for edges in self.program.out_groups[stage]:
            payload = pack([flight.outputs[name] for name in edges[0].values])
            self._check_gradients(edges[0], payload)
            self.handover.put(edges, stage, microbatch, payload, backward=False)
        if stage == self.program.loss_stage and self.boundary is not None:
            known = flight.inputs | flight.outputs
            outputs = {name: known[name] for name in self.executor.output_names}
            for name in self.executor.output_names:
                if name in flight.inputs:  # the user may change it in place; a leaf may not change
                    outputs[name] = copies(outputs[name])
            start_ns = time.monotonic_ns()
            flight.loss = self.boundary.finish(microbatch, outputs)
            if flight.loss is not None:
                self.loss_start_ns = start_ns
            elif self.program.has_backward:
                flight.keep_results(outputs)
        if self.program.has_backward:
            flight.let_go()
            self.flights[stage, microbatch] = flight

    def _keep_state(self, stage: int, code: StageCode) -> None:
        """Lets state that changes once per mini-batch be changed by the last micro-batch alone."""
        if stage in self._put_back:
            self._put_back[stage]()
        elif code.keep_state is not None:
            self._put_back[stage] = code.keep_state()

    def _check_gradients(self, edge: StageEdge, payload: Payload) -> None:
        """Refuses to send what would need a gradient back along an edge that brings none."""
        if self.program.has_backward and not edge.has_backward and any(payload.requires_grad):
            raise RuntimeError(
                f"{', '.join(edge.values)} for {self.program.replica(edge.target)} requires a "
                "gradient now, but did not when the model was captured, so none would flow back. "
                "If it is made by trainable layers before the pipelined forward, let the first "
                "step that runs make it likewise (Trainer(num_sanity_val_steps=0), for example)."
            )

    # Backward --------------------------------------------------------------------------------

    def _backward(self, stage: int, microbatch: int) -> None:
        flight = self.flights[stage, microbatch]
        if not self.keeps_flights:
            del self.flights[stage, microbatch]
        for edges in self.program.out_groups[stage]:
            if edges[0].has_backward:
                payload = self.handover.take(edges, stage, microbatch, backward=True)
                flight.add_gradients(edges[0].values, payload.tensors)
        if flight.results and self.boundary is not None:
            flight.add_result_gradients(self.boundary.output_gradients(microbatch))
        is_shared = (
            flight.loss is not None
            and any(  # with the user's step, which goes on from FEED
                edge.has_backward for edge in self.program.out_edges[FEED]
            )
        )
        flight.backward(retain_graph=is_shared or self.keeps_flights)
        for edges in self.program.in_groups[stage]:
            if edges[0].has_backward:
                payload = pack_gradients(flight.input_gradients(edges[0].values))
                self.handover.put(edges, stage, microbatch, payload, backward=True)

    # Parameters on several ranks -------------------------------------------------------------

    def _reduce(self, action: Action) -> None:
        """Sums the gradients of parameters that several ranks hold."""
        group = self.program.reduce_groups[action.microbatch]
        if group.stage is None:
            self._reduce_shared(group, action)
        else:
            assert self._reduction is not None
            self._reduction.finish(
                action.microbatch, self.executor.timeout_s, self._purpose(action)
            )

    def _reduce_shared(self, group: ReduceGroup, action: Action) -> None:
        """Of different stages: the owner adds up and answers with the sum."""
        parameters = [self.executor.shared[name] for name in group.parameters]
        ranks = [self.executor.rank_of_device[device] for device in group.devices]
        transport = self.executor.transport
        up: Tag = (SHARED_GRADIENTS, action.microbatch, 0, 0)
        down: Tag = (SHARED_GRADIENTS, action.microbatch, 1, 0)
        gradients: list[Tensor | None] = [parameter.grad for parameter in parameters]
        if transport.rank != ranks[0]:
            transport.send(pack(gradients), target=ranks[0], tag=up)
            gradients = unpack(self._receive(ranks[0], down, action))
        else:
            for rank in ranks[1:]:
                gradients = _added(gradients, unpack(self._receive(rank, up, action)))
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
