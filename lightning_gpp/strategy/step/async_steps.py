"""Training steps of a pipeline that does not drain; several batches are in flight.

Step ``t`` of the Trainer is on every rank a window of the asynchronous schedule
(:mod:`lightning_gpp.schedule.windows`): the forwards of batches ahead, the backward of batch ``t``;
the optimizer's step follows, as the Trainer does it. Rank 0 reads as many batches ahead as the
pipeline is deep. Their steps begin when their forward does, and wait, suspended, for its outputs,
so that ``training_step`` of batch ``t`` returns in step ``t``: what it logs and returns keeps its
place.

Ranks do not wait for each other but for messages: a deep stage may be some steps behind rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lightning_gpp.runtime.gradients import GradientStash
from lightning_gpp.runtime.run_state import RunState
from lightning_gpp.runtime.stage_run import StageCall, StageFunction
from lightning_gpp.schedule import ONE_F_ONE_B_ASYNC, Windows, most_ahead
from lightning_gpp.schedule.windows import version_differences
from lightning_gpp.strategy.cutting.microbatches import batch_size
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.messages import AsyncMinibatch
from lightning_gpp.strategy.settings import refuse_for_async
from lightning_gpp.strategy.step.followers import Follower
from lightning_gpp.strategy.step.loaders import LeadingBatches, batches_left, placed_batch
from lightning_gpp.strategy.step.suspended_steps import SuspendedSteps
from lightning_gpp.weights.policies import Place
from lightning_gpp.weights.versions import StageWeights


@dataclass(slots=True)
class WeightVersions:
    """What the weights of all stages of a rank depend on.

    Attributes:
        first: number of the mini-batch with which the pipeline began to fill.
        per_update: mini-batches whose gradients are accumulated for one update.
        epoch: number of the first mini-batch of the epoch, at which accumulation begins; below 0
            where training was resumed within an epoch.
        stages: weights of every stage of this rank.
    """

    first: int = 0
    per_update: int = 1
    epoch: int = 0
    stages: dict[int, StageWeights] = field(default_factory=dict)

    @classmethod
    def of(cls, run: PipelinedRun, windows: Windows) -> WeightVersions:
        """Puts versions of weights into the stages of a rank's pipeline."""
        built = run.built
        versions = cls()
        most = windows.most_ahead
        ahead = version_differences(windows.window(most + 1, most))
        codes = dict(built.executor.stages)
        for stage, code in codes.items():
            own = {
                name: built.captured.module.get_parameter(name)
                for name, readers in built.placed.stages.parameter_readers
                if stage in readers
            }
            weights = StageWeights(run.settings.policy, own, run.last_steps)
            versions.stages[stage] = weights
            function = versions.stage(code.function, weights, ahead[stage], most)
            codes[stage] = replace(code, function=function, keep_state=None)
        built.executor.stages = codes
        return versions

    def stage(
        self, function: StageFunction, weights: StageWeights, ahead: int, most_ahead: int
    ) -> StageFunction:
        """A stage whose weights a policy gives; forwards without a backward have those of now.

        Args:
            function: the operators.
            weights: of the stage.
            ahead: mini-batches that it is ahead of its backward once the pipeline is full.
            most_ahead: the most that any stage is.
        """

        def run(values: Sequence[Any], call: StageCall) -> Sequence[Any]:
            if not torch.is_grad_enabled():
                return function(values, call)
            with weights.forward(self.place(call.microbatch, ahead, most_ahead)) as own:
                return weights.apart(function(values, replace(call, weights=own)))

        return run

    def begin(self, number: int) -> None:
        """The pipeline fills anew, from this mini-batch on."""
        self.first = number
        for weights in self.stages.values():
            weights.forget()

    def place(self, number: int, ahead: int, most_ahead: int) -> Place:
        """Position of a stage when the forward of a mini-batch runs.

        The backward of the mini-batch that many before it is the next one: the pipeline is full,
        or filling with the weights of its first one.
        """
        next_backward = max(self.first, number - ahead)
        # Updates of the epoch before the backward of each.
        one, other = ((each - self.epoch) // self.per_update for each in (number, next_backward))
        return Place(one - other, ahead, most_ahead)


class AsyncSteps(SuspendedSteps):
    """Leads the steps of an asynchronous pipeline, or follows them.

    Args:
        run: the run whose pipeline executes them.
        follower: this rank's follower.
    """

    def __init__(self, run: PipelinedRun, follower: Follower) -> None:
        super().__init__(run)
        follower.window = lambda message: self._perform(message, None)
        self._state = RunState()
        self._windows: Windows | None = None
        self._versions = WeightVersions()
        self._batches: LeadingBatches | None = None
        self._number = self._since = 0

    # Rank 0 ----------------------------------------------------------------------------------

    def lead(self, name: str, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Rank 0: runs the user's step; returns what it returns."""
        run, steps = self._run, self.steps
        if run.train_batches is not self._batches:  # an epoch begins
            self._batches, self._since = run.train_batches, 0
            if steps:
                raise NotImplementedError(_CUT_SHORT.format(len(steps)))
        if run.pipeline is None:
            self._build(name, self._step(name, args, kwargs), batch, batch_size(batch))
        ahead = self._ahead()
        for number, other in enumerate([batch, *ahead], self._number):
            if number not in steps:  # the first argument is the batch's index
                later = [args[0] + number - self._number, *args[1:]] if args else args
                size = batch_size(other)
                steps[number] = self._open(self._step(name, later, kwargs), other, size)
        with run.control.alone(name), run.leader_state.watching(name), self.intercepting():
            if needs := steps[self._number].needs:
                raise NotImplementedError(_NEEDS.format(", ".join(sorted(needs))))
            message = AsyncMinibatch(self._since, len(ahead))
            run.lead(message)
            stash = self._perform(message, self)
        return self._returned([steps.pop(self._number - 1)], batch, stash)

    def _ahead(self) -> list[Any]:
        """The batches that follow, as far as the pipeline is ahead and the Trainer will go."""
        run = self._run
        count = min(most_ahead(run.built.placed.stages), batches_left(run.module.trainer))
        assert self._batches is not None
        return self._batches.look_ahead(int(count), partial(placed_batch, run))

    # All ranks -------------------------------------------------------------------------------

    def close(self) -> None:
        """Likewise; the optimizers are the user's again."""
        for watched in self._run.last_steps:
            watched.close()
        super().close()
        self._batches = None

    def _perform(self, message: AsyncMinibatch, boundary: AsyncSteps | None) -> GradientStash:
        """This rank's part of a window; its gradients are in what is returned."""
        run = self._run
        if self._windows is None:
            placed = run.built.placed
            self._windows = Windows(
                partial(placed.program, schedule=ONE_F_ONE_B_ASYNC.name), most_ahead(placed.stages)
            )
            self._versions = WeightVersions.of(run, self._windows)
        if message.since == 0:  # nothing is in flight
            self._fill_anew()
        window = self._windows.window(message.since, message.remaining)
        shift = self._number - window.number
        stash = run.built.window(window, self._state, shift, boundary)
        self._number += 1
        self._since = message.since + 1
        return stash

    def _fill_anew(self) -> None:
        """Nothing is in flight. Callbacks may accumulate another number of batches in an epoch."""
        run, versions = self._run, self._versions
        trainer = run.module.trainer
        refuse_for_async(trainer, run.settings, most_ahead(run.built.placed.stages))
        versions.epoch = self._number - trainer.fit_loop.epoch_loop.batch_idx
        versions.per_update = trainer.accumulate_grad_batches
        versions.begin(self._number)
        for watched in run.last_steps:
            watched.forget()


_CUT_SHORT = (
    "an epoch was cut short (by on_train_batch_start, say) while {} of its batches were in the "
    "pipeline already; use schedule='gpipe', or skip batches in the data loader."
)

_NEEDS = (
    "the pipelined forward takes {} with a gradient, but the asynchronous schedule does not train "
    "layers before it. Put them into the pipelined forward (GraphPipeStrategy(module=...)), or use "
    "schedule='gpipe'."
)
