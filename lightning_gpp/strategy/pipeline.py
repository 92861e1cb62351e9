"""The pipeline of one run (fit, validate, test or predict) on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import Parameter

from lightning_gpp.capture import CapturedModel
from lightning_gpp.emulation.real_time import RealTime
from lightning_gpp.gnn import ChunkedModel
from lightning_gpp.planner import Plan, PlanGraph
from lightning_gpp.planner.plan_to_run import PlanToRun
from lightning_gpp.runtime.executor import Executor, Run
from lightning_gpp.runtime.gradients import GradientStash
from lightning_gpp.runtime.run_state import Boundary, RunState
from lightning_gpp.runtime.stage_run import StageCode
from lightning_gpp.runtime.sums import ProcessSums
from lightning_gpp.schedule import Program, Window
from lightning_gpp.schedule.schedules import FORWARD_ONLY
from lightning_gpp.strategy.ranks.messages import Autocast, Forward, Minibatch, SentAhead
from lightning_gpp.strategy.recording.recorder import StepRecorder
from lightning_gpp.strategy.state.callbacks import clear_old_gradients
from lightning_gpp.strategy.state.held_elsewhere import lifted
from lightning_gpp.strategy.state.optimizers import PartialOptimizer
from lightning_gpp.strategy.state.partition import Partition
from lightning_gpp.strategy.step.pipelined_call import RankCall


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
        module: the LightningModule, partial.
        recorder: records what runs.
        time: in which steps run; that of emulated devices, if they are.
        chunked: the model in chunks of one graph; None where micro-batches are of samples.
        optimizers: of this rank's parameters.
        last_trained: the program of the last mini-batch that was trained on.
        last_sizes: samples of each of its smallest micro-batches.
    """

    captured: CapturedModel
    plan: Plan
    schedule: str
    placed: PlanGraph
    planned: PlanToRun | None
    rank_of_device: tuple[int, ...]
    partition: Partition
    executor: Executor
    module: pl.LightningModule
    recorder: StepRecorder
    time: RealTime = field(default_factory=RealTime)
    chunked: ChunkedModel | None = None
    optimizers: Sequence[PartialOptimizer] = ()
    last_trained: Program | None = None
    last_sizes: tuple[int, ...] = ()
    _programs: dict[tuple[int, str, frozenset[str]], Program] = field(default_factory=dict)
    _held: list[Parameter] = field(default_factory=list)
    _of_stages: list[Parameter] = field(default_factory=list)

    def settle(self, target: nn.Module, optimizers: Sequence[PartialOptimizer]) -> None:
        """The parameters are in place, in the module that is pipelined and in the optimizers."""
        self.optimizers = optimizers
        self.executor.shared = dict(target.named_parameters())
        self.executor.sparse = frozenset(sparse_parameters(target))
        self._held = self.partition.held_parameters()
        self._of_stages = self.partition.stage_parameters()

    # Runs ------------------------------------------------------------------------------------

    def call(self, message: Forward, boundary: Boundary | None) -> RankCall:
        """A call of the forward that backwards may follow; nothing of it runs yet."""
        self._adopt_new_groups()
        if message.chunks:
            assert self.chunked is not None
            self.chunked.begin_epoch()
        run = self._begin(message, message.training, boundary, message.chunks)
        if message.ahead is not None and message.ahead.is_right:
            run.ahead = message.ahead.number
        return RankCall(run, GradientStash(self._of_stages), self._part)

    def early_run(self, number: int, units: Sequence[int], boundary: Boundary) -> Run:
        """Rank 0: sends the inputs of a call to come.

        Args:
            number: under which they go.
            units: samples of each of the smallest micro-batches.
            boundary: gives the inputs.
        """
        program = self._trained_program(units, frozenset())
        return Run(self.executor, program, units, True, boundary, ahead=number, is_early=True)

    def drop_ahead(self, sent: SentAhead) -> None:
        """Other ranks: the inputs that were sent ahead are those of no call."""
        program = self._trained_program(sent.units, frozenset())
        Run(self.executor, program, sent.units, True, ahead=sent.number).drop_ahead()

    @contextmanager
    def _part(self, run: Run, is_second: bool) -> Iterator[None]:
        """What a part of a call runs in."""
        with (
            self.time.step(run.program, is_second=is_second),
            self.recorder.part(run, is_second=is_second),
            lifted(),
        ):
            yield

    def forward(self, message: Forward, boundary: Boundary | None) -> None:
        """Runs a call of the forward that no backward follows."""
        chunked = self.chunked if message.fills else None
        with (
            torch.no_grad(),
            message.autocast.on(self.executor.device),
            lifted(),
            nullcontext() if chunked is None else chunked.filling(),
        ):
            self.run_forward(message.units, training=message.training, boundary=boundary)

    def train(self, minibatch: Minibatch, boundary: Boundary | None) -> GradientStash:
        """Runs a mini-batch forward and backward; its gradients are in what is returned."""
        stash = self._stash(minibatch.loss_scale)
        run = self._begin(minibatch, self.module.training, boundary)
        with (
            stash,
            self._both_ways(),
            self.time.step(run.program),
            self.recorder.part(run, is_second=True),
        ):
            run.whole()
        return stash

    def window(
        self, window: Window, state: RunState, shift: int, boundary: Boundary | None
    ) -> GradientStash:
        """Runs a window of an asynchronous schedule; its gradients are in what is returned.

        Args:
            window: of the schedule.
            state: what is in flight.
            shift: of its numbers.
            boundary: the user's steps, on rank 0.
        """
        program, stash = window.program, self._stash()
        units, training = [1] * program.num_microbatches, self.module.training
        run = Run(self.executor, program, units, training, boundary, state=state, shift=shift)
        with stash, self._both_ways():
            run.window(window.number)
        return stash

    def run_forward(
        self,
        units: Sequence[int],
        *,
        training: bool,
        boundary: Boundary | None,
        errors: list[str] | None = None,
        as_trained: bool = False,
    ) -> None:
        """Runs the forwards of a batch of which no backward follows.

        Args:
            units: samples of each of the micro-batches.
            training: whether modules are in training mode.
            boundary: what gives the inputs and takes the outputs, on rank 0.
            errors: gets those of this rank's stages, if they are to be found out.
            as_trained: whether the batch is cut as a mini-batch that trains.
        """
        key = (len(units), "trial" if as_trained else FORWARD_ONLY.name, frozenset[str]())
        if key not in self._programs:
            make = self.placed.trial_program if as_trained else self.placed.forward_program
            self._programs[key] = make(len(units))
        Run(self.executor, self._programs[key], units, training, boundary, errors).whole()

    def only_stage(self, units: Sequence[int]) -> StageCode | None:
        """The one stage, where it is the whole forward on real devices, in one piece.

        Nothing has to be handed on then, so it can run in the caller's own autograd graph.

        Args:
            units: samples of each of the smallest micro-batches.
        """
        num_ranks = self.executor.transport.num_ranks
        has_one = num_ranks == self.placed.stages.num_stages == len(units) == 1
        is_plain = self.time.time_scale is None and self.chunked is None
        is_free = has_one and is_plain and not self.recorder.is_on
        return self.executor.stages[0] if is_free else None

    def _begin(
        self,
        message: Forward | Minibatch,
        training: bool,
        boundary: Boundary | None,
        chunks: Sequence[int] = (),
    ) -> Run:
        """A run of a mini-batch that trains, of which nothing is done yet."""
        units = message.units
        program = self._trained_program(units, message.needs)
        self.last_trained, self.last_sizes = program, tuple(units)
        return Run(self.executor, program, units, training, boundary, chunks=chunks)

    def _trained_program(self, units: Sequence[int], needs: frozenset[str]) -> Program:
        key = (len(units), self.schedule, needs)
        if key not in self._programs:
            placed = self.placed.with_needs(needs)
            is_small = len(units) % placed.units_at_a_time
            make = placed.small_program if is_small else placed.program
            self._programs[key] = make(len(units), schedule=self.schedule)
        return self._programs[key]

    def _stash(self, loss_scale: float = 1.0) -> GradientStash:
        """What the gradients of a training step that runs them itself go to."""
        self._adopt_new_groups()
        clear_old_gradients(self.module.trainer)
        return GradientStash(self._held, loss_scale)

    def _adopt_new_groups(self) -> None:
        for optimizer in self.optimizers:
            optimizer.adopt_new_groups()

    @contextmanager
    def _both_ways(self) -> Iterator[None]:
        """Backwards in the body run without the autocast of the step, as after a step."""
        device = self.executor.device
        autocast = Autocast.current(device)
        with torch.enable_grad():
            if not autocast.is_on:
                yield
                return
            self.executor.forward_context = lambda: autocast.on(device)
            try:
                with replace(autocast, is_on=False).on(device):
                    yield
            finally:
                self.executor.forward_context = nullcontext

    def has_made(self, program: Program) -> bool:
        """Whether a program is one of this pipeline's, and not of another form of call."""
        return any(program is each for each in self._programs.values())

    # Sizes -----------------------------------------------------------------------------------

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

    def close(self) -> None:
        """All ranks: gives back what the pipeline needed for its sums."""
        if isinstance(self.executor.sums, ProcessSums):
            self.executor.sums.close()
        self.time.close()


