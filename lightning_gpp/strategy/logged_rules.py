"""Which rule joins the numbers that the micro-batches log into that of their mini-batch.

On one device ``training_step`` logs one number per batch: a mean over samples, a sum, the largest.
Here it logs one per micro-batch, and nothing in the call says how they belong together:
``reduce_fx`` joins batches over an epoch (the sum of mean losses, say), which is another matter.
So it is found out. The step is rehearsed with some samples in one piece and in halves, and once
more with the halves swapped. The rules that turn the numbers of the halves into the number of the
whole, in both orders, remain possible.

What is not known: a number that is random in the rehearsal (it runs in ``eval`` mode), that only
some steps log, or that is zero in all rehearsals. ``reduce_fx`` then names the rule, a mean by
default. Wherever the rules that remain would differ, another rehearsal with two micro-batches of
that very batch is asked for, :data:`MAX_REHEARSALS` times per name.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

MAX_REHEARSALS = 3
"""Further rehearsals that are asked for because of one name."""

_MOST_CANDIDATES = 12
"""Micro-batches among which the two for a rehearsal are looked for."""

_RELATIVE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
_FINE_TOLERANCE = 1e-6


class Rule(enum.Enum):
    """How the numbers of micro-batches become one; the likelier rules first."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    FIRST = "first"
    LAST = "last"


ALL_RULES = frozenset(Rule)

_JOIN: dict[Rule, Callable[[Tensor], Tensor]] = {
    Rule.SUM: lambda values: values.sum(),
    Rule.MAX: lambda values: values.max(),
    Rule.MIN: lambda values: values.min(),
    Rule.FIRST: lambda values: values[0],
    Rule.LAST: lambda values: values[-1],
}

_NAMED: dict[Any, Rule] = {
    **dict.fromkeys(("sum", sum, torch.sum), Rule.SUM),
    **dict.fromkeys(("max", max, torch.max), Rule.MAX),
    **dict.fromkeys(("min", min, torch.min), Rule.MIN),
}


@dataclass(frozen=True, slots=True)
class LoggedNumber:
    """What the micro-batches logged under one name.

    Attributes:
        values: one number each, shape ``()``.
        weights: of each in a mean: samples, or the ``batch_size`` that was given.
        reduce_fx: as given to ``self.log``.
        microbatches: which of them logged each, where that is known.
    """

    values: tuple[Tensor, ...]
    weights: tuple[int, ...]
    reduce_fx: Any = "mean"
    microbatches: tuple[int, ...] = ()

    def joined(self, rule: Rule) -> Tensor:
        """The number of the mini-batch, shape ``()``.

        >>> LoggedNumber((torch.tensor(1.0), torch.tensor(4.0)), (2, 1)).joined(Rule.MEAN)
        tensor(2.)
        """
        if len(self.values) == 1:
            return self.values[0]
        stacked = torch.stack(list(self.values))
        if rule is not Rule.MEAN:
            return _JOIN[rule](stacked)
        kind = stacked.dtype if stacked.is_floating_point() else torch.get_default_dtype()
        weights = torch.tensor(self.weights, dtype=torch.float64, device=stacked.device)
        # In double precision, so that the mean of equal numbers is that number.
        return ((stacked * weights).sum() / weights.sum()).to(kind)

    def reversed(self) -> LoggedNumber:
        """The same, had the micro-batches come in the opposite order."""
        return LoggedNumber(self.values[::-1], self.weights[::-1], self.reduce_fx)

    def of(self, *microbatches: int) -> LoggedNumber:
        """What some of the micro-batches logged."""
        places = [place for place, m in enumerate(self.microbatches) if m in microbatches]
        values = tuple(self.values[place] for place in places)
        return LoggedNumber(values, tuple(self.weights[place] for place in places), self.reduce_fx)

    @property
    def usual_rule(self) -> Rule:
        """The rule that ``reduce_fx`` names."""
        return _NAMED.get(self.reduce_fx, Rule.MEAN)

    def is_close(self, a: float, b: float) -> bool:
        """Whether two ways to the number of the mini-batch differ by no more than rounding."""
        tolerance = _RELATIVE_TOLERANCE.get(self.values[0].dtype, _FINE_TOLERANCE)
        scale = max(abs(float(value)) for value in self.values)
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance * scale)


