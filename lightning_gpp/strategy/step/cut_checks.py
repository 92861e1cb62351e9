"""Tries on a few samples whether cutting a batch changes what the forward returns.

The forward alone runs: in one piece, with other samples beside the first, and cut; once more where
these differ. Where layers are random in training (dropout) or compare samples on purpose (batch
normalisation, which takes the statistics of a micro-batch as it does of a process under DDP),
training mode only tells whether it fails when it is cut, and results are compared in evaluation
mode.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_gpp.capture.checks.rollback import rollback
from lightning_gpp.capture.other_sizes import unlike_tried
from lightning_gpp.common.host_copies import to_host
from lightning_gpp.planner.plan.plan_graph import check_cuts
from lightning_gpp.runtime.run_state import Boundary
from lightning_gpp.strategy.cutting.cutting import (
    CannotJoinError,
    Values,
    at_rows,
    difference,
    influence,
    some_samples,
)
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.messages import Autocast, Trial
from lightning_gpp.strategy.report import show, waiting_for
from lightning_gpp.strategy.step.pipelined_call import CallBoundary


class CutChecks:
    """Knows which calls of the forward can be cut; on rank 0.

    Args:
        run: whose pipeline runs them.
    """

    def __init__(self, run: PipelinedRun) -> None:
        self._run = run
        self._num_plans = run.num_plans
        self._can_cut: dict[tuple[int, ...], bool] = {}
        self._most: dict[tuple[int, ...], int] = defaultdict(int)
        self._kinds: dict[tuple[int, ...], CountedEntries] = defaultdict(CountedEntries)
        self._said: set[str] = set()

    def can_cut(
        self, inputs: Mapping[str, Tensor], units: Sequence[int], *, is_trained: bool
    ) -> bool:
        """Whether a call can be cut; tried again where samples differ in what did not before.

        That is told from whole numbers and flags (lengths, masks, numbers of tokens): orders and
        choices of samples are made of them. Tried again with more samples than before, too.

        Args:
            inputs: arguments of the call, by name.
            units: samples of each of the smallest micro-batches if it is cut.
            is_trained: whether it is cut as a mini-batch that trains.
        """
        pipeline = self._run.built
        if self._num_plans != self._run.num_plans:
            self._num_plans = self._run.num_plans
            self._can_cut.clear()
            self._most.clear()
        at_a_time = pipeline.placed.units_at_a_time
        key = (
            id(pipeline),
            pipeline.captured.module.training,
            is_trained and not len(units) % at_a_time,
            _num_apart(units, at_a_time) > 0,
        )
        if self._can_cut.get(key, True):
            numbers = [each for each in inputs.values() if not each.is_floating_point()]
            is_new = bool(self._kinds[key].new_pairs(self._run.originals.of(numbers), units))
            if is_new or sum(units) > self._most[key]:
                self._most[key] = sum(units)
                why_not = why_not_cut(self._run, inputs, units, is_trained=is_trained)
                self._can_cut[key] = why_not is None
                if why_not is not None and why_not not in self._said:
                    self._said.add(why_not)
                    remedy = ""
                    if "entropy" in why_not or "loss" in why_not:
                        remedy = " Compute the loss in your step, from what forward returns."
                    show(
                        f"Batches of {sum(units)} samples run through the stages in one piece, as "
                        f"{why_not}. That is exact, but stages of one branch do not overlap."
                        f"{remedy}"
                    )
        return self._can_cut[key]


def why_not_cut(
    run: PipelinedRun,
    inputs: Mapping[str, Tensor],
    units: Sequence[int],
    *,
    is_trained: bool,
    averaged: frozenset[str] | None = None,
) -> str | None:
    """Rank 0: tries a few samples; why cutting them changes the outputs, None if nothing says so.

    Args:
        run: whose pipeline runs them.
        inputs: arguments of a call, by name.
        units: samples of each of the smallest micro-batches if it is cut.
        is_trained: whether it is cut as a mini-batch that trains.
        averaged: outputs that are looked at, if those which are not one entry per sample are
            averaged; None looks at all, and does not.
    """
    captured, at_a_time = run.built.captured, run.built.placed.units_at_a_time
    try:
        check_cuts(run.built.placed, captured.graph)
    except ValueError as error:  # this form of call does not fit the replicas of the first
        return str(error)
    is_trained = is_trained and not len(units) % at_a_time  # else all take the smallest
    whole: list[str] = []
    if is_trained:
        stages = zip(run.built.plan.stages, run.built.placed.shares)
        whole = [op for stage, of in stages if max(of) == len(units) for op in stage.operators]
    # a few samples may not show it
    if (known := captured.where_samples_meet(averaged, whole)) is not None:
        return known
    few = [*units] if captured.by_size else [2 if min(units) > 1 else 1] * len(units)
    if not captured.takes_graphs:
        why_not = unlike_tried(captured, (few[0], sum(few)), (*units, sum(units)))
        if why_not is not None:
            return why_not
    first = some_samples(captured, inputs, sum(few), sum(units))
    is_training = captured.module.training
    normalizes = any(operator.state for operator in captured.graph)
    differs = is_training and (normalizes or captured.verified.is_random)
    for training in (True, False) if differs else (is_training,):
        trial = Trial([few], is_trained, training, Autocast.current(run.device))
        compares = not (training and differs)
        why_not = _tried(run, first, trial, averaged) if compares else _runs(run, [first], trial)[1]
        if why_not is not None:
            return why_not
    return None


def _tried(
    run: PipelinedRun, inputs: Mapping[str, Tensor], trial: Trial, averaged: frozenset[str] | None
) -> str | None:
    """Why it cannot be cut; None where nothing says so, or the forward differs by itself."""
    captured, (units,) = run.built.captured, trial.passes
    dims, num_samples = captured.graph.batch_dims, sum(units)
    num_first = _num_apart(units, run.built.placed.units_at_a_time)

    def at(values: Values, rows: Tensor) -> Values:
        """Batches of graphs stay as they are: their shapes differ from sample to sample."""
        return values if captured.takes_graphs else at_rows(values, dims, rows, num_samples)

    def taken(boundary: CallBoundary) -> Values:
        if averaged is not None:
            boundary.outputs = [{n: o[n] for n in o if n in averaged} for o in boundary.outputs]
        return boundary.take_outputs(averages=averaged is not None)

    def found(again: Values) -> str | None:
        if joined is not None and (why_not := difference(joined, at(whole, rows.flip(0)))):
            return why_not
        return influence(whole, again, beside_others, dims, num_samples, num_first)

    rows = torch.arange(num_samples)
    others = at(inputs, rows % (num_first or num_samples))
    turned = at(inputs, rows.flip(0))  # samples may look at those in front of them only
    in_whole = [num_samples]
    trial = replace(trial, passes=[in_whole, in_whole, units])
    boundaries, why_not = _runs(run, [inputs, others, turned], trial)
    if why_not is not None:
        return why_not
    whole, beside_others = map(taken, boundaries[:-1])
    joined = None
    try:
        joined = taken(boundaries[-1])
        why_not = found(whole)
    except CannotJoinError as error:
        why_not = str(error)
    if why_not is None:
        return None
    # after another call, which may have changed a buffer
    (_, boundary), _ = _runs(run, [inputs] * 2, replace(trial, passes=[in_whole] * 2))
    again = taken(boundary)
    why_not = why_not if joined is None else found(again)
    return why_not if difference(again, whole) is None else None


def _runs(
    run: PipelinedRun, inputs: Sequence[Mapping[str, Tensor]], trial: Trial
) -> tuple[list[CallBoundary], str | None]:
    """Rank 0: runs the passes of a trial with these inputs; why they fail, if they do."""
    boundaries = [
        CallBoundary.of(
            run.built.captured,
            {name: tensor.clone() for name, tensor in given.items()},
            run.built.call_sizes(units, is_trained=trial.is_trained) if len(units) > 1 else units,
        )
        for given, units in zip(inputs, trial.passes, strict=True)
    ]
    run.lead(trial)
    with waiting_for("Trying whether batches can be cut", run.module), run.control.together():
        errors = take_part(run, trial, boundaries)
    return boundaries, f"forward fails on a part of the samples ({errors[0]})" if errors else None


def _num_apart(units: Sequence[int], at_a_time: int) -> int:
    """Samples, about half, that no stage takes together with the rest; 0 if there are none."""
    return sum(units[: len(units) // at_a_time // 2 * at_a_time])


def take_part(
    run: PipelinedRun, trial: Trial, boundaries: Sequence[Boundary | None] = ()
) -> list[str]:
    """All ranks: runs the forward as often as is said; leaves no trace.

    Args:
        run: whose pipeline runs it.
        trial: what is tried.
        boundaries: on rank 0 those of all passes.

    Returns:
        On rank 0 the errors.
    """
    errors: list[str] = []
    with rollback(run.module), torch.no_grad():
        run.module.train(trial.training)
        for units, boundary in itertools.zip_longest(trial.passes, boundaries):
            run.built.run_forward(
                units,
                training=trial.training,
                boundary=boundary,
                errors=errors,
                as_trained=trial.is_trained and len(units) > 1,
            )
    found = run.control.gather(errors, "waiting for what a trial of the forward showed")
    return [*itertools.chain(*found)]


_MOST_VALUES = 8
"""Of a tensor's largest or most common values: with more of them they mean nothing special."""