def pipelined_module(module: nn.Module, name: str | None) -> nn.Module:
    """The module whose forward is pipelined.

    Raises:
        ValueError: there is no sub-module of that name, or there are several to choose from.
    """
    return module.get_submodule(pipelined_name(module, name) or "")


def pipelined_name(module: nn.Module, name: str | None) -> str | None:
    """The name of the sub-module to pipeline; None for the module itself.

    Without a name, a module that defines no forward is pipelined at its only child with parameters.

    Raises:
        ValueError: there are several to choose from, or none.
    """
    children = dict(module.named_children())
    if name is not None and name not in dict(module.named_modules(remove_duplicate=False)):
        raise ValueError(
            f"GraphPipeStrategy(module={name!r}): {type(module).__name__} has no such sub-module; "
            f"its children are: {', '.join(children)}"
        )
    if name is not None or has_forward(module):
        return name
    trained = [child for child, part in children.items() if any(True for _ in part.parameters())]
    callable_ones = [child for child in trained if has_forward(children[child])]
    if len(trained) == len(callable_ones) == 1:
        return trained[0]
    several = "to pipeline all of them, write a forward that returns all results; "
    raise ValueError(
        f"{type(module).__name__} has no forward to pipeline. Give it one that its steps call "
        "(self(...)), or name the one sub-module to pipeline: GraphPipeStrategy(module='...'); "
        f"{several if len(callable_ones) > 1 else ''}"
        f"its children with a forward are: {', '.join(callable_ones) or 'none'}"
    )


def has_forward(module: nn.Module) -> bool:
    """Whether the module defines a forward, or was given one."""
    inherited = (nn.Module.forward, pl.LightningModule.forward)
    return "forward" in vars(module) or type(module).forward not in inherited


def sparse_parameters(module: nn.Module) -> list[str]:
    """Canonical names of the parameters whose gradients are sparse, by what their modules say.

    >>> sparse_parameters(nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True)}))
    ['table.weight']
    """
    sparse = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    }
    return [name for name, each in module.named_parameters() if id(each) in sparse]
