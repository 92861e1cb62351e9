"""Training steps: the user's step once per micro-batch, inside the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_gpp.capture.rollback import rollback
from lightning_gpp.strategy.held_elsewhere import held_elsewhere
from lightning_gpp.strategy.logs import LogCall
from lightning_gpp.strategy.loss_check import (
    CHECKED_HALVES,
    CHECKED_WHOLE,
    LossProbe,
    mismatch,
)
from lightning_gpp.strategy.microbatches import (
    batch_size,
    copy_tensors,
    cut_batch,
    few_samples,
    refuse_full_graph,
)
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.steps import LOSS_CHECK, first_call

if TYPE_CHECKING:
    from lightning_gpp.strategy.session import Session


class TrainingSteps:
    """How rank 0 leads a training step, and how the others follow.

    Args:
        session: whose pipeline runs them.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._has_trained = False

    def lead(
        self, name: str, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, list[LogCall]]:
        """Rank 0: runs the user's step; returns what it returns and what it logs."""
        num_samples = batch_size(batch)
        refuse_full_graph(batch, self._session.settings.num_microbatches)
        method = getattr(self._session.module, name)

        def step(microbatch: Any) -> Any:
            with held_elsewhere(self._session.module, self._session.device):
                return method(microbatch, *args, **kwargs)

        pipeline = self._prepare(name, step, batch, num_samples)
        units = self._session.unit_sizes(num_samples)
        self._session.control.tell(units)
        sizes = pipeline.step_sizes(units)
        boundary = self._session.boundary(name, step, cut_batch(batch, sizes), sizes)
        with (
            self._session.control.alone(name),
            self._session.leader_state.watching(name),
            boundary.active(),
        ):
            stash = self._session.train(units, boundary)
        result, calls = boundary.result(), boundary.log_calls(batch)
        changes = self._session.leader_state.take_changes()
        value = result["loss"] if isinstance(result, Mapping) else result
        self._session.control.tell((value, calls, changes))
        loss = stash.loss(value)
        return ({**result, "loss": loss} if isinstance(result, Mapping) else loss), calls

    def _prepare(
        self, name: str, step: Callable[[Any], Any], batch: Any, num_samples: int
    ) -> Pipeline:
        """Rank 0: builds the pipeline if there is none; checks the first mini-batch's loss."""
        session = self._session
        is_first, self._has_trained = not self._has_trained, True
        if is_first:
            self._check_fills_microbatches(num_samples)
            session.full_batch = num_samples
        if session.pipeline is None:
            units = session.unit_sizes(num_samples)
            parts = cut_batch(copy_tensors(batch), units)
            boundary = session.boundary(name, step, parts, units)
            with session.leader_state.preserved():
                call = first_call(session.module, boundary)
            if call is None:
                raise boundary.no_call()
            session.build(call, len(units))
        assert session.pipeline is not None
        session.pipeline.captured.check_reads()
        if is_first:
            with session.leader_state.preserved():
                self._lead_loss_check(step, batch, num_samples)
        return session.pipeline

    def follow(self, name: str) -> tuple[Any, list[LogCall]]:
        """Other ranks: the loss, and what rank 0's step logged."""
        if self._session.pipeline is None:
            self._session.build(None, 0)
        if not self._has_trained:
            self._has_trained = True
            self._follow_loss_check()
        units = self._session.control.hear(f"waiting for rank 0 to begin {name}")
        stash = self._session.train(units, None)
        value, calls, changes = self._session.control.hear(f"waiting for the result of {name}")
        self._session.leader_state.apply(changes)
        return stash.loss(value.to(self._session.device)), calls

    def _lead_loss_check(self, step: Callable[[Any], Any], batch: Any, num_samples: int) -> None:
        """Rank 0: compares the loss of a few samples in one piece and in halves."""
        assert self._session.pipeline is not None
        total = sum(CHECKED_WHOLE)
        runs = [CHECKED_WHOLE, CHECKED_WHOLE, CHECKED_HALVES]
        if num_samples < total or len(self._session.unit_sizes(num_samples)) == 1:
            runs = []
        self._session.control.tell(runs)
        if not runs:
            return
        few = few_samples(batch, total, num_samples)
        probe = LossProbe(step)
        means = []
        with rollback(self._session.module), torch.no_grad():
            self._session.module.eval()
            for sizes in runs:
                boundary = self._session.boundary(LOSS_CHECK, probe, cut_batch(few, sizes), sizes)
                with boundary.active():
                    self._session.pipeline.run(
                        sizes, has_backward=False, training=False, boundary=boundary
                    )
                means.append(probe.mean())
        if text := mismatch(means[0], means[1], means[2], probe.tolerance):
            rank_zero_warn(text)

    def _follow_loss_check(self) -> None:
        assert self._session.pipeline is not None
        with rollback(self._session.module), torch.no_grad():
            self._session.module.eval()
            for units in self._session.control.hear("waiting for rank 0 to check the loss"):
                self._session.pipeline.run(units, has_backward=False, training=False, boundary=None)

    def _check_fills_microbatches(self, num_samples: int) -> None:
        """A full mini-batch must fill all micro-batches; small ones later get fewer."""
        asked = self._session.settings.num_microbatches
        if asked is not None and num_samples < asked:
            raise ValueError(
                f"a mini-batch of {num_samples} samples cannot be cut into "
                f"num_microbatches={asked}; use a larger batch or fewer micro-batches"
            )