def fitting_rules(
    whole: float, again: float, parts: LoggedNumber, swapped: float
) -> frozenset[Rule]:
    """The rules that turn the numbers of parts into the number of the whole.

    Args:
        whole: the number of some samples in one piece.
        again: the same once more: differs if the step draws random numbers.
        parts: the numbers of the same samples in parts.
        swapped: the number of the whole with its parts in the opposite order.

    Returns:
        None fits a number that has to see the whole batch (F1); all fit one that says nothing.

    >>> ones = LoggedNumber((torch.tensor(1.0), torch.tensor(1.0)), (2, 2))
    >>> fitting_rules(2.0, 2.0, ones, 2.0)
    frozenset({<Rule.SUM: 'sum'>})
    """
    numbers = (whole, again, swapped, *map(float, parts.values))
    if not all(map(math.isfinite, numbers)) or not parts.is_close(whole, again):
        return ALL_RULES
    orders = ((whole, parts), (swapped, parts.reversed()))
    return frozenset(
        rule
        for rule in Rule
        if all(number.is_close(result, float(number.joined(rule))) for result, number in orders)
    )


class LoggedRules:
    """What is known about the names that a module's training step logs."""

    def __init__(self) -> None:
        self._possible: dict[str, frozenset[Rule]] = {}
        self._asked: Counter[str] = Counter()

    def learn(
        self,
        whole: Mapping[str, LoggedNumber],
        again: Mapping[str, LoggedNumber],
        parts: Mapping[str, LoggedNumber],
        swapped: Mapping[str, LoggedNumber],
    ) -> None:
        """Narrows the rules down by what a rehearsal logged; tells the user if none is left."""
        for name, number in parts.items():
            before = self._possible.get(name, ALL_RULES)
            in_one_piece = (whole, again, swapped)
            if not all(name in run for run in in_one_piece) or not before:
                continue
            once, twice, other = (float(run[name].values[-1]) for run in in_one_piece)
            self._possible[name] = before & fitting_rules(once, twice, number, other)
            if not self._possible[name]:
                rank_zero_warn(_NO_RULE.format(name=name, rule=number.usual_rule.value))

    def joined(self, name: str, number: LoggedNumber) -> Tensor:
        """The number of the mini-batch, by the likeliest rule that is possible."""
        possible = self._possible.get(name, ALL_RULES)
        usual = number.usual_rule
        if usual in possible or not possible:
            return number.joined(usual)
        return number.joined(next(rule for rule in Rule if rule in possible))

    def questions(self, logged: Mapping[str, LoggedNumber]) -> list[str]:
        """Names whose possible rules differ for these numbers; each is named a few times only."""
        names = [name for name, number in logged.items() if self._is_open(name, number)]
        self._asked.update(names)
        return names

    def most_telling(self, logged: Mapping[str, LoggedNumber]) -> tuple[int, int]:
        """The two micro-batches whose numbers tell most of the possible rules apart.

        Args:
            logged: the numbers that the rules are needed for.
        """
        found = dict.fromkeys(m for number in logged.values() for m in _extremes(number))
        pairs = itertools.combinations(sorted(list(found)[:_MOST_CANDIDATES]), 2)

        def num_told_apart(pair: tuple[int, int]) -> int:
            return sum(self._num_results(name, n.of(*pair)) for name, n in logged.items())

        return max(pairs, key=num_told_apart, default=(0, 1))

    def _num_results(self, name: str, number: LoggedNumber) -> int:
        """How many results the possible rules have, in the order of the numbers and the other."""
        if len(number.values) < 2:
            return 0
        seen: list[tuple[float, float]] = []
        for rule in self._possible.get(name, ALL_RULES):
            result = float(number.joined(rule)), float(number.reversed().joined(rule))
            if not any(all(map(number.is_close, result, other)) for other in seen):
                seen.append(result)
        return len(seen)

    def _is_open(self, name: str, number: LoggedNumber) -> bool:
        possible = self._possible.get(name, ALL_RULES)
        if len(number.values) == 1 or len(possible) < 2 or self._asked[name] >= MAX_REHEARSALS:
            return False
        first, *others = [float(number.joined(rule)) for rule in possible]
        return not all(number.is_close(first, other) for other in others)


def _extremes(number: LoggedNumber) -> list[int]:
    """The micro-batches that logged the two largest and the two smallest numbers."""
    values = zip(map(float, number.values), number.microbatches, strict=True)
    ordered = [microbatch for _, microbatch in sorted(values, key=lambda pair: pair[0])]
    return [*ordered[-2:], *ordered[:2]]


_NO_RULE = (
    "{name!r}, logged in training_step, is no mean, sum, maximum or minimum over samples: a few "
    "samples in one piece give another number than their halves together. Logged is the {rule} "
    "over the micro-batches, not the number of the whole batch. Log a torchmetrics object "
    "(self.log(name, metric)), which sees the whole batch, or use num_microbatches=1."
)
