"""Random stage graphs, and toy stages that compute on them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.threads.start import of_ranks
from helpers.threads.sums import ThreadSumHub, ThreadSums
from helpers.threads.transport import ThreadHub
from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.runtime.executor import Executor, Run
from lightning_gpp.runtime.pieces import Cutter
from lightning_gpp.runtime.run_state import RunState
from lightning_gpp.runtime.stage_run import StageCall, StageCode
from lightning_gpp.schedule import Action, Program


@st.composite
def stage_graphs(draw: st.DrawFn, max_stages: int = 6) -> StageGraph:
    """Connected stage DAGs; stage i makes the value ``v<i>``, sources read the feed's ``x``."""
    num_stages = draw(st.integers(1, max_stages))
    pairs: set[tuple[int, int]] = set()
    for target in range(1, num_stages):
        sources = draw(st.sets(st.integers(FEED, target - 1), min_size=1, max_size=3))
        pairs |= {(source, target) for source in sources}
    pairs.add((FEED, 0))
    for stage in range(num_stages - 1):
        if not any(source == stage for source, _ in pairs):
            pairs.add((stage, num_stages - 1))
    return edges_to_graph(num_stages, pairs)


def edges_to_graph(num_stages: int, pairs: set[tuple[int, int]]) -> StageGraph:
    """A stage graph with one value per producing stage."""
    edges = tuple(
        StageEdge(source, target, ("x",) if source == FEED else (f"v{source}",))
        for source, target in sorted(pairs)
    )
    return StageGraph(num_stages, edges)