_SMALL = 1 << 16
"""Entries of a tensor up to which all of these are looked for."""

_Key = tuple[int, str, float]
"""Leaf of the batch, what is counted, its value."""


class CountedEntries:
    """Of which entries micro-batches have unequal numbers: padding, ignored labels, masks.

    A loss may be a mean over some entries only (``ignore_index``, a mask), which is a mean over
    samples as long as every micro-batch has as many of them. Which entries it leaves out is not
    known, so those that losses do leave out are counted: zeros, negative numbers, NaN, the largest
    value (255, the size of a vocabulary) and the most common one (padding). A mini-batch is of a
    new kind if micro-batches differ in the number of entries that did not differ before.
    """

    def __init__(self) -> None:
        self._known: set[_Key] = set()
        self._num_values: Counter[tuple[int, str]] = Counter()

    def new_pairs(self, batch: Any, sizes: Sequence[int]) -> list[int]:
        """Micro-batches that differ, each from the next, in what did not differ before; a few.

        Args:
            batch: the mini-batch.
            sizes: samples of each micro-batch.
        """
        new: dict[_Key, set[int]] = {}
        for key, counts in _counts(batch, sum(sizes)):
            if key in self._known or self._num_values[key[:2]] == _MOST_VALUES:
                continue
            left = iter(counts)
            means = [sum(next(left) for _ in range(size)) / size for size in sizes]
            if firsts := {i for i, (one, other) in enumerate(pairwise(means)) if one != other}:
                new[key] = firsts
        self._known.update(new)
        self._num_values.update(key[:2] for key in new)
        pairs = []
        while new:
            ((first, _),) = Counter(chain(*new.values())).most_common(1)
            pairs.append(first)
            new = {key: firsts for key, firsts in new.items() if first not in firsts}
        return pairs


