"""Training steps: the user's step once per micro-batch, inside the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_gpp.strategy.held_elsewhere import held_elsewhere
from lightning_gpp.strategy.logs import LogCall
from lightning_gpp.strategy.microbatches import (
    batch_size,
    copy_tensors,
    cut_batch,
    refuse_full_graph,
)
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.planning import Example
from lightning_gpp.strategy.rehearsals import Rehearsals
from lightning_gpp.strategy.steps import first_call

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
        self._rehearsals = Rehearsals(session)

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
        result, changes = boundary.result(), self._session.leader_state.take_changes()
        self._rehearsals.answer_questions(boundary.logged(), step, batch, sizes)
        calls = boundary.log_calls(batch, self._rehearsals.rules)
        boundary.call_loggers(self._rehearsals.rules)
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
            parts = cut_batch(copy_tensors(session.where_module_is(batch)), units)
            boundary = session.boundary(name, step, parts, units)
            with session.leader_state.preserved():
                call = first_call(session.module, boundary)
            if call is None:
                raise boundary.no_call()
            session.build(Example.of(call, num_samples, len(units)))
        assert session.pipeline is not None
        session.pipeline.captured.check_reads()
        if is_first:
            self._rehearsals.check_loss(step, batch, num_samples)
        return session.pipeline

    def follow(self, name: str) -> tuple[Any, list[LogCall]]:
        """Other ranks: the loss, and what rank 0's step logged."""
        if self._session.pipeline is None:
            self._session.build(None)
        units = self._rehearsals.hear(f"waiting for rank 0 to begin {name}")
        stash = self._session.train(units, None)
        value, calls, changes = self._rehearsals.hear(f"waiting for the result of {name}")
        self._session.leader_state.apply(changes)
        return stash.loss(value.to(self._session.device)), calls

    def _check_fills_microbatches(self, num_samples: int) -> None:
        """A full mini-batch must fill all micro-batches; small ones later get fewer."""
        asked = self._session.settings.num_microbatches
        if asked is not None and num_samples < asked:
            raise ValueError(
                f"a mini-batch of {num_samples} samples cannot be cut into "
                f"num_microbatches={asked}; use a larger batch or fewer micro-batches"
            )
