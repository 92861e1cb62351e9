"""A part of a timeline in which mini-batches overlap: the windows of some of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_gpp.schedule import Program, Window
from lightning_gpp.simulate.timeline.measured_path import with_inferred_path
from lightning_gpp.simulate.timeline.span import Span, SpanKind
from lightning_gpp.simulate.timeline.timeline import MemoryCurve, Timeline


def windows_of(
    timeline: Timeline, program: Program, windows: range, *, updates: Sequence[int] | None = None
) -> Timeline:
    """Of every rank what it did in the windows of some mini-batches, as recorded ones are shown.

    Mini-batches are numbered from the first of them, and time begins with their first span.
    Transfers and the critical path are those that spans tell: what was before is not there.

    Args:
        timeline: of the whole program.
        program: of several mini-batches, of one micro-batch each.
        windows: their numbers, one after the other; at least one.
        updates: of all parameters before every window, where an update may take several; one of
            each window, from 0 on, if not given.
    """
    kept = [
        span
        for rank, device in enumerate(timeline.devices)
        for span in _kept(timeline, program, windows, rank, device)
    ]
    start_s = min(span.start_s for span in kept)
    step_s = max(span.end_s for span in kept) - start_s
    first = windows.start
    seen = range(len(windows)) if updates is None else updates
    return with_inferred_path(
        replace(
            timeline,
            step_s=step_s,
            spans=tuple(_moved(span, start_s, first, seen) for span in kept),
            transfers=(),
            critical_path=(),
            memory=tuple(_cropped(curve, start_s, step_s) for curve in timeline.memory),
            num_minibatches=len(windows),
        )
    )


def pace_s(timeline: Timeline) -> float | None:
    """Seconds from the end of one mini-batch to the end of the next, the mean of some that overlap.

    A mini-batch ends with its last backward. None where there is only one.
    """
    if timeline.num_minibatches == 1:
        return None
    ends_s = [0.0] * timeline.num_minibatches
    for span in timeline.spans:
        if span.kind is SpanKind.BACKWARD and span.microbatch is not None:
            ends_s[span.microbatch] = max(ends_s[span.microbatch], span.end_s)
    return (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)


def _kept(
    timeline: Timeline, program: Program, windows: range, rank: int, device: int
) -> Iterator[Span]:
    """The spans of a rank in its windows; what is no action belongs to the action before it."""
    wanted = {
        str(action) for number in windows for action in Window(program, number).actions(device)
    }
    is_in = windows.start == 0
    for span in timeline.of_rank(rank):
        if span.action is not None:
            is_in = span.action in wanted
        if is_in:
            yield span


def _moved(span: Span, start_s: float, first: int, updates: Sequence[int]) -> Span:
    """A span as the first window counts."""
    action = span.action
    if action is not None:
        action = str(replace(span.parsed, microbatch=span.parsed.microbatch - first))
    seen = None if span.updates is None else updates[span.updates - first]
    return replace(
        span,
        start_s=span.start_s - start_s,
        end_s=span.end_s - start_s,
        action=action,
        updates=seen,
    )


def _cropped(curve: MemoryCurve, start_s: float, step_s: float) -> MemoryCurve:
    """Memory from a moment on, for some seconds."""
    points = [(time_s - start_s, used) for time_s, used in zip(curve.times_s, curve.used_bytes)]
    before = [used for time_s, used in points if time_s <= 0]
    inside = [(time_s, used) for time_s, used in points if 0 < time_s <= step_s]
    found = [(0.0, before[-1]), *inside] if before else inside
    return replace(
        curve,
        times_s=tuple(time_s for time_s, _ in found),
        used_bytes=tuple(used for _, used in found),
    )
