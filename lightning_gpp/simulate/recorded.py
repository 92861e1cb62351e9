"""Refits the costs of a plan to recorded steps.

Of several steps those count that took about the median; of these the mean of every quantity, not
its median: what adds up to a step has to do so after it was averaged, too.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from lightning_gpp.cluster import Cluster
from lightning_gpp.graph import FEED
from lightning_gpp.planner import Plan, PlanRequest
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches
from lightning_gpp.schedule import Kind, Program
from lightning_gpp.simulate.plan_costs import program_costs
from lightning_gpp.simulate.program_costs import Overhead, StepCosts
from lightning_gpp.simulate.refit import Refit, StageRecord
from lightning_gpp.simulate.simulation import simulate
from lightning_gpp.simulate.slow_devices import SlowDevice, slow_devices, usual_kind
from lightning_gpp.simulate.timeline.predicted import predicted_timeline
from lightning_gpp.simulate.timeline.span import Span, SpanKind
from lightning_gpp.simulate.timeline.timeline import Timeline

WARM_UP_STEPS = 2
"""The first steps of a run are not like the others: memory is allocated, code is loaded."""

Point = tuple[float, float]
"""Bytes, and recorded seconds of something with so many."""


def refit(
    timelines: Sequence[Timeline], program: Program, plan: Plan, request: PlanRequest
) -> Refit:
    """Refits the costs of a plan to recorded steps.

    Args:
        timelines: of one step or more, past the warm-up; of several those that took about the
            median count.
        program: what they ran (:func:`check_program`).
        plan: what it was made from.
        request: the question that the plan answers, with the costs to correct.
    """
    slow = slow_devices(timelines, program, plan, request)
    since = max((each.since or 0 for each in slow), default=0)  # devices are as they are now
    used = [t for t in timelines if t.step is None or t.step >= since]
    recorded, devices = Recorded(_typical(used), program), range(plan.num_devices)
    found = Refit(
        steps=tuple(timeline.step for timeline in used if timeline.step is not None),
        step_s=statistics.median(timeline.step_s for timeline in used),
        stages=tuple(_stage_records(recorded, plan, request, slow)),
        besides=_besides(recorded, plan, request.cluster),
        optimizer_s=tuple(map(recorded.optimizer_s, devices)),
        finish_s=tuple(map(recorded.finish_s, devices)),
        slow=tuple(slow),
    )
    if not program.reduce_groups:
        return found
    reduce = _reduce_overhead(found, recorded, plan, request)
    return replace(found, besides=replace(found.besides, reduce=reduce))


@dataclass(frozen=True)
class Recorded:
    """Recorded steps of one program, at least one."""

    timelines: Sequence[Timeline]
    program: Program

    @property
    def ranks(self) -> list[int]:
        """Of the devices."""
        devices = self.timelines[0].devices
        return [devices.index(device) for device in range(len(devices))]

    def mean_s(self, spans: Callable[[Timeline], Iterable[float]]) -> float:
        """The mean over the steps of the mean in a step; 0 where nothing was recorded."""
        means = [statistics.fmean(found) for t in self.timelines if (found := [*spans(t)])]
        return statistics.fmean(means) if means else 0.0

    def action_s(self, stage: int | None, kind: SpanKind) -> float:
        """Seconds of a span of one kind and stage (None: outside of the program)."""
        return self.mean_s(
            lambda t: (s.duration_s for s in t.spans if s.kind is kind and s.stage == stage)
        )

    def optimizer_s(self, device: int) -> float | None:
        """Seconds of the optimizer on a device, once per step; None where there is none."""
        found = [
            [s.duration_s for s in _of_device(t, device) if s.kind is SpanKind.OPTIMIZER]
            for t in self.timelines
        ]
        return statistics.fmean(map(sum, found)) if any(found) else None

    def finish_s(self, device: int) -> float | None:
        """Seconds from the end of a device's actions, and of those of the loss's, to its optimizer.

        None where it has no optimizer.
        """
        found = []
        for timeline in self.timelines:
            own, of_loss = (_of_device(timeline, d) for d in (device, self.program.device(FEED)))
            starts = [span.start_s for span in own if span.kind is SpanKind.OPTIMIZER]
            ends = [span.end_s for span in (*own, *of_loss) if span.action is not None]
            found += [max(0.0, start - max(ends, default=0.0)) for start in starts[:1]]
        return statistics.fmean(found) if found else None

    def gaps_s(self, timeline: Timeline) -> Iterator[float]:
        """Between two actions of a device, the user's step between the halves left out.

        Nor after a send of gradients, behind which inputs of the next step may be sent.
        """
        for spans in timeline_actions(timeline):
            for one, other in pairwise(spans):
                is_turn = self.program.has_turn and (
                    one.parsed.kind.is_forward and not other.parsed.kind.is_forward
                )
                is_turn |= one.parsed.kind is Kind.SEND_BACKWARD
                if one.action != other.action and one.minibatch == other.minibatch and not is_turn:
                    yield other.start_s - one.end_s


def _of_device(timeline: Timeline, device: int) -> tuple[Span, ...]:
    return timeline.of_rank(timeline.devices.index(device))


def _typical(timelines: Sequence[Timeline]) -> list[Timeline]:
    """The half of some steps whose seconds are nearest to their median."""
    median_s = statistics.median(timeline.step_s for timeline in timelines)
    nearest = sorted(timelines, key=lambda timeline: abs(timeline.step_s - median_s))
    return nearest[: (len(timelines) + 1) // 2]


def check_program(timeline: Timeline, program: Program) -> None:
    """Checks that a timeline is of a program.

    Raises:
        ValueError: it is not; the text names the device.
    """
    for device, spans in zip(timeline.devices, timeline_actions(timeline)):
        expected = [*map(str, program.before_update(device))]
        for _, found in groupby(spans, key=lambda span: span.minibatch):
            actions = [action for action, _ in groupby(found, key=lambda span: span.action)]
            if actions != expected:
                raise ValueError(f"its record is incomplete on device {device}")


def timeline_actions(timeline: Timeline) -> list[list[Span]]:
    """The spans of every rank's actions, by mini-batch, in order of time."""
    return [
        sorted(
            (span for span in timeline.of_rank(rank) if span.action is not None),
            key=lambda span: span.minibatch,
        )
        for rank in range(timeline.num_ranks)
    ]


