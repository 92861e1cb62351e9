"""What batches really take, said once in a fit, beside what was predicted of them."""

from __future__ import annotations

import statistics
import time

from lightning_gpp.reports import BatchTimes, PlanVerdict

NUM_WARM_UP = 1
"""Batches that are not counted: building the pipeline, allocations, lazy optimizer state."""

NUM_COUNTED = 12
"""Batches of which the median is told: a validation between two of them, or the first ones, which
may still be a little slower, do not move it."""

FEWEST_COUNTED, LONG_S = 3, 2.0
"""Of long batches so many suffice, once they take so many seconds together."""


class BatchClock:
    """Notes when batches begin, until there are enough of them; then costs a comparison per batch.

    Args:
        verdict: what was predicted.

    Attributes:
        found: what they took, once there are enough of them.
    """

    def __init__(self, verdict: PlanVerdict) -> None:
        self.found: BatchTimes | None = None
        self._verdict = verdict
        self._num_begun = 0
        self._last: tuple[float, float] | None = None
        self._took: list[tuple[float, float]] = []

    def begin(self, *, is_recorded: bool = False, in_pipeline_s: float = 0.0) -> str | None:
        """A batch begins. What the batches before it took, once there are enough of them.

        Args:
            is_recorded: whether it is recorded: it takes longer, and is followed by the gathering
                and the picture of the record, so it does not count.
            in_pipeline_s: seconds that batches spent in the pipeline so far; always 0 where the
                user's step runs within it.
        """
        if self.found is not None:
            return None
        now = time.monotonic(), in_pipeline_s
        if self._last is not None:
            self._took.append((now[0] - self._last[0], now[1] - self._last[1]))
        self._num_begun += 1
        self._last = None if is_recorded or self._num_begun <= NUM_WARM_UP else now
        if not self._is_enough():
            return None
        batch_s, pipeline_s = (statistics.median(times) for times in zip(*self._took, strict=True))
        self.found = BatchTimes(batch_s, len(self._took), pipeline_s or None)
        return self._verdict.measured_text(self.found)

    def _is_enough(self) -> bool:
        if len(self._took) < FEWEST_COUNTED:
            return False
        typical_s = statistics.median(batch_s for batch_s, _ in self._took)
        return len(self._took) == NUM_COUNTED or typical_s * len(self._took) >= LONG_S
