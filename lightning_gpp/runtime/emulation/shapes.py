"""Stages that compute shapes alone, so that models far larger than this machine can run.

Tensors are on torch's meta device: they have a type and a shape, and autograd runs on them, but
they hold no numbers. A stage makes outputs of the shapes that its graph has for the samples of the
micro-batch, which require gradients where the graph says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from lightning_gpp.graph import FEED, ModelGraph, TensorSpec, Value, Variation
from lightning_gpp.runtime.emulation.emulate import EmulatedRun, emulate
from lightning_gpp.runtime.emulation.threads import RankWork
from lightning_gpp.runtime.stage_run import StageCall, StageCode
from lightning_gpp.runtime.value_pieces import Cutter
from lightning_gpp.schedule import Program
from lightning_gpp.simulate.program_costs import ProgramCosts

META = torch.device("meta")
FLOAT_BYTES = 4


def emulate_shapes(
    program: Program,
    graph: ModelGraph,
    costs: ProgramCosts,
    *,
    minibatch_size: int,
    num_steps: int = 1,
    prefetch: bool = False,
    time_scale: float | None = None,
    timeout_s: float = 1800.0,
) -> EmulatedRun:
    """Runs a program of a model on emulated devices with tensors that are shapes alone.

    Args:
        program: made from a plan of the model (``plan_graph(plan, graph).program(…)``), or taken
            from its simulation.
        graph: the model.
        costs: what the program costs on the emulated cluster.
        minibatch_size: samples of a step.
        num_steps: how many steps.
        prefetch: whether the host reads the input of a step while the one before runs.
        time_scale: real seconds that an emulated second takes; chosen if not given.
        timeout_s: limit of every wait, in real seconds.

    Raises:
        ValueError: graph, costs and program do not belong together.
    """
    _warm_up()
    shapes = _Shapes(program, graph, _even_sizes(minibatch_size, program.num_microbatches))
    values = graph.values
    return emulate(
        program,
        costs,
        [shapes.work(device) for device in range(len(program.actions))],
        unit_sizes=shapes.unit_sizes,
        output_names=graph.outputs,
        cutter=Cutter(
            {name: tuple(s.batch_dim for s in value.tensors) for name, value in values.items()},
            {name: value.variation for name, value in values.items()},
        ),
        num_steps=num_steps,
        prefetch=prefetch,
        time_scale=time_scale,
        timeout_s=timeout_s,
    )


def _warm_up() -> None:
    """The first backward of a process takes half a second; it would be slip."""
    (made,) = computed([torch.empty(1, device=META)], [Parameter(torch.empty(1, device=META))])
    torch.autograd.backward([made], [torch.empty(1, device=META)])


def _even_sizes(num_samples: int, count: int) -> list[int]:
    """Sizes of equal parts; the first ones have one more where they cannot be equal."""
    size, rest = divmod(num_samples, count)
    return [size + (index < rest) for index in range(count)]


@dataclass(frozen=True)
class _Shapes:
    """The work of the ranks."""

    program: Program
    graph: ModelGraph
    unit_sizes: Sequence[int]

    def work(self, device: int) -> RankWork:
        """The stages of one device."""
        program = self.program
        own = [stage for stage, home in enumerate(program.devices) if home == device]
        parameters = self._parameters(device)

        def step() -> None:
            for parameter in parameters.values():
                parameter.grad = None

        leads = device == program.device(FEED)
        return RankWork(
            {program.replica(stage).stage: self._code(stage, parameters) for stage in own},
            parameters,
            _ShapeBoundary(self) if leads else None,
            step,
        )

    def samples(self, stage: int, microbatch: int) -> int:
        """Samples in a micro-batch of a stage."""
        return sum(self.unit_sizes[unit] for unit in self.program.units(stage, microbatch))

    def _parameters(self, device: int) -> dict[str, Parameter]:
        """Those of the sums that a device takes part in."""
        names = [n for g in self.program.reduce_groups if device in g.devices for n in g.parameters]
        return {name: _parameter(self.graph, name) for name in names}

    def _code(self, stage: int, parameters: Mapping[str, Parameter]) -> StageCode:
        program = self.program
        inputs = [n for edge in program.in_edges[stage] for n in edge.values]
        outputs = [n for edge in program.out_edges[stage] for n in edge.values]
        if stage == program.loss_stage:
            outputs += [name for name in self.graph.outputs if name not in inputs]
        inputs, outputs = list(dict.fromkeys(inputs)), list(dict.fromkeys(outputs))
        id = program.replica(stage).stage
        read = [
            parameters[name]
            for group in program.reduce_groups
            if group.stage in (id, None)
            for name in group.parameters
            if name in parameters
        ]
        token = Parameter(torch.empty(1, device=META))
        return StageCode(
            _ShapeFunction(self, stage, outputs, [token, *read]), tuple(inputs), tuple(outputs)
        )


class _ShapeFunction:
    """The operators of a stage, as far as shapes go; micro-batches come in order."""

    def __init__(
        self, shapes: _Shapes, stage: int, outputs: Sequence[str], read: Sequence[Parameter]
    ) -> None:
        self._shapes, self._stage, self._read = shapes, stage, read
        self._values = [shapes.graph.values[name] for name in outputs]

    def __call__(self, values: Sequence[Any], call: StageCall) -> Sequence[Any]:
        samples = self._shapes.samples(self._stage, call.microbatch)
        made = Made.of(self._values, samples, self._shapes.graph.microbatch_size)
        inputs = [t for t in pytree.tree_leaves(list(values)) if takes_gradient(t)]
        return made.values(computed(made.tensors, [*inputs, *self._read]))


class _ShapeBoundary:
    """The user's step: arguments of the right shapes, a loss of no number."""

    def __init__(self, shapes: _Shapes) -> None:
        self._shapes = shapes

    def start(self, microbatch: int) -> Mapping[str, Any]:
        graph = self._shapes.graph
        samples = self._shapes.samples(FEED, microbatch)
        arguments = {}
        for item in graph.inputs:
            made = Made.of([item.value], samples, graph.microbatch_size)
            tensors = [tensor.requires_grad_(item.requires_grad) for tensor in made.tensors]
            (arguments[item.value.name],) = made.values(tensors)
        return arguments

    def finish(self, microbatch: int, outputs: Mapping[str, Any]) -> Tensor | None:
        leaves = pytree.tree_leaves(dict(outputs))
        inputs = [leaf for leaf in leaves if takes_gradient(leaf)]
        (loss,) = computed([torch.empty((), device=META)], inputs)
        return loss

    def output_gradients(self, microbatch: int) -> Mapping[str, Sequence[Tensor | None]]:
        raise AssertionError("the backward of a micro-batch starts at its loss")