def _besides(recorded: Recorded, plan: Plan, cluster: Cluster) -> StepCosts:
    """What is not of a stage, sums of gradients left out."""
    program, action_s, loss = recorded.program, recorded.action_s, recorded.program.loss_stage
    is_empty = program.replica(loss).stage >= plan.num_stages  # it has the user's step alone
    sends, receives = list[Point](), list[Point]()
    for timeline in recorded.timelines:
        for size_bytes, send_s, receive_s in _messages(timeline, cluster):
            sends.append((size_bytes, send_s))
            receives += [(size_bytes, receive_s)] if receive_s is not None else []
    return StepCosts(
        data_s=action_s(None, SpanKind.DATA),
        prepare_s=action_s(None, SpanKind.PREPARE),
        feed_s=action_s(FEED, SpanKind.FEED),
        feed_backward_s=action_s(FEED, SpanKind.BACKWARD),
        loss_s=action_s(loss, SpanKind.LOSS)
        + (action_s(loss, SpanKind.FORWARD) if is_empty else 0.0),
        loss_backward_s=action_s(loss, SpanKind.BACKWARD) if is_empty else 0.0,
        turn_s=action_s(None, SpanKind.LOSS),
        action_s=recorded.mean_s(recorded.gaps_s),
        send=fit_overhead(sends),
        receive=fit_overhead(receives),
    )


def _messages(timeline: Timeline, cluster: Cluster) -> Iterator[tuple[float, float, float | None]]:
    """Of every message: bytes, seconds of the sender, seconds of the receiver.

    The receiver's are those after it has asked for the message and the link could have brought it;
    they are not known (None) of a message that may have queued behind another one of its devices.
    """
    asked_s: dict[tuple[int, str | None], float] = {}
    for span in timeline.spans:
        if span.kind in (SpanKind.WAIT, SpanKind.RECEIVE):
            key = span.minibatch, span.action
            asked_s[key] = min(asked_s.get(key, span.start_s), span.start_s)
    pairs = [*timeline.messages()]
    for sent, received in pairs:
        if sent.size_bytes is None:
            continue
        has_queued = any(
            (one.rank == sent.rank or other.rank == received.rank)
            and one.end_s <= sent.end_s < other.end_s
            and one is not sent
            for one, other in pairs
        )
        ends = timeline.devices[sent.rank], timeline.devices[received.rank]
        here_s = sent.end_s + cluster.link(*ends).transfer_s(sent.size_bytes)
        begun_s = max(here_s, asked_s[received.minibatch, received.action])
        seconds = None if has_queued else max(0.0, received.end_s - begun_s)
        yield sent.size_bytes, sent.duration_s, seconds