def _counts(batch: Any, num_samples: int) -> Iterator[tuple[_Key, Sequence[int]]]:
    """What is counted, and how many a sample has."""
    kinds: list[tuple[int, list[str]]] = []
    tables: list[Tensor] = []
    for index, leaf in enumerate(pytree.tree_leaves(batch)):
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_complex():
            continue
        if leaf.dim() == 0 or len(leaf) != num_samples or not leaf.numel():
            continue
        found = _entries(leaf.detach().reshape(num_samples, -1))
        if found:
            columns = torch.stack([each.sum(1) for _, each, _ in found])
            values = torch.stack([value.to(columns.dtype) for _, _, value in found])
            kinds.append((index, [what for what, _, _ in found]))
            tables.append(torch.cat([values[:, None], columns], 1))
    for (index, whats), numbers in zip(kinds, to_host(tables), strict=True):
        for what, (value, *counts) in zip(whats, numbers.tolist(), strict=True):
            yield (index, what, value), counts


def _entries(rows: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """What is counted in a tensor: its name, where it is, and its value if that may vary."""
    none, is_small = rows.new_zeros(()), rows.numel() <= _SMALL
    if rows.dtype == torch.bool:
        return [("zero", ~rows, none)]
    if rows.is_floating_point():
        return [("zero", rows == 0, none), ("nan", rows.isnan(), none)] if is_small else []
    most = rows.max()
    found = [("zero", rows == 0, none), ("negative", rows < 0, none), ("most", rows == most, most)]
    if is_small:
        common = _most_common(rows.flatten())
        found.append(("common", rows == common, common))
    return found


def _most_common(numbers: Tensor) -> Tensor:
    """The most common of some whole numbers; torch's own way waits for a GPU several times."""
    numbers = numbers.long()
    if numbers.device.type == "cpu":
        low, high = numbers.aminmax()
        if int(high) - int(low) < _SMALL:  # may exceed int64: hashed ids
            return torch.bincount(numbers - low).argmax() + low
    ordered = numbers.sort().values
    ends = torch.searchsorted(ordered, ordered, right=True)
    return ordered.take((ends - torch.searchsorted(ordered, ordered)).argmax())
