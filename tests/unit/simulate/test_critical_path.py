"""Critical path and utilisation of steps worked out by hand."""

from __future__ import annotations

import pytest
from helpers.simulations import simulated_stages

from lightning_gpp.cluster import Link
from lightning_gpp.simulate import (
    Bucket,
    Simulation,
    SpanKind,
    StepCosts,
    TransferKind,
    critical_path,
    predicted_timeline,
    shares,
)

BRANCHES = simulated_stages(
    "0>2 1>2",
    3,
    num_microbatches=2,
    message_bytes=0.5,
    link=Link(1.0),
    backward_s=[2, 2, 1],
    memory=(10.0, 2.0, 1.0),
)
"""The picture is in test_engine.py, ``test_two_branches``: a step of 8.5 s."""


def kind_s(simulation: Simulation) -> dict[SpanKind | TransferKind, float]:
    """Kind of task -> its seconds on the path."""
    found: dict[SpanKind | TransferKind, float] = {}
    for step in critical_path(simulation):
        found[step.task.kind] = found.get(step.task.kind, 0.0) + step.duration_s
    return found


def test_the_path_through_two_branches() -> None:
    path = critical_path(BRANCHES)
    assert [str(step.task.action) for step in path] == [
        "0F0", "0SF0>2", "2F0", "2B0", "2SB0>0", "2SB0>1", "1B0", "1B1"
    ]  # fmt: skip
    assert path[-1].end_s == BRANCHES.step_s == 8.5
    parts = {SpanKind.FORWARD: 2.0, TransferKind.MESSAGE: 1.5, SpanKind.BACKWARD: 5.0}
    assert kind_s(BRANCHES) == parts


def test_how_busy_everything_is() -> None:
    timeline = predicted_timeline(BRANCHES)
    found = shares(timeline)
    assert [rank.bubble_s for rank in found.ranks] == [2.5, 2.5, 4.5]
    assert found.bubble_share == pytest.approx((2.5 + 2.5 + 4.5) / (3 * 8.5))
    # both micro-batches are in flight on devices 0 and 1, and a backward works
    assert [curve.peak_bytes for curve in timeline.memory] == [15.0, 15.0, 13.0]
    busy_s: dict[str, float] = {}
    for one in timeline.transfers:
        (channel,) = one.channels
        busy_s[channel] = busy_s.get(channel, 0.0) + one.duration_s
    assert busy_s == {"gpu2 out": 2.0, "gpu0 out": 1.0, "gpu1 out": 1.0}
    # 2SB0>1 and 2SB1>1 wait for the messages to stage 0, half a second each
    assert sorted(one.waited_s for one in timeline.transfers)[-2:] == [0.5, 0.5]


def test_a_sum_in_the_middle_of_a_backward() -> None:
    """The path takes the part of the backward after which the first bucket is there.

    .. code-block:: text

        seconds       0    1    2    3    4    5    6    7    8    9
        both devices  |-F--|---------B---------|
        sums                         |------0------|------1------|
        path          |-F--|----B----|------0------|------1------|
    """
    found = simulated_stages(
        "0>1",
        2,
        devices=[(0, 1), 0],
        shares=[(1, 1), (2,)],
        forward_s=[1, 1, 0],
        backward_s=[4, 4, 0],
        link=Link(1.0),
        buckets=[Bucket(0, 3.0, 0.5), Bucket(0, 3.0, 1.0)],
        step=StepCosts(optimizer_s={0: 1.0, 1: 0.5}),
    )
    assert found.step_s == critical_path(found)[-1].end_s == 1 + 2 + 3 + 3 + 1
    assert kind_s(found) == {
        SpanKind.FORWARD: 1.0,
        SpanKind.BACKWARD: 2.0,
        TransferKind.SUM: 6.0,
        SpanKind.OPTIMIZER: 1.0,
    }
    # the second bucket is there at 5 s and begins at 6 s
    assert max(one.waited_s for one in predicted_timeline(found).transfers) == 1.0