def fit_overhead(points: Iterable[Point]) -> Overhead:
    """The line ``fixed_s + per_byte_s * bytes`` through recorded seconds, not negative.

    The slope is that of the medians of every number of bytes, so that single slow messages do not
    tilt it; the line passes through the mean of all points, so that their sum is kept.

    >>> fit_overhead([(10, 3.0), (30, 4.0)])
    Overhead(fixed_s=2.5, per_byte_s=0.05)
    >>> fit_overhead([(10, 3.0), (10, 4.0)])  # one size does not show a slope
    Overhead(fixed_s=3.5, per_byte_s=0.0)
    """
    seconds: defaultdict[float, list[float]] = defaultdict(list)
    for size_bytes, taken_s in points:
        seconds[size_bytes].append(taken_s)
    if not seconds:
        return Overhead()
    slope = 0.0
    if len(seconds) > 1:
        medians = [statistics.median(found) for found in seconds.values()]
        slope = max(0.0, statistics.linear_regression(list(seconds), medians).slope)
    mean_s = statistics.fmean(s for found in seconds.values() for s in found)
    mean_bytes = statistics.fmean(size for size, found in seconds.items() for _ in found)
    if slope * mean_bytes > mean_s:  # the line would begin below 0
        return Overhead(0.0, mean_s / mean_bytes)
    return Overhead(mean_s - slope * mean_bytes, slope)


def _reduce_overhead(
    found: Refit, recorded: Recorded, plan: Plan, request: PlanRequest
) -> Overhead:
    """What sums of gradients took longer than simulated, by their bytes."""
    asked = found.request(request, recorded.ranks)
    costs = program_costs(plan, asked, step=found.step_costs(plan))
    size_bytes: Counter[int] = Counter()
    for bucket in costs.buckets:
        size_bytes[bucket.group] += round(bucket.size_bytes)
    simulated = dict(_sums(predicted_timeline(simulate(recorded.program, costs))))
    return fit_overhead(
        (size_bytes[key[0]], max(0.0, seconds - simulated.get(key, 0.0)))
        for timeline in recorded.timelines
        for key, seconds in _sums(timeline)
    )


def _sums(timeline: Timeline) -> Iterator[tuple[tuple[int, int], float]]:
    """(group, device) and the seconds since all devices came to it of every sum of gradients."""
    for span in timeline.spans:
        if span.kind is SpanKind.REDUCE:
            yield (span.parsed.microbatch, timeline.devices[span.rank]), span.duration_s


def _stage_records(
    recorded: Recorded, plan: Plan, request: PlanRequest, slow: Sequence[SlowDevice]
) -> Iterator[StageRecord]:
    """Every stage on every kind of device that it runs on; replicas of one kind together."""
    program, ranks = recorded.program, recorded.ranks
    times = {each.rank: each.times for each in slow}
    unit_size = request.minibatch_size / num_microbatches(plan, request)
    replicas: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for number in range(program.num_stages):
        stage = program.replica(number).stage
        if stage < plan.num_stages:
            kind, _ = usual_kind(request.cluster.devices[program.device(number)].kind)
            replicas[stage, kind].append(number)

    def mean_s(numbers: Sequence[int], kind: SpanKind) -> float:
        """As if no device were slow."""
        return statistics.fmean(
            recorded.action_s(n, kind) / times.get(ranks[program.device(n)], 1.0) for n in numbers
        )

    for (stage, kind), numbers in sorted(replicas.items()):
        one = plan.stages[stage]
        yield StageRecord(
            stage,
            kind,
            one.operators,
            unit_size * statistics.fmean(map(program.multiple, numbers)),
            one.recompute,
            mean_s(numbers, SpanKind.FORWARD),
            mean_s(numbers, SpanKind.BACKWARD),
        )
