"""A rank from the Trainer's setup to its teardown: user code, state, the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_gpp.capture.checks.rollback import ModuleState
from lightning_gpp.emulation.report import EmulationReport
from lightning_gpp.planner.base import FASTEST
from lightning_gpp.strategy.lightning_private import DataloaderIter, keep_results, tell_device
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.report import warn_of_no_call
from lightning_gpp.strategy.state.without_values import note_lost_weights
from lightning_gpp.strategy.step.asides import Asides
from lightning_gpp.strategy.step.async_steps import AsyncSteps
from lightning_gpp.strategy.step.followers import Follower
from lightning_gpp.strategy.step.forward_calls import BeginAnewError, ForwardCalls
from lightning_gpp.strategy.step.manual_optimization import ManualOptimization
from lightning_gpp.strategy.step.microbatch_steps import MicrobatchSteps

READS_ITSELF = (
    "{} takes `dataloader_iter` and reads batches by itself, which neither other ranks nor the "
    "micro-batches of '1f1b' and '1f1b-async' can follow; let it take `batch`"
)


APART_S = 1.0
"""For the goodbyes of ranks that will not meet again."""


class Session:
    """One run of ``fit``, ``validate``, ``test`` or ``predict`` on this rank.

    All ranks call the same methods in the same order. The pipeline is built at the first batch,
    because capture needs an example.

    Args:
        run: what this rank has while it lasts.
        forward: stands in for the forward on rank 0.

    Attributes:
        run: likewise.
        forward: likewise.
        manual: manual optimization.
        follower: what this rank does while rank 0 runs user code.
        asides: what it does while user code outside of steps needs the model.
        on_all_ranks: whether ranks other than 0 go on with the module, as they do when every rank
            runs the user's script.
        is_closed: whether the run is over.
        lost: why the module is not whole after that; None if it is.
    """

    def __init__(self, run: PipelinedRun, forward: ForwardCalls | None = None) -> None:
        self.run, self.forward = run, forward or ForwardCalls(run)
        self.on_emulated: Callable[[EmulationReport], None] | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.follower = Follower(run)
        self.manual = ManualOptimization(run, self.follower)
        self.asides = Asides(run, self.follower, self.forward)
        is_asynchronous = run.settings.is_asynchronous
        self._steps = AsyncSteps(run, self.follower) if is_asynchronous else MicrobatchSteps(run)
        self.on_all_ranks = True
        self.is_closed = False
        self.lost: str | None = None

    def __reduce__(self) -> Any:
        """Connections of a running process have no copy: a copy of a session is None."""
        return type(None), ()

    # User code ------------------------------------------------------------------------------

    def step(self, name: str, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the user's step on rank 0; the others follow its calls, and log what it logs.

        Args:
            name: of the step (``"training_step"``).
            batch: the mini-batch, on rank 0.
            args: what the step takes after the batch.
            kwargs: likewise, by name.

        Returns:
            What the step returns; on other ranks than 0 the loss, or None.
        """
        run, is_training = self.run, name == "training_step"
        steps = self._steps if is_training and run.suspends_steps else self.forward
        reads_itself = isinstance(batch, DataloaderIter)
        if reads_itself and not (run.is_alone and steps is self.forward):
            raise NotImplementedError(READS_ITSELF.format(name))
        with run.failures.guard():
            if not run.control.is_leader:
                return self.follower.step(name)
            # Which schedule runs may be known only once the step has called its forward.
            before: list[Callable[[], None]] = []
            is_open = run.settings.schedule in (None, FASTEST) and not run.stays_whole
            if is_training and run.model is None and is_open:
                before = [ModuleState(run.module).restore, keep_results(run.module.trainer)]
            try:
                result = steps.lead(name, batch, args, kwargs)
            except BeginAnewError:
                if reads_itself:  # the batch is read already
                    raise NotImplementedError(READS_ITSELF.format(name)) from None
                for put_back in before:
                    put_back()
                run.partition.make_partial()  # what was put back is the whole module
                return self._steps.lead(name, batch, args, kwargs)
            if is_training and run.model is None and not run.stays_whole:
                warn_of_no_call(run.module, run.target)
            return result

    # End -------------------------------------------------------------------------------------

    def error_that_ends(self) -> BaseException | None:
        """The error that ends the Trainer's run, which then is over; None if there is none."""
        error = sys.exc_info()[1]
        is_over = self.run.has_module and (
            self.run.module.trainer.state.status == TrainerStatus.INTERRUPTED
        )
        if error is None or not is_over or self.run.failures.is_in_order(error):
            return None
        first = self.run.failures.origin(error)
        self.close()
        return first or error

    def close(self) -> None:
        """Makes the module whole and closes the connections."""
        if self.is_closed:
            return
        self.is_closed = True
        failures = self.run.failures
        try:
            if not failures.has_failed:
                with failures.guard():
                    self._end_together()
        finally:
            try:
                if failures.has_failed and self.run.has_module:
                    self._end_after_failure()
            finally:
                self._hang_up()

    def _end_after_failure(self) -> None:
        """All ranks that are left: the module is whole again, if all are."""
        run, model = self.run, self.run.model
        state = {"is divided": model is not None, "updates": run.module.trainer.global_step}
        if run.is_placing:
            run.failures.part("parameters were on their way to the ranks that hold them")
        self.lost = run.failures.meet(state)
        if self.lost is None and model is not None:
            try:
                run.reconnect()
                run.take_saved_optimizers()
                self._make_whole()
                tell_device(run.module, torch.device("cpu"))
                run.control.meet("waiting until all ranks have the module")
            except Exception as error:
                self.lost = f"{type(error).__name__}: {error}"
                run.failures.part(f"rank {run.control.rank}: {self.lost}")
        if self.lost is not None:
            note_lost_weights(run.module, self.lost)

    def _end_together(self) -> None:
        """All ranks: the module is whole again."""
        model = self.run.model
        self.run.take_saved_optimizers()
        if model is not None:
            report = model.time.report()
            if report is not None and self.on_emulated is not None:
                self.on_emulated(report)
            self._make_whole()
        if self.run.has_module:
            tell_device(self.run.module, torch.device("cpu"))
        self.run.control.meet("waiting for the end of the run on all ranks")
        for each in {id(each): each for each in (*self.run.forms, model) if each}.values():
            each.close()
        if self.run.peers is not None:
            self.run.peers.close()

    def end_process(self, error: BaseException) -> BaseException | None:
        """This process ends with an error, and nobody needs the module again.

        No thread may wait for a message when Python ends. Returns another rank's error if this one
        only echoes it.
        """
        failures = self.run.failures
        first: BaseException | None = None
        if isinstance(error, Exception) and not self.is_closed:
            first = failures.origin(error)
        if failures.has_failed and not self.is_closed:
            self.is_closed = True
            self._hang_up()
        return first

    def _hang_up(self) -> None:
        """Ends this rank's connections and threads, at once after a failure."""
        has_failed = self.run.failures.has_failed
        self.run.failures.close()
        if has_failed:
            self.on_failure()
        if has_failed and self.lost is not None:  # a rank that is cut off says no goodbye
            self.run.transport.hang_up(APART_S)
        elif has_failed:
            self.run.transport.hang_up()
        else:
            self.run.transport.close()
        if self.run.peers is not None and sys.exc_info()[1] is not None:
            self.run.peers.leave()
        self._steps.close()
        self.run.train_batches = None  # worker processes of a loader end
        self.run.stop_early_modules()

    def _make_whole(self) -> None:
        partition, on_all_ranks = self.run.partition, self.on_all_ranks
        states = [partial.whole_state_dict() for partial in self.run.partial_optimizers]
        partition.reunite(on_all_ranks=on_all_ranks)
        for average in self.run.averages:
            average.reunite(on_all_ranks=on_all_ranks)
        if self.run.control.is_leader or on_all_ranks:
            self.run.module.cpu()
        if self.run.control.is_leader:
            for partial, state in zip(self.run.partial_optimizers, states, strict=True):
                partial.make_whole(state)
