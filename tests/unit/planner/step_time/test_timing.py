"""Playing the orders of stages, by hand; tests/property/test_evaluate.py compares with programs."""

from __future__ import annotations

import pytest

from lightning_gpp.graph import FEED
from lightning_gpp.planner.step_time.least_step import least_step_s
from lightning_gpp.planner.step_time.timing import Messages, TimedStage, play
from lightning_gpp.schedule import one_f_one_b

ONE = Messages(1, 1, 0.0)


#   stage 0   F0 at 0.25, F1 at 1.25                              B0 at 4.25, B1 at 6.25
#   stage 1                           F0 at 1.75, B0 at 2.75, F1 at 3.75, B1 at 4.75, 3 s of sums
def test_two_stages_and_their_messages():
    stages = [TimedStage(2, 1.0, 2.0), TimedStage(2, 1.0, 1.0, end_s=3.0)]
    orders = [one_f_one_b(2, in_flight=2), one_f_one_b(2, in_flight=1)]
    half = Messages(1, 1, 0.5)
    forward = {(FEED, 0): Messages(1, 1, 0.25), (0, 1): half}
    found = play(stages, orders, forward, {(0, 1): half}, num_feeds=2, record=True)
    assert found.start_s == ((0.25, 1.25, 4.25, 6.25), (1.75, 2.75, 3.75, 4.75))
    assert found.end_s == (8.25, 5.75 + 3.0)
    assert found.step_s == 8.75
    assert least_step_s(stages, forward, {(0, 1): half}) == 1.75 + 4.0 + 3.0


def test_a_stage_with_larger_micro_batches_waits_for_all_parts():
    stages = [TimedStage(4, 1.0, 1.0), TimedStage(2, 2.0, 2.0)]
    orders = [[0, 1, 2, 3, ~0, ~1, ~2, ~3], [0, ~0, 1, ~1]]
    forward = {(FEED, 0): Messages(2, 1, 0.0), (0, 1): Messages(1, 2, 0.0)}
    backward = {(0, 1): Messages(2, 1, 0.5)}
    found = play(stages, orders, forward, backward, num_feeds=2, record=True)
    assert found.start_s == (
        (0.0, 1.0, 2.0, 3.0, 6.5, 7.5, 10.5, 11.5),  # the second part comes 0.5 s after the first
        (2.0, 4.0, 6.0, 8.0),
    )
    assert least_step_s(stages, forward, backward) == 2.0 + 8.0 + 2.5


def test_orders_that_deadlock_are_named():
    stages = [TimedStage(2, 1.0, 1.0), TimedStage(2, 1.0, 1.0), TimedStage(1, 1.0, 1.0)]
    orders = [[0, ~0, 1, ~1], [0, 1, ~0, ~1], [0, ~0]]  # 1 wants two, 0 answers one at a time
    with pytest.raises(ValueError, match=r"stages \[0, 1\] wait for each other"):
        play(stages, orders, {(0, 1): ONE}, {(0, 1): ONE}, num_feeds=0)


def test_a_feed_with_too_few_micro_batches_is_a_deadlock():
    with pytest.raises(ValueError, match=r"stages \[0\] wait"):
        play([TimedStage(2, 1.0, 1.0)], [[0, ~0, 1, ~1]], {(FEED, 0): ONE}, {}, num_feeds=1)
