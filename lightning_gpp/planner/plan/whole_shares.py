"""Shares of replicas as whole numbers of smallest micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

MOST_PARTS = 100
"""Fractions are taken as hundredths or coarser where nobody says how many parts there are."""


def whole_shares(fractions: Sequence[float], total: int) -> tuple[int, ...]:
    """Shares nearest to some fractions: whole, at least 1, together a total.

    Largest remainders: every share is rounded down, and those that lose most by it get one more.
    Shares that would be below 1 are 1, and the others divide what is left.

    Args:
        fractions: positive, of any sum.
        total: at least as many as there are fractions.

    Raises:
        ValueError: a fraction is not positive, or the total is too small.

    >>> whole_shares([0.5, 0.25, 0.25], 10), whole_shares([0.97, 0.01, 0.02], 10)
    ((5, 3, 2), (8, 1, 1))
    """
    if total < len(fractions) or min(fractions, default=0.0) <= 0:
        raise ValueError(
            f"expected positive fractions, and at least as many parts, got {list(fractions)} of "
            f"{total}"
        )
    shares = [1] * len(fractions)
    free = list(range(len(fractions)))
    while True:
        left = total - (len(fractions) - len(free))
        whole = sum(fractions[i] for i in free)
        exact = {i: fractions[i] / whole * left for i in free}
        small = [i for i in free if exact[i] < 1]
        if not small:
            break
        free = [i for i in free if i not in small]
    for i in free:
        shares[i] = math.floor(exact[i])
    by_remainder = sorted(free, key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


def least_parts(fractions: Sequence[float]) -> int | None:
    """The least number of parts of which fractions that sum to one are whole numbers.

    None where it is above :data:`MOST_PARTS`.

    >>> least_parts([0.75, 0.25]), least_parts([2 / 3, 1 / 3]), least_parts([0.123, 0.877])
    (4, 3, None)
    """
    near = [Fraction(fraction).limit_denominator(MOST_PARTS) for fraction in fractions]
    total = math.lcm(*(one.denominator for one in near))
    is_exact = all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(near, fractions))
    return total if is_exact and total <= MOST_PARTS else None
