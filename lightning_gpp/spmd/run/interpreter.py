"""Runs an SPMD program on one device: the instructions one by one, each on the device's parts."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gpp.common.torch_device import forked_random
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, ValueSource
from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.program import (
    Computation,
    Conversion,
    Instruction,
    Option,
    ReceiveInput,
    ReturnOutput,
    SpmdProgram,
)
from lightning_gpp.spmd.run.collectives import Collectives, Shape
from lightning_gpp.spmd.run.emulated import EmulatedProgram
from lightning_gpp.spmd.run.gradient_sums import GradientSums
from lightning_gpp.spmd.run.graph_of_calls import on_device
from lightning_gpp.spmd.run.local_arguments import local_arguments
from lightning_gpp.spmd.run.moves import Mover
from lightning_gpp.spmd.run.operator_calls import OperatorCall
from lightning_gpp.spmd.run.options import look_up_rows, mean_of_part, sufficient_factors
from lightning_gpp.spmd.run.program_run import Key, LocalGraph, ProgramRun, cut
from lightning_gpp.spmd.run.shards import Shards

_DRAWING = threading.Lock()
"""Devices that are threads of one process share its generator of random numbers."""


@dataclass(slots=True)
class Interpreter:
    """Runs a program on one device.

    Attributes:
        graph: the model.
        calls: how its operators are called, in its order.
        program: what all devices do.
        collectives: of this device with the others.
        device: where its tensors are.
        pace: lets time pass; None: as fast as it can.
    """

    graph: SpmdGraph
    calls: Sequence[OperatorCall]
    program: SpmdProgram
    collectives: Collectives
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pace: EmulatedProgram | None = None
    mover: Mover = field(init=False)
    _call_of: dict[str, tuple[int, OperatorCall]] = field(init=False)
    _last_use: dict[Key, int] = field(init=False)

    def __post_init__(self) -> None:
        if self.program.num_devices != self.collectives.num_ranks:
            raise ValueError(
                f"the program is for {self.program.num_devices} devices, there are "
                f"{self.collectives.num_ranks} ranks"
            )
        self.mover = Mover(self.collectives, Shards(self.program.shares))
        self._call_of = {call.name: (number, call) for number, call in enumerate(self.calls)}
        self._last_use = {
            key: number
            for number, instruction in enumerate(self.program.instructions)
            for key in _reads(instruction, self.graph)
        }
        _check_buffers(self.graph, self.program, self._call_of)

    def run(
        self,
        stored: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor] | None,
        *,
        seed: int = 0,
    ) -> ProgramRun:
        """The forward; where gradients are recorded, a backward may follow.

        Args:
            stored: this device's parts of parameters, buffers and constants, as stored.
            inputs: the arguments of the forward, on rank 0.
            seed: of random numbers; the same on all ranks.
        """
        sums = GradientSums(self.collectives, pace=self.pace)
        run = ProgramRun(
            self.graph, self.program, self.mover, sums, stored, inputs, self.device, self.pace
        )
        there: dict[Key, Tensor] = {}
        for source in (ValueSource.PARAMETER, ValueSource.BUFFER):
            for value in self.graph.of_source(source):
                there[value.name, self.program.stored(value.name)] = stored[value.name].detach()
        for number, instruction in enumerate(self.program.instructions):
            match instruction:
                case ReceiveInput():
                    received = self._receive(inputs, instruction)
                    there[instruction.value, instruction.placement] = received
                case Conversion():
                    whole = self.graph.value_of[instruction.value].shape
                    part = there[instruction.value, instruction.source]
                    converted = self.mover.convert(part, whole, instruction)
                    there[instruction.value, instruction.target] = converted
                case Computation():
                    self._compute(there, run, number, instruction, seed)
                case ReturnOutput():
                    part = there[instruction.value, instruction.placement]
                    run.results[instruction.value] = self._give(part, instruction)
            if self.pace is not None:
                self.pace.passed(number, is_backward=False)
            for key in _reads(instruction, self.graph):
                if self._last_use[key] == number:
                    there.pop(key, None)
        if self.pace is not None:
            self.pace.end_half(is_backward=False)
        return run

    def _receive(self, inputs: Mapping[str, Tensor] | None, instruction: ReceiveInput) -> Tensor:
        value = self.graph.value_of[instruction.value]
        given = None if inputs is None else inputs[value.name].detach().to(self.device)
        return self.mover.receive(given, value.shape, getattr(torch, value.spec.dtype), instruction)

    def _give(self, part: Tensor, instruction: ReturnOutput) -> Tensor:
        """On rank 0 a result of the forward; elsewhere an empty tensor in its place."""
        value = self.graph.value_of[instruction.value]
        given = self.mover.give(part, value.shape, instruction)
        result = part.new_zeros(0) if given is None else given.detach()
        return result.requires_grad_(value.requires_grad and torch.is_grad_enabled())

    def _compute(
        self,
        there: dict[Key, Tensor],
        run: ProgramRun,
        number: int,
        computation: Computation,
        seed: int,
    ) -> None:
        operator = self.graph.operator_of[computation.operator]
        place, call = self._call_of[operator.name]
        tensors = [there[key] for key in zip(operator.inputs, computation.inputs, strict=True)]
        is_recorded = call.is_recorded and torch.is_grad_enabled()
        if is_recorded:
            flows = [self.graph.value_of[name].requires_grad for name in operator.inputs]
            tensors = [cut(t) if flow else t for t, flow in zip(tensors, flows, strict=True)]
        if call.is_random:
            is_sharded = any(placement.is_shard for placement in computation.outputs)
            own = 1 + self.collectives.rank if is_sharded else 0
            with _DRAWING, forked_random(self.device):
                torch.manual_seed(((seed * 1_000_003 + place) * 8191 + own) % 2**63)
                made = self._called(call, operator, computation, tensors)
        else:
            made = self._called(call, operator, computation, tensors)
        self._check(operator, computation, made)
        if is_recorded:
            run.local[number] = LocalGraph.of(tensors, made)
        keys = zip(operator.outputs, computation.outputs, strict=True)
        there.update(zip(keys, (tensor.detach() for tensor in made), strict=True))

    def _called(
        self,
        call: OperatorCall,
        operator: SpmdOperator,
        computation: Computation,
        tensors: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """This device's parts of the outputs of an operator."""
        shapes = self._shapes(operator.outputs, computation.outputs)
        arguments = local_arguments(operator.kind, call.arguments, computation.outputs, shapes)
        arguments = on_device(arguments, self.device)

        def run(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return call.run(given, arguments)

        match computation.option:
            case Option.PLAIN:
                return run(tensors)
            case Option.MEAN:
                whole = self.graph.value_of[operator.inputs[0]].shape
                return (mean_of_part(run, tensors[0], whole),)
            case Option.VOCABULARY:
                first = self._first_row(operator, computation)
                return (look_up_rows(tensors[0], tensors[1], first, arguments),)
            case Option.SUFFICIENT_FACTORS:
                wholes = [self.graph.value_of[name].shape for name in operator.inputs]
                result = self.graph.value_of[operator.outputs[0]].shape, computation.outputs[0]
                found = sufficient_factors(
                    self.mover, computation, run, operator.arguments, tensors, wholes, result
                )
                return (found,)

    def _first_row(self, operator: SpmdOperator, computation: Computation) -> int:
        """The first row of a table that this device has."""
        placement = computation.inputs[0]
        length = self.graph.value_of[operator.inputs[0]].shape[0]
        first = self.mover.shards.start(placement, self.collectives.rank)
        return first * placement.block(length)

    def _shapes(self, names: Sequence[str], placements: Sequence[Placement]) -> list[Shape]:
        rank, shards = self.collectives.rank, self.mover.shards
        return [
            shards.shape(self.graph.value_of[name].shape, placement, rank)
            for name, placement in zip(names, placements, strict=True)
        ]

    def _check(
        self, operator: SpmdOperator, computation: Computation, made: Sequence[Tensor]
    ) -> None:
        """A part of another size than its placement says would go wrong silently later."""
        expected = self._shapes(operator.outputs, computation.outputs)
        for shape, tensor in zip(expected, made, strict=True):
            if tuple(tensor.shape) != shape:
                raise RuntimeError(
                    f"operator {operator.name!r} ({operator.kind}, rule {computation.note!r}) made "
                    f"{tuple(tensor.shape)} on rank {self.collectives.rank}, but {shape} is this "
                    f"rank's part as {', '.join(map(str, computation.outputs))}"
                )


def _reads(instruction: Instruction, graph: SpmdGraph) -> list[Key]:
    """The values that an instruction reads."""
    match instruction:
        case Conversion():
            return [(instruction.value, instruction.source)]
        case Computation():
            operator = graph.operator_of[instruction.operator]
            return list(zip(operator.inputs, instruction.inputs, strict=True))
        case ReturnOutput():
            return [(instruction.value, instruction.placement)]
        case _:
            return []


def _check_buffers(
    graph: SpmdGraph, program: SpmdProgram, call_of: Mapping[str, tuple[int, OperatorCall]]
) -> None:
    """A buffer that operators change has to be changed where it is stored.

    Raises:
        ValueError: a part or a copy of it would be changed, or only summands of it are there.
    """
    for instruction in program.instructions:
        if not isinstance(instruction, Computation):
            continue
        operator = graph.operator_of[instruction.operator]
        for name, role, placement in zip(
            operator.inputs, operator.arguments, instruction.inputs, strict=True
        ):
            if role not in _written(call_of[operator.name][1]):
                continue
            stored = program.stored(name)
            if placement != stored and not (placement.is_replicated and stored.is_replicated):
                raise ValueError(
                    f"operator {operator.name!r} changes the buffer {name!r} as {placement}, which "
                    f"is stored as {stored}"
                )


def written_buffers(graph: SpmdGraph, calls: Sequence[OperatorCall]) -> set[str]:
    """Names of the buffers that operators change."""
    return {
        name
        for operator, call in zip(graph.operators, calls, strict=True)
        for name, role in zip(operator.inputs, operator.arguments, strict=True)
        if role in _written(call)
    }


def _written(call: OperatorCall) -> set[str]:
    """Names of the arguments that a call changes."""
    schema = call.function._schema
    found = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    if schema.name == "aten::batch_norm" and call.arguments.get("training"):
        found |= {"running_mean", "running_var"}
    return found
