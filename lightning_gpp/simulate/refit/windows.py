"""Costs of recorded windows, where the pipeline does not drain between steps.

Seconds of forwards, backwards, messages and the user's step are means. What a rank does between two
windows (results are joined and told, the optimizer, hooks, data) is one number: the median, as a
validation may come between; it is the update of the simulation. Links are as they are taken for.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_gpp.graph import FEED
from lightning_gpp.schedule import Program
from lightning_gpp.simulate.program_costs import ProgramCosts
from lightning_gpp.simulate.refit.fit import fit_receive, fit_send
from lightning_gpp.simulate.refit.recorded import timeline_messages
from lightning_gpp.simulate.timeline.span import SpanKind
from lightning_gpp.simulate.timeline.timeline import Timeline


def windows_costs(
    timelines: Sequence[Timeline], program: Program, costs: ProgramCosts
) -> ProgramCosts:
    """The costs of a program with the seconds that its recorded windows took.

    Args:
        timelines: of windows; at least one.
        program: that has them, or windows of the same stages.
        costs: of the program, for what timelines do not show.
    """
    loss, loss_s = program.loss_stage, _mean_s(timelines, program.loss_stage, SpanKind.LOSS)
    messages = [list(timeline_messages(timeline)) for timeline in timelines]
    gaps = [gap for timeline in timelines for gap in _gaps(timeline)]
    between_s: dict[int, list[float]] = {}
    for gap in gaps:
        if gap.is_between:
            between_s.setdefault(gap.device, []).append(gap.seconds)
    return replace(
        costs,
        stages=tuple(
            replace(
                known,
                forward_s=_mean_s(timelines, stage, SpanKind.FORWARD) + (stage == loss) * loss_s,
                backward_s=_mean_s(timelines, stage, SpanKind.BACKWARD),
            )
            for stage, known in enumerate(costs.stages)
        ),
        step=replace(
            costs.step,
            feed_s=_mean_s(timelines, FEED, SpanKind.FEED),
            loss_s=loss_s,
            optimizer_s={device: statistics.median(found) for device, found in between_s.items()},
            send=fit_send(messages),
            receive=fit_receive(messages),
            action_s=_mean([gap.seconds for gap in gaps if not gap.is_between]),
        ),
    )


def _mean_s(timelines: Sequence[Timeline], stage: int, kind: SpanKind) -> float:
    """Seconds of the spans of one kind of a stage."""
    return _mean(
        [
            span.duration_s
            for timeline in timelines
            for span in timeline.spans
            if span.kind is kind and span.stage == stage
        ]
    )


def _mean(found: Sequence[float]) -> float:
    return statistics.fmean(found) if found else 0.0


@dataclass(frozen=True, slots=True)
class _Gap:
    """What is between two actions of a device.

    Attributes:
        device: whose.
        seconds: from the end of the one to the start of the other.
        is_between: whether a window ends in it.
    """

    device: int
    seconds: float
    is_between: bool


def _gaps(timeline: Timeline) -> Iterator[_Gap]:
    for rank, device in enumerate(timeline.devices):
        spans = timeline.of_rank(rank)
        numbers = [number for number, span in enumerate(spans) if span.action is not None]
        for one, other in pairwise(numbers):
            before, after = spans[one], spans[other]
            if before.action != after.action:
                yield _Gap(device, after.start_s - before.end_s, is_between=other > one + 1)
