"""Rehearsals of the training step: a few samples in one piece, again, in halves, and swapped.

They show before training whether the loss is a mean over samples, and how the numbers that
micro-batches log belong together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_gpp.capture.rollback import rollback
from lightning_gpp.strategy.logged_rules import LoggedNumber, LoggedRules, most_telling
from lightning_gpp.strategy.loss_check import CHECKED_WHOLE, SWAPPED, LossProbe, Rehearsal, mismatch
from lightning_gpp.strategy.microbatches import cut_batch, few_samples, picked_samples
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.steps import LOSS_CHECK

if TYPE_CHECKING:
    from lightning_gpp.strategy.session import Session


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
        probe = self._rehearse(step, batch, num_samples)
        if probe is not None:
            whole, again, halves, _ = probe.means
            if text := mismatch(whole, again, halves, probe.tolerance):
                rank_zero_warn(text)

    def answer_questions(
        self,
        logged: Mapping[str, LoggedNumber],
        step: Callable[[Any], Any],
        batch: Any,
        sizes: Sequence[int],
    ) -> None:
        """Rank 0, after a step: rehearses where it is not clear how to join what it logged."""
        if self._session.is_shape_only:  # nothing was logged that could be compared
            return
        if len(sizes) > 1 and (names := self.rules.questions(logged)):
            start = sum(sizes[: most_telling([logged[name] for name in names])])
            self._rehearse(step, batch, sum(sizes), start)

    def hear(self, doing: str) -> Any:
        """Other ranks: rank 0's next message; rehearsals that come before it are joined in."""
        while isinstance(message := self._session.control.hear(doing), Rehearsal):
            with self._rehearsing() as pipeline:
                for units in message.runs:
                    pipeline.run(units, has_backward=False, training=False, boundary=None)
        return message

    def _rehearse(
        self, step: Callable[[Any], Any], batch: Any, num_samples: int, start: int | None = None
    ) -> LossProbe | None:
        """Rank 0: learns from what a few samples log; None with too few samples."""
        total = sum(CHECKED_WHOLE)
        if num_samples < total:
            return None
        rehearsal = Rehearsal()
        self._session.control.tell(rehearsal)
        few = few_samples(batch, total, num_samples, start)
        swapped = picked_samples(few, SWAPPED, total)
        probe = LossProbe(step)
        logged = []
        with self._session.leader_state.preserved(), self._rehearsing() as pipeline:
            for sizes, samples in zip(rehearsal.runs, (few, few, few, swapped), strict=True):
                parts = cut_batch(samples, sizes)
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
