"""Rules for numbers that are logged per micro-batch, on literal numbers."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from lightning_gpp.strategy.logged_rules import (
    ALL_RULES,
    MAX_REHEARSALS,
    LoggedNumber,
    LoggedRules,
    Rule,
    fitting_rules,
)

MEAN, SUM, MAX, MIN, FIRST, LAST = Rule


def numbers(*values: float, reduce_fx: Any = "mean", dtype: Any = torch.float64) -> LoggedNumber:
    """Numbers of micro-batches of two samples."""
    tensors = tuple(torch.tensor(value, dtype=dtype) for value in values)
    return LoggedNumber(tensors, (2,) * len(values), reduce_fx, tuple(range(len(values))))


def rehearsed(
    name: str,
    whole: float,
    *halves: float,
    swapped: float | None = None,
    reduce_fx: Any = "mean",
) -> LoggedRules:
    """What a rehearsal teaches; the order of samples matters only where ``swapped`` is given."""
    rules = LoggedRules()
    once = {name: numbers(whole, reduce_fx=reduce_fx)}
    other = {name: numbers(whole if swapped is None else swapped, reduce_fx=reduce_fx)}
    rules.learn(once, once, {name: numbers(*halves, reduce_fx=reduce_fx)}, other)
    return rules


@pytest.mark.parametrize(
    ("whole", "swapped", "halves", "expected"),
    [
        (2.0, 2.0, (1.0, 3.0), {MEAN}),
        (4.0, 4.0, (1.0, 3.0), {SUM}),
        (3.0, 3.0, (1.0, 3.0), {MAX}),
        (3.0, 1.0, (1.0, 3.0), {LAST}),
        (1.0, 1.0, (1.0, 3.0), {MIN}),
        (1.0, 3.0, (1.0, 3.0), {FIRST}),
        (3.0, 3.0, (3.0, 3.0), {MEAN, MAX, MIN, FIRST, LAST}),  # a constant
        (1.0, 1.0, (1.0, 0.0), {SUM, MAX}),  # a count
        (0.0, 0.0, (0.0, 0.0), set(Rule)),
        (2.2, 2.2, (1.0, 3.0), set()),  # F1, perplexity
        (3.0, 2.0, (1.0, 3.0), set()),  # another number in the other order
        (0.0, 0.0, (1.0, -1.0), {MEAN, SUM}),
        (1e-10, 0.0, (1.0, -1.0), {MEAN, SUM}),  # rounding
        (math.nan, math.nan, (1.0, 3.0), set(Rule)),
        (3.0, math.nan, (1.0, 3.0), set(Rule)),
        (2.0, 2.0, (1.0, math.inf), set(Rule)),
    ],
)
def test_rules_that_fit(
    whole: float, swapped: float, halves: tuple[float, ...], expected: set[Rule]
) -> None:
    assert fitting_rules(whole, whole, numbers(*halves), swapped) == expected


def test_random_numbers_say_nothing() -> None:
    assert fitting_rules(2.0, 2.1, numbers(1.0, 7.0), 2.0) == ALL_RULES


def test_tolerance_follows_the_type() -> None:
    single = numbers(1.0, 3.0, dtype=torch.float32)
    assert fitting_rules(2.0001, 2.0001, single, 2.0001) == {MEAN}
    assert fitting_rules(2.0001, 2.0001, numbers(1.0, 3.0), 2.0001) == set()


@pytest.mark.parametrize(
    ("whole", "halves", "reduce_fx", "expected"),
    [
        (2.0, (1.0, 3.0), "sum", 1.5),  # a mean, although batches are summed
        (2.0, (1.0, 3.0), torch.max, 1.5),
        (4.0, (1.0, 3.0), "mean", 6.0),  # a sum, although batches are averaged
        (3.0, (1.0, 3.0), "mean", 4.0),
        (0.0, (0.0, 0.0), "mean", 1.5),  # nothing is known: as reduce_fx says
        (0.0, (0.0, 0.0), "sum", 6.0),
        (0.0, (0.0, 0.0), max, 4.0),
        (1.0, (1.0, 0.0), "mean", 6.0),  # the likeliest of those that are left
    ],
)
def test_joined_numbers(
    whole: float, halves: tuple[float, ...], reduce_fx: Any, expected: float
) -> None:
    rules = rehearsed("name", whole, *halves, reduce_fx=reduce_fx)
    found = rules.joined("name", numbers(1.0, 0.0, 1.0, 4.0, reduce_fx=reduce_fx))
    assert float(found) == expected


def test_weights_and_integers() -> None:
    number = LoggedNumber((torch.tensor(3), torch.tensor(6)), (2, 1))
    assert number.joined(MEAN).item() == 4.0
    assert number.joined(SUM).item() == 9
    assert not number.joined(SUM).is_floating_point()


def test_asks_where_the_rules_that_are_left_differ() -> None:
    rules = rehearsed("count", 0.0, 0.0, 0.0)
    assert not rules.questions({"count": numbers(0.0, 0.0)})
    assert rules.questions({"count": numbers(2.0, 1.0)}) == ["count"]
    once = {"count": numbers(3.0)}
    rules.learn(once, once, {"count": numbers(1.0, 2.0)}, once)
    assert not rules.questions({"count": numbers(2.0, 1.0)})
    assert float(rules.joined("count", numbers(2.0, 1.0))) == 3.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.0, 0.0, 2.0, 3.0), (2, 3)),
        ((0.0, 5.0, 0.0, 0.0), (0, 1)),
        ((1.0, 1.0, 1.0, 3.0), (0, 3)),  # the largest is not the first
        ((-1.0, 1.0, 1.0, 1.0), (0, 1)),
    ],
)
def test_asks_for_micro_batches_that_tell_rules_apart(
    values: tuple[float, ...], expected: tuple[int, int]
) -> None:
    assert LoggedRules().most_telling({"name": numbers(*values)}) == expected


def test_asks_for_micro_batches_that_tell_of_the_rules_that_are_left() -> None:
    number = numbers(0.0, 1.0, 0.0, 1.0)
    assert LoggedRules().most_telling({"name": number}) == (0, 1)
    sum_or_largest = rehearsed("name", 1.0, 1.0, 0.0)
    assert sum_or_largest.most_telling({"name": number}) == (1, 3)


def test_asks_for_micro_batches_that_logged_a_rare_name() -> None:
    values = (torch.tensor(2.0), torch.tensor(1.0))
    rare = LoggedNumber(values, (2, 2), microbatches=(1, 3))
    assert LoggedRules().most_telling({"rare": rare}) == (1, 3)
    random = numbers(9.0, 8.0, 0.0, 0.0)
    assert LoggedRules().most_telling({"random": random, "rare": rare}) == (1, 3)


def test_asks_a_few_times_only() -> None:
    rules = LoggedRules()
    asked = [bool(rules.questions({"rare": numbers(2.0, 1.0)})) for _ in range(9)]
    assert asked == [True] * MAX_REHEARSALS + [False] * (9 - MAX_REHEARSALS)


def test_says_once_that_no_rule_fits() -> None:
    with pytest.warns(UserWarning, match=r"'f1'.*torchmetrics object") as found:
        rules = rehearsed("f1", 2.2, 1.0, 3.0)
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        once = {"f1": numbers(2.2)}
        rules.learn(once, once, {"f1": numbers(1.0, 3.0)}, once)
    assert not rules.questions({"f1": numbers(1.0, 3.0)})
    assert float(rules.joined("f1", numbers(1.0, 3.0))) == 2.0
