"""What batches really take, said once in a fit, beside what was predicted of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lightning_gpp.reports.plan.verdict import BatchTimes

NUM_WARM_UP = 1
"""Batches that are not counted: building the pipeline, allocations, lazy optimizer state."""

ENOUGH_S = 1.0
"""As many batches are counted as take so long: short ones, which differ most from each other, are
many. Their median is told: a validation between two of them, or the first ones, which may still be
a little slower, do not move it."""

FEWEST_COUNTED = 3
"""However long they are."""


class BatchClock:
    """Notes when batches begin, until there are enough of them; then costs a comparison per batch.

    Attributes:
        found: what they took, once there are enough of them.
    """

    def __init__(self) -> None:
        self.found: BatchTimes | None = None
        self._num_begun = 0
        self._last: tuple[float, float] | None = None
        self._took: list[tuple[float, float]] = []
        self._counted_s = 0.0

    def begin(self, *, is_recorded: bool = False, in_pipeline_s: float = 0.0) -> bool:
        """A batch begins; whether that was the last that counts.

        Args:
            is_recorded: whether it is recorded: it takes longer, and is followed by the gathering
                and the picture of the record, so it does not count.
            in_pipeline_s: seconds that batches spent in the pipeline so far; always 0 where the
                user's step runs within it.
        """
        if self.found is not None:
            return False
        now = time.monotonic(), in_pipeline_s
        if self._last is not None:
            batch_s, pipeline_s = (end - start for end, start in zip(now, self._last, strict=True))
            self._took.append((batch_s, batch_s - pipeline_s))
            self._counted_s += batch_s
        self._num_begun += 1
        self._last = None if is_recorded or self._num_begun <= NUM_WARM_UP else now
        return self._is_enough() and self.end()

    def end(self) -> bool:
        """No more batches will count; whether they were enough to tell what one takes."""
        if self.found is not None or len(self._took) < FEWEST_COUNTED:
            return False
        batch_s, own_s = (statistics.median(times) for times in zip(*self._took, strict=True))
        self.found = BatchTimes(batch_s, len(self._took), own_s if own_s < batch_s else None)
        return True

    def _is_enough(self) -> bool:
        if self._counted_s < ENOUGH_S:  # not even with a validation among them
            return False
        typical_s = statistics.median(batch_s for batch_s, _ in self._took)
        return typical_s * len(self._took) >= ENOUGH_S


class PipelineClock:
    """Seconds that rank 0 spends on what one process would not do, or would do otherwise.

    These are calls of the forward, their backwards, and telling the other ranks what to do. What
    remains of a batch is the user's step, data, the optimizer and Lightning's loop.

    Attributes:
        seconds: so far, while they were wanted.
        is_wanted: whether anybody will ask, and the two can be told apart.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_wanted = self._is_on = False

    def pipeline(self) -> AbstractContextManager[None]:
        """What counts runs in this, nested or not."""
        is_new = self.is_wanted and not self._is_on
        return self._timing(True) if is_new else nullcontext()

    def user(self) -> AbstractContextManager[None]:
        """In the midst of what counts: user code, which one process runs as well."""
        return self._timing(False) if self._is_on else nullcontext()

    @contextmanager
    def _timing(self, counts: bool) -> Iterator[None]:
        start_s, self._is_on = time.monotonic(), counts
        try:
            yield
        finally:
            took_s, self._is_on = time.monotonic() - start_s, not counts
            self.seconds += took_s if counts else -took_s
