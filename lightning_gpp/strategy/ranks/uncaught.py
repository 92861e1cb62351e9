"""Prints an uncaught error of a job once: the shortened traceback of the rank that failed.

Every rank of a script would print one of 100 lines, most of them of Lightning's loops. Here the
rank that failed prints its own, and the others a line each.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from lightning_gpp.strategy.ranks.failure import FailureWatch
from lightning_gpp.strategy.ranks.short_traceback import shorten

_LAST_WORDS_S = 1.0
"""For the other processes of a script to print their lines."""


def show_once(
    watch: FailureWatch, ranks_here: Sequence[int], children: Sequence[subprocess.Popen[bytes]]
) -> None:
    """After a failure: if it ends this process, it is shown like this.

    Args:
        watch: of the failed run.
        ranks_here: ranks of this host.
        children: processes of other ranks that this one has started, which print before it.
    """
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        end = time.monotonic() + _LAST_WORDS_S
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))
        first = watch.first
        if first is None or watch.is_own(error):
            sys.stderr.write(shorten(error))
            before(kind, error, error.__traceback__)
        elif first.rank not in ranks_here and watch.rank == ranks_here[0]:
            sys.stderr.write(f"{first.full_text}\n")  # no other process of this host shows it
        elif watch.rank == 0 or not watch.has_said:
            sys.stderr.write(f"rank {watch.rank} ends: {first.text}\n")

    sys.excepthook = show
