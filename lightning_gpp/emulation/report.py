"""Compares emulated training steps with their simulation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_gpp.common.text_table import wrapped
from lightning_gpp.common.units_of_measure import number_text, seconds_text
from lightning_gpp.emulation.shared import EmulatedStep


@dataclass(frozen=True, slots=True)
class EmulationReport:
    """A run on emulated devices. All but the scale is in emulated seconds.

    The first step is left out where there are more: torch warms up in it.

    Attributes:
        step_s: of every whole mini-batch.
        slip_s: of the rank that slipped most in the step whose time is the median.
        predicted_s: of the same program on the same costs, simulated.
        time_scale: real seconds that an emulated second took.
        num_devices: of the cluster.
        kinds: of its devices.
    """

    step_s: tuple[float, ...]
    slip_s: float
    predicted_s: float
    time_scale: float
    num_devices: int
    kinds: tuple[str, ...]

    @property
    def typical_s(self) -> float:
        """The step in the middle."""
        return statistics.median_low(self.step_s)

    @property
    def error(self) -> float:
        """By which part the emulated step was longer than predicted."""
        return self.typical_s / self.predicted_s - 1

    def metrics(self) -> dict[str, float]:
        """The numbers for loggers."""
        return {
            "emulated_step_s": self.typical_s,
            "emulated_slip_s": self.slip_s,
            "predicted_step_s": self.predicted_s,
        }

    def text(self, max_width: int = 100) -> str:
        """A few lines for a person, of so many columns."""
        low, high = seconds_text(min(self.step_s)), seconds_text(max(self.step_s))
        percent = f"{100 * round(self.error, 3) + 0.0:+.1f} %"  # never -0.0
        count = f"median of {len(self.step_s)} steps, {low} to {high}"
        slip = "All real work fitted into its emulated time."
        if self.slip_s:
            part = 100 * self.slip_s / self.typical_s
            slip = f"Real work took longer than its emulated time (slip {part:.1f} % of the step)."
        lines = [
            f"Emulated on {self.num_devices} devices ({', '.join(self.kinds)}): "
            f"{seconds_text(self.typical_s)} per step "
            f"({count if len(self.step_s) > 1 else 'one step'}), {percent} against the "
            f"{seconds_text(self.predicted_s)} that were predicted.",
            slip,
            f"An emulated second took {number_text(self.time_scale)} real ones. Reading data, the "
            "optimizer and what else is between steps take no emulated time.",
        ]
        return wrapped(lines, max_width)


def emulation_report(
    ranks: Sequence[Sequence[EmulatedStep]], *, num_microbatches: int, **told: Any
) -> EmulationReport | None:
    """The report of a run; None where no whole mini-batch was trained on.

    Args:
        ranks: the steps of every rank, all equally many.
        num_microbatches: smallest micro-batches of a whole mini-batch.
        told: more of the report.
    """
    whole = [
        parts for parts in zip(*ranks, strict=True) if parts[0].num_microbatches == num_microbatches
    ]
    counted = whole[1:] or whole
    if not counted:
        return None
    taken_s = [max(part.end_s for part in parts) - parts[0].start_s for parts in counted]
    middle = counted[taken_s.index(statistics.median_low(taken_s))]
    slip_s = max(part.slip_s for part in middle)
    return EmulationReport(tuple(taken_s), slip_s, num_devices=len(ranks), **told)
