"""The pipeline of one fit, validate, test or predict run, as one rank has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_gpp.capture import CapturedModel
from lightning_gpp.emulation.real_time import RealTime
from lightning_gpp.gnn import ChunkedModel
from lightning_gpp.planner import Plan, PlanGraph
from lightning_gpp.runtime.boundary import Boundary
from lightning_gpp.runtime.executor import Executor, Run
from lightning_gpp.runtime.processes.peers import Peers
from lightning_gpp.runtime.stage_run import StageCode
from lightning_gpp.runtime.sums.process_sums import ProcessSums
from lightning_gpp.runtime.sums.reduction import GradientReduction, unshared_gradients
from lightning_gpp.schedule import FORWARD_ONLY, Program
from lightning_gpp.strategy.planning.planning import Planned
from lightning_gpp.strategy.state.partition import Partition

CPU = torch.device("cpu")


@dataclass(slots=True)
class Pipeline:
    """The captured, planned and partitioned model on this rank.

    Attributes:
        captured: graph and runnable operators.
        plan: operators of every stage.
        schedule: name of the schedule that runs it.
        placed: the stages as they run.
        planned: how the plan came about; on rank 0 only.
        rank_of_device: rank of every device of the plan; the loss is on rank 0.
        partition: which rank holds which parameters.
        executor: runs programs on this rank.
        time: in which steps run; that of emulated devices, if they are.
        chunked: the model in chunks of one graph; None where micro-batches are of samples.
        last_trained: the program of the last mini-batch that was trained on.
        last_sizes: samples of each of its smallest micro-batches.
    """

    captured: CapturedModel
    plan: Plan
    schedule: str
    placed: PlanGraph
    planned: Planned | None
    rank_of_device: tuple[int, ...]
    partition: Partition
    executor: Executor
    time: RealTime[Program] = field(default_factory=RealTime)
    chunked: ChunkedModel | None = None
    last_trained: Program | None = None
    last_sizes: tuple[int, ...] = ()
    _programs: dict[tuple[int, str, frozenset[str]], Program] = field(default_factory=dict)

    def begin(
        self,
        units: Sequence[int],
        *,
        needs: frozenset[str],
        training: bool,
        boundary: Boundary | None,
        chunks: Sequence[int] = (),
    ) -> Run:
        """A run of a mini-batch that trains, of which nothing is done yet.

        Args:
            units: samples of each of the smallest micro-batches.
            needs: arguments of the forward that need a gradient.
            training: whether modules are in training mode.
            boundary: the user's step or call, on rank 0.
            chunks: which part of one graph every micro-batch is, where they are that.
        """
        program = self._training_program(len(units), needs)
        self.last_trained, self.last_sizes = program, tuple(units)
        if chunks:
            assert self.chunked is not None
            self.chunked.begin_epoch()
        return self.executor.begin(
            program, units, training=training, boundary=boundary, chunks=chunks
        )

    def only_stage(self, units: Sequence[int]) -> StageCode | None:
        """The one stage, where it is the whole forward on real devices, in one piece.

        Nothing has to be handed on then, so it can run in the caller's own autograd graph.

        Args:
            units: samples of each of the smallest micro-batches.
        """
        has_one = self.executor.transport.num_ranks == self.placed.stages.num_stages == len(units)
        is_plain = self.time.time_scale is None and self.chunked is None
        return self.executor.stages[0] if has_one and is_plain else None

    def run_forward(
        self,
        units: Sequence[int],
        *,
        training: bool,
        boundary: Boundary | None,
        errors: list[str] | None = None,
    ) -> None:
        """Runs the forwards of a batch of which no backward follows.

        Args:
            units: samples of each of the micro-batches.
            training: whether modules are in training mode.
            boundary: what gives the inputs and takes the outputs, on rank 0.
            errors: gets those of this rank's stages, if they are to be found out.
        """
        self.time.leave()
        key = (len(units), FORWARD_ONLY.name, frozenset[str]())
        if key not in self._programs:
            self._programs[key] = self.placed.forward_program(len(units))
        program = self._programs[key]
        run = self.executor.begin(
            program, units, training=training, boundary=boundary, errors=errors
        )
        run.whole()

    def filling(self, fills: bool) -> AbstractContextManager[None]:
        """A forward in this fills the histories of one graph, if ``fills``."""
        if not fills:
            return nullcontext()
        assert self.chunked is not None
        return self.chunked.filling()

    def try_forward(
        self,
        units: Sequence[int],
        *,
        training: bool,
        boundary: Boundary | None,
        errors: list[str],
    ) -> None:
        """The same, cut as a mini-batch that trains."""
        program = self.placed.trial_program(len(units))
        run = self.executor.begin(
            program, units, training=training, boundary=boundary, errors=errors
        )
        run.whole()

    def _training_program(self, count: int, needs: frozenset[str]) -> Program:
        """The program of a number of micro-batches; made once.

        Args:
            count: of the smallest micro-batches.
            needs: arguments that need a gradient.
        """
        key = (count, self.schedule, needs)
        if key not in self._programs:
            placed = self.placed.with_needs(needs)
            is_small = count % placed.units_at_a_time
            make = placed.small_program if is_small else placed.program
            self._programs[key] = make(count, schedule=self.schedule)
        return self._programs[key]

    def call_sizes(self, unit_sizes: Sequence[int], *, is_trained: bool) -> Sequence[int]:
        """Samples of each piece in which a call of the forward goes in and comes out.

        Without a backward stages take one unit at a time, but unequal replicas their shares.
        """
        is_as_trained = is_trained or self.placed.is_uneven
        return self.step_sizes(unit_sizes) if is_as_trained else unit_sizes

    def step_sizes(self, unit_sizes: Sequence[int]) -> list[int]:
        """Samples of each call of the user's step, which goes at the pace of the loss stage."""
        if len(unit_sizes) % self.placed.units_at_a_time:  # a small program
            return list(unit_sizes)
        pace = self.placed.multiples[-1]
        return [sum(unit_sizes[start : start + pace]) for start in range(0, len(unit_sizes), pace)]

    def means(self, peers: Peers) -> Callable[[Program | None], GradientReduction]:
        """Makes what averages gradients over pipelines while the backwards of a program run."""
        executor, placed = self.executor, self.placed
        device = self.rank_of_device.index(executor.transport.rank)
        elsewhere = set(map(id, self.partition.held_with_others().values()))
        alone = {
            name: parameter
            for name, parameter in executor.shared.items()
            if not parameter.is_meta
            and id(parameter) not in elsewhere
            and name not in executor.sparse
        }

        def made(program: Program | None) -> GradientReduction:
            summed = unshared_gradients(placed.stages, placed.devices, device, alone, program)
            return GradientReduction(summed, peers)

        return made

    def close(self) -> None:
        """All ranks: gives back what the pipeline needed for its sums."""
        if isinstance(self.executor.sums, ProcessSums):
            self.executor.sums.close()
        self.time.close()


def pipelined_module(module: nn.Module, name: str | None) -> nn.Module:
    """The module whose forward is pipelined.

    Raises:
        ValueError: there is no sub-module of that name.
    """
    if name is None:
        return module
    try:
        return module.get_submodule(name)
    except AttributeError:
        known = ", ".join(child for child, _ in module.named_children())
        raise ValueError(
            f"GraphPipeStrategy(module={name!r}): {type(module).__name__} has no such sub-module; "
            f"its children are: {known}"
        ) from None


def sparse_parameters(module: nn.Module) -> Iterator[str]:
    """Canonical names of the parameters whose gradients are sparse, by what their modules say.

    >>> list(sparse_parameters(nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True)})))
    ['table.weight']
    """
    sparse = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    }
    for name, parameter in module.named_parameters():
        if id(parameter) in sparse:
            yield name


def share_parameters(pipeline: Pipeline, target: nn.Module) -> None:
    """Tells the executor the parameters, once they are in place; for those on several ranks."""
    pipeline.executor.shared = dict(target.named_parameters())
    pipeline.executor.sparse = frozenset(sparse_parameters(target))
