"""The simulator on random programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from helpers.simulations import Case, random_simulations, send_seconds
from helpers.stage_dags import compute_actions
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.schedule import Action, Kind, Program, dry_run
from lightning_gpp.simulate import (
    Simulation,
    SpanKind,
    StepCosts,
    TransferKind,
    critical_path,
    predicted_timeline,
    shares,
    simulate,
)
from lightning_gpp.simulate.program_costs import Overhead, compute_s

STEPS = st.builds(
    StepCosts,
    data_s=st.sampled_from([0.0, 3.0]),
    prepare_s=st.sampled_from([0.0, 0.5]),
    feed_s=st.sampled_from([0.0, 0.25]),
    turn_s=st.sampled_from([0.0, 0.5]),
    finish_s=st.sampled_from([{}, {0: 0.5}]),
    optimizer_s=st.sampled_from([{}, {0: 2.0}]),
    send=st.sampled_from([Overhead(), Overhead(0.25, 0.5)]),
    receive=st.sampled_from([Overhead(), Overhead(0.5)]),
    action_s=st.sampled_from([0.0, 0.25]),
)
ANYTHING = random_simulations(private_channels=False, step=STEPS)


@st.composite
def simulations(draw: st.DrawFn) -> Simulation:
    """Any program with any costs."""
    case = draw(ANYTHING)
    return simulate(case.program, case.costs)


def dependencies(program: Program, action: Action) -> Iterator[Action]:
    """The compute actions whose results one compute action needs."""
    is_forward = action.kind is Kind.FORWARD
    if not is_forward:
        yield Action(action.stage, Kind.FORWARD, action.microbatch)
    for edge, (other, _, _, index) in program.exchanged(action, is_needed=True):
        part = program.parts[edge.source, edge.target][index]
        yield Action(
            other, action.kind, part.source_microbatch if is_forward else part.target_microbatch
        )


@given(random_simulations(with_replicas=False))
def test_without_sums_it_is_the_dry_run(case):
    def action_s(action):
        if action.kind.is_compute:
            return compute_s(case.costs, action)
        return send_seconds(case, action) if action.kind.is_send else 0.0

    expected = dry_run(case.program, action_s)
    found = simulate(case.program, case.costs)
    assert found.step_s == expected.step_s
    starts = {task.action: task.start_s for task in found.tasks if task.device is not None}
    assert starts == expected.start_s


@given(simulations())
def test_the_critical_path_has_no_gap(found):
    path = critical_path(found)
    end_s = max(task.end_s for task in found.tasks)
    bounds = [(step.task.start_s, step.end_s) for step in path]
    assert [start for start, _ in bounds] == [0.0, *(end for _, end in bounds[:-1])]
    assert path[-1].end_s == end_s
    assert sum(Fraction(step.duration_s) for step in path) == Fraction(end_s)
    for step in path:
        assert step.end_s <= step.task.end_s
        assert step.end_s == step.task.end_s or step.task.kind is SpanKind.BACKWARD


@given(simulations())
def test_nothing_does_two_things_at_a_time_and_no_work_is_lost(found):
    _check_exclusive(found)
    _check_complete(found)
    _check_order(found)


def _check_exclusive(found: Simulation) -> None:
    """So no step is shorter than what its busiest device or channel has to do."""
    places: dict[object, list[tuple[float, float]]] = {}
    for task in found.tasks:
        for place in (task.device, *task.channels):
            if place is not None:
                places.setdefault(place, []).append((task.start_s, task.end_s))
    end_s = max(task.end_s for task in found.tasks)
    for spans in places.values():
        spans.sort()
        assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:]))
        assert sum(end - start for start, end in spans) <= end_s
    for rank in shares(predicted_timeline(found)).ranks:
        assert 0 <= rank.bubble_s <= sum(rank.seconds.values()) <= end_s * (1 + 1e-9)


def _check_complete(found: Simulation) -> None:
    program = found.program
    expected = [*compute_actions(program), *_sends(found)]
    work = (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.FEED, TransferKind.MESSAGE)
    done = [task.action for task in found.tasks if task.kind in work]
    assert sorted(map(str, done)) == sorted(map(str, expected))
    sums = [t for t in found.tasks if t.kind is TransferKind.SUM]
    groups = [program.reduce_groups[bucket.group] for bucket in found.costs.buckets]
    buckets = sum(group.stage is not None for group in groups)
    shared = {
        index: group
        for index, group in enumerate(program.reduce_groups)
        if group.stage is None
        and any(b.group == index and b.size_bytes for b in found.costs.buckets)
    }
    messages = sum(2 * (len(group.devices) - 1) for group in shared.values())
    assert len(sums) == buckets + messages


def _sends(found: Simulation) -> list[Action]:
    return [a for actions in found.program.actions for a in actions if a.kind.is_send]


def _check_order(found: Simulation) -> None:
    """Whatever the program says that an action needs is over before it starts."""
    times = {task.action: task for task in found.tasks if task.kind in _COMPUTE}
    for action, task in times.items():
        assert action is not None
        for need in dependencies(found.program, action):
            assert times[need].end_s <= task.start_s
    for task in found.tasks:
        assert task.cause is None or found.tasks[task.cause].start_s <= task.start_s
        if task.kind is SpanKind.OPTIMIZER:
            before = [t for t in found.tasks if t.device == task.device]
            assert max(t.end_s for t in before) == task.end_s
            assert all(
                t.end_s <= task.start_s
                for t in found.tasks
                if t.kind is TransferKind.SUM
                and t.device is None
                and t.action is not None
                and t.action.kind is Kind.REDUCE
                and found.program.reduce_groups[t.action.microbatch].stage is not None
                and task.device in found.program.reduce_groups[t.action.microbatch].devices
            )


_COMPUTE = (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.FEED)


@given(random_simulations(with_replicas=False, step=STEPS), st.data())
def test_on_private_channels_more_speed_never_costs_time(case, data):
    """Every device and every port has a fixed order then.

    With shared channels, or sums of gradients that go through the ports of messages, the order is
    that of arrival, and there are anomalies: see Graham's in ``test_engine.py``.
    """
    before_s = simulate(case.program, case.costs).step_s
    assert simulate(case.program, faster(case, data)).step_s <= before_s


def faster(case: Case, data: st.DataObject):
    """Some stages, one kind of link and the user's step take less time than before."""
    factors = st.sampled_from([0.0, 0.5, 1.0])
    costs = case.costs
    stages = tuple(
        replace(
            stage,
            forward_s=stage.forward_s * data.draw(factors),
            backward_s=stage.backward_s * data.draw(factors),
        )
        for stage in costs.stages
    )
    link = costs.cluster.host_link
    link = replace(link, latency_s=link.latency_s * data.draw(factors))
    step = replace(costs.step, feed_s=costs.step.feed_s * data.draw(factors))
    cluster = replace(costs.cluster, host_link=link)
    return replace(costs, stages=stages, cluster=cluster, step=step)
