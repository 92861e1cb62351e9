"""Training steps that run once per micro-batch, in the middle of a schedule that saves memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_gpp.capture.checks.rollback import random_state, rollback
from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.strategy.cutting.cutting import (
    CannotJoinError,
    Values,
    input_slices,
    join_values,
)
from lightning_gpp.strategy.cutting.microbatches import (
    batch_size,
    chosen_samples,
    copy_tensors,
    cut_batch,
)
from lightning_gpp.strategy.logging.logs import recording
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.messages import Minibatch
from lightning_gpp.strategy.state.precision import loss_scale
from lightning_gpp.strategy.step.cut_checks import why_not_cut
from lightning_gpp.strategy.step.loss_check import Cadence, OutputGradients
from lightning_gpp.strategy.step.suspended_steps import (
    OpenStep,
    Step,
    SuspendedSteps,
    microbatch_loss,
)

DRAWS = (
    "training_step draws random numbers outside of the pipelined forward. With schedule='1f1b' it "
    "runs for every micro-batch, so they are others than those that one device draws from the same "
    "seed, and whether the loss is a mean over samples cannot be seen. It has to be one. "
    "schedule='gpipe' runs the step once, on the whole batch, with the numbers of one device."
)


class MicrobatchSteps(SuspendedSteps):
    """How rank 0 leads a training step.

    Args:
        run: whose pipeline runs them.
    """

    def __init__(self, run: PipelinedRun) -> None:
        super().__init__(run)
        self._looked_at = Cadence()
        self._has_drawn = False
        self._form: Pipeline | None = None

    def lead(self, name: str, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the user's step; returns what it returns.

        Raises:
            NotImplementedError: the module optimizes by hand.
        """
        run = self._run
        if not run.module.automatic_optimization:
            raise NotImplementedError(
                "manual optimization needs a training_step that runs once per batch; with the "
                "schedule '1f1b' it runs for every micro-batch. Use schedule='gpipe'."
            )
        num_samples = batch_size(batch)
        step = self._step(name, args, kwargs)
        if self._form is None:
            self._build(name, step, batch, num_samples)
            self._form = run.built
        run.to_form(self._form)
        run.full_batch = run.full_batch or num_samples
        run.built.captured.check_reads()
        units = run.unit_sizes(num_samples)
        run.show_state(len(units))
        sizes = run.built.step_sizes(units)
        parts = zip(cut_batch(batch, sizes), sizes, strict=True)
        steps = [self._open(step, part, size) for part, size in parts]
        self.steps, self.total = dict(enumerate(steps)), num_samples
        self.loss_scale = loss_scale(run.module.trainer.precision_plugin)
        # A step that runs once has no loss to compare; stages before it may take less at a time.
        is_once, pairs = len(sizes) == 1, list[int]()
        if min(sizes) > 0 and len(units) > 1:
            pairs = self._looked_at.pairs(batch, units if is_once else sizes)
        dims = run.built.captured.graph.batch_dims
        self.seen = [OutputGradients(dims, sizes, first) for first in pairs if not is_once]
        with run.control.alone(name), run.leader_state.watching(name), self.intercepting():
            try:
                minibatch = Minibatch(units, steps[0].needs, self.loss_scale)
                run.lead(minibatch)
                stash = run.built.train(minibatch, self)
                for seen in self.seen:
                    if self._is_off(step, batch, [steps[each] for each in seen.pair], seen):
                        _refuse("its gradients at the outputs of the forward are others")
                    self._check_cut(steps, units, seen.used)
                if pairs and is_once:
                    self._check_cut(steps, units, None)
            finally:
                self.abandon()
        return self._returned(steps, batch, stash)

    def _is_off(
        self, step: Step, batch: Any, pair: Sequence[OpenStep], seen: OutputGradients
    ) -> bool:
        """Whether two micro-batches' losses show that they are not that of the step on both.

        A step that draws numbers shows nothing; that is said once.
        """
        run, captured = self._run, self._run.built.captured
        both = chosen_samples(batch, seen.samples)

        def loss_of_both(outputs: Values) -> Tensor:
            def forward(*args: Any, **kwargs: Any) -> Any:
                # Of graphs the numbers of vertices are counted anew.
                if not captured.takes_graphs and not _are_equal(
                    captured.inputs(args, kwargs), self._inputs(pair)
                ):
                    raise CannotCompareError
                return captured.output(outputs)

            with instance_attribute(run.target, "forward", forward):
                return microbatch_loss(step(copy_tensors(both)))

        before = random_state(run.device)
        with (
            run.leader_state.preserved(),
            rollback(run.module),
            recording(run.module, lambda *args, **kwargs: None),
            torch.enable_grad(),
        ):
            try:
                is_off = seen.is_off(loss_of_both)
            except (CannotCompareError, CannotJoinError):
                is_off = False  # the forward is tried
            if torch.equal(before, random_state(run.device)):
                return is_off
        if not self._has_drawn:
            self._has_drawn = True
            rank_zero_warn(DRAWS)
        return False

    def _inputs(self, steps: Sequence[OpenStep]) -> Values | None:
        """The joined arguments of some steps' forwards; None where they cannot be joined."""
        dims = self._run.built.captured.graph.batch_dims
        try:
            return join_values([each.inputs() for each in steps], dims, [s.size for s in steps])
        except CannotJoinError:
            return None

    def _check_cut(
        self, steps: Sequence[OpenStep], units: Sequence[int], used: frozenset[str] | None
    ) -> None:
        """Refuses a forward that a few samples show to be another one where it is cut."""
        run, captured = self._run, self._run.built.captured
        inputs = None if captured.takes_graphs else self._inputs(steps)
        if inputs is not None and input_slices(captured, inputs, units) is not None:
            _refuse(why_not_cut(run, inputs, units, is_trained=True, averaged=used))


class CannotCompareError(BaseException):
    """Raised through the step on both micro-batches: it does not call the forward as they did."""


def _are_equal(inputs: Mapping[str, Tensor], others: Values | None) -> bool:
    return (
        others is not None
        and inputs.keys() == others.keys()
        and all(torch.equal(tensor, others[name]) for name, tensor in inputs.items())
    )


def _refuse(why_not: str | None) -> None:
    """Refuses a mini-batch whose micro-batches do not add up to it, if there is a reason."""
    if why_not is not None:
        raise ValueError(
            "the loss of this mini-batch is not the mean over its samples, which it has to be with "
            f"the schedule '1f1b', where the step runs for every micro-batch: {why_not}. Use "
            "schedule='gpipe', which runs the step once on the whole batch and is exact for every "
            "loss, or make the loss a mean over samples."
        )
