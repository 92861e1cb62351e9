"""The executor: runs one device's actions of a program on real tensors.

A stage exchanges one payload per micro-batch with each of its neighbours. Where the neighbour takes
other units at a time, or has replicas, the payload is cut into the messages that go to each of
them, or joined from theirs; gradients from different stages are added up (by autograd).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import Parameter

from lightning_gpp.common.torch_device import synchronize
from lightning_gpp.graph import FEED, StageEdge
from lightning_gpp.runtime.payload import Payload, copies, pack, pack_gradients, unpack
from lightning_gpp.runtime.pieces import Cutter
from lightning_gpp.runtime.run_state import ActionRecord, Boundary, Pace, RunState
from lightning_gpp.runtime.stage_run import Flight, StageCall, StageCode, ends_of, run_forward
from lightning_gpp.runtime.staying_inputs import StayingInputs
from lightning_gpp.runtime.sums import GradientReduction, Sums, sum_shared
from lightning_gpp.runtime.transport.transport import Tag, Transport
from lightning_gpp.schedule import Action, Kind, Program, Window
from lightning_gpp.schedule.program_parts import Part

_FIRST_AHEAD = 2
"""In a tag, in the place of what says whether a message goes backward: inputs that come ahead."""


class _NothingCameError(RuntimeError):
    """A stage was to get values from another one, whose error is known."""


@dataclass(slots=True)
class Executor:
    """Runs programs on one rank, at once or in two halves around the user's step.

    Attributes:
        transport: messages to other ranks.
        rank_of_device: rank of every device of the plan.
        stages: code of the stages on this rank, by their id in the plan.
        output_names: values that the model returns; the loss stage returns them all.
        cutter: cuts and joins values where stages take other numbers of samples.
        staying: inputs that are sent once.
        shared: parameters by canonical name, for the reduce groups.
        sparse: names of those whose gradients are sparse.
        sums: sums the gradients of replicas.
        timeout_s: limit of every wait.
        device: where the stages compute; recorded actions are waited for there.
        on_record: gets a record of every action when set.
        pace: makes the actions last as long as those of an emulated device, when set.
        forward_context: what forwards of stages run in, and backwards do not (autocast).
    """

    transport: Transport
    rank_of_device: Sequence[int]
    stages: Mapping[int, StageCode]
    output_names: tuple[str, ...] = ()
    cutter: Cutter = field(default_factory=Cutter)
    staying: StayingInputs = field(default_factory=StayingInputs)
    shared: Mapping[str, Parameter] = field(default_factory=dict)
    sparse: frozenset[str] = frozenset()
    sums: Sums | None = None
    timeout_s: float = 1800.0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    on_record: Callable[[ActionRecord], None] | None = None
    pace: Pace | None = None
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass
class Run:
    """One run of a program on this rank.

    Attributes:
        executor: whose.
        program: the program of all devices.
        unit_sizes: samples of each of the smallest micro-batches.
        training: whether modules are in training mode (dropout, running statistics).
        boundary: the user's step, on the rank of the loss.
        errors: gets those of this rank's forwards, where no rank is to stop.
        state: what is held between actions; an earlier run may have left something in flight.
        shift: added to numbers of micro-batches, in a window of a longer training.
        chunks: which part of one graph every micro-batch is, where they are that.
        device: of this rank.
        ahead: under this number its inputs have come before it began; None: they come in it.
        is_early: whether it sends inputs under that number, for a run to come.
        early: on the rank of the feed, the run whose inputs are sent in this one's backward half;
            none once they are on their way.
        message: the last one, as it was sent.
        loss_start_ns: when the user's step went on in the last forward of the loss stage.
        keeps_flights: whether the backwards can be run again.
    """

    executor: Executor
    program: Program
    unit_sizes: Sequence[int]
    training: bool
    boundary: Boundary | None = None
    errors: list[str] | None = None
    state: RunState = field(default_factory=RunState)
    shift: int = 0
    chunks: Sequence[int] = ()
    device: int = field(init=False)
    ahead: int | None = None
    is_early: bool = False
    early: Run | None = None
    message: Payload | None = None
    loss_start_ns: int | None = None
    keeps_flights: bool = False

    def __post_init__(self) -> None:
        assert len(self.unit_sizes) == self.program.num_microbatches, self.unit_sizes
        self.device = self.executor.rank_of_device.index(self.executor.transport.rank)
        self.executor.staying.begin()

    def whole(self) -> None:
        """Runs everything in one go, up to the update that ends the program."""
        self.perform_all(self.program.before_update(self.device))

    def forward_half(self) -> None:
        """Runs all forwards."""
        self.perform_all(self.program.forward_half(self.device))

    def backward_half(self, *, retain: bool) -> None:
        """Runs all backwards and sums; ``retain``: they can be run again."""
        self.keeps_flights = retain
        self.state.reduction = None  # of an earlier backward
        self.perform_all(self.program.around_turn(self.device)[1])

    def window(self, number: int) -> None:
        """Runs what a mini-batch's part of the program has, up to the update that ends it."""
        self.perform_all(Window(self.program, number).actions(self.device))

    def perform_all(self, actions: Sequence[Action]) -> None:
        """Runs actions of this device."""
        pace, on_record, early = self.executor.pace, self.executor.on_record, self.early
        num_sends = 0 if early is None else sum(a.kind is Kind.SEND_BACKWARD for a in actions)
        is_plain = pace is None and on_record is None
        with nullcontext() if pace is None else pace.run(self.program, self.device):
            for action in actions:
                if is_plain:
                    HANDLERS[action.kind](self, action)
                else:
                    record = self.perform_timed(action)
                    if on_record is not None:
                        on_record(record)
                if num_sends and early is not None and action.kind is Kind.SEND_BACKWARD:
                    early.feed_ahead(num_sends)
                    num_sends -= 1
        self.executor.transport.flush()
        if self.executor.cutter.doubtful:
            try:
                self.executor.cutter.check()
            except ValueError as error:
                self._note(error)

    def _note(self, error: Exception) -> None:
        """Raises an error unless errors are to be found out."""
        if self.errors is None:
            raise error
        self.errors.append(f"{type(error).__name__}: {error}")

    def perform_timed(self, action: Action) -> ActionRecord:
        """Runs one action, and says when."""
        pace = self.executor.pace
        self.message = self.loss_start_ns = None
        start_ns = time.monotonic_ns()
        with nullcontext() if pace is None else pace.action(action):
            HANDLERS[action.kind](self, action)
        if pace is not None:  # only a forward as a whole has an emulated time
            self.loss_start_ns = None
        synchronize(self.executor.device)
        end_ns, size_bytes = time.monotonic_ns(), self.message and self.message.num_bytes
        return ActionRecord(action, start_ns, end_ns, size_bytes, self.loss_start_ns)

    # Messages --------------------------------------------------------------------------------

    def send(self, action: Action) -> None:
        """Hands a message to the transport."""
        executor, program = self.executor, self.program
        source, target, backward, index = action.message
        tag: Tag = (source, target, backward, index + self.shift)
        payload = self.state.outbox.pop(tag)
        if source == FEED and self.ahead is not None:
            if not self.is_early:  # it is there
                return
            tag = self._ahead_tag(tag)
        rank = executor.rank_of_device[program.devices[target]]  # of FEED: the last
        if source == FEED and executor.staying.names:
            names = program.edge[FEED, target].values
            payload = executor.staying.thinned(payload, names, rank, program.replica(target).stage)
        self.message = payload
        executor.transport.send(payload, target=rank, tag=tag)

    def receive(self, action: Action) -> None:
        """Waits for a message."""
        executor, program = self.executor, self.program
        source, target, backward, index = action.message
        tag = source, target, backward, index + self.shift
        rank = executor.rank_of_device[program.devices[source]]  # of FEED: the last
        came_early = source == FEED and self.ahead is not None
        payload = self._receive(rank, self._ahead_tag(tag) if came_early else tag, action)
        self.message = payload
        if source == FEED and executor.staying.names and not payload.is_nothing:
            names = program.edge[FEED, target].values
            payload = executor.staying.filled(payload, names, program.replica(target).stage)
        self.state.inbox[tag] = payload

    def _ahead_tag(self, tag: Tag) -> Tag:
        assert self.ahead is not None, "inputs come ahead under a number"
        return *tag[:2], _FIRST_AHEAD + self.ahead, tag[3]

    def feed_ahead(self, times: int) -> None:
        """Sends inputs of a run to come, in which :attr:`ahead` is the same.

        They take turns with gradients, of which none waits for all of them.

        Args:
            times: after so many calls all are on their way.
        """
        pace, left = self.executor.pace, self._not_fed
        for _ in range(-(-len(left) // times)):
            action = left.popleft()
            if action.kind.is_compute:
                self.forward(action)
            else:
                with nullcontext() if pace is None else pace.action(action):
                    self.send(action)

    @cached_property
    def _not_fed(self) -> deque[Action]:
        """What is left of the feed's actions."""
        actions = self.program.forward_half(self.device)
        return deque(action for action in actions if action.stage == FEED)

    @property
    def is_fed(self) -> bool:
        """Whether all inputs are on their way."""
        return not self._not_fed

    def drop_ahead(self) -> None:
        """Takes the inputs that have come for a run that takes others."""
        for action in self.program.forward_half(self.device):
            if action.kind is Kind.RECEIVE_FORWARD and action.message[0] == FEED:
                self.receive(action)

    def _receive(self, source: int, tag: Tag, action: Action) -> Payload:
        return self.executor.transport.receive(
            source=source,
            tag=tag,
            timeout_s=self.executor.timeout_s,
            purpose=f"{self.program.replica(action.stage)}, action {action}",
        )

    def _take(
        self, edges: Sequence[StageEdge], stage: int, microbatch: int, *, backward: bool
    ) -> list[Any]:
        """What has come for one micro-batch of a stage from the replicas of another.

        ``edges`` are those between the two, a group of :attr:`Program.in_groups` (forward) or
        :attr:`Program.out_groups` (``backward``: gradients).
        """
        parts, sizes = [], []
        for edge, index, part, is_local in self.program.messages(edges, stage, microbatch):
            ends = (edge.target, edge.source) if backward else (edge.source, edge.target)
            box = self.state.outbox if is_local else self.state.inbox
            payload = box.pop((*ends, backward, index + self.shift))
            if payload.arrival is not None:
                payload.settle()
            if payload.structure is not None and payload.is_nothing:
                raise _NothingCameError
            parts.append(payload.tensors if backward else unpack(payload))
            sizes.append(part)
        if len(parts) == 1:
            return parts[0]
        names, samples = edges[0].values, self._samples(sizes)
        return self.executor.cutter.join(names, parts, samples, backward=backward)

    def _put(
        self,
        edges: Sequence[StageEdge],
        stage: int,
        microbatch: int,
        values: Sequence[Any] | None,
        *,
        backward: bool,
    ) -> None:
        """Puts what one micro-batch of a stage has for the replicas of another into the outbox.

        The other way round than :meth:`_take`; no values where its forward has failed.
        """
        messages = self.program.messages(edges, stage, microbatch)
        if values is None:
            pieces = [Payload.nothing()] * len(messages)
        elif len(messages) == 1:
            pieces = [(pack_gradients if backward else pack)(values)]
        else:
            sizes = self._samples([part for _, _, part, _ in messages])
            parts = self.executor.cutter.cut(edges[0].values, values, sizes, backward=backward)
            pieces = [(pack_gradients if backward else pack)(part) for part in parts]
        must_end = not (backward or edges[0].has_backward) and self.program.has_backward
        for (edge, index, _, _), piece in zip(messages, pieces, strict=True):
            if must_end and True in piece.requires_grad:
                names, reader = ", ".join(edge.values), self.program.replica(edge.target)
                raise RuntimeError(
                    f"{names} for {reader} requires a gradient now, but did not when the model was "
                    "captured, so none would flow back. The first call of the pipelined forward "
                    "must have it, too: Trainer(num_sanity_val_steps=0) makes it a training step."
                )
            ends = (edge.target, edge.source) if backward else (edge.source, edge.target)
            self.state.outbox[(*ends, backward, index + self.shift)] = piece

    def _samples(self, parts: Sequence[Part]) -> list[int]:
        return [sum(self.unit_sizes[part.start : part.stop]) for part in parts]

    # Forward ---------------------------------------------------------------------------------

    def forward(self, action: Action) -> None:
        """A forward; where errors are noted, whoever waits for its values gets none."""
        stage, microbatch = action.stage, action.microbatch
        program, executor, number = self.program, self.executor, microbatch + self.shift
        has_backward = program.has_backward
        inputs: dict[str, Any] = {}
        try:
            if stage == FEED:
                assert self.boundary is not None
                flight = Flight(inputs, dict(self.boundary.start(number)))
                is_kept = program.feed_has_backward
            else:
                for edges in program.in_groups[stage]:
                    values = self._take(edges, stage, microbatch, backward=False)
                    inputs |= zip(edges[0].values, values, strict=True)
                code = executor.stages[program.replica(stage).stage]
                # State that changes once per mini-batch is changed by the last micro-batch alone.
                if stage in self.state.put_back:
                    self.state.put_back[stage]()
                elif code.keep_state is not None:
                    self.state.put_back[stage] = code.keep_state()
                chunk = self.chunks[microbatch] if self.chunks else None
                call = StageCall(number, training=self.training, chunk=chunk)
                with executor.forward_context():
                    flight = run_forward(code, inputs, call, has_backward=has_backward)
                is_kept = has_backward
            for edges in program.out_groups[stage]:
                values = [*map(flight.outputs.__getitem__, edges[0].values)]
                self._put(edges, stage, microbatch, values, backward=False)
            if stage == program.loss_stage and self.boundary is not None:
                known = flight.inputs | flight.outputs
                outputs = {name: known[name] for name in executor.output_names}
                for name in flight.inputs.keys() & outputs.keys():
                    outputs[name] = copies(outputs[name])  # the user may change it in place
                start_ns = time.monotonic_ns()
                flight.loss = self.boundary.finish(number, outputs)
                if flight.loss is not None:
                    self.loss_start_ns = start_ns
                elif has_backward:
                    flight.results = ends_of(outputs)
            if is_kept:
                flight.let_go()
                self.state.flights[stage, number] = flight
        except Exception as error:  # user code may raise anything
            if not isinstance(error, _NothingCameError):
                self._note(error)
            for edges in program.out_groups[stage]:
                self._put(edges, stage, microbatch, None, backward=False)

    # Backward --------------------------------------------------------------------------------

    def backward(self, action: Action) -> None:
        """A backward; sums of gradients begin in it as soon as they can."""
        reduction = self._reduction(action)
        with reduction.watching(action) if reduction else nullcontext():
            self._backward(action.stage, action.microbatch)

    def _backward(self, stage: int, microbatch: int) -> None:
        flights, key = self.state.flights, (stage, microbatch + self.shift)
        flight = flights[key] if self.keeps_flights else flights.pop(key)
        for edges in self.program.out_groups[stage]:
            if edges[0].has_backward:
                gradients = self._take(edges, stage, microbatch, backward=True)
                ends = [end for name in edges[0].values for end in flight.ends[name]]
                flight.add_gradients(ends, gradients)
        if flight.results and self.boundary is not None:
            of_results = self.boundary.output_gradients(microbatch + self.shift)
            for name, ends in flight.results.items():
                flight.add_gradients(ends, of_results[name])
        # With the user's step, which goes on from FEED, a loss shares its graph.
        is_shared = flight.loss is not None and self.program.feed_has_backward
        flight.backward(retain_graph=is_shared or self.keeps_flights)
        for edges in self.program.in_groups[stage]:
            if edges[0].has_backward:
                gradients = flight.input_gradients(edges[0].values)
                self._put(edges, stage, microbatch, gradients, backward=True)

    # Parameters ------------------------------------------------------------------------------

    def _reduction(self, action: Action) -> GradientReduction | None:
        """The sums of the gradients of replicas; None where no stage has any."""
        program, own = self.program, self.executor
        if self.state.reduction is None and program.has_replicas:
            assert own.sums is not None, "stages with replicas need sums of their gradients"
            dense = {name: p for name, p in own.shared.items() if name not in own.sparse}
            minibatch = program.minibatch(action)
            self.state.reduction = GradientReduction(
                program, self.device, own.rank_of_device, dense, own.sums, minibatch
            )
        return self.state.reduction

    def reduce(self, action: Action) -> None:
        """Sums the gradients of parameters that several ranks hold."""
        group = self.program.reduce_group(action.microbatch)
        by_messages = list(group.parameters)
        if group.stage is not None:
            reduction = self._reduction(action)
            assert reduction is not None
            purpose = f"{self.program.replica(action.stage)}, action {action}"
            reduction.finish(action.microbatch, self.executor.timeout_s, purpose)
            by_messages = [name for name in group.parameters if name in self.executor.sparse]
        if by_messages:
            sum_shared(
                [self.executor.shared[name] for name in by_messages],
                [self.executor.rank_of_device[device] for device in group.devices],
                action.microbatch,
                self.executor.transport,
                lambda rank, tag: self._receive(rank, tag, action).settle(),
            )

    def step(self, action: Action) -> None:
        """Not asked for: what runs ends before an update, which is its caller's."""
        raise AssertionError(f"{action}: whoever runs a program makes its updates")


HANDLERS: Mapping[Kind, Callable[[Run, Action], None]] = MappingProxyType(
    {
        Kind.FORWARD: Run.forward,
        Kind.BACKWARD: Run.backward,
        Kind.SEND_FORWARD: Run.send,
        Kind.RECEIVE_FORWARD: Run.receive,
        Kind.SEND_BACKWARD: Run.send,
        Kind.RECEIVE_BACKWARD: Run.receive,
        Kind.REDUCE: Run.reduce,
        Kind.STEP: Run.step,
    }
)
"""What a rank does in each kind of action."""
