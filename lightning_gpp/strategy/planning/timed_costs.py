"""Costs, and whether the machine was busy with other things while they were measured.

Operators that were measured while others kept the processors busy look slower than they are, and
nothing in a profile shows it. What does is that the measuring thread, which never sleeps, then
has a processor for a part of the time only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_gpp.common.units_of_measure import number_text
from lightning_gpp.cost import Costs, costs_from_json, costs_to_json

BUSY = 1.5
"""Times as long as the thread computed: less than two thirds of a processor were left for it."""


@dataclass(frozen=True, slots=True)
class TimedCosts:
    """Costs, and how busy the machine was when they were measured.

    Attributes:
        costs: of the model.
        slowness: seconds that measuring took over those for which it had a processor; 1 on devices
            that are no CPUs.
    """

    costs: Costs
    slowness: float = 1.0

    @classmethod
    def measured(cls, device: torch.device, measure: Callable[[], Costs]) -> TimedCosts:
        """Measures them on a device."""
        start_s, computed_s = time.perf_counter(), time.thread_time()
        costs = measure()
        took_s, computed_s = time.perf_counter() - start_s, time.thread_time() - computed_s
        is_known = device.type == "cpu" and computed_s > 0
        return cls(costs, max(1.0, took_s / computed_s) if is_known else 1.0)

    @property
    def is_of_busy_machine(self) -> bool:
        """Whether they are likely to be too long."""
        return self.slowness > BUSY

    @property
    def notes(self) -> tuple[str, ...]:
        """What to say of costs of a machine that was busy; nothing of others."""
        if not self.is_of_busy_machine:
            return ()
        return (
            "This machine was busy: measuring the model took "
            f"{number_text(round(self.slowness, 1))} times as long as it computed, so predictions "
            "may be too long. A later run measures again.",
        )

    def to_json(self) -> str:
        """The form in which they are kept."""
        return json.dumps({"slowness": self.slowness, "costs": costs_to_json(self.costs)})

    @classmethod
    def from_json(cls, text: str) -> TimedCosts:
        """Reads :meth:`to_json`'s form.

        Raises:
            ValueError: it is another.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.keys() != {"slowness", "costs"}:
            raise ValueError('expected "slowness" and "costs"')
        slowness = data["slowness"]
        if not isinstance(slowness, float) or not slowness >= 1:
            raise ValueError(f"expected a slowness of at least 1, got {slowness!r}")
        return cls(costs_from_json(data["costs"]), slowness)
