"""A refit of recorded windows, where the pipeline does not drain between steps.

Seconds of forwards, backwards, messages and the user's step are means. What a rank does between two
windows (results are joined and told, the optimizer, hooks, data) is one number: the median, as a
validation may come between; it is the optimizer's of the refit. Links are as they are taken for.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_gpp.planner import Plan, PlanRequest
from lightning_gpp.schedule import Program
from lightning_gpp.simulate.refit.fit import fit_receive, fit_send
from lightning_gpp.simulate.refit.from_timelines import refit_of_actions
from lightning_gpp.simulate.refit.recorded import timeline_messages
from lightning_gpp.simulate.refit.records import devices_of
from lightning_gpp.simulate.refit.refit import Refit
from lightning_gpp.simulate.timeline.span import SpanKind
from lightning_gpp.simulate.timeline.timeline import Timeline
from lightning_gpp.simulate.timeline.windows import pace_s


def refit_windows(
    timelines: Sequence[Timeline], program: Program, plan: Plan, request: PlanRequest
) -> Refit:
    """What recorded windows say about the costs that their plan was made from.

    Args:
        timelines: of windows; at least one.
        program: that has them, or windows of the same stages.
        plan: what it was made from.
        request: the question that the plan answers, with the costs to correct.
    """

    def action_s(stage: int, kind: SpanKind) -> float:
        return _mean([s.duration_s for s in spans if s.kind is kind and s.stage == stage])

    spans = [span for timeline in timelines for span in timeline.spans]
    messages = [list(timeline_messages(timeline)) for timeline in timelines]
    gaps = [gap for timeline in timelines for gap in _gaps(timeline)]
    between_s: dict[int, list[float]] = {}
    for gap in gaps:
        if gap.is_between:
            between_s.setdefault(gap.device, []).append(gap.seconds)
    return replace(
        refit_of_actions(action_s, program, plan, request),
        steps=tuple(timeline.step for timeline in timelines if timeline.step is not None),
        step_s=statistics.median(pace_s(timeline) or timeline.step_s for timeline in timelines),
        devices=tuple(
            replace(held, optimizer_s=statistics.median(between_s[held.device]))
            if held.device in between_s
            else held
            for held in devices_of(plan, request.graph)
        ),
        send=fit_send(messages),
        receive=fit_receive(messages),
        action_s=_mean([gap.seconds for gap in gaps if not gap.is_between]),
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