@dataclass(frozen=True, slots=True)
class Made:
    """Values in the making: their tensors, and how to put them together."""

    kinds: Sequence[Value]
    tensors: Sequence[Tensor]
    samples: int

    @classmethod
    def of(cls, kinds: Sequence[Value], samples: int, microbatch_size: int) -> Made:
        """Values for a number of samples."""
        specs = [spec for kind in kinds for spec in kind.tensors]
        return cls(kinds, [_tensor(spec, samples, microbatch_size) for spec in specs], samples)

    def values(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The values, made of these tensors."""
        rest = iter(tensors)
        return [self._value(kind, [next(rest) for _ in kind.tensors]) for kind in self.kinds]

    def _value(self, kind: Value, tensors: list[Tensor]) -> Any:
        if len(tensors) == 1:
            return tensors[0]
        if not tensors:
            return self.samples if kind.variation is Variation.COUNT else None
        return tuple(tensors)


class _Compute(torch.autograd.Function):
    """Joins tensors to what they are made from, forward and backward."""

    @staticmethod
    def forward(ctx: Any, made: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.likes = [(tensor.shape, tensor.dtype) for tensor in inputs]
        ctx.mark_non_differentiable(*[t for t in made if not _is_differentiable(t)])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        made = [torch.empty(shape, dtype=dtype, device=META) for shape, dtype in ctx.likes]
        return (None, *made)


def computed(made: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """New tensors as if they were computed from others."""
    found: Sequence[Tensor] = _Compute.apply(made, *inputs)  # type: ignore[no-untyped-call]
    return found


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def takes_gradient(leaf: Any) -> bool:
    """Whether something is a tensor that wants a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _tensor(spec: TensorSpec, samples: int, microbatch_size: int) -> Tensor:
    shape = list(spec.shape)
    if spec.batch_dim is not None:
        shape[spec.batch_dim] = shape[spec.batch_dim] * samples // microbatch_size
    return torch.empty(shape, dtype=getattr(torch, spec.dtype), device=META)


def _parameter(graph: ModelGraph, name: str) -> Parameter:
    found = graph.parameter[name]
    count = round(found.size_bytes / FLOAT_BYTES)
    return Parameter(torch.empty(count, device=META), requires_grad=found.requires_grad)
