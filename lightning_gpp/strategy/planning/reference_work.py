"""A fixed piece of work that says how fast this machine is at the moment.

Operators that were measured while others kept the machine busy look slower than they are, and
nothing in a profile shows it. So the same small work is timed before and after them, in the way in
which they are: on a machine that was as fast as ever it took as long as ever.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_gpp.cost import Costs, costs_from_json, costs_to_json
from lightning_gpp.units_of_measure import number_text

WORK = "matmul 256, add and tanh 2**16, float32"
"""What is timed; a profile whose work was another cannot be compared."""

NUM_RUNS = 9
"""Median of so many, of about half a millisecond each."""

MUCH_SLOWER = 1.5
"""Times as long as ever: more than clock rates, neighbours on a core and chance explain (medians of
an idle machine lay within 1.2), and less than half of the machine taken by somebody else (2)."""


def reference_s(device: torch.device) -> float:
    """Seconds that the work takes on a device now; the median of some runs after one to warm up.

    Args:
        device: on ``meta`` nothing is computed, so it takes as long as ever.
    """
    if device.type == "meta":
        return 1.0
    matrix = torch.ones(256, 256, device=device)
    vector = torch.ones(2**16, device=device)
    took_s = []
    for _ in range(NUM_RUNS + 1):
        _synchronize(device)
        start_s = time.perf_counter()
        (matrix @ matrix, (vector + vector).tanh())
        _synchronize(device)
        took_s.append(time.perf_counter() - start_s)
    return statistics.median(took_s[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class TimedCosts:
    """Costs, and how long the reference work took when they were measured.

    Attributes:
        costs: of the model.
        reference_s: the longer of before and after.
    """

    costs: Costs
    reference_s: float

    @classmethod
    def measured(cls, measure: Callable[[], Costs], reference: Callable[[], float]) -> TimedCosts:
        """Measures them, with the reference work around it."""
        before_s = reference()
        costs = measure()
        return cls(costs, max(before_s, reference()))

    def slowness(self, best_s: float) -> float:
        """How many times as long as ever the work took.

        Args:
            best_s: the least seconds that are known of it.
        """
        return self.reference_s / best_s

    def note(self, best_s: float) -> tuple[str, ...]:
        """What to say of costs of a machine that was busy; nothing of others."""
        slow = self.slowness(best_s)
        if slow <= MUCH_SLOWER:
            return ()
        return (
            f"This machine was busy while the model was measured, {number_text(round(slow, 1))} "
            "times as slow as it can be: predicted steps are too long. A later run measures again.",
        )

    def to_json(self) -> str:
        """The form in which they are kept."""
        return json.dumps({"reference_s": self.reference_s, "costs": costs_to_json(self.costs)})

    @classmethod
    def from_json(cls, text: str) -> TimedCosts:
        """Reads :meth:`to_json`'s form.

        Raises:
            ValueError: it is another.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.keys() != {"reference_s", "costs"}:
            raise ValueError('expected "reference_s" and "costs"')
        return cls(costs_from_json(data["costs"]), positive_s(data["reference_s"]))


def positive_s(data: object) -> float:
    """Seconds as they are kept.

    Raises:
        ValueError: they are none.
    """
    if not isinstance(data, float) or not data > 0:
        raise ValueError(f"expected seconds above 0, got {data!r}")
    return data
