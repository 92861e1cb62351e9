"""Runs a step of a plan on emulated devices, a thread each, with tensors that are shapes alone.

The executor, the transport, the messages and the sums are the real ones; time is virtual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from helpers.threads.reservations import LocalReservations
from helpers.threads.start import of_ranks
from helpers.threads.sums import ThreadSumHub, ThreadSums
from helpers.threads.transport import ThreadHub
from helpers.threads.virtual_time import VirtualTime
from lightning_gpp.emulation.emulation import choose_time_scale
from lightning_gpp.emulation.rank import EmulatedRank, EmulatedSums, EmulatedTransport
from lightning_gpp.graph import FEED, ModelGraph, TensorSpec, Value, Variation
from lightning_gpp.planner import Plan, PlanRequest, plan_graph
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches
from lightning_gpp.runtime.executor import Executor, Run
from lightning_gpp.runtime.pieces import Cutter
from lightning_gpp.runtime.run_state import Boundary
from lightning_gpp.runtime.stage_run import StageCall, StageCode
from lightning_gpp.schedule import Program
from lightning_gpp.simulate.plan_costs import program_costs
from lightning_gpp.strategy.cutting.microbatches import microbatch_sizes

FLOAT_BYTES = 4
META = torch.device("meta")


def emulate_plan(plan: Plan, request: PlanRequest) -> tuple[float, float]:
    """Seconds of the step, and of what did not fit its emulated time."""
    graph, count = request.graph, num_microbatches(plan, request)
    program = plan_graph(plan, graph).program(count, schedule=request.schedule)
    shapes = Shapes(program, graph, microbatch_sizes(request.minibatch_size, count))
    costs, every = program_costs(plan, request), tuple(range(len(program.actions)))
    virtual, reservations = VirtualTime(len(every)), LocalReservations()
    clock = virtual.clock(choose_time_scale(program, costs))
    hub, sum_hub = ThreadHub(len(every), virtual.condition), ThreadSumHub(virtual.condition)
    paces = [EmulatedRank(clock, reservations, costs) for _ in every]
    sums = [ThreadSums(sum_hub, rank) for rank in every]
    executors = [
        Executor(
            transport=EmulatedTransport(hub.transport(rank), pace, every),
            rank_of_device=every,
            output_names=graph.outputs,
            cutter=shapes.cutter(),
            sums=EmulatedSums(sums[rank], pace),
            timeout_s=1800.0,
            pace=pace,
            **shapes.of_device(rank),
        )
        for rank, pace in enumerate(paces)
    ]

    def step(rank: int) -> float:
        """When the rank is through."""
        pace = paces[rank]
        boundary = ShapeBoundary(shapes) if rank == program.device(FEED) else None
        updates = program.device_actions(rank)[len(program.before_update(rank)) :]
        with virtual.thread(rank):
            pace.wait_until(0.0)
            sizes = shapes.unit_sizes
            Run(executors[rank], program, sizes, training=True, boundary=boundary).whole()
            with pace.run(program, rank):
                for update in updates:
                    with pace.action(update):
                        pass
            return clock.now_s()

    ends_s = of_ranks(len(every), step, [each.waits for each in (*hub.mailboxes, *sums)])
    return max(ends_s), max(pace.slip_s for pace in paces)


@dataclass(frozen=True)
class Shapes:
    """What the devices of a program compute, as far as shapes go.

    Attributes:
        program: what runs.
        graph: the model.
        unit_sizes: samples of each of the smallest micro-batches.
    """

    program: Program
    graph: ModelGraph
    unit_sizes: Sequence[int]

    def cutter(self) -> Cutter:
        """Cuts and joins values where stages take other numbers of samples."""
        values = self.graph.values.items()
        return Cutter(
            {name: tuple(spec.batch_dim for spec in value.tensors) for name, value in values},
            {name: value.variation for name, value in values},
        )

    def of_device(self, device: int) -> dict[str, Any]:
        """Stages and parameters of an executor."""
        groups = [g for g in self.program.reduce_groups if device in g.devices]
        shared = {name: self._parameter(name) for group in groups for name in group.parameters}
        stages = {}
        for stage, home in enumerate(self.program.devices):
            if home == device:
                id = self.program.replica(stage).stage
                read = [
                    shared[name]
                    for group in self.program.reduce_groups
                    if group.stage in (id, None)
                    for name in group.parameters
                    if name in shared
                ]
                stages[id] = self._code(stage, read)
        return {"stages": stages, "shared": shared}

    def _parameter(self, name: str) -> Parameter:
        found = self.graph.parameter[name]
        count = round(found.size_bytes / FLOAT_BYTES)
        return Parameter(torch.empty(count, device=META), requires_grad=found.requires_grad)

    def _code(self, stage: int, read: Sequence[Parameter]) -> StageCode:
        program = self.program
        inputs = dict.fromkeys(n for edge in program.in_edges[stage] for n in edge.values)
        outputs = dict.fromkeys(n for edge in program.out_edges[stage] for n in edge.values)
        if stage == program.loss_stage:
            outputs |= dict.fromkeys(name for name in self.graph.outputs if name not in inputs)
        made = [self.graph.values[name] for name in outputs]
        token = Parameter(torch.empty(1, device=META))

        def run(values: Sequence[Any], call: StageCall) -> Any:
            samples = self.samples(stage, call.microbatch)
            return computed([self.value(each, samples) for each in made], [values, token, *read])

        return StageCode(run, tuple(inputs), tuple(outputs))

    def samples(self, stage: int, microbatch: int) -> int:
        """Samples in a micro-batch of a stage."""
        return sum(self.unit_sizes[unit] for unit in self.program.units(stage, microbatch))

    def value(self, value: Value, samples: int) -> Any:
        """A value for a number of samples, made of nothing."""
        tensors = [self._tensor(spec, samples) for spec in value.tensors]
        if not tensors:
            return samples if value.variation is Variation.COUNT else None
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def _tensor(self, spec: TensorSpec, samples: int) -> Tensor:
        shape = list(spec.shape)
        if spec.batch_dim is not None:
            shape[spec.batch_dim] = shape[spec.batch_dim] * samples // self.graph.microbatch_size
        return torch.empty(shape, dtype=getattr(torch, spec.dtype), device=META)


def computed(made: Any, inputs: Any) -> Any:
    """The same as if its numbers depended on these inputs."""
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    depends = sum(leaf.sum().float() for leaf in leaves if leaf.requires_grad)

    def like(leaf: Any) -> Any:
        is_number = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return (leaf + depends).to(leaf.dtype) if is_number else leaf

    return pytree.tree_map(like, made)


class ShapeBoundary(Boundary):
    """The user's step: arguments of the right shapes, a loss of no number."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes

    def start(self, microbatch: int) -> Mapping[str, Any]:
        arguments = {}
        for item in self.shapes.graph.inputs:
            made = self.shapes.value(item.value, self.shapes.samples(FEED, microbatch))
            for tensor in pytree.tree_leaves(made):
                if isinstance(tensor, Tensor):
                    tensor.requires_grad_(item.requires_grad)
            arguments[item.value.name] = made
        return arguments

    def finish(self, microbatch: int, outputs: Mapping[str, Any]) -> Tensor | None:
        loss: Tensor = computed(torch.empty((), device=META), dict(outputs))
        return loss
