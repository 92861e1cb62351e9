"""Runs plans of models of any size on emulated devices, with stages that compute shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from helpers.threads.emulate import EmulatedRun, emulate
from helpers.threads.ranks import RankWork
from lightning_gpp.graph import FEED, ModelGraph, TensorSpec, Value, Variation
from lightning_gpp.planner import Plan, PlanRequest, plan_graph
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches
from lightning_gpp.runtime.boundary import Boundary
from lightning_gpp.runtime.pieces import Cutter
from lightning_gpp.runtime.stage_run import StageCall, StageCode
from lightning_gpp.schedule import Program
from lightning_gpp.simulate.plan_costs import program_costs
from lightning_gpp.simulate.program_costs import ProgramCosts
from lightning_gpp.strategy.cutting.microbatches import microbatch_sizes

FLOAT_BYTES = 4
META = torch.device("meta")


def emulate_plan(
    plan: Plan, request: PlanRequest, *, timeout_s: float = 1800.0, is_exact: bool = False
) -> EmulatedRun:
    """Runs a step of a plan with the real executor, messages and sums on emulated devices.

    It is to :func:`lightning_gpp.simulate.plan_costs.simulate_plan` what a run is to a prediction:
    the same program and the same costs.

    Args:
        plan: stages on devices of the request's cluster.
        request: the model, the cluster, the costs, the mini-batch, the schedule.
        timeout_s: limit of every wait, in real seconds.
        is_exact: whether time is virtual, so that nothing slips.
    """
    count = num_microbatches(plan, request)
    return emulate_shapes(
        plan_graph(plan, request.graph).program(count, schedule=request.schedule),
        request.graph,
        program_costs(plan, request),
        minibatch_size=request.minibatch_size,
        timeout_s=timeout_s,
        is_exact=is_exact,
    )


def emulate_shapes(
    program: Program,
    graph: ModelGraph,
    costs: ProgramCosts,
    *,
    minibatch_size: int,
    num_steps: int = 1,
    time_scale: float | None = None,
    timeout_s: float = 1800.0,
    is_exact: bool = False,
) -> EmulatedRun:
    """Runs a program of a model on emulated devices with tensors that are shapes alone.

    Args:
        program: made from a plan of the model (``plan_graph(plan, graph).program(…)``), or taken
            from its simulation.
        graph: the model.
        costs: what the program costs on the emulated cluster.
        minibatch_size: samples of a step.
        num_steps: how many steps.
        time_scale: real seconds that an emulated second takes; chosen if not given.
        timeout_s: limit of every wait, in real seconds.
        is_exact: whether time is virtual, so that nothing slips.

    Raises:
        ValueError: graph, costs and program do not belong together.
    """
    _warm_up()
    shapes = _Shapes(program, graph, microbatch_sizes(minibatch_size, program.num_microbatches))
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
        time_scale=time_scale,
        timeout_s=timeout_s,
        is_exact=is_exact,
    )


def _warm_up() -> None:
    """The first backward of a process takes half a second; it would be slip."""
    made = _computed(torch.empty(1, device=META), [Parameter(torch.empty(1, device=META))])
    torch.autograd.backward([made], [torch.empty(1, device=META)])


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


def _made(graph: ModelGraph, values: Sequence[Value], samples: int) -> list[Any]:
    """Values for a number of samples, that are made of nothing."""
    return [_value(graph, value, samples) for value in values]


def _value(graph: ModelGraph, value: Value, samples: int) -> Any:
    tensors = [_tensor(spec, samples, graph.microbatch_size) for spec in value.tensors]
    if not tensors:
        return samples if value.variation is Variation.COUNT else None
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _tensor(spec: TensorSpec, samples: int, microbatch_size: int) -> Tensor:
    shape = list(spec.shape)
    if spec.batch_dim is not None:
        shape[spec.batch_dim] = shape[spec.batch_dim] * samples // microbatch_size
    return torch.empty(shape, dtype=getattr(torch, spec.dtype), device=META)


def _takes_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _computed(made: Any, inputs: Sequence[Tensor]) -> Any:
    """The same as if its numbers depended on these inputs."""
    depends = sum(tensor.sum().float() for tensor in inputs)

    def like(leaf: Any) -> Any:
        is_number = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return (leaf + depends).to(leaf.dtype) if is_number else leaf

    return pytree.tree_map(like, made)


class _ShapeFunction:
    """The operators of a stage, as far as shapes go; micro-batches come in order."""

    def __init__(
        self, shapes: _Shapes, stage: int, outputs: Sequence[str], read: Sequence[Parameter]
    ) -> None:
        self._shapes, self._stage, self._read = shapes, stage, read
        self._values = [shapes.graph.values[name] for name in outputs]

    def __call__(self, values: Sequence[Any], call: StageCall) -> Sequence[Any]:
        samples = self._shapes.samples(self._stage, call.microbatch)
        made = _made(self._shapes.graph, self._values, samples)
        inputs = [t for t in pytree.tree_leaves(list(values)) if _takes_gradient(t)]
        found: list[Any] = _computed(made, [*inputs, *self._read])
        return found


class _ShapeBoundary(Boundary):
    """The user's step: arguments of the right shapes, a loss of no number."""

    def __init__(self, shapes: _Shapes) -> None:
        self._shapes = shapes

    def start(self, microbatch: int) -> Mapping[str, Any]:
        graph = self._shapes.graph
        samples = self._shapes.samples(FEED, microbatch)
        arguments = {}
        for item in graph.inputs:
            made = _value(graph, item.value, samples)
            for tensor in pytree.tree_leaves(made):
                if isinstance(tensor, Tensor):
                    tensor.requires_grad_(item.requires_grad)
            arguments[item.value.name] = made
        return arguments

    def finish(self, microbatch: int, outputs: Mapping[str, Any]) -> Tensor | None:
        leaves = pytree.tree_leaves(dict(outputs))
        inputs = [leaf for leaf in leaves if _takes_gradient(leaf)]
        loss: Tensor = _computed(torch.empty((), device=META), inputs)
        return loss


def _parameter(graph: ModelGraph, name: str) -> Parameter:
    found = graph.parameter[name]
    count = round(found.size_bytes / FLOAT_BYTES)
    return Parameter(torch.empty(count, device=META), requires_grad=found.requires_grad)
