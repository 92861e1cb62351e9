"""Training steps of a pipeline that does not drain: several batches are in flight.

Step ``t`` of the Trainer is on every rank a window of the asynchronous schedule
(:mod:`lightning_gpp.schedule.windows`): the forwards of batches ahead, the backward of batch ``t``;
the optimizer's step follows, as the Trainer does it. Rank 0 reads as many batches ahead as the
pipeline is deep. Their steps begin when their forward does, and wait, suspended, for its outputs,
so that ``training_step`` of batch ``t`` returns in step ``t``: what it logs and returns keeps its
place.

Ranks do not wait for each other but for messages: a deep stage may be some steps behind rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lightning_gpp.runtime.boundary import Boundary
from lightning_gpp.runtime.gradients import GradientStash
from lightning_gpp.runtime.measured import WindowRecord
from lightning_gpp.runtime.run_state import RunState
from lightning_gpp.schedule import ONE_F_ONE_B_ASYNC, Window, Windows, most_ahead
from lightning_gpp.strategy.cutting.microbatches import batch_size
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.messages import AsyncMinibatch
from lightning_gpp.strategy.step.async_refusals import refuse_for_async, refuse_short_updates
from lightning_gpp.strategy.step.followers import Follower
from lightning_gpp.strategy.step.loaders import LeadingBatches
from lightning_gpp.strategy.step.microbatch_boundary import MicrobatchBoundary
from lightning_gpp.strategy.step.step_boundaries import SuspendedSteps
from lightning_gpp.strategy.step.weight_versions import WeightVersions


class _OpenSteps(Boundary):
    """Rank 0: the steps of all batches in flight, by the number of their mini-batch."""

    def __init__(self) -> None:
        self.steps: dict[int, MicrobatchBoundary] = {}

    def start(self, microbatch: int) -> Mapping[str, Tensor]:
        """The arguments of its forward; its step runs up to there."""
        step = self.steps[microbatch]
        with step.intercepting():
            return step.start(0)

    def finish(self, microbatch: int, outputs: Mapping[str, Any]) -> Tensor:
        """Goes on with its step; returns its loss."""
        step = self.steps[microbatch]
        with step.intercepting():
            return step.finish(0, outputs)

    def abandon(self, numbers: Sequence[int]) -> None:
        """Ends steps that wait for their outputs."""
        for number in numbers:
            self.steps.pop(number).abandon()


class AsyncSteps(SuspendedSteps):
    """How rank 0 leads the steps of an asynchronous pipeline, and how the others follow.

    Args:
        run: whose pipeline runs them.
        follower: does the same on other ranks.
    """

    def __init__(self, run: PipelinedRun, follower: Follower) -> None:
        super().__init__(run)
        follower.window = lambda message: self._perform(message, None)
        self._open = _OpenSteps()
        self._state = RunState()
        self._windows: Windows | None = None
        self._versions = WeightVersions()
        self._last: Window | None = None
        self._batches: LeadingBatches | None = None
        self._number = self._since = 0
        self._begins_anew = False

    # Rank 0 ----------------------------------------------------------------------------------

    def lead(self, name: str, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Rank 0: runs the user's step; returns what it returns."""
        run = self._run
        is_epoch = self._take_up(run.train_batches)
        if run.pipeline is None:
            self._build(name, self._step(name, args, kwargs), batch, batch_size(batch))
        run.built.captured.check_reads()
        ahead = self._ahead()
        for lead, other in enumerate([batch, *ahead]):
            if self._number + lead not in self._open.steps:
                step = self._step(name, _later(args, lead), kwargs)
                boundary = self._boundary(step, [other], [batch_size(other)])
                self._open.steps[self._number + lead] = boundary
        own = self._open.steps[self._number]
        with run.control.alone(name), run.leader_state.watching(name), own.intercepting():
            needs = own.needs()
        if needs:
            raise NotImplementedError(_NEEDS.format(", ".join(sorted(needs))))
        drops = self._drops()
        resumption = run.built.time.resumption(self._since)
        message = AsyncMinibatch(self._since, len(ahead), drops, is_epoch, resumption)
        with run.control.alone(name), run.leader_state.watching(name):
            run.lead(message)
            stash = self._perform(message, self._open)
        del self._open.steps[self._number - 1]
        return self._returned(own, batch, stash)

    def _take_up(self, batches: LeadingBatches) -> bool:
        """A new iteration of the data begins with an empty pipeline; whether one does."""
        if batches is self._batches:
            return False
        self._batches, self._begins_anew = batches, True
        self._open.abandon(list(self._open.steps))
        return True

    def _drops(self) -> bool:
        """Whether what is in flight is to be forgotten before this step."""
        drops, self._begins_anew = self._begins_anew and self._last is not None, False
        if drops or self._last is None or self._run.settings.policy.drains:
            self._since = 0
        return drops

    def _ahead(self) -> list[Any]:
        """The batches that follow, as far as the pipeline is ahead and the Trainer will go."""
        run, trainer = self._run, self._run.module.trainer
        loop = trainer.fit_loop.epoch_loop
        if run.settings.policy.drains:
            return []
        left = [
            most_ahead(run.built.placed.stages),
            trainer.num_training_batches - loop.batch_progress.current.ready,
            math.inf if loop.max_steps < 0 else self._until_last_update(),
        ]
        assert self._batches is not None
        return self._batches.look_ahead(int(max(0, min(left))), self._placed)

    def _until_last_update(self) -> int:
        """Batches of the epoch after this one up to the last update that the Trainer will make."""
        trainer = self._run.module.trainer
        loop, each = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
        return (loop.max_steps - loop.global_step) * each - loop.batch_idx % each - 1

    def _placed(self, batch: Any) -> Any:
        """A batch as the Trainer gives it to the step."""
        trainer = self._run.module.trainer
        batch = trainer.precision_plugin.convert_input(batch)
        batch = self._run.module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    # All ranks -------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """The next step forgets what is in flight, as a run does that is resumed from here."""
        self._begins_anew = True
        self._versions.put_back_buffers(self._number)

    def close(self) -> None:
        """Ends the steps that wait; the optimizers are the user's again."""
        for watched in self._run.last_steps:
            watched.close()
        self._open.abandon(list(self._open.steps))
        super().close()
        self._batches = self._run.train_batches = None  # worker processes of a loader end

    def _perform(self, message: AsyncMinibatch, boundary: _OpenSteps | None) -> GradientStash:
        """This rank's part of a window; its gradients are in what is returned."""
        run = self._run
        if self._windows is None:
            placed = run.built.placed
            self._windows = Windows(
                partial(placed.program, schedule=ONE_F_ONE_B_ASYNC.name), most_ahead(placed.stages)
            )
            self._versions = WeightVersions.of(run, self._windows)
        if message.drops:
            assert self._last is not None
            shift = self._number - 1 - self._last.number
            run.built.drop_ahead(self._last, self._state, shift)
            self._versions.put_back_buffers(self._number)
        if message.since == 0:
            self._fill_anew(is_epoch=message.is_epoch)
        window = self._windows.window(message.since, message.remaining)
        shift = self._number - window.number
        record = WindowRecord(message.since, message.remaining, self._versions.all_updates)
        stash = run.built.window(window, self._state, shift, boundary, record, message.resumption)
        self._last = window
        self._number += 1
        self._since = message.since + 1
        return stash

    def _fill_anew(self, *, is_epoch: bool) -> None:
        """Nothing is in flight. Callbacks may accumulate another number of batches in an epoch."""
        run, versions = self._run, self._versions
        if is_epoch:
            trainer = run.module.trainer
            refuse_for_async(trainer, run.settings)
            refuse_short_updates(trainer, run.settings, run.built.placed.stages)
            versions.epoch = self._number - trainer.fit_loop.epoch_loop.batch_idx
            versions.per_update = trainer.accumulate_grad_batches
        versions.begin(self._number)
        for watched in run.last_steps:
            watched.forget()


def _later(args: Sequence[Any], count: int) -> Sequence[Any]:
    """What a step takes after the batch, of a batch that comes later: its index first."""
    return [args[0] + count, *args[1:]] if args else args


_NEEDS = (
    "the pipelined forward takes {} with a gradient: layers before it would be trained with "
    "batches ahead, which the asynchronous schedule does not do. Put them into the pipelined "
    "forward (GraphPipeStrategy(module=...)), or use schedule='gpipe'."
)
