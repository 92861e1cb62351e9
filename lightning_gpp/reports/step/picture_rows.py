"""Where things are in the picture of a step: a row per rank, in it a lane per stage.

With many rows they get thinner, so that a step of 64 devices still fits a screen; texts leave out
what does not fit any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_gpp.reports.step.paint import Paint
from lightning_gpp.simulate.timeline.span import Span
from lightning_gpp.simulate.timeline.timeline import Timeline

LANE_IN, THINNEST_LANE_IN = 0.40, 0.06
ROOM_IN = 7.0
"""Height that all lanes of a picture share where they are many."""
GAP = 0.35
"""Gap between rows in parts of a lane."""
NUMBER_PT, VERSION_PT = 8.0, 5.5
LARGEST_PT, SMALLEST_PT = 10.0, 5.5


def lane_in(timelines: Sequence[Timeline]) -> float:
    """Height of a lane in a picture of some timelines."""
    num_lanes = sum(
        max(1, len(timeline.stages_of(rank)))
        for timeline in timelines
        for rank in range(timeline.num_ranks)
    )
    return min(LANE_IN, max(THINNEST_LANE_IN, ROOM_IN / max(1, num_lanes)))


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of ranks and the lanes of stages are, in inches from the top.

    Attributes:
        row: rank -> (top, height).
        lane: stage -> (top, height).
        lane_in: height of a lane.
        height_in: of all rows.
    """

    row: Mapping[int, tuple[float, float]]
    lane: Mapping[int, tuple[float, float]]
    lane_in: float
    height_in: float

    @classmethod
    def of(cls, timeline: Timeline, lane_in: float) -> Rows:
        """The rows of a timeline."""
        row, lane = {}, {}
        top = GAP * lane_in / 2
        for rank in range(timeline.num_ranks):
            stages = timeline.stages_of(rank)
            row[rank] = (top, lane_in * max(1, len(stages)))
            for number, stage in enumerate(stages):
                lane[stage.id] = (top + number * lane_in, lane_in)
            top += row[rank][1] + GAP * lane_in
        return cls(row, lane, lane_in, top - GAP * lane_in / 2)

    @classmethod
    def of_ranks(cls, num_ranks: int, lane_in: float) -> Rows:
        """Rows of one lane each, which is of no stage."""
        pitch = lane_in * (1 + GAP)
        row = {rank: (GAP * lane_in / 2 + rank * pitch, lane_in) for rank in range(num_ranks)}
        return cls(row, {}, lane_in, num_ranks * pitch)

    def place(self, span: Span, paint: Paint) -> tuple[float, float]:
        """(top, height) of a span."""
        if paint.in_lane and span.stage is not None and span.stage in self.lane:
            return self.lane[span.stage]
        return self.row[span.rank]  # also for the backward of the feed, which is of no stage

    @property
    def has_numbers(self) -> bool:
        """Whether the numbers of micro-batches fit into the lanes."""
        return self.lane_in * 72 >= 1.8 * NUMBER_PT

    @property
    def has_versions(self) -> bool:
        """Whether the versions of weights fit below those numbers, above the critical path."""
        return self.lane_in * 72 >= 1.8 * (NUMBER_PT + VERSION_PT)

    @property
    def text_pt(self) -> float:
        """Size of the names of rows."""
        return min(LARGEST_PT, max(SMALLEST_PT, self.lane_in * 72 * 0.85))

    @property
    def every(self) -> int:
        """One in how many rows has room for its name."""
        pitch_pt = self.lane_in * (1 + GAP) * 72
        return max(1, -(-int(SMALLEST_PT * 1.3) // max(1, int(pitch_pt))))
