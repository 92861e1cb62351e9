"""What a rank keeps from the Trainer's setup to its teardown: connections, pipeline, optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_gpp.capture.rollback import rollback
from lightning_gpp.runtime.executor import ActionRecord, Boundary
from lightning_gpp.runtime.gradients import GradientStash
from lightning_gpp.runtime.open_transport import open_transport
from lightning_gpp.runtime.suspend import StepThreads
from lightning_gpp.strategy.control import Control
from lightning_gpp.strategy.evaluation import EvaluatedForward, StepEnd
from lightning_gpp.strategy.failure import FailureWatch
from lightning_gpp.strategy.held_elsewhere import held_elsewhere
from lightning_gpp.strategy.instance_attribute import instance_attribute
from lightning_gpp.strategy.leader_state import LeaderState
from lightning_gpp.strategy.logs import (
    EveryLogCall,
    LogCall,
    LogRecorder,
    recording,
    replay,
)
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
    default_microbatches,
    few_samples,
    refuse_full_graph,
    size_or_none,
    unit_sizes,
)
from lightning_gpp.strategy.optimizers import PartialOptimizer
from lightning_gpp.strategy.pipeline import (
    Pipeline,
    Settings,
    build_pipeline,
    pipelined_module,
    share_parameters,
)
from lightning_gpp.strategy.recorder import StepRecorder
from lightning_gpp.strategy.steps import LOSS_CHECK, ForwardCall, StepBoundary, first_call


class Session:
    """One run of ``fit``, ``validate``, ``test`` or ``predict`` on this rank.

    All ranks call the same methods in the same order. The pipeline is built at the first batch,
    because capture needs an example.

    Args:
        settings: what the user asked for.
        device: where this rank's stages run.
        host: address of rank 0.
    """

    def __init__(self, settings: Settings, device: torch.device, host: str) -> None:
        self.settings = settings
        self.device = device
        self.transport = open_transport(device, settings.timeout_s)
        self.control = Control(self.transport, settings.timeout_s)
        self.failures = FailureWatch(host, self.transport.abort)
        self.pipeline: Pipeline | None = None
        self.on_built: Callable[[Pipeline, int], None] | None = None
        self.on_record: Callable[[ActionRecord], None] | None = None
        self.recorder = StepRecorder()
        self._threads = StepThreads()
        self._module: pl.LightningModule | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._partial_optimizers: list[PartialOptimizer] = []
        self._stash: GradientStash | None = None
        self._train_modes: dict[str, bool] = {}
        self._has_trained = False
        self._leader_state: LeaderState | None = None
        self._full_batch = 0
        self._is_separable: dict[tuple[str, int], bool] = {}

    def attach(self, module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Takes the whole module and the optimizers of all its parameters."""
        pipelined_module(module, self.settings.module)
        self._module = module
        self._optimizers = optimizers
        self._train_modes = _modes(module)
        self._leader_state = LeaderState(module, optimizers)

    @property
    def leader_state(self) -> LeaderState:
        """What user code on rank 0 changes."""
        assert self._leader_state is not None, "no module is attached"
        return self._leader_state

    @property
    def module(self) -> pl.LightningModule:
        """The LightningModule."""
        assert self._module is not None, "no module is attached"
        return self._module

    # Steps -----------------------------------------------------------------------------------

    def step(self, name: str, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the user's step of a mini-batch through the pipeline and logs what it logs.

        Args:
            name: of the step (``"training_step"``).
            batch: the mini-batch, on rank 0.
            args: what the step takes after the batch.
            kwargs: likewise, by name.

        Returns:
            What the step returns; on other ranks than 0 the loss, or None.
        """
        with self.failures.guard():
            if name != "training_step":
                result, calls = self._evaluate(name, batch, args, kwargs)
            elif self.control.is_leader:
                result, calls = self._lead(name, batch, args, kwargs)
            else:
                result, calls = self._follow(name)
            replay(self.module, calls)
        return result

    # Evaluation ------------------------------------------------------------------------------

    def _evaluate(
        self, name: str, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, list[LogCall]]:
        if not self.control.is_leader:
            return None, self._follow_evaluation(name)
        method = getattr(self.module, name)

        def step(batch: Any) -> Any:
            with held_elsewhere(self.module, self.device):
                return method(batch, *args, **kwargs)

        num_samples = size_or_none(batch)
        if self.pipeline is None:
            self._build_for_evaluation(name, step, batch, num_samples)
        logged = EveryLogCall(self.module)
        with (
            self.control.alone(name),
            self.leader_state.watching(name),
            self._evaluated_forward(name, num_samples),
            recording(self.module, logged),
        ):
            result = step(batch)
        calls = logged.calls(batch)
        self.control.tell(StepEnd(calls, self.leader_state.take_changes()))
        return result, calls

    def _follow_evaluation(self, name: str) -> list[LogCall]:
        while True:
            message = self.control.hear(f"waiting for rank 0's {name}")
            if isinstance(message, StepEnd):
                self.leader_state.apply(message.changes)
                return message.calls
            if message is None:
                self._build(None, 0)
            else:
                self._run(message, None)

    def _build_for_evaluation(
        self, name: str, step: Callable[[Any], Any], batch: Any, num_samples: int | None
    ) -> None:
        """Rank 0: builds the pipeline if the step calls the forward; tells the others by None."""
        units = [1] if num_samples is None else self._unit_sizes(num_samples)
        parts = [batch] if num_samples is None else cut_batch(copy_tensors(batch), units)
        boundary = self._boundary(name, step, parts, units)
        with self.leader_state.preserved():
            call = first_call(self.module, boundary)
        if call is not None:
            self.control.tell(None)
            self._build(call, len(units))

    def _evaluated_forward(
        self, name: str, num_samples: int | None
    ) -> contextlib.AbstractContextManager[None]:
        """Rank 0: puts the pipeline in the place of the forward while an evaluation step runs."""
        if self.pipeline is None:  # the step calls no forward
            return contextlib.nullcontext()

        def run(sizes: Sequence[int], boundary: Boundary) -> None:
            self.control.tell(list(sizes))
            self._run(sizes, boundary)

        forward = EvaluatedForward(
            self.pipeline.captured,
            run,
            self._evaluation_sizes,
            num_samples=num_samples,
            step=name,
            is_separable=self._is_separable,
        )
        target = pipelined_module(self.module, self.settings.module)
        return instance_attribute(target, "forward", forward)

    # Training --------------------------------------------------------------------------------

    def _lead(
        self, name: str, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, list[LogCall]]:
        num_samples = batch_size(batch)
        refuse_full_graph(batch, self.settings.num_microbatches)
        method = getattr(self.module, name)

        def step(microbatch: Any) -> Any:
            with held_elsewhere(self.module, self.device):
                return method(microbatch, *args, **kwargs)

        is_first = not self._has_trained
        if is_first:
            self._check_fills_microbatches(num_samples)
            self._full_batch = num_samples
        if self.pipeline is None:
            units = self._unit_sizes(num_samples)
            boundary = self._boundary(name, step, cut_batch(copy_tensors(batch), units), units)
            with self.leader_state.preserved():
                call = first_call(self.module, boundary)
            if call is None:
                raise boundary.no_call()
            self._build(call, len(units))
        assert self.pipeline is not None
        self.pipeline.captured.check_reads()
        if is_first:
            self._has_trained = True
            with self.leader_state.preserved():
                self._lead_loss_check(step, batch, num_samples)
        units = self._unit_sizes(num_samples)
        self.control.tell(units)
        sizes = self.pipeline.step_sizes(units)
        boundary = self._boundary(name, step, cut_batch(batch, sizes), sizes)
        with self.control.alone(name), self.leader_state.watching(name), boundary.active():
            stash = self._train(units, boundary)
        result, calls = boundary.result(), boundary.log_calls(batch)
        changes = self.leader_state.take_changes()
        value = result["loss"] if isinstance(result, Mapping) else result
        self.control.tell((value, calls, changes))
        loss = stash.loss(value)
        return ({**result, "loss": loss} if isinstance(result, Mapping) else loss), calls

    def _follow(self, name: str) -> tuple[Any, list[LogCall]]:
        if self.pipeline is None:
            self._build(None, 0)
        if not self._has_trained:
            self._has_trained = True
            self._follow_loss_check()
        units = self.control.hear(f"waiting for rank 0 to begin {name}")
        stash = self._train(units, None)
        value, calls, changes = self.control.hear(f"waiting for the result of {name}")
        self.leader_state.apply(changes)
        return stash.loss(value.to(self.device)), calls

    def _train(self, units: Sequence[int], boundary: StepBoundary | None) -> GradientStash:
        assert self.pipeline is not None and self._stash is not None
        for partial in self._partial_optimizers:
            partial.adopt_new_groups(self.module, self.pipeline.partition.held_parameters())
        with self._stash, torch.enable_grad():
            self._run(units, boundary, has_backward=True)
        return self._stash

    def _run(
        self, units: Sequence[int], boundary: Boundary | None, *, has_backward: bool = False
    ) -> None:
        assert self.pipeline is not None
        self.pipeline.record(self.on_record)
        recorder = self.recorder.run(self.pipeline.executor) if has_backward else nullcontext()
        with recorder:
            self.pipeline.run(
                units, has_backward=has_backward, training=self.module.training, boundary=boundary
            )

    def _boundary(
        self, name: str, step: Callable[[Any], Any], parts: Sequence[Any], sizes: Sequence[int]
    ) -> StepBoundary:
        boundary = StepBoundary(
            self.module,
            pipelined_module(self.module, self.settings.module),
            step,
            name=name,
            microbatches=parts,
            sizes=sizes,
            is_training=name == "training_step",
            threads=self._threads,
        )
        boundary.captured = None if self.pipeline is None else self.pipeline.captured
        return boundary

    def _lead_loss_check(self, step: Callable[[Any], Any], batch: Any, num_samples: int) -> None:
        """Rank 0: compares the loss of a few samples in one piece and in halves."""
        assert self.pipeline is not None
        total = sum(CHECKED_WHOLE)
        runs = [CHECKED_WHOLE, CHECKED_WHOLE, CHECKED_HALVES]
        if num_samples < total or len(self._unit_sizes(num_samples)) == 1:
            runs = []
        self.control.tell(runs)
        if not runs:
            return
        few = few_samples(batch, total, num_samples)
        probe = LossProbe(step)
        means = []
        with rollback(self.module), torch.no_grad():
            self.module.eval()
            for sizes in runs:
                boundary = self._boundary(LOSS_CHECK, probe, cut_batch(few, sizes), sizes)
                with boundary.active():
                    self.pipeline.run(sizes, has_backward=False, training=False, boundary=boundary)
                means.append(probe.mean())
        if text := mismatch(means[0], means[1], means[2], probe.tolerance):
            rank_zero_warn(text)

    def _follow_loss_check(self) -> None:
        assert self.pipeline is not None
        with rollback(self.module), torch.no_grad():
            self.module.eval()
            for units in self.control.hear("waiting for rank 0 to check the loss"):
                self.pipeline.run(units, has_backward=False, training=False, boundary=None)

    def _check_fills_microbatches(self, num_samples: int) -> None:
        """A full mini-batch must fill all micro-batches; small ones later get fewer."""
        asked = self.settings.num_microbatches
        if asked is not None and num_samples < asked:
            raise ValueError(
                f"a mini-batch of {num_samples} samples cannot be cut into "
                f"num_microbatches={asked}; use a larger batch or fewer micro-batches"
            )

    def _evaluation_sizes(self, num_samples: int) -> list[int]:
        """Samples of each micro-batch of an evaluation batch."""
        return self._unit_sizes(num_samples, at_a_time=1)

    def _unit_sizes(self, num_samples: int, at_a_time: int | None = None) -> list[int]:
        """Samples of each of the smallest micro-batches of a mini-batch."""
        if at_a_time is None:
            at_a_time = 1 if self.pipeline is None else self.pipeline.largest_multiple
        return unit_sizes(
            num_samples,
            full=max(self._full_batch, num_samples),
            asked=self.settings.num_microbatches or default_microbatches(dist.get_world_size()),
            at_a_time=at_a_time,
        )

    def _build(self, call: ForwardCall | None, num_microbatches: int) -> None:
        """Captures, plans, partitions. Rank 0 gives the example and the number."""
        if self.module.training:
            self._train_modes = _modes(self.module)
        logged = LogRecorder(self.module)
        with recording(self.module, logged):
            pipeline = build_pipeline(
                self.settings,
                self.module,
                call,
                num_microbatches=num_microbatches,
                train_modes=self._train_modes,
                transport=self.transport,
                control=self.control,
                device=self.device,
            )
        if calls := logged.combined(None):
            raise RuntimeError(
                f"forward logs {calls[0].name!r}, which a pipelined forward cannot: it is captured "
                "once and runs on several ranks. Return the value and log it in the step."
            )
        held = pipeline.partition.held_parameters()
        self._partial_optimizers = [
            PartialOptimizer.keep(optimizer, self.module, held) for optimizer in self._optimizers
        ]
        pipeline.partition.spread()
        share_parameters(pipeline, pipelined_module(self.module, self.settings.module))
        self._stash = GradientStash(held)
        holders = pipeline.partition.owners.holders
        self.leader_state.settle(frozenset(n for n, ranks in holders.items() if ranks != (0,)))
        self.pipeline = pipeline
        if self.on_built is not None:
            self.on_built(pipeline, num_microbatches)

    # State -----------------------------------------------------------------------------------

    def module_state_dict(self) -> dict[str, Any]:
        """On rank 0 the state dict of the whole module; elsewhere with ``meta`` tensors."""
        if self.pipeline is None:
            return self.module.state_dict()
        with self.failures.guard():
            partition = self.pipeline.partition
            partition.make_whole(partition.whole_values())
            state = self.module.state_dict()
            partition.make_partial()
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """On rank 0 the state that one device would write; elsewhere this rank's own."""
        for partial in self._partial_optimizers:
            if partial.optimizer is optimizer:
                with self.failures.guard():
                    return partial.whole_state_dict(self.control)
        return optimizer.state_dict()

    # End -------------------------------------------------------------------------------------

    def close(self, *, on_all_ranks: bool) -> None:
        """Makes the module whole and closes the connections.

        Args:
            on_all_ranks: whether ranks other than 0 go on with the module, as they do when every
                rank runs the user's script.
        """
        if self.failures.has_failed:
            self.failures.close()
            self.transport.hang_up()
        else:
            with self.failures.guard():
                if self.pipeline is not None:
                    self._make_whole(self.pipeline, on_all_ranks)
                dist.barrier()
            self.failures.close()
            self.transport.close()
        self._threads.close()

    def _make_whole(self, pipeline: Pipeline, on_all_ranks: bool) -> None:
        partition = pipeline.partition
        values = partition.whole_values()
        states = [partial.whole_state_dict(self.control) for partial in self._partial_optimizers]
        partition.make_whole(values)
        if on_all_ranks:
            mine = partition.values() if self.control.is_leader else {}
            partition.make_whole(self.control.share(mine, "waiting for the trained weights"))
        if self.control.is_leader:
            self.module.cpu()
            for partial, state in zip(self._partial_optimizers, states, strict=True):
                partial.make_whole(self.module, state)


def _modes(module: pl.LightningModule) -> dict[str, bool]:
    return {name: part.training for name, part in module.named_modules()}
