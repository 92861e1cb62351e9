"""Rank 0: what stands in for the divided forward while the user's step runs.

A call goes to all ranks with the whole batch. A call of a new form (sizes, modes, what needs a
gradient) is exported first, here alone, so that a forward that cannot be captured is an ordinary
error of the user's step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_gpp.capture.checks.rounding import is_autocast
from lightning_gpp.capture.errors import raised_location
from lightning_gpp.capture.tracing.reads import Read, check_reads, is_as_read, watched_reads
from lightning_gpp.common.instance_attribute import taken_away
from lightning_gpp.spmd.run.export import CallForm, ExportedForward, export_forward
from lightning_gpp.spmd.run.node_reader import ExportError
from lightning_gpp.strategy.ranks.messages import Autocast, Build
from lightning_gpp.strategy.report import waiting_for
from lightning_gpp.strategy.spmd.call_key import call_key
from lightning_gpp.strategy.spmd.spmd_model import ProgramPackage, SpmdBoundary
from lightning_gpp.strategy.spmd.spmd_run import SpmdForward, SpmdRun
from lightning_gpp.strategy.state.held_elsewhere import lifted
from lightning_gpp.strategy.step.forward_calls import ForwardCalls

NO_AUTOCAST = (
    "an SPMD program is of operators with the types that they were exported with, which autocast "
    "would change; use precision='bf16-true' or '16-true', or strategy='graphpipe'"
)


@dataclass(frozen=True, slots=True)
class _Known:
    """An export that all ranks have.

    Attributes:
        number: of it.
        form: of arguments and results.
        outputs: names of the tensors among the results, in order.
        is_random: whether it draws random numbers.
        reads: plain attributes that the forward read.
    """

    number: int
    form: CallForm
    outputs: tuple[str, ...]
    is_random: bool
    reads: tuple[Read, ...]


class SpmdCalls(ForwardCalls):
    """Stands in for the divided forward on rank 0.

    Args:
        run: of this rank.
    """

    def __init__(self, run: SpmdRun) -> None:
        super().__init__(run)
        self._divided_run = run
        self._exports: dict[Hashable, _Known] = {}
        self._planned: tuple[Hashable, _Known] | None = None
        """A training call that one in evaluation has led to: its key, and its export."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What forward returns.

        Raises:
            NotImplementedError: it is called under autocast.
        """
        run = self._divided_run
        self.before()
        if is_autocast():
            raise NotImplementedError(NO_AUTOCAST)
        target = run.target
        if run.divided is not None:
            run.divided.partition.agree_on_gradients()
        is_trained = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with torch.set_grad_enabled(is_trained):
            known = self._known(target, args, kwargs)
        check_reads(target, known.reads)
        inputs = known.form.inputs(args, kwargs)
        seed = int(torch.randint(2**31, ())) if known.is_random else 0
        values = self._ran(target, known, inputs, seed, is_trained=is_trained)
        return known.form.result([values[name] for name in known.outputs])

    def _ran(
        self,
        target: nn.Module,
        known: _Known,
        inputs: Mapping[str, Tensor],
        seed: int,
        *,
        is_trained: bool,
    ) -> Mapping[str, Any]:
        """The results by name."""
        run = self._divided_run
        needs = frozenset(n for n, t in inputs.items() if t.requires_grad and is_trained)
        message = SpmdForward(
            self._num_calls if is_trained else None,
            [1],
            target.training,
            needs,
            Autocast.current(run.device),
            export=known.number,
            seed=seed,
        )
        boundary = SpmdBoundary.whole(inputs, needs)
        if is_trained:
            return self._led(message, boundary, inputs)
        run.lead(message)
        run.run_forward(message, boundary)
        return boundary.take_outputs()

    def _known(self, target: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Known:
        """The export for a call; made, and given to all ranks, if there is none yet."""
        key = call_key(target, args, kwargs)
        if key not in self._exports:
            run, is_trained = self._divided_run, torch.is_grad_enabled()
            run.stop_early_modules()
            plain = pytree.tree_map(_out_of_inference, (args, dict(kwargs)))
            is_fit = run.module.trainer.state.fn == TrainerFn.FITTING
            if run.divided is None and is_fit and not is_trained:
                self._plan_for_training(target, *plain)
            planned_key, planned = self._planned or (None, None)
            if planned and planned_key == key and is_as_read(target, planned.reads):
                run.check_is_divided(planned.number)
                self._exports[key] = planned
            else:
                self._exports[key] = self._exported(target, *plain, is_trained=is_trained)
        return self._exports[key]

    def _exported(
        self, target: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_trained: bool
    ) -> _Known:
        """Exports a call, plans it, and gives it to all ranks."""
        run = self._divided_run
        with lifted():
            run.stop_early_modules()  # or the export would contain how they move
        with watched_reads(target) as reads:
            exported = self._export(target, args, kwargs)
        number = 0 if run.divided is None else len(run.divided.interpreters)
        self._give(exported)
        if is_trained:
            run.check_is_divided(number)
        is_random = any(call.is_random for call in exported.calls)
        outputs = exported.graph.outputs
        return _Known(number, exported.form, outputs, is_random, tuple(reads))

    def _give(self, exported: ExportedForward) -> None:
        """Plans an export and gives it to all ranks."""
        run = self._divided_run
        program = run.plan(exported.graph)
        package = ProgramPackage(exported.graph, exported.calls, exported.constants, program)
        with (
            waiting_for("Giving every rank its parts", run.module),
            run.control.together(),
        ):
            run.lead(Build(Autocast.current(run.device)))
            run.build(package)
        run.leader_state.look_again()

    def _plan_for_training(
        self, target: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Exports the same call in training: how parameters are stored is for that.

        Lightning's sanity check validates before the first training step.
        """
        modes = {part: part.training for part in target.modules()}
        names = {part: name for name, part in self._divided_run.module.named_modules()}
        try:
            for part in modes:
                part.training = self._divided_run.train_modes[names[part]]
            with torch.enable_grad():
                key = call_key(target, args, kwargs)
                exported = self._exported(target, args, kwargs, is_trained=False)
        finally:
            for part, mode in modes.items():
                part.training = mode
        self._planned = key, exported

    def _export(
        self, target: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ExportedForward:
        run = self._divided_run
        with (
            waiting_for("Capturing the model", run.module),
            taken_away(target, "forward", self.inner),
            lifted(),
            torch.inference_mode(False),
            torch.set_grad_enabled(torch.is_grad_enabled()),
            torch.autocast(run.device.type, enabled=False),
        ):
            run.stop_early_modules()  # the capture calls modules, too
            try:
                return export_forward(target, args, kwargs)
            except ExportError as error:
                where = raised_location(error.__cause__ or error)
                raise ExportError(f"{where}: {error}") from None  # which says what torch said


def _out_of_inference(leaf: Any) -> Any:
    """Tensors of inference mode cannot be captured; only the form of arguments counts here."""
    if isinstance(leaf, Tensor) and leaf.is_inference():
        with torch.inference_mode(False):
            return torch.empty(leaf.shape, dtype=leaf.dtype)
    return leaf
