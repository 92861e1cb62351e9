"""A stage that a search found."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.planner.graphpipe.space.crew import Crew


@dataclass(frozen=True, slots=True)
class FoundStage:
    """A stage before it has a number and devices.

    Attributes:
        places: places of its units in the layout.
        crew: its devices.
        units: its smallest micro-batches in flight, as the search took them.
        recompute: whether it runs its forward twice.
        seconds_per_sample: as the search took it.
        compute_s_per_sample: seconds per sample that it computes.
    """

    places: tuple[int, ...]
    crew: Crew
    units: int
    recompute: bool
    seconds_per_sample: float
    compute_s_per_sample: float
