"""How much of a batch is spent in the pipeline, apart from what is the user's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class PipelineClock:
    """Seconds that rank 0 spends on what one process would not do, or would do otherwise.

    These are calls of the forward, their backwards, and telling the other ranks what to do. What
    remains of a batch is the user's step, data, the optimizer and Lightning's loop.

    Args:
        can_time: whether the two can be told apart.

    Attributes:
        seconds: so far; 0 where they cannot.
    """

    def __init__(self, can_time: Callable[[], bool]) -> None:
        self.seconds = 0.0
        self._can_time = can_time
        self._is_on = False

    def pipeline(self) -> AbstractContextManager[None]:
        """What counts runs in this, nested or not."""
        return self._timing(True) if not self._is_on and self._can_time() else nullcontext()

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
