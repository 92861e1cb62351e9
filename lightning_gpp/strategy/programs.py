"""What a rank runs on a pipeline that is built: calls of the forward, mini-batches, windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import lightning.pytorch as pl
import torch
from torch.nn import Parameter

from lightning_gpp.emulation.real_time import Resumption
from lightning_gpp.runtime.boundary import Boundary
from lightning_gpp.runtime.executor import Run
from lightning_gpp.runtime.gradients import GradientStash
from lightning_gpp.runtime.measured import WindowRecord
from lightning_gpp.runtime.run_state import RunState
from lightning_gpp.schedule import Window
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.ranks.control import Control
from lightning_gpp.strategy.ranks.messages import Autocast, Forward, Minibatch
from lightning_gpp.strategy.recording.recorder import StepRecorder
from lightning_gpp.strategy.state.callbacks import clear_old_gradients
from lightning_gpp.strategy.state.held_elsewhere import lifted
from lightning_gpp.strategy.state.optimizers import PartialOptimizer
from lightning_gpp.strategy.step.open_call import OpenCall


@dataclass(slots=True)
class Programs:
    """Runs the programs of a pipeline on this rank.

    Attributes:
        pipeline: whose.
        module: the LightningModule, partial.
        optimizers: of this rank's parameters.
        device: where this rank's stages run.
        control: between the ranks.
        recorder: records what runs.
        before_backward: called with a call of the forward, and what its gradients go to, before
            backwards that are run once and give parameters gradients.
        before_backwards: likewise of a mini-batch that goes forward and backward in one go.
    """

    pipeline: Pipeline
    module: pl.LightningModule
    optimizers: Sequence[PartialOptimizer]
    device: torch.device
    control: Control
    recorder: StepRecorder
    before_backward: Callable[[Run, GradientStash], None]
    before_backwards: Callable[[Run, GradientStash], None]
    _held: list[Parameter] = field(init=False)
    _of_stages: list[Parameter] = field(init=False)

    def __post_init__(self) -> None:
        partition = self.pipeline.partition
        self._held, self._of_stages = partition.held_parameters(), partition.stage_parameters()

    def open_call(self, message: Forward, boundary: Boundary | None) -> OpenCall:
        """A call of the forward that backwards may follow; nothing of it runs yet."""
        self._adopt_new_groups()
        run = self.pipeline.begin(
            message.units,
            needs=message.needs,
            training=message.training,
            boundary=boundary,
            chunks=message.chunks,
        )
        stash = GradientStash(self._of_stages)
        return OpenCall(run, stash, self._part, partial(self.before_backward, run, stash))

    @contextmanager
    def _part(self, run: Run, is_second: bool) -> Iterator[None]:
        """What a part of a run runs in."""
        with (
            self.pipeline.time.step(run.program, is_second=is_second) as still_ns,
            self.recorder.part(run, is_second=is_second, still_ns=still_ns),
            lifted(),
        ):
            yield

    def run_forward(self, message: Forward, boundary: Boundary | None) -> None:
        """Runs a call of the forward that no backward follows."""
        with (
            torch.no_grad(),
            message.autocast.on(self.device),
            self.recorder.heard(self.pipeline.executor),
            lifted(),
            self.pipeline.filling(message.fills),
        ):
            self.pipeline.run_forward(message.units, training=message.training, boundary=boundary)

    def train(self, minibatch: Minibatch, boundary: Boundary | None) -> GradientStash:
        """Runs a mini-batch forward and backward; its gradients are in what is returned."""
        stash = self._stash(minibatch.loss_scale)
        run = self.pipeline.begin(
            minibatch.units,
            needs=minibatch.needs,
            training=self.module.training,
            boundary=boundary,
        )
        self.before_backwards(run, stash)
        with (
            stash,
            self._both_ways(),
            self.pipeline.time.step(run.program),
            self.recorder.part(run, is_second=True),
        ):
            run.whole()
        return stash

    def window(
        self,
        window: Window,
        state: RunState,
        shift: int,
        boundary: Boundary | None,
        record: WindowRecord,
        resumption: Resumption | None = None,
    ) -> GradientStash:
        """Runs a window of an asynchronous schedule; its gradients are in what is returned.

        Args:
            window: of the schedule.
            state: what is in flight.
            shift: of its numbers.
            boundary: the user's steps, on rank 0.
            record: where the pipeline is.
            resumption: how emulated time goes on before it, if it stood still.
        """
        stash = self._stash()
        self.pipeline.last_trained = window.program
        run = self._begin_window(window, state, shift, boundary)
        with (
            stash,
            self._both_ways(),
            self.pipeline.time.window(record.since, resumption),
            self.recorder.window(run, window.number, record),
        ):
            run.window(window.number)
        return stash

    def drop_ahead(self, window: Window, state: RunState, shift: int) -> None:
        """Forgets what is in flight after a window of an asynchronous schedule.

        Args:
            window: the last one that ran.
            state: what is in flight.
            shift: of its numbers.
        """
        run = self._begin_window(window, state, shift, None)
        with self.pipeline.time.messages():
            run.drop_ahead(window.number)

    def _begin_window(
        self, window: Window, state: RunState, shift: int, boundary: Boundary | None
    ) -> Run:
        return self.pipeline.executor.begin(
            window.program,
            [1] * window.program.num_microbatches,
            training=self.module.training,
            boundary=boundary,
            state=state,
            shift=shift,
        )

    def _stash(self, loss_scale: float = 1.0) -> GradientStash:
        """What the gradients of a training step that runs them itself go to."""
        self._adopt_new_groups()
        clear_old_gradients(self.module.trainer)
        return GradientStash(self._held, loss_scale)

    def _adopt_new_groups(self) -> None:
        for optimizer in self.optimizers:
            optimizer.adopt_new_groups(self.module, self.pipeline.partition.held_parameters)

    @contextmanager
    def _both_ways(self) -> Iterator[None]:
        """Backwards in the body run without the autocast of the step, as after a step."""
        autocast, executor = Autocast.current(self.device), self.pipeline.executor
        with torch.enable_grad():
            if not autocast.is_on:
                yield
                return
            executor.forward_context = lambda: autocast.on(self.device)
            try:
                with replace(autocast, is_on=False).on(self.device):
                    yield
            finally:
                executor.forward_context = nullcontext
