"""Training steps that run once per micro-batch, in the middle of a schedule that saves memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_gpp.capture.rollback import rollback
from lightning_gpp.runtime.suspend import StepThreads
from lightning_gpp.strategy.followers import Follower
from lightning_gpp.strategy.logs import replay
from lightning_gpp.strategy.messages import Autocast, Build, Minibatch, StepEnd
from lightning_gpp.strategy.microbatch_boundary import MicrobatchBoundary
from lightning_gpp.strategy.microbatches import (
    batch_size,
    copy_tensors,
    cut_batch,
    refuse_full_graph,
)
from lightning_gpp.strategy.pipeline import pipelined_module
from lightning_gpp.strategy.planning import Example

if TYPE_CHECKING:
    from lightning_gpp.strategy.session import Session


class MicrobatchSteps:
    """How rank 0 leads a training step, and how the others follow.

    Args:
        session: whose pipeline runs them.
        follower: what other ranks do.
    """

    def __init__(self, session: Session, follower: Follower) -> None:
        self._session = session
        self._follower = follower
        self._threads = StepThreads()

    def lead(self, name: str, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Rank 0: runs the user's step; returns what it returns.

        Raises:
            NotImplementedError: the module optimizes by hand.
        """
        session = self._session
        if not session.module.automatic_optimization:
            raise NotImplementedError(
                "manual optimization needs a training_step that runs once per batch; with the "
                "schedule '1f1b' it runs for every micro-batch. Use schedule='gpipe'."
            )
        num_samples = batch_size(batch)
        refuse_full_graph(batch, session.settings.num_microbatches)
        method = getattr(session.module, name)

        def step(microbatch: Any) -> Any:
            if session.device.type == "cuda":  # this is another thread
                torch.cuda.set_device(session.device)
            with session.held_elsewhere():
                return method(microbatch, *args, **kwargs)

        if session.pipeline is None:
            self._build(name, step, batch, num_samples)
        session.full_batch = session.full_batch or num_samples
        session.built.captured.check_reads()
        units = session.unit_sizes(num_samples)
        session.show_state(len(units))
        sizes = session.built.step_sizes(units)
        boundary = self._boundary(step, cut_batch(batch, sizes), sizes)
        boundary.captured = session.built.captured
        with session.control.alone(name), session.leader_state.watching(name), boundary.active():
            minibatch = Minibatch(units, boundary.needs())
            session.lead(minibatch)
            stash = session.train(minibatch, boundary)
        result, calls = boundary.result(), boundary.log_calls(batch)
        replay(session.module, calls)
        value = result["loss"] if isinstance(result, Mapping) else result
        session.lead_end(calls, value)
        loss = stash.loss(value)
        return {**result, "loss": loss} if isinstance(result, Mapping) else loss

    def follow(self, name: str) -> Tensor:
        """Other ranks: the loss."""
        session, follower = self._session, self._follower
        stash = session.train(follower.until(Minibatch, doing=name), None)
        end = follower.until(StepEnd, doing=f"result of {name}")
        session.follow_end(end)
        return stash.loss(follower.value.to(session.device))

    def close(self) -> None:
        """Ends the threads of the steps."""
        self._threads.close()

    def _build(self, name: str, step: Callable[[Any], Any], batch: Any, num_samples: int) -> None:
        """Builds the pipeline; a first micro-batch's step runs up to its forward for it.

        It leaves no trace: random states, buffers and plain attributes of the module are put back.
        """
        session = self._session
        units = session.unit_sizes(num_samples)
        parts = cut_batch(copy_tensors(session.where_module_is(batch)), units)
        boundary = self._boundary(step, parts, units)
        with (
            session.control.alone(name),
            session.leader_state.preserved(),
            rollback(session.module),
            boundary.active(),
        ):
            call = boundary.call(0)
        session.lead(Build(Autocast.current(session.device)))
        session.build(Example(call.args, call.kwargs, num_samples, len(units)))

    def _boundary(
        self, step: Callable[[Any], Any], parts: Sequence[Any], sizes: Sequence[int]
    ) -> MicrobatchBoundary:
        session = self._session
        return MicrobatchBoundary(
            session.module,
            pipelined_module(session.module, session.settings.module),
            step,
            microbatches=parts,
            sizes=sizes,
            threads=self._threads,
            is_shape_only=session.is_shape_only,
        )
