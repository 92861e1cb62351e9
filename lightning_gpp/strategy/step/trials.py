"""Whether cutting a batch changes what the pipelined forward returns, tried on a few samples.

The forward alone runs: in one piece, once more (to see whether it is random), and cut. In training
mode layers are random (dropout) or compare samples on purpose (batch normalisation, which takes the
statistics of a micro-batch as it does of a process under DDP); what training mode cannot tell is
found out in evaluation mode.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gpp.capture.checks.rollback import rollback
from lightning_gpp.planner import evaluate_plan
from lightning_gpp.runtime.boundary import Boundary
from lightning_gpp.runtime.handover import NothingCameError
from lightning_gpp.strategy.cutting.cutting import (
    CannotJoinError,
    Values,
    difference,
    first_samples,
    influence,
    with_other_neighbours,
)
from lightning_gpp.strategy.cutting.one_piece import one_piece_step_s
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.messages import Autocast, Trial
from lightning_gpp.strategy.report import show
from lightning_gpp.strategy.step.pipelined_call import CallBoundary
from lightning_gpp.units_of_measure import seconds_text


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial showed.

    Attributes:
        is_sure: whether the forward does the same twice.
        why_not: why it cannot be cut; None where it can.
        fails: whether it is because of an error, which other modes would not have.
    """

    is_sure: bool
    why_not: str | None
    fails: bool = False


def find_out(
    run: PipelinedRun, inputs: Mapping[str, Tensor], units: Sequence[int], *, is_trained: bool
) -> bool:
    """Rank 0: whether calls of the forward can be cut; says so once if not.

    Args:
        run: whose pipeline runs them.
        inputs: arguments of a call, by name.
        units: samples of each of the smallest micro-batches if it is cut.
        is_trained: whether it is cut as a mini-batch that trains.
    """
    why_not = why_not_cut(run, inputs, units, is_trained=is_trained)
    if why_not is not None:
        show(_in_one_piece(run, why_not, sum(units)))
    return why_not is None


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
    captured = run.built.captured
    if captured.decision is not None:  # a few samples may not show it
        return captured.decision
    if len(units) % run.built.placed.units_at_a_time:
        is_trained = False  # too few for the stages' own micro-batches: all take the smallest
    few = [2 if min(units) > 1 else 1] * len(units)
    first = first_samples(captured, inputs, sum(few), sum(units))
    training = captured.module.training
    autocast = Autocast.current(run.device)
    verdict = _tried(run, first, Trial(few, is_trained, training, autocast), averaged)
    normalizes = any(operator.state for operator in captured.graph)
    is_open = not verdict.is_sure or (verdict.why_not is not None and normalizes)
    if training and is_open and not verdict.fails:
        verdict = _tried(run, first, Trial(few, is_trained, False, autocast), averaged)
    return verdict.why_not if verdict.is_sure else None


def _tried(
    run: PipelinedRun,
    inputs: Mapping[str, Tensor],
    trial: Trial,
    averaged: frozenset[str] | None,
) -> Verdict:
    captured = run.built.captured
    num_samples = sum(trial.units)
    num_first = _num_apart(trial.units, run.built.placed.units_at_a_time)
    others = with_other_neighbours(captured, inputs, num_samples, num_first or num_samples)
    cut_sizes = run.built.call_sizes(trial.units, is_trained=trial.is_trained)
    passes = [(inputs, [num_samples]), (inputs, [num_samples]), (others, [num_samples])]
    boundaries = [
        CallBoundary.of(captured, {n: t.clone() for n, t in given.items()}, sizes)
        for given, sizes in (*passes, (inputs, cut_sizes))
    ]
    run.lead(trial)
    with run.control.together():
        errors = take_part(run, trial, boundaries)
    if errors:
        return Verdict(True, f"forward fails on a part of the samples ({errors[0]})", fails=True)
    if averaged is not None:
        for boundary in boundaries:
            boundary.leave_only(averaged)
    whole, again, beside_others = (boundary.take_outputs() for boundary in boundaries[:-1])
    is_sure = difference(again, whole) is None
    why_not = _why_not(boundaries[-1], whole, averaged is not None)
    if is_sure and why_not is None and num_first:
        dims = captured.graph.batch_dims
        why_not = influence(whole, again, beside_others, dims, num_samples, num_first)
    return Verdict(is_sure, why_not)


def _num_apart(units: Sequence[int], at_a_time: int) -> int:
    """Samples, about half, that no stage takes together with the rest; 0 if there are none."""
    return sum(units[: len(units) // at_a_time // 2 * at_a_time])


def _why_not(boundary: CallBoundary, whole: Values, averages: bool) -> str | None:
    try:
        return difference(boundary.take_outputs(averages=averages), whole)
    except CannotJoinError as error:
        return str(error)


def take_part(
    run: PipelinedRun, trial: Trial, boundaries: Sequence[Boundary | None] = (None,) * 4
) -> list[str]:
    """All ranks: runs the forward in one piece, three times, and cut; leaves no trace.

    The second time shows whether it does the same twice, the third, with other samples in the
    place of half of them, whether they matter to the rest.

    Returns:
        On rank 0 the errors, those of stages that got nothing from others last.
    """
    pipeline = run.built
    pipeline.record(None)
    whole = [sum(trial.units)]
    errors: list[str] = []
    with rollback(run.module), torch.no_grad():
        run.module.train(trial.training)
        for boundary in boundaries[:-1]:
            pipeline.run_forward(whole, training=trial.training, boundary=boundary, errors=errors)
        try_cut = pipeline.try_forward if trial.is_trained else pipeline.run_forward
        try_cut(trial.units, training=trial.training, boundary=boundaries[-1], errors=errors)
    found = run.control.gather(errors, "waiting for what a trial of the forward showed")
    return sorted(itertools.chain(*found), key=lambda text: NothingCameError.__name__ in text)


def _in_one_piece(run: PipelinedRun, why: str, num_samples: int) -> str:
    """The line that says that batches are not cut, and what that costs."""
    costs = ""
    planned = run.built.planned
    if planned is not None:
        cut_s = evaluate_plan(planned.plan, planned.request).step_s
        whole_s = one_piece_step_s(planned.plan, planned.request)
        costs = f" ({seconds_text(whole_s)} per step instead of {seconds_text(cut_s)}, predicted)"
    return (
        f"Batches of {num_samples} samples run through the stages in one piece, as {why}. That is "
        f"exact, but stages of one branch do not overlap{costs}."
    )
