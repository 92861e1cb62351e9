"""Whether cutting a batch changes what the pipelined forward returns, tried on a few samples.

The forward alone runs: in one piece, with other samples beside the first, and cut; where outputs
differ, twice more in one piece, to see whether it is random. In training mode layers are random
(dropout) or compare samples on purpose (batch normalisation, which takes the statistics of a
micro-batch as it does of a process under DDP); what training mode cannot tell is found out in
evaluation mode. Of a forward that drew random numbers at capture, training mode only tells whether
it fails when it is cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_gpp.capture.checks.rollback import rollback
from lightning_gpp.common.units_of_measure import seconds_text
from lightning_gpp.planner import evaluate_plan
from lightning_gpp.runtime.boundary import Boundary
from lightning_gpp.runtime.executor import NothingCameError
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
    run: PipelinedRun,
    inputs: Mapping[str, Tensor],
    units: Sequence[int],
    *,
    is_trained: bool,
    said: set[str],
) -> bool:
    """Rank 0: whether calls of the forward can be cut; says so if not.

    Args:
        run: whose pipeline runs them.
        inputs: arguments of a call, by name.
        units: samples of each of the smallest micro-batches if it is cut.
        is_trained: whether it is cut as a mini-batch that trains.
        said: reasons that were given before, which are not given again.
    """
    why_not = why_not_cut(run, inputs, units, is_trained=is_trained)
    if why_not is not None and why_not not in said:
        said.add(why_not)
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
    at_a_time = run.built.placed.units_at_a_time
    if len(units) % at_a_time:
        is_trained = False  # too few for the stages' own micro-batches: all take the smallest
    training = captured.module.training
    normalizes = any(operator.state for operator in captured.graph)
    # a few samples may not show it
    met = None
    if not is_trained or _num_apart(units, at_a_time):
        met = captured.where_samples_meet(training and not normalizes, averaged)
    if known := captured.decision or met:
        return known
    few = [2 if min(units) > 1 else 1] * len(units)
    first = some_samples(captured, inputs, sum(few), sum(units))
    # Of a random forward nothing can be compared: it is only seen whether its parts fail.
    num_whole = 0 if training and captured.is_random else 2
    trial = Trial(few, is_trained, training, Autocast.current(run.device), num_whole)
    verdict = _tried(run, first, trial, averaged)
    is_open = not verdict.is_sure or (verdict.why_not is not None and normalizes)
    if training and is_open and not verdict.fails:
        verdict = _tried(run, first, replace(trial, training=False, num_whole=2), averaged)
    return verdict.why_not if verdict.is_sure else None


def holds_for(run: PipelinedRun, units: Sequence[int], *, is_trained: bool) -> tuple[bool, ...]:
    """What a verdict holds for: calls in the same mode that are cut in the same manner."""
    at_a_time = run.built.placed.units_at_a_time
    is_trained = is_trained and not len(units) % at_a_time
    is_apart = _num_apart(units, at_a_time) > 0
    return run.built.captured.module.training, is_trained, is_apart


def _tried(
    run: PipelinedRun,
    inputs: Mapping[str, Tensor],
    trial: Trial,
    averaged: frozenset[str] | None,
) -> Verdict:
    captured = run.built.captured
    dims, num_samples = captured.graph.batch_dims, sum(trial.units)
    num_first = _num_apart(trial.units, run.built.placed.units_at_a_time)

    def at(values: Values, rows: Tensor) -> Values:
        """Batches of graphs stay as they are: their shapes differ from sample to sample."""
        return values if captured.takes_graphs else at_rows(values, dims, rows, num_samples)

    rows = torch.arange(num_samples)
    others = at(inputs, rows % (num_first or num_samples))
    turned = at(inputs, rows.flip(0))  # samples may look at those in front of them only
    boundaries, errors = _ran(run, trial, [inputs, others][: trial.num_whole], turned, averaged)
    if errors:
        return Verdict(True, f"forward fails on a part of the samples ({errors[0]})", fails=True)
    if not trial.num_whole:
        return Verdict(False, None)
    whole, beside_others = (boundary.take_outputs() for boundary in boundaries[:-1])

    def touched(again: Values) -> str | None:
        if not num_first:
            return None
        return influence(whole, again, beside_others, dims, num_samples, num_first)

    try:
        joined = boundaries[-1].take_outputs(averages=averaged is not None)
        why_not = difference(joined, at(whole, rows.flip(0)))
    except CannotJoinError as error:
        why_not = str(error)
    if why_not is None and touched(whole) is None:
        return Verdict(True, None)
    repeated = replace(trial, is_cut=False)
    boundaries, _ = _ran(run, repeated, [inputs] * repeated.num_whole, inputs, averaged)
    once, again = (boundary.take_outputs() for boundary in boundaries)
    is_sure = difference(again, once) is None
    return Verdict(is_sure, touched(again) if is_sure and why_not is None else why_not)


def _ran(
    run: PipelinedRun,
    trial: Trial,
    whole: Sequence[Mapping[str, Tensor]],
    cut: Mapping[str, Tensor],
    averaged: frozenset[str] | None,
) -> tuple[list[CallBoundary], list[str]]:
    """Runs a trial on these inputs: what its passes returned, the cut one last, and its errors."""
    captured = run.built.captured
    sizes: Sequence[int] = [sum(trial.units)]
    calls = [(inputs, sizes) for inputs in whole]
    if trial.is_cut:
        calls.append((cut, run.built.call_sizes(trial.units, is_trained=trial.is_trained)))
    boundaries = [
        CallBoundary.of(captured, {name: tensor.clone() for name, tensor in inputs.items()}, sizes)
        for inputs, sizes in calls
    ]
    run.lead(trial)
    with (
        waiting_for("Trying whether batches can be cut", run.module),
        run.control.together(),
    ):
        errors = take_part(run, trial, boundaries)
    if averaged is not None:
        for boundary in boundaries:
            boundary.leave_only(averaged)
    return boundaries, errors


def _num_apart(units: Sequence[int], at_a_time: int) -> int:
    """Samples, about half, that no stage takes together with the rest; 0 if there are none."""
    return sum(units[: len(units) // at_a_time // 2 * at_a_time])


def take_part(
    run: PipelinedRun, trial: Trial, boundaries: Sequence[Boundary | None] = ()
) -> list[str]:
    """All ranks: runs the forward in one piece, as often as is said, and cut; leaves no trace.

    Args:
        run: whose pipeline runs it.
        trial: what is tried.
        boundaries: on rank 0 those of all passes, the one that is cut last.

    Returns:
        On rank 0 the errors, those of stages that got nothing from others last.
    """
    pipeline = run.built
    whole = [sum(trial.units)]
    errors: list[str] = []
    boundaries = boundaries or [None] * (trial.num_whole + trial.is_cut)
    with rollback(run.module), torch.no_grad():
        run.module.train(trial.training)
        for boundary in boundaries[: trial.num_whole]:
            pipeline.run_forward(whole, training=trial.training, boundary=boundary, errors=errors)
        for boundary in boundaries[trial.num_whole :]:
            pipeline.run_forward(
                trial.units,
                training=trial.training,
                boundary=boundary,
                errors=errors,
                as_trained=trial.is_trained,
            )
    found = run.control.gather(errors, "waiting for what a trial of the forward showed")
    return sorted(itertools.chain(*found), key=lambda text: NothingCameError.__name__ in text)


def _in_one_piece(run: PipelinedRun, why: str, num_samples: int) -> str:
    """The line that says that batches are not cut, and what that costs."""
    costs = ""
    planned = run.built.planned
    if planned is not None:
        cut_s = evaluate_plan(planned.plan, planned.request).step_s
        stages = tuple(  # every one on its first device, all samples at once
            replace(stage, devices=stage.devices[:1], microbatch_multiple=1, shares=())
            for stage in planned.plan.stages
        )
        whole = replace(planned.plan, stages=stages, num_microbatches=1)
        whole_s = evaluate_plan(whole, replace(planned.request, num_microbatches=1)).step_s
        costs = f" ({seconds_text(whole_s)} per step instead of {seconds_text(cut_s)}, predicted)"
    return (
        f"Batches of {num_samples} samples run through the stages in one piece, as {why}. That is "
        f"exact, but stages of one branch do not overlap{costs}."
    )
