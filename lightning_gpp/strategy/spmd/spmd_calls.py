"""Rank 0: what stands in for the divided forward while the user's step runs.

A call goes to all ranks with the whole batch. A call of a new form (sizes, modes, what needs a
gradient) is exported first, here alone, so that a forward that cannot be captured is an ordinary
error of the user's step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_gpp.capture.checks.check import is_autocast
from lightning_gpp.capture.errors import raised_location
from lightning_gpp.capture.tracing.reads import Read, check_reads, is_as_read, watched_reads
from lightning_gpp.common.instance_attribute import taken_away
from lightning_gpp.spmd.run.export import CallForm, ExportedForward, ExportError, export_forward
from lightning_gpp.spmd.run.operator_calls import is_random
from lightning_gpp.strategy.ranks.messages import Autocast, Build
from lightning_gpp.strategy.report import waiting_for
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


def call_key(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """Equal for two calls exactly if one export serves both.

    Args:
        module: whose forward is called.
        args: of the call.
        kwargs: likewise, by name.
    """
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return (
        torch.is_grad_enabled(),
        tuple(part.training for part in module.modules()),
        tuple(parameter.requires_grad for parameter in module.parameters()),
        str(structure),
        *(
            (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else (type(leaf).__name__, repr(leaf))
            for leaf in leaves
        ),
    )


class SpmdCalls(ForwardCalls):
    """Stands in for the divided forward on rank 0.

    Args:
        run: of this rank.
    """

    def __init__(self, run: SpmdRun) -> None:
        super().__init__(run)
        self._divided_run = run
        self._exports: dict[Hashable, _Known] = {}
        self._tentative: Hashable = None
        """The key of a training call that one in evaluation has led to; it may come otherwise."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What forward returns.

        Raises:
            NotImplementedError: it is called under autocast.
        """
        run = self._divided_run
        self.before()
        if is_autocast():
            raise NotImplementedError(NO_AUTOCAST)
        if run.divided is not None:
            run.divided.partition.agree_on_gradients()
        is_trained = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with torch.set_grad_enabled(is_trained):
            known = self._known(args, kwargs)
        check_reads(run.target, known.reads)
        if is_trained:
            run.check_is_divided(known.number)
        inputs = known.form.inputs(args, kwargs)
        needs = frozenset(n for n, t in inputs.items() if t.requires_grad and is_trained)
        message = SpmdForward(
            self._num_calls if is_trained else None,
            [1],
            run.target.training,
            needs,
            Autocast.current(run.device),
            export=known.number,
            seed=int(torch.randint(2**31, ())) if known.is_random else 0,
        )
        values = self._led(message, SpmdBoundary.whole(inputs, needs), inputs)
        return known.form.result([values[name] for name in known.outputs])

    def _known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Known:
        """The export for a call; made, and given to all ranks, if there is none yet."""
        run = self._divided_run
        key = call_key(run.target, args, kwargs)
        if key == self._tentative:
            self._tentative = None
            if not is_as_read(run.target, self._exports[key].reads):
                del self._exports[key]
        if key not in self._exports:
            run.stop_early_modules()
            plain = pytree.tree_map(_out_of_inference, (args, kwargs))
            is_fit = run.module.trainer.state.fn == TrainerFn.FITTING
            if run.divided is None and is_fit and not torch.is_grad_enabled():
                with self._in_training():
                    self._tentative = call_key(run.target, *plain)
                    self._exports[self._tentative] = self._exported(*plain)
            if key not in self._exports:
                self._exports[key] = self._exported(*plain)
        return self._exports[key]

    @contextmanager
    def _in_training(self) -> Iterator[None]:
        """How parameters are stored is for training, which may begin with a validation."""
        run = self._divided_run
        modes = {part: part.training for part in run.target.modules()}
        names = {part: name for name, part in run.module.named_modules()}
        try:
            for part in modes:
                part.training = run.train_modes[names[part]]
            with torch.enable_grad():
                yield
        finally:
            for part, mode in modes.items():
                part.training = mode

    def _exported(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Known:
        """Exports a call, plans it, and gives it to all ranks."""
        run = self._divided_run
        with watched_reads(run.target) as reads:
            exported = self._export(args, kwargs)
        number = 0 if run.divided is None else len(run.divided.interpreters)
        graph = exported.graph
        package = ProgramPackage(graph, exported.constants, run.plan(graph))
        with waiting_for("Giving every rank its parts", run.module), run.control.together():
            run.lead(Build(Autocast.current(run.device)))
            run.build(package)
        run.leader_state.look_again()
        has_random = any(map(is_random, graph.operators))
        return _Known(number, exported.form, graph.outputs, has_random, tuple(reads))

    def _export(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedForward:
        run = self._divided_run
        with (
            waiting_for("Capturing the model", run.module),
            taken_away(run.target, "forward", self.inner),
            lifted(),
            torch.inference_mode(False),
            torch.set_grad_enabled(torch.is_grad_enabled()),
            torch.autocast(run.device.type, enabled=False),
        ):
            run.stop_early_modules()  # or the export would contain how they move
            try:
                return export_forward(run.target, args, kwargs)
            except ExportError as error:
                where = raised_location(error.__cause__ or error)
                raise ExportError(f"{where}: {error}") from None  # which says what torch said


def _out_of_inference(leaf: Any) -> Any:
    """Tensors of inference mode cannot be captured; only the form of arguments counts here."""
    if isinstance(leaf, Tensor) and leaf.is_inference():
        with torch.inference_mode(False):
            return torch.empty(leaf.shape, dtype=leaf.dtype)
    return leaf
