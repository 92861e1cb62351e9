"""Whether cutting a batch changes what the pipelined forward returns, tried on a few samples.

The forward alone runs: in one piece, once more (to see whether it is random), and cut. In training
mode layers are random (dropout) or compare samples on purpose (batch normalisation, which takes the
statistics of a micro-batch as it does of a process under DDP); what training mode cannot tell is
found out in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_gpp.capture.rollback import rollback
from lightning_gpp.planner import evaluate_plan
from lightning_gpp.planner.units_of_measure import seconds_text
from lightning_gpp.runtime.executor import Boundary
from lightning_gpp.strategy.cutting import (
    CannotJoinError,
    Values,
    difference,
    first_samples,
)
from lightning_gpp.strategy.messages import Trial
from lightning_gpp.strategy.one_piece import one_piece_step_s
from lightning_gpp.strategy.pipelined_call import CallBoundary
from lightning_gpp.strategy.report import show

if TYPE_CHECKING:
    from lightning_gpp.strategy.session import Session


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial showed.

    Attributes:
        is_sure: whether the forward does the same twice.
        why_not: why it cannot be cut; None where it can.
    """

    is_sure: bool
    why_not: str | None


def find_out(
    session: Session, inputs: Mapping[str, Tensor], units: Sequence[int], *, is_trained: bool
) -> bool:
    """Rank 0: whether calls of the forward can be cut; says so once if not.

    Args:
        session: whose pipeline runs them.
        inputs: arguments of a call, by name.
        units: samples of each of the smallest micro-batches if it is cut.
        is_trained: whether it is cut as a mini-batch that trains.
    """
    captured = session.built.captured
    few = [2 if min(units) > 1 else 1] * len(units)
    first = first_samples(captured, inputs, sum(few), sum(units))
    training = captured.module.training
    verdict = _tried(session, first, Trial(few, is_trained, training))
    normalizes = any(operator.state for operator in captured.graph)
    if training and (not verdict.is_sure or (verdict.why_not is not None and normalizes)):
        verdict = _tried(session, first, Trial(few, is_trained, False))
    if verdict.is_sure and verdict.why_not is not None:
        show(_in_one_piece(session, verdict.why_not, sum(units)))
        return False
    return True


def _tried(session: Session, inputs: Mapping[str, Tensor], trial: Trial) -> Verdict:
    captured = session.built.captured
    boundaries = [
        CallBoundary.of(captured, {n: t.clone() for n, t in inputs.items()}, sizes)
        for sizes in trial_sizes(session, trial)
    ]
    session.lead(trial)
    take_part(session, trial, boundaries)
    whole, again = (boundary.take_outputs() for boundary in boundaries[:2])
    is_sure = difference(again, whole) is None
    return Verdict(is_sure, _why_not(boundaries[2], whole))


def _why_not(boundary: CallBoundary, whole: Values) -> str | None:
    try:
        return difference(boundary.take_outputs(), whole)
    except CannotJoinError as error:
        return str(error)


def trial_sizes(session: Session, trial: Trial) -> list[list[int]]:
    """Samples of each piece of each pass, as the feed hands them out."""
    whole = [sum(trial.units)]
    cut = session.built.step_sizes(trial.units) if trial.is_trained else trial.units
    return [whole, whole, cut]


def take_part(
    session: Session, trial: Trial, boundaries: Sequence[Boundary | None] = (None,) * 3
) -> None:
    """All ranks: runs the forward in one piece, once more, and cut; leaves no trace."""
    pipeline = session.built
    pipeline.record(None)
    whole = [sum(trial.units)]
    with rollback(session.module), torch.no_grad():
        session.module.train(trial.training)
        for boundary in boundaries[:2]:
            pipeline.run_forward(whole, training=trial.training, boundary=boundary)
        run = pipeline.try_forward if trial.is_trained else pipeline.run_forward
        run(trial.units, training=trial.training, boundary=boundaries[2])


def _in_one_piece(session: Session, why: str, num_samples: int) -> str:
    """The line that says that batches are not cut, and what that costs."""
    costs = ""
    planned = session.built.planned
    if planned is not None:
        cut_s = evaluate_plan(planned.plan, planned.request).step_s
        whole_s = one_piece_step_s(planned.plan, planned.request)
        costs = f" ({seconds_text(whole_s)} per step instead of {seconds_text(cut_s)}, predicted)"
    return (
        f"Batches of {num_samples} samples run through the stages in one piece, as {why}. That is "
        f"exact, but stages of one branch do not overlap{costs}."
    )
