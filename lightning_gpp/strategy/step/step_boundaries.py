"""Steps that are suspended at their forward, which the pipeline is built from and runs in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_gpp.capture.checks.rollback import rollback
from lightning_gpp.common.torch_device import set_current
from lightning_gpp.runtime.gradients import GradientStash
from lightning_gpp.runtime.suspend import StepThreads
from lightning_gpp.strategy.cutting.microbatches import copy_tensors, cut_batch
from lightning_gpp.strategy.logging.logs import replay
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.planning.planning import Example
from lightning_gpp.strategy.ranks.messages import Autocast, Build
from lightning_gpp.strategy.step.losses import loss_in, with_loss
from lightning_gpp.strategy.step.microbatch_boundary import MicrobatchBoundary

Step = Callable[[Any], Any]


class SuspendedSteps:
    """Rank 0: what all steps have in common that run in the midst of a schedule.

    Args:
        run: whose pipeline they run in.
    """

    def __init__(self, run: PipelinedRun) -> None:
        self._run = run
        self._threads = StepThreads()

    def _step(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
        """The user's step as a function of its batch alone."""
        run = self._run
        method = getattr(run.module, name)
        autocast = Autocast.current(run.device)

        def step(batch: Any) -> Any:
            set_current(run.device)  # this is another thread
            with autocast.on(run.device), run.held_elsewhere():
                return method(batch, *args, **kwargs)

        return step

    def _boundary(
        self, step: Step, parts: Sequence[Any], sizes: Sequence[int]
    ) -> MicrobatchBoundary:
        return MicrobatchBoundary(self._run, step, parts, sizes, self._threads)

    def _build(self, name: str, step: Step, batch: Any, num_samples: int) -> None:
        """Builds the pipeline; a first micro-batch's step runs up to its forward for it.

        It leaves no trace: random states, buffers and plain attributes of the module are put back.
        """
        run = self._run
        units = run.unit_sizes(num_samples)
        boundary = self._boundary(step, cut_batch(copy_tensors(batch), units), units)
        with (
            run.control.alone(name),
            run.leader_state.preserved(),
            rollback(run.module),
            boundary.active(),
        ):
            try:
                call = boundary.call(0)
            finally:
                run.stop_early_modules()  # before buffers are put back
        autocast = Autocast.current(run.device)
        run.lead(Build(autocast))
        with autocast.while_building(run.device):
            run.build(Example(call.args, call.kwargs, num_samples, len(units)))

    def _returned(self, boundary: MicrobatchBoundary, batch: Any, stash: GradientStash) -> Any:
        """What a step returns that is over, as is its backward; the others know it, too.

        Args:
            boundary: of the step.
            batch: its batch.
            stash: the gradients, which the backward of the returned loss hands out.
        """
        result, calls = boundary.result(), boundary.log_calls(batch)
        replay(self._run.module, calls)
        value = loss_in(result)
        self._run.lead_end(calls, value)
        return with_loss(result, stash.loss(value))

    def close(self) -> None:
        """Ends the threads of the steps."""
        self._threads.close()
