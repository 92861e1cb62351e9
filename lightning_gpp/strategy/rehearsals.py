"""Rehearsals of the training step: a few samples in one piece, again, in halves, and swapped.

The halves are a few samples before training, and two of its micro-batches after a step.

They show before training whether the loss is a mean over samples, and how the numbers that
micro-batches log belong together.
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
from lightning_gpp.strategy.logged_rules import LoggedNumber, LoggedRules
from lightning_gpp.strategy.loss_check import MOST_CHECKED, LossProbe, mismatch
from lightning_gpp.strategy.microbatches import picked_samples, telling_samples
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.steps import LOSS_CHECK

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
        """Rank 0, before training: warns if the loss is no mean over samples."""
        pipeline = self._session.pipeline
        assert pipeline is not None
        calls = pipeline.step_sizes(self._session.unit_sizes(num_samples))
        if self._session.is_shape_only or len(calls) == 1:
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
        while isinstance(message := self._session.control.hear(doing), Rehearsal):
            with self._rehearsing() as pipeline:
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
