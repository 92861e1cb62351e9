"""Playing the orders of devices, by hand; tests/property compares with simulations of programs."""

from __future__ import annotations

import pytest

from lightning_gpp.graph import FEED
from lightning_gpp.planner.step_time.least_step import TimedEdge, TimedStage, least_step_s
from lightning_gpp.planner.step_time.timing import Sum, Work, play

# Work is numbered on: forwards of a stage, its backwards, the next stage.


#   stage 0   F0 at 0.25, F1 at 1.25                              B0 at 4.25, B1 at 6.25
#   stage 1                           F0 at 1.75, B0 at 2.75, F1 at 3.75, B1 at 4.75, 3 s of sums
def test_two_stages_and_their_messages():
    work = Work(
        seconds=[1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0],
        missing=[1, 1, 1, 1, 1, 1, 0, 0],
        sends=[[(4, 0.5, ())], [(5, 0.5, ())], [], [], [], [], [(2, 0.5, ())], [(3, 0.5, ())]],
        lines=[[0, 1, 2, 3], [4, 6, 5, 7]],
        feeds=[(0, 0.25, ()), (1, 0.25, ())],
        sums=[Sum(1, (7,), ((1.0, 3.0),))],
    )
    found = play(work)
    assert found.start_s == [0.25, 1.25, 4.25, 6.25, 1.75, 3.75, 2.75, 4.75]
    assert found.line_s == [8.25, 5.75]
    assert found.sums_s == [8.75]
    stages = [TimedStage(1, 1, 2, 1.0, 2.0), TimedStage(1, 1, 2, 1.0, 1.0, end_s=3.0)]
    edges = [TimedEdge(FEED, 0, 0.25, None), TimedEdge(0, 1, 0.5, 0.5)]
    assert least_step_s(stages, edges) == 1.75 + 4.0 + 3.0


def test_a_stage_with_larger_micro_batches_waits_for_all_parts():
    work = Work(
        seconds=[1.0] * 8 + [2.0] * 4,
        missing=[0] * 4 + [1] * 4 + [2, 2, 0, 0],
        sends=[
            *([(8, 0.0, ())], [(8, 0.0, ())], [(9, 0.0, ())], [(9, 0.0, ())], [], [], [], []),
            *([], [], [(4, 0.5, ()), (5, 0.5, ())], [(6, 0.5, ()), (7, 0.5, ())]),
        ],
        lines=[[0, 1, 2, 3, 4, 5, 6, 7], [8, 10, 9, 11]],
    )
    # The second part comes 0.5 s after the first.
    assert play(work).start_s == [0.0, 1.0, 2.0, 3.0, 6.5, 7.5, 10.5, 11.5, 2.0, 6.0, 4.0, 8.0]
    stages = [TimedStage(1, 1, 4, 1.0, 1.0), TimedStage(2, 1, 2, 2.0, 2.0)]
    assert least_step_s(stages, [TimedEdge(0, 1, 0.0, 0.5)]) == 2.0 + 8.0 + 2.5


def test_replicas_wait_for_each_other_where_gradients_are_summed():
    """Both in buckets of 1 s, the first final when half of the backward is done."""
    work = Work([1.0, 2.0, 1.0, 2.0], [0, 0, 1, 0], [[] for _ in range(4)], [[0, 1], [2, 3]])
    work.feeds.append((2, 0.5, ()))
    work.sums.append(Sum(0, (1, 3), ((1.0, 1.0), (2.0, 1.0))))
    assert play(work).sums_s == [1.5 + 3.0]


def test_messages_on_one_channel_follow_one_another_as_they_become_ready():
    """Two devices send to a third over one bus; what is ready first goes first."""
    work = Work([2.0, 1.0, 1.0, 1.0], [0, 0, 1, 1], [[(2, 3.0, (0,))], [(3, 3.0, (0,))], [], []], [
        [0], [1], [2], [3]
    ], num_channels=1)  # fmt: skip
    assert play(work).start_s == [0.0, 0.0, 1.0 + 3.0 + 3.0, 1.0 + 3.0]


def test_sums_share_channels_with_messages():
    work = Work([1.0, 1.0], [0, 1], [[(1, 3.0, (0,))], []], [[0], [1]], num_channels=1)
    work.sums.append(Sum(0, (0,), ((0.5, 2.0),), (0,)))
    found = play(work)
    assert (found.sums_s, found.start_s) == ([2.5], [0.0, 5.5])


def test_orders_that_deadlock_are_named():
    """Device 1 wants two micro-batches before it answers; device 0 wants an answer first."""
    work = Work(
        seconds=[1.0] * 8,
        missing=[0, 0, 1, 1, 1, 1, 0, 0],
        sends=[[(4, 0.0, ())], [(5, 0.0, ())], [], [], [], [], [(2, 0.0, ())], [(3, 0.0, ())]],
        lines=[[0, 2, 1, 3], [4, 5, 6, 7]],
    )
    with pytest.raises(ValueError, match=r"devices \[0, 1\] wait for each other"):
        play(work)
