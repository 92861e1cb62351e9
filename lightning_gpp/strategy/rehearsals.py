"""Rehearsals of the training step: a few samples in one piece, again, in halves, and swapped.

The halves are a few samples before training, and two of its micro-batches after a step.

They show before training whether the loss is a mean over samples, and how the numbers that
micro-batches log belong together. Where the loss is taken of the whole batch, but stages see parts
of it, the forward alone is tried instead: once in one piece, and once cut as in training.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_gpp.capture.rollback import rollback
from lightning_gpp.strategy.evaluation import ForwardPass, difference
from lightning_gpp.strategy.logged_rules import LoggedNumber, LoggedRules
from lightning_gpp.strategy.loss_check import MOST_CHECKED, LossProbe, mismatch
from lightning_gpp.strategy.microbatches import picked_samples, telling_samples
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.steps import LOSS_CHECK, first_call

if TYPE_CHECKING:
    from lightning_gpp.strategy.session import Session


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What rank 0 tells the others when it tries the user's step on a few samples.

    Attributes:
        runs: samples of each micro-batch of each run: in one piece, once more, in halves, and in
            one piece with the halves swapped, which tells the first number from the smallest.
    """

    runs: tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class ForwardTrial:
    """What rank 0 tells the others when it tries the forward alone on a few samples.

    Attributes:
        whole: the samples in one piece; it runs first, twice.
        cut: samples of the smallest micro-batches of a mini-batch cut as in training.
    """

    whole: list[int]
    cut: list[int]


class Rehearsals:
    """How rank 0 rehearses the user's training step, and how the others join in.

    Args:
        session: whose pipeline runs them.

    Attributes:
        rules: what they taught about the numbers that the step logs.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rules = LoggedRules()

    def check_loss(self, step: Callable[[Any], Any], batch: Any, num_samples: int) -> None:
        """Rank 0, before training: warns if cutting the batch changes the loss."""
        pipeline = self._session.pipeline
        assert pipeline is not None
        units = self._session.unit_sizes(num_samples)
        if self._session.is_shape_only or len(units) == 1:
            return
        if len(pipeline.step_sizes(units)) == 1:  # the loss is taken of the whole batch
            self._try_forward(pipeline, step, batch, num_samples, len(units))
            return
        count = MOST_CHECKED if num_samples >= MOST_CHECKED else 2
        samples = telling_samples(batch, count, num_samples)
        probe = self._rehearse(
            step, batch, num_samples, (samples[: count // 2], samples[count // 2 :])
        )
        whole, again, halves, _ = probe.means
        text = mismatch(whole, again, halves, tolerance=probe.tolerance, num_samples=count)
        if text is not None:
            rank_zero_warn(text)

    def _try_forward(
        self,
        pipeline: Pipeline,
        step: Callable[[Any], Any],
        batch: Any,
        num_samples: int,
        num_units: int,
    ) -> None:
        """Rank 0: warns if outputs are others where stages see parts of a batch."""
        session, captured = self._session, pipeline.captured
        cut = [2 if num_samples >= 2 * num_units else 1] * num_units
        trial = ForwardTrial([sum(cut)], cut)
        few = picked_samples(batch, range(sum(cut)), num_samples)
        boundary = session.boundary(LOSS_CHECK, step, [few], trial.whole)
        with session.leader_state.preserved():
            call = first_call(session.module, boundary)
        if call is None:
            return
        inputs = captured.inputs(call.args, call.kwargs)
        session.control.tell(trial)
        passes = [ForwardPass([{n: t.clone() for n, t in inputs.items()}]) for _ in range(3)]
        with self._rehearsing():
            _try(pipeline, trial, passes)
        (whole,), (again,), (in_parts,) = (each.outputs for each in passes)
        if difference(again, whole) is None and (text := difference(in_parts, whole)) is not None:
            rank_zero_warn(_COMPARES.format(text=text))

    def answer_questions(
        self,
        logged: Mapping[str, LoggedNumber],
        step: Callable[[Any], Any],
        batch: Any,
        sizes: Sequence[int],
    ) -> None:
        """Rank 0, after a step: rehearses while it is not clear how to join what it logged."""
        if self._session.is_shape_only or len(sizes) == 1:  # nothing that could be compared
            return
        starts = [0, *itertools.accumulate(sizes)]
        samples = [range(start, stop) for start, stop in itertools.pairwise(starts)]
        while names := self.rules.questions(logged):
            first, second = self.rules.most_telling({name: logged[name] for name in names})
            self._rehearse(step, batch, sum(sizes), (samples[first], samples[second]))

    def hear(self, doing: str) -> Any:
        """Other ranks: rank 0's next message; rehearsals that come before it are joined in."""
        while isinstance(message := self._session.control.hear(doing), Rehearsal | ForwardTrial):
            with self._rehearsing() as pipeline:
                if isinstance(message, ForwardTrial):
                    _try(pipeline, message, [None] * 3)
                    continue
                for units in message.runs:
                    pipeline.run(units, has_backward=False, training=False, boundary=None)
        return message

    def _rehearse(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        num_samples: int,
        halves: tuple[Sequence[int], Sequence[int]],
    ) -> LossProbe:
        """Rank 0: learns from what some samples of a batch, in two parts, log."""
        first, second = map(list, halves)
        whole, swapped = first + second, second + first
        probe, runs = LossProbe(step), ([whole], [whole], [first, second], [swapped])
        rehearsal = Rehearsal(tuple([len(samples) for samples in run] for run in runs))
        self._session.control.tell(rehearsal)
        logged = []
        with self._session.leader_state.preserved(), self._rehearsing() as pipeline:
            for sizes, run in zip(rehearsal.runs, runs, strict=True):
                parts = [picked_samples(batch, samples, num_samples) for samples in run]
                boundary = self._session.boundary(LOSS_CHECK, probe, parts, sizes)
                with boundary.active():
                    pipeline.run(sizes, has_backward=False, training=False, boundary=boundary)
                probe.end_run()
                logged.append(boundary.logged())
        if not probe.has_failed:
            self.rules.learn(*logged)
        return probe

    @contextlib.contextmanager
    def _rehearsing(self) -> Iterator[Pipeline]:
        pipeline = self._session.pipeline
        assert pipeline is not None
        pipeline.record(None)
        with rollback(self._session.module), torch.no_grad():
            self._session.module.eval()
            yield pipeline


def _try(pipeline: Pipeline, trial: ForwardTrial, passes: Sequence[ForwardPass | None]) -> None:
    """All ranks: runs the forward in one piece, once more, and cut as in training."""
    for boundary in passes[:2]:
        pipeline.run(trial.whole, has_backward=False, training=False, boundary=boundary)
    pipeline.try_forward(trial.cut, passes[2])


_COMPARES = (
    "the forward compares the samples of a batch ({text}), and the plan's stages or their replicas "
    "see parts of a batch: the loss is another one than on one device. Use num_microbatches=1, or "
    "a plan by hand without replicas."
)
