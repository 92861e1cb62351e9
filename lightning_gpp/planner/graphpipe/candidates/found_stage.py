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
        forward_s: seconds of a forward of a replica's share of a micro-batch.
        backward_s: the same of the backward; with recomputation the second forward included.
        gradient_bytes: of its parameters' gradients.
    """

    places: tuple[int, ...]
    crew: Crew
    units: int
    recompute: bool
    seconds_per_sample: float
    forward_s: float
    backward_s: float
    gradient_bytes: int
