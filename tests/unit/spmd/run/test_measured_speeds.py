"""How long the devices of a run are timed; the times here are made up."""

from __future__ import annotations

from lightning_gpp.strategy.spmd.measured_speeds import LEAST_ROUNDS, MOST_ROUNDS, is_settled

SLOW_SECOND = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
ALIKE = [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]


def test_some_rounds_at_least() -> None:
    assert not is_settled([SLOW_SECOND] * (LEAST_ROUNDS - 1))
    assert is_settled([SLOW_SECOND] * LEAST_ROUNDS)


def test_rounds_that_disagree_are_followed_by_others() -> None:
    assert not is_settled([SLOW_SECOND, ALIKE] * (LEAST_ROUNDS // 2))


def test_a_moment_in_which_the_burden_does_not_show_is_outvoted() -> None:
    """Of an odd half of three rounds the median is that of two."""
    assert not is_settled([ALIKE, *[SLOW_SECOND] * 3])
    assert is_settled([ALIKE, *[SLOW_SECOND] * 4])


def test_a_slip_of_all_devices_at_once_does_not_matter() -> None:
    slowed = [[3 * seconds for seconds in device] for device in SLOW_SECOND]
    assert is_settled([SLOW_SECOND, slowed] * (LEAST_ROUNDS // 2))


def test_rounds_that_never_agree_end() -> None:
    assert is_settled([SLOW_SECOND, ALIKE] * (MOST_ROUNDS // 2))
