"""Training steps that run once per micro-batch, inside a schedule that saves memory.

They add up to the step of one device if the loss is a mean over samples. On some mini-batches,
those with new shapes or of a new kind (``CountedEntries``) and the 1st, 2nd, 4th, 8th and so on,
the step also runs on two neighbouring micro-batches together, each time others, with the outputs
that their forwards gave: its loss has to have the same gradients at these outputs. Two need little
more memory than one, which is what the schedule is there for. Gradients tell more than values,
which may be alike by chance or hide a small term behind a large one, and each of their rows comes
from the same arithmetic: they differ by a few roundings only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_gpp.capture.checks.check import is_autocast, is_tf32, of_other_sizes
from lightning_gpp.capture.checks.rollback import random_state, rollback
from lightning_gpp.capture.values.arguments import OtherFormError
from lightning_gpp.capture.values.structure import map_tensors
from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.common.torch_device import widest_float
from lightning_gpp.runtime.payload import tensors_in
from lightning_gpp.strategy.cutting.cutting import (
    CannotJoinError,
    Dims,
    Values,
    input_slices,
    join_values,
)
from lightning_gpp.strategy.cutting.microbatches import (
    batch_size,
    chosen_samples,
    copy_tensors,
    cut_batch,
)
from lightning_gpp.strategy.logging.logs import recording
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.messages import Minibatch
from lightning_gpp.strategy.state.precision import loss_scale
from lightning_gpp.strategy.step.cut_checks import CountedEntries, why_not_cut
from lightning_gpp.strategy.step.suspended_steps import (
    OpenStep,
    Step,
    SuspendedSteps,
    microbatch_loss,
)

DRAWS = (
    "training_step draws random numbers. With schedule='1f1b' it runs once per micro-batch, so it "
    "draws other numbers than one device, and whether the loss is a mean over samples cannot be "
    "checked. schedule='gpipe' runs the step once, with the numbers of one device."
)


CHANGES = (
    "training_step changes {}. With schedule='1f1b' it runs once per micro-batch, so it does that "
    "{} times per batch, each time for a part of it. schedule='gpipe' runs the step once per batch."
)
_ROUNDINGS = 16
"""Units of the last place by which the same gradients may differ, relative to all of them: rows
that no other touches differed by none, and by up to 0.7 where the step multiplies with a matrix of
300 columns, as sums are ordered by the size of the batch; the rest is for wider ones."""

_COARSEST = 0.05
"""Whatever the precision (the units of bfloat16 are 0.8 %)."""

_MOST_SHAPES = 16
"""Mini-batches that are looked at for their shapes alone; a run may have new ones for ever."""

Gradients = Sequence[Tensor | None]


class OutputGradients:
    """Gradients of two neighbouring micro-batches' losses at the outputs of the forward.

    Args:
        dims: of the samples, for every output.
        sizes: samples of each micro-batch of the mini-batch.
        first: number of the first of the two.
    """

    def __init__(self, dims: Dims, sizes: Sequence[int], first: int) -> None:
        self._dims, self._sizes, self._total = dims, list(sizes[first : first + 2]), sum(sizes)
        self.pair = (first, first + 1)
        start = sum(sizes[:first])
        self.samples = slice(start, start + sum(self._sizes))
        """Those of the two."""
        self._outputs: list[dict[str, Any]] = []
        self._gradients: list[Gradients] = []

    def take(self, microbatch: int, outputs: Values, loss: Tensor) -> None:
        """Notes those of a micro-batch, if it is one of the two.

        Args:
            microbatch: its number; they come in order.
            outputs: of its forward, which the loss was made of.
            loss: times the share of its samples in the mini-batch.
        """
        if microbatch in self.pair:
            self._gradients.append(_gradients(loss, outputs))
            self._outputs.append(map_tensors(dict(outputs), _leaf))

    @property
    def used(self) -> frozenset[str]:
        """The outputs that the losses were made of."""
        return frozenset(
            name
            for found in self._gradients
            for (name, _), gradient in zip(self._places(), found, strict=True)
            if gradient is not None
        )

    def _places(self) -> list[tuple[str, int | None]]:
        """For every tensor of the outputs the name of its output, and the dimension of samples."""
        return [
            (name, dim)
            for name, value in self._outputs[0].items()
            for _, dim in zip(tensors_in([value]), chain(self._dims.get(name, ()), repeat(None)))
        ]

    def is_off(self, loss_of: Callable[[Values], Tensor]) -> bool:
        """Whether they differ from those of the step on both by more than rounding.

        Args:
            loss_of: runs the step on the samples of both, given the outputs of their forward.

        Raises:
            CannotJoinError: an output is not one entry per sample.
        """
        joined: dict[str, Any] = {}
        for name, value in self._outputs[0].items():
            column = [{name: outputs[name]} for outputs in self._outputs]
            try:
                joined |= join_values(column, self._dims, self._sizes)
            except CannotJoinError:
                if name in self.used:
                    raise
                joined[name] = value  # no loss is made of it
        loss = loss_of(joined) * (sum(self._sizes) / self._total)
        theirs = [_gradients(loss, outputs) for outputs in self._outputs]
        tensors = tensors_in(list(self._outputs[0].values()))
        columns = [zip(*each, strict=True) for each in (self._gradients, theirs)]
        for tensor, (_, dim), *both in zip(tensors, self._places(), *columns, strict=True):
            # Of an output that both have whole the sum counts.
            mine, others = (each if dim is not None else [_sum(each)] for each in both)
            if _differ(mine, others, tensor):
                return True
        return False


def each_apart(outputs: Values) -> Values:
    """The same; the gradient at one does not come through another that was made of it."""
    apart: Values = map_tensors(dict(outputs), lambda tensor: tensor.view_as(tensor))
    return apart


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _gradients(loss: Tensor, outputs: Values) -> Gradients:
    """Of the loss at every tensor of some outputs; None where it has none."""
    tensors = tensors_in(list(outputs.values()))
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    found: Gradients = [None] * len(wanted)
    if loss.requires_grad and wanted:
        found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    left = iter(found)
    return [next(left) if tensor.requires_grad else None for tensor in tensors]


def _sum(gradients: Gradients) -> Tensor | None:
    there = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(there).sum(0) if there else None


def _norm(gradients: Iterable[Tensor | None]) -> float:
    """Of some together; one that is missing, as of something unused, is zero."""
    norms = []
    for each in gradients:
        if each is not None:
            real = torch.view_as_real(each) if each.is_complex() else each
            norms.append(float(torch.linalg.vector_norm(real, dtype=widest_float(each.device))))
    return math.hypot(*norms)


def _differ(mine: Gradients, theirs: Gradients, tensor: Tensor) -> bool:
    """Whether gradients at parts of a tensor differ by more than rounding."""
    dtype, device = tensor.dtype, tensor.device
    if not (dtype.is_floating_point or dtype.is_complex):
        return False
    relative = min(_ROUNDINGS * torch.finfo(dtype).eps, _COARSEST)
    if is_autocast():
        relative = _COARSEST
    elif torch.finfo(dtype).bits == 32 and is_tf32(device):
        relative = max(relative, of_other_sizes(device))
    # One after the other: they may be as large as all scores of a vocabulary.
    pairs = zip(mine, theirs, strict=True)
    between = (b if a is None else a if b is None else a - b for a, b in pairs)
    return _norm(between) > relative * _norm(theirs)


class MicrobatchSteps(SuspendedSteps):
    """Leads a training step on rank 0.

    Args:
        run: whose pipeline runs them.
    """

    def __init__(self, run: PipelinedRun) -> None:
        super().__init__(run)
        self._num_batches = self._num_looks = 0
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._counted = CountedEntries()
        self._has_drawn = False
        self._changing: set[str] = set()
        self._form: Pipeline | None = None
        self._total, self._loss_scale = 0, 1.0
        self._seen: Sequence[OutputGradients] = ()

    def lead(self, name: str, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the user's step; returns what it returns.

        Raises:
            NotImplementedError: the module optimizes by hand.
        """
        run = self._run
        if not run.module.automatic_optimization:
            raise NotImplementedError(
                "manual optimization needs a training_step that runs once per batch; with the "
                "schedule '1f1b' it runs for every micro-batch. Use schedule='gpipe'."
            )
        num_samples = batch_size(batch)
        step = self._step(name, args, kwargs)
        if self._form is None:
            self._build(name, step, batch, num_samples)
            self._form = run.built
        if all(form is not self._form for form in run.forms):  # there is a new plan
            self._form = run.forms[0]
        run.to_form(self._form)
        run.full_batch = run.full_batch or num_samples
        units = run.unit_sizes(num_samples)
        run.show_state(len(units))
        sizes = run.built.step_sizes(units)
        parts = zip(cut_batch(batch, sizes), sizes, strict=True)
        steps = [self._open(step, part, size) for part, size in parts]
        self.steps, self._total = dict(enumerate(steps)), num_samples
        self._loss_scale = loss_scale(run.module.trainer.precision_plugin)
        # A step that runs once has no loss to compare; stages before it may take less at a time.
        is_once, pairs = len(sizes) == 1, list[int]()
        if min(sizes) > 0 and len(units) > 1:
            pairs = self._pairs(batch, units if is_once else sizes)
        dims = run.built.captured.graph.batch_dims
        firsts = [0] * bool(pairs) if is_once else pairs
        self._seen = [OutputGradients(dims, sizes, first) for first in firsts]
        with run.control.alone(name), run.leader_state.watching(name), self.intercepting():
            try:
                minibatch = Minibatch(units, steps[0].needs, self._loss_scale)
                run.lead(minibatch)
                stash = run.built.train(minibatch, self)
                if len(sizes) > 1:
                    self._warn_of_changes(len(sizes))
                for seen in self._seen:
                    pair = [] if is_once else [steps[each] for each in seen.pair]
                    if pair and self._is_off(step, batch, pair, seen):
                        _refuse("its gradients at the outputs of the forward are others")
                    self._check_cut(steps, units, seen.used)
            finally:
                self.abandon()
                self._seen = ()
        return self._returned(steps, batch, stash)

    def _warn_of_changes(self, num_steps: int) -> None:
        """Says, once for each, which attributes the steps of a mini-batch changed."""
        run = self._run
        leaves = tuple(f"{run.settings.prefix}{leaf}." for leaf in run.built.captured.leaf_modules)
        found = {n for n in run.leader_state.changed_attributes() if not n.startswith(leaves)}
        if names := sorted(found - self._changing):
            self._changing |= found
            rank_zero_warn(CHANGES.format(", ".join(f"self.{n}" for n in names), num_steps))

    def _pairs(self, batch: Any, sizes: Sequence[int]) -> list[int]:
        """Counts a mini-batch; the first of each two micro-batches of it that are looked at.

        Args:
            batch: the mini-batch.
            sizes: samples of each micro-batch.
        """
        self._num_batches += 1
        pairs = self._counted.new_pairs(self._run.originals.of(batch), sizes)
        shapes = tuple(tensor.shape for tensor in tensors_in([batch]))
        is_new = shapes not in self._shapes and len(self._shapes) < _MOST_SHAPES
        self._shapes |= {shapes} if is_new else set()
        is_power_of_two = self._num_batches & (self._num_batches - 1) == 0
        if (is_power_of_two or is_new) and not pairs:
            pairs = [self._num_looks % (len(sizes) - 1)]
        self._num_looks += bool(pairs)
        return pairs

    def finish(self, microbatch: int, outputs: Mapping[str, Any]) -> Tensor:
        """Goes on with its step; returns its loss times the share of its samples, scaled."""
        if self._seen:
            outputs = each_apart(outputs)
        share = self.steps[microbatch].size / self._total if self._total else 1.0
        loss = super().finish(microbatch, outputs) * share
        for seen in self._seen:
            seen.take(microbatch, outputs, loss)
        return loss if self._loss_scale == 1 else loss * self._loss_scale

    def _is_off(
        self, step: Step, batch: Any, pair: Sequence[OpenStep], seen: OutputGradients
    ) -> bool:
        """Whether two micro-batches' losses show that they are not that of the step on both.

        A step that draws numbers shows nothing; that is said once.
        """
        run, captured = self._run, self._run.built.captured
        both = chosen_samples(batch, seen.samples)

        def loss_of_both(outputs: Values) -> Tensor:
            def forward(*args: Any, **kwargs: Any) -> Any:
                # Of graphs the numbers of vertices are counted anew.
                try:
                    inputs = captured.inputs(args, kwargs)
                except OtherFormError:
                    raise CannotCompareError from None
                theirs = inputs if captured.takes_graphs else self._inputs(pair) or {}
                if inputs.keys() != theirs.keys() or not all(
                    map(torch.equal, inputs.values(), map(theirs.__getitem__, inputs))
                ):
                    raise CannotCompareError
                return captured.output(outputs)

            with instance_attribute(run.target, "forward", forward):
                return microbatch_loss(step(copy_tensors(both)))

        before = random_state(run.device)
        with (
            run.leader_state.preserved(),
            rollback(run.module),
            recording(run.module, lambda *args, **kwargs: None),
            torch.enable_grad(),
        ):
            try:
                is_off = seen.is_off(loss_of_both)
            except (CannotCompareError, CannotJoinError):
                is_off = False  # the forward is tried
            if torch.equal(before, random_state(run.device)):
                return is_off
        if not self._has_drawn:
            self._has_drawn = True
            rank_zero_warn(DRAWS)
        return False

    def _inputs(self, steps: Sequence[OpenStep]) -> Values | None:
        """The joined arguments of some steps' forwards; None where they cannot be joined."""
        dims = self._run.built.captured.graph.batch_dims
        try:
            return join_values([each.inputs() for each in steps], dims, [s.size for s in steps])
        except CannotJoinError:
            return None

    def _check_cut(
        self, steps: Sequence[OpenStep], units: Sequence[int], used: frozenset[str]
    ) -> None:
        """Refuses a forward that a few samples show to be another one where it is cut."""
        run, captured = self._run, self._run.built.captured
        if captured.takes_graphs:  # which cannot be joined
            steps, units = steps[:1], [1] * steps[0].size
        inputs = steps[0].inputs() if captured.takes_graphs else self._inputs(steps)
        if inputs is None or input_slices(captured, inputs, units) is None:
            _refuse(captured.where_samples_meet(used))
        else:
            _refuse(why_not_cut(run, inputs, units, is_trained=True, averaged=used))


class CannotCompareError(BaseException):
    """The step on two joined micro-batches calls the forward in another way than on each."""


def _refuse(why_not: str | None) -> None:
    """Refuses a mini-batch whose micro-batches do not add up to it, if there is a reason."""
    if why_not is not None:
        raise ValueError(
            f"the loss of this mini-batch is not the mean over its samples: {why_not}. "
            "schedule='1f1b' runs the step once per micro-batch and needs such a mean. Use "
            "schedule='gpipe', which runs the step once on the whole batch."
        )