class ToyStages:
    """Stage i computes ``tanh(linear(sum of its inputs))``; the loss is the mean square.

    Args:
        stages: the stage graph; a last stage of the loss is not counted.
        weight_of: for every stage the weight that it reads; stages may share one.
    """

    def __init__(
        self, stages: StageGraph, weight_of: Sequence[int] | None = None, width: int = 3
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight_of = list(weight_of or range(stages.num_stages))
        readers: dict[str, tuple[int, ...]] = {}
        for stage, weight in enumerate(self.weight_of):
            readers[f"w{weight}"] = (*readers.get(f"w{weight}", ()), stage)
        self.stages = replace(stages, parameter_readers=tuple(sorted(readers.items())))
        self.weights = {
            name: nn.Parameter(torch.randn(width, width, generator=generator, dtype=torch.float64))
            for name in readers
        }

    def copy(self) -> ToyStages:
        """With weights of its own, as every device has them."""
        return copy.deepcopy(self)

    def function(self, stage: int) -> Callable[..., Sequence[Any]]:
        """The stage as a function of its values."""
        name = f"w{self.weight_of[stage]}"
        weight = self.weights[name]

        def run(values: Sequence[Tensor], call: StageCall) -> Sequence[Tensor]:
            found = weight if call.weights is None else call.weights[name]
            return [torch.tanh(torch.stack(list(values)).sum(0) @ found)]

        return run

    def code(self, stage: int) -> StageCode:
        """The stage for the executor; one beyond the last takes outputs to the loss."""
        if stage == self.stages.num_stages:
            return StageCode(lambda values, call: [], (f"v{stage - 1}",), ())
        inputs = tuple(v for e in self.stages.edges if e.target == stage for v in e.values)
        return StageCode(self.function(stage), inputs, (f"v{stage}",))

    def with_loss_stage(self) -> StageGraph:
        """The stage graph with a stage after the last one that only computes the loss."""
        last = self.stages.num_stages
        edge = StageEdge(last - 1, last, (f"v{last - 1}",))
        return replace(self.stages, num_stages=last + 1, edges=(*self.stages.edges, edge))

    def output(self, x: Tensor) -> Tensor:
        """The whole model's output on one device."""
        values = {"x": x}
        for stage in range(self.stages.num_stages):
            code = self.code(stage)
            (values[f"v{stage}"],) = code.function([values[n] for n in code.inputs], StageCall())
        return values[f"v{self.stages.num_stages - 1}"]

    def loss(self, x: Tensor) -> Tensor:
        """The whole model's loss on one device."""
        return self.output(x).square().mean()


class ToyBoundary:
    """Feeds slices of ``x`` and takes the mean square of the last stage's value."""

    def __init__(self, x: Tensor, sizes: Sequence[int], value: str) -> None:
        self.parts = x.split(list(sizes))
        self.total = x.shape[0]
        self.value = value
        self.losses: list[float] = []

    def start(self, microbatch: int) -> dict[str, Tensor]:
        return {"x": self.parts[microbatch]}

    def finish(self, microbatch: int, outputs: dict[str, Any]) -> Tensor:
        loss = outputs[self.value].square().mean() * len(self.parts[microbatch]) / self.total
        self.losses.append(loss.item())
        return loss


class WholeBoundary(ToyBoundary):
    """Feeds slices of ``x``; the loss is taken of the whole output, between the two parts."""

    def __init__(self, x: Tensor, sizes: Sequence[int], value: str) -> None:
        super().__init__(x, sizes, value)
        self.outputs: list[Tensor] = []
        self.gradients: Sequence[Tensor] = ()

    def finish(self, microbatch: int, outputs: dict[str, Any]) -> None:  # type: ignore[override]
        assert microbatch == len(self.outputs)
        self.outputs.append(outputs[self.value].detach())

    def take_loss(self) -> None:
        """Between the parts: the loss, and its gradients."""
        output = torch.cat(self.outputs).requires_grad_()
        loss = comparing_loss(output)
        self.losses = [loss.item()]
        sizes = [len(part) for part in self.parts]
        self.gradients = torch.autograd.grad(loss, output)[0].split(sizes)

    def output_gradients(self, microbatch: int) -> dict[str, Sequence[Tensor | None]]:
        return {self.value: [self.gradients[microbatch]]}


def comparing_loss(output: Tensor) -> Tensor:
    """Is no mean over samples."""
    return (output @ output.T).logsumexp(1).mean()


def in_two_parts(executor: Executor, *arguments: Any, boundary: Any, num_backwards: int) -> None:
    """Runs a program's forwards, takes the loss, and runs its backwards, the last ones counting."""
    run = Run(executor, *arguments, training=True, boundary=boundary)
    run.forward_half()
    if boundary is not None:
        boundary.take_loss()
    for left in reversed(range(num_backwards)):
        for weight in executor.shared.values():
            weight.grad = None
        run.backward_half(retain=left > 0)
    assert is_drained(run.state)


def is_drained(state: RunState) -> bool:
    """Whether no micro-batch is in flight, here or on the way here."""
    return not (state.flights or state.outbox or state.inbox)


def run_on_threads(
    program: Program,
    toy: ToyStages,
    x: Tensor,
    unit_sizes: Sequence[int],
    *,
    num_backwards: int = 0,
) -> ToyBoundary:
    """Runs a program with one thread per device; raises the first error of any.

    The gradients are in the weights of ``toy`` afterwards; devices with the same weight must agree.
    With a number of backwards the program runs in two parts, the second one as often.
    """
    num_devices = 1 + max(program.devices)
    hub, sums_hub = ThreadHub(num_devices), ThreadSumHub()
    sums = [ThreadSums(sums_hub, device) for device in range(num_devices)]
    pace = program.multiples[-1]
    sizes = [sum(unit_sizes[i : i + pace]) for i in range(0, len(unit_sizes), pace)]
    output = f"v{toy.stages.num_stages - 1}"
    boundary = (WholeBoundary if num_backwards else ToyBoundary)(x, sizes, output)
    copies = [toy.copy() for _ in range(num_devices)]

    def work(device: int) -> None:
        own = copies[device]
        executor = Executor(
            transport=hub.transport(device),
            rank_of_device=tuple(range(num_devices)),
            stages={
                program.replica(s).stage: own.code(program.replica(s).stage)
                for s, home in enumerate(program.devices)
                if home == device
            },
            output_names=(output,),
            cutter=Cutter({name: (0,) for edge in program.edges for name in edge.values}),
            shared=own.weights,
            sums=sums[device],
            timeout_s=100,
        )
        mine = boundary if device == program.devices[-1] else None
        if num_backwards:
            arguments = (program, unit_sizes)
            in_two_parts(executor, *arguments, boundary=mine, num_backwards=num_backwards)
        else:
            Run(executor, program, unit_sizes, training=True, boundary=mine).whole()

    of_ranks(num_devices, work, [each.waits for each in (*hub.mailboxes, *sums)])
    _collect_gradients(program, toy, copies)
    return boundary


def _collect_gradients(program: Program, toy: ToyStages, copies: Sequence[ToyStages]) -> None:
    for name, stages in toy.stages.parameter_readers:
        holders = {
            home for s, home in enumerate(program.devices) if program.replica(s).stage in stages
        }
        found = [copies[device].weights[name].grad for device in sorted(holders)]
        for gradient in found:
            torch.testing.assert_close(gradient, found[0], rtol=0, atol=0)
        toy.weights[name].grad = found[0]


def compute_actions(program: Program) -> list[Action]:
    """All forwards and backwards."""
    return [action for row in program.actions for action in row if action.kind.is_compute]
