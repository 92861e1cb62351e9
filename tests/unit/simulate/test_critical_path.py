"""Critical path and utilisation of steps worked out by hand."""

from __future__ import annotations

import pytest
from helpers.simulations import simulated_stages

from lightning_gpp.cluster import Link
from lightning_gpp.simulate import Bucket, StepCosts, TaskKind, critical_path, usage

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


def test_the_path_through_two_branches() -> None:
    path = critical_path(BRANCHES)
    assert [str(step.task.action) for step in path.steps] == [
        "0F0", "0SF0>2", "2F0", "2B0", "2SB0>0", "2SB0>1", "1B0", "1B1"
    ]  # fmt: skip
    assert path.duration_s == BRANCHES.step_s == 8.5
    assert path.kind_s == {TaskKind.FORWARD: 2.0, TaskKind.TRANSFER: 1.5, TaskKind.BACKWARD: 5.0}
    assert path.kind_shares[TaskKind.TRANSFER] == pytest.approx(1.5 / 8.5)
    assert path.channel_s == 0.5  # 2SB0>1 waits for 2SB0>0


def test_how_busy_everything_is() -> None:
    found = usage(BRANCHES)
    assert [device.compute_s for device in found.devices] == [6.0, 6.0, 4.0]
    assert [device.bubble_s for device in found.devices] == [2.5, 2.5, 4.5]
    assert found.bubble_share == pytest.approx((2.5 + 2.5 + 4.5) / (3 * 8.5))
    # both micro-batches are in flight on devices 0 and 1, and a backward works
    assert [device.peak_bytes for device in found.devices] == [15.0, 15.0, 13.0]
    busy_s = {channel.name: channel.busy_s for channel in found.channels}
    assert busy_s == {"gpu2 out": 2.0, "gpu0 out": 1.0, "gpu1 out": 1.0}
    assert found.channels[0].name == "gpu2 out"
    assert found.channels[0].waited_s == 1.0  # of 2SB0>1 and of 2SB1>1, half a second each
    assert found.channels[0].busy_s == 2.0


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
        multiples=[2, 2],
        forward_s=[1, 1, 0],
        backward_s=[4, 4, 0],
        link=Link(1.0),
        buckets=[Bucket(0, 3.0, 0.5), Bucket(0, 3.0, 1.0)],
        step=StepCosts(optimizer_s={0: 1.0, 1: 0.5}),
    )
    path = critical_path(found)
    assert found.step_s == path.duration_s == 1 + 2 + 3 + 3 + 1
    assert path.kind_s == {
        TaskKind.FORWARD: 1.0,
        TaskKind.BACKWARD: 2.0,
        TaskKind.REDUCE: 6.0,
        TaskKind.OPTIMIZER: 1.0,
    }
    assert path.channel_s == 1.0  # the second bucket is there at 5 s and begins at 6 s
