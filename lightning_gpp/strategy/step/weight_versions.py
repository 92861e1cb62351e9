"""The stages of a rank with the weights that the policy of an asynchronous pipeline gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lightning_gpp.capture.steady_state import keep
from lightning_gpp.runtime.stage_run import StageCall, StageFunction
from lightning_gpp.schedule import Windows
from lightning_gpp.schedule.windows import version_differences
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.weights.policies import Place
from lightning_gpp.weights.versions import StageWeights


@dataclass(slots=True)
class BuffersAhead:
    """The buffers that forwards of a stage change, as they were before those in flight.

    Attributes:
        keep: gives what puts them back to what they are now.
        before: mini-batch -> puts them back to what they were before its forward.
    """

    keep: Callable[[], Callable[[], None]]
    before: dict[int, Callable[[], None]] = field(default_factory=dict)

    def note(self, number: int, ahead: int) -> None:
        """The forward of a mini-batch begins; as many as the stage is ahead are in flight."""
        self.before[number] = self.keep()
        self.before.pop(number - ahead - 1, None)

    def put_back(self, number: int) -> None:
        """Only the mini-batches before this one count."""
        if ahead := [each for each in self.before if each >= number]:
            self.before[min(ahead)]()
        self.before.clear()


@dataclass(slots=True)
class WeightVersions:
    """What all stages of a rank need to know.

    Attributes:
        first: number of the mini-batch with which the pipeline began to fill.
        per_update: mini-batches whose gradients are accumulated for one update.
        epoch: number of the first mini-batch of the epoch, at which accumulation begins; below 0
            where training was resumed within an epoch.
        all_updates: updates since training began.
        stages: weights of every stage of this rank.
        buffers: of those stages whose forward changes any.
    """

    first: int = 0
    per_update: int = 1
    epoch: int = 0
    all_updates: int = 0
    stages: dict[int, StageWeights] = field(default_factory=dict)
    buffers: list[BuffersAhead] = field(default_factory=list)

    @classmethod
    def of(cls, run: PipelinedRun, windows: Windows) -> WeightVersions:
        """Puts versions of weights into the stages of a rank's pipeline."""
        built = run.built
        trainer = run.module.trainer
        versions = cls(all_updates=trainer.global_step)
        for watched in run.last_steps[:1]:
            watched.before_update.append(versions.count)
        most = windows.most_ahead
        ahead = version_differences(windows.window(most + 1, most))
        codes = dict(built.executor.stages)
        for stage, code in codes.items():
            operators = [
                built.captured.graph.operator[name] for name in built.plan.stages[stage].operators
            ]
            names = dict.fromkeys(name for each in operators for name in each.parameters)
            own = {name: built.captured.module.get_parameter(name) for name in names}
            weights = versions.stages[stage] = StageWeights(
                run.settings.policy, own, run.last_steps
            )
            buffers = None
            if changing := sorted({name for each in operators for name in each.state}):
                buffers = BuffersAhead(partial(keep, built.captured.module, changing))
                versions.buffers.append(buffers)
            function = VersionedStage(code.function, weights, versions, ahead[stage], most, buffers)
            codes[stage] = replace(code, function=function, keep_state=None)
        built.executor.stages = codes
        return versions

    def put_back_buffers(self, number: int) -> None:
        """Buffers become what they were before the forward of a mini-batch, if it has begun."""
        for buffers in self.buffers:
            buffers.put_back(number)

    def count(self) -> None:
        """An update comes."""
        self.all_updates += 1

    def begin(self, number: int) -> None:
        """The pipeline fills anew, from this mini-batch on."""
        self.first = number
        for weights in self.stages.values():
            weights.forget()

    def place(self, number: int, ahead: int, most_ahead: int) -> Place:
        """Where a stage is when the forward of a mini-batch runs.

        The backward of the mini-batch that many before it is the next one: the pipeline is full,
        or filling with the weights of its first one.
        """
        next_backward = max(self.first, number - ahead)
        difference = self._updates_before(number) - self._updates_before(next_backward)
        return Place(difference, ahead, most_ahead)

    def _updates_before(self, number: int) -> int:
        """Updates of the epoch before the backward of a mini-batch."""
        return (number - self.epoch) // self.per_update


@dataclass(frozen=True, slots=True)
class VersionedStage:
    """A :class:`~lightning_gpp.runtime.stage_run.StageFunction` whose weights a policy gives.

    Attributes:
        function: the operators.
        weights: of the stage.
        versions: of the rank.
        ahead: mini-batches that the stage is ahead of its backward once the pipeline is full.
        most_ahead: the most that any stage is.
        buffers: that its forward changes, if any.
    """

    function: StageFunction
    weights: StageWeights
    versions: WeightVersions
    ahead: int
    most_ahead: int
    buffers: BuffersAhead | None = None

    def __call__(self, values: Sequence[Any], call: StageCall) -> Sequence[Any]:
        """The values that leave it; forwards that no backward follows have the weights of now."""
        if not torch.is_grad_enabled():
            return self.function(values, call)
        if self.buffers is not None:
            self.buffers.note(call.microbatch, self.ahead)
        place = self.versions.place(call.microbatch, self.ahead, self.most_ahead)
        found = self.weights.forward(place)
        with found.saving:
            return self.weights.apart(self.function(values, replace(call, weights=found.weights)))
