"""What did not fit its emulated time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slip:
    """Something ended later than its emulated end; what follows on its rank is later by as much.

    Attributes:
        rank: where.
        what: text form of the action (``"2F0"``), or what else it was (``"optimizer"``).
        late_s: by how much, in emulated seconds.
    """

    rank: int
    what: str
    late_s: float


@dataclass(frozen=True)
class SlipReport:
    """All slips of a step on one or all ranks.

    Attributes:
        slips: in the order of time on each rank.
    """

    slips: tuple[Slip, ...] = ()

    @property
    def total_s(self) -> float:
        """Emulated seconds by which the rank that slipped most is late."""
        totals: dict[int, float] = {}
        for slip in self.slips:
            totals[slip.rank] = totals.get(slip.rank, 0.0) + slip.late_s
        return max(totals.values(), default=0.0)

    @property
    def worst(self) -> Slip | None:
        """The longest."""
        return max(self.slips, key=lambda slip: slip.late_s, default=None)

    def text(self, step_s: float) -> str:
        """One line for a report.

        >>> SlipReport((Slip(0, "2F0", 0.25), Slip(1, "1B3", 0.5))).text(10.0)
        'slip 5.0 % of the step (0.5 s on the rank that slipped most); worst: 1B3 on rank 1, 0.5 s'
        """
        if self.worst is None:
            return "no slip: all real work fitted its emulated time"
        return (
            f"slip {self.total_s / step_s:.1%}".replace("%", " %")
            + f" of the step ({self.total_s:.3g} s on the rank that slipped most); worst: "
            f"{self.worst.what} on rank {self.worst.rank}, {self.worst.late_s:.3g} s"
        )
