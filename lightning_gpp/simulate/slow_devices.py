"""Finds devices that became slower than others of their kind.

A device is compared with the others of its kind, each by what it took beside what its profile
says, so that a step that is slow on all of them (a clock of the whole host) accuses none. Profiles
are off by more for some operators than for others, so what counts is the change: later steps
against earlier ones, or devices against replicas of the same stages. That a profile alone accuses a
device takes more.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_gpp.cluster import Cluster, Device
from lightning_gpp.planner import Plan, PlanRequest
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches
from lightning_gpp.planner.step_time.stage_costs import kind_compute
from lightning_gpp.schedule import Program
from lightning_gpp.simulate.timeline.span import SpanKind
from lightning_gpp.simulate.timeline.timeline import Timeline

SLOWER = 1.25
"""Times as long as before, or as replicas of the same stages: what differs less is noise."""

SLOWER_THAN_PROFILE = 2.0
"""Times as long as others of its kind, each by its profile, where nothing else is known."""

FEWEST_STEPS = 2
"""Steps before and after a change that tell of it: one may have been disturbed."""


@dataclass(frozen=True, slots=True)
class SlowDevice:
    """A device that is slower than others of its kind.

    Attributes:
        rank: of the device.
        kind: of which it is.
        times: its time as a multiple of the others'.
        since: first recorded step that shows it; None: all steps do.
    """

    rank: int
    kind: str
    times: float
    since: int | None = None

    def describe(self) -> str:
        """In words."""
        since = "in all recorded steps" if self.since is None else f"since step {self.since}"
        return (
            f"rank {self.rank} ({self.kind}) is {self.times:.2f} times as slow as others of its "
            f"kind, {since}"
        )

    @property
    def own_kind(self) -> str:
        """A kind for it alone, as planners know devices by their kinds."""
        return f"{self.kind}, {self.times:.2f} times as slow"


_OWN_KIND = re.compile(r"(.+), (\d+\.\d\d) times as slow")


def usual_kind(kind: str) -> tuple[str, float]:
    """The kind that a device was before it was found to be slow, and how slow.

    >>> usual_kind(SlowDevice(0, "NVIDIA A10", 1.5).own_kind), usual_kind("cpu")
    (('NVIDIA A10', 1.5), ('cpu', 1.0))
    """
    found = _OWN_KIND.fullmatch(kind)
    return (found[1], float(found[2])) if found else (kind, 1.0)


def with_slow(cluster: Cluster, slow: Iterable[SlowDevice], ranks: Sequence[int]) -> Cluster:
    """The cluster in which these devices, and no others, are slow.

    Args:
        cluster: the devices.
        slow: which are slow.
        ranks: of the devices of the cluster.
    """
    kinds = {each.rank: each for each in slow}

    def seen(device: Device, rank: int) -> Device:
        kind, _ = usual_kind(device.kind)
        is_slow = rank in kinds and kinds[rank].kind == kind
        return replace(device, kind=kinds[rank].own_kind if is_slow else kind)

    return replace(cluster, devices=tuple(map(seen, cluster.devices, ranks)))


def slow_devices(
    timelines: Sequence[Timeline], program: Program, plan: Plan, request: PlanRequest
) -> list[SlowDevice]:
    """The devices that recorded steps show to be slow now.

    Args:
        timelines: of the steps.
        program: what they ran.
        plan: what it was made from.
        request: the question that the plan answers; of devices that it knows to be slow it is
            found out whether they still are.
    """
    steps = sorted(timelines, key=lambda timeline: timeline.step or 0)
    ratios = [_by_profile(timeline, program, plan, request) for timeline in steps]
    seen = set.intersection(*(set(each) for each in ratios))
    work = {
        device: {
            (program.replica(number).stage, program.multiple(number))
            for number in range(program.num_stages)
            if program.device(number) == device
        }
        for device in sorted(seen)
    }
    known = {device: usual_kind(request.cluster.devices[device].kind) for device in work}
    found = []
    for device, (kind, known_times) in known.items():
        others = [each for each in work if each != device and known[each][0] == kind]
        alike = [each for each in others if work[each] == work[device]]
        if not others:
            continue
        compared, is_sure = alike or others, bool(alike) or known_times > 1
        times = [
            known_times * each[device] / statistics.median(each[o] for o in compared)
            for each in ratios
        ]
        since = _change(times)
        before, after = (times[:since], times[since:]) if since else ([1.0], times)
        now = statistics.median(after) / statistics.median(before) * (known_times if since else 1)
        least = SLOWER if since or is_sure else SLOWER_THAN_PROFILE
        if len(after) >= FEWEST_STEPS and (since or _apart(before, after)) and now >= least:
            rank, step = steps[0].devices.index(device), steps[since].step if since else None
            found.append(SlowDevice(rank, kind, round(now, 2), step))
    return found


def _change(times: Sequence[float]) -> int | None:
    """From which step on a device is slower than before; None where that is not so."""
    found = {}
    for first in range(FEWEST_STEPS, len(times) - FEWEST_STEPS + 1):
        before, after = times[:first], times[first:]
        if _apart(before, after) and _usual(after)[0] >= SLOWER * _usual(before)[1]:
            found[first] = _scatter(before) + _scatter(after)
    return min(found, key=found.__getitem__, default=None)


def _scatter(times: Sequence[float]) -> float:
    middle = statistics.median(times)
    return sum(abs(each - middle) for each in times)


def _apart(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether what is between them is more than how far they scatter."""
    (low, high), (later_low, later_high) = _usual(before), _usual(after)
    return later_low - high >= high - low + later_high - later_low


def _usual(times: Sequence[float]) -> tuple[float, float]:
    """Least and greatest without a quarter at either end: other processes disturb some steps."""
    ordered, quarter = sorted(times), len(times) // 4
    return ordered[quarter], ordered[-1 - quarter]


def _by_profile(
    timeline: Timeline, program: Program, plan: Plan, request: PlanRequest
) -> dict[int, float]:
    """Device -> recorded seconds of its stages over those of its profile, of those that have."""
    recorded_s: dict[int, float] = {}
    profile_s: dict[int, float] = {}
    unit_size = request.minibatch_size / num_microbatches(plan, request)
    for number in range(program.num_stages):
        stage, device = program.replica(number).stage, program.device(number)
        if stage >= plan.num_stages:
            continue
        size, kind = unit_size * program.multiple(number), request.cluster.devices[device].kind
        compute = kind_compute(request, plan.stages[stage], size, kind)
        computed_s = compute.forward_s + compute.backward_s
        profile_s[device] = profile_s.get(device, 0.0) + computed_s
        recorded_s[device] = recorded_s.get(device, 0.0) + sum(_means_s(timeline, number))
    return {d: recorded_s[d] / s for d, s in profile_s.items() if s > 0 and recorded_s[d] > 0}


def _means_s(timeline: Timeline, stage: int) -> Iterator[float]:
    """Mean seconds of the forwards and of the backwards of a stage."""
    for kind in (SpanKind.FORWARD, SpanKind.BACKWARD):
        spans = [s.duration_s for s in timeline.spans if s.kind is kind and s.stage == stage]
        if spans:
            yield statistics.fmean(spans)
