"""Evaluation steps: the user's step once per batch, with a pipeline where its forward was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_gpp.runtime.executor import Boundary
from lightning_gpp.strategy.evaluation import EvaluatedForward, StepEnd
from lightning_gpp.strategy.held_elsewhere import held_elsewhere
from lightning_gpp.strategy.instance_attribute import instance_attribute
from lightning_gpp.strategy.logs import EveryLogCall, LogCall, recording
from lightning_gpp.strategy.microbatches import copy_tensors, cut_batch, size_or_none
from lightning_gpp.strategy.pipeline import pipelined_module
from lightning_gpp.strategy.planning import Example
from lightning_gpp.strategy.steps import first_call

if TYPE_CHECKING:
    from lightning_gpp.strategy.session import Session


class EvaluationSteps:
    """How rank 0 leads a step of validation, test or prediction, and how the others follow.

    Args:
        session: whose pipeline runs them.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_separable: dict[tuple[str, int], bool] = {}

    def lead(
        self, name: str, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, list[LogCall]]:
        """Rank 0: runs the user's step; returns what it returns and what it logs."""
        method = getattr(self._session.module, name)

        def step(batch: Any) -> Any:
            with held_elsewhere(self._session.module, self._session.device):
                return method(batch, *args, **kwargs)

        num_samples = size_or_none(batch)
        if self._session.pipeline is None:
            self._build(name, step, batch, num_samples)
        logged = EveryLogCall(self._session.module)
        with (
            self._session.control.alone(name),
            self._session.leader_state.watching(name),
            self._pipelined_forward(name, num_samples),
            recording(self._session.module, logged),
        ):
            result = step(batch)
        calls = logged.calls(batch)
        self._session.control.tell(StepEnd(calls, self._session.leader_state.take_changes()))
        return result, calls

    def follow(self, name: str) -> tuple[Any, list[LogCall]]:
        """Other ranks: nothing, and what rank 0's step logged."""
        while True:
            message = self._session.control.hear(f"waiting for rank 0's {name}")
            if isinstance(message, StepEnd):
                self._session.leader_state.apply(message.changes)
                return None, message.calls
            if message is None:
                self._session.build(None)
            else:
                self._session.run(message, None)

    def _build(
        self, name: str, step: Callable[[Any], Any], batch: Any, num_samples: int | None
    ) -> None:
        """Rank 0: builds the pipeline if the step calls the forward; tells the others by None."""
        units = [1] if num_samples is None else self._session.unit_sizes(num_samples)
        batch = self._session.where_module_is(batch)
        parts = [batch] if num_samples is None else cut_batch(copy_tensors(batch), units)
        boundary = self._session.boundary(name, step, parts, units)
        with self._session.leader_state.preserved():
            call = first_call(self._session.module, boundary)
        if call is not None:
            self._session.control.tell(None)
            self._session.build(Example.of(call, num_samples, len(units)))

    def _pipelined_forward(
        self, name: str, num_samples: int | None
    ) -> contextlib.AbstractContextManager[None]:
        """Rank 0: puts the pipeline in the place of the forward while an evaluation step runs."""
        if self._session.pipeline is None:  # the step calls no forward
            return contextlib.nullcontext()

        def run(sizes: Sequence[int], boundary: Boundary) -> None:
            self._session.control.tell(list(sizes))
            self._session.run(sizes, boundary)

        forward = EvaluatedForward(
            self._session.pipeline.captured,
            run,
            self._sizes,
            num_samples=num_samples,
            step=name,
            is_separable=self._is_separable,
        )
        target = pipelined_module(self._session.module, self._session.settings.module)
        return instance_attribute(target, "forward", forward)

    def _sizes(self, num_samples: int) -> list[int]:
        """Samples of each micro-batch of an evaluation batch."""
        return self._session.unit_sizes(num_samples, is_training=False)
