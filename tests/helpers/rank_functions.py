"""Functions that the tests of the worker pool run on ranks."""

from __future__ import annotations

import os
import sys
import threading
import time


def raise_on(rank: int) -> str:
    """Raises on one rank."""
    if int(os.environ["RANK"]) == rank:
        sys.stdout.write("about to raise\n")
        raise ValueError(f"rank {rank} is out of order") from KeyError("the cause")
    return "fine"


def hang_on(rank: int) -> None:
    """Waits forever on one rank."""
    while int(os.environ["RANK"]) == rank:
        time.sleep(0.1)


def leave_a_thread() -> None:
    """Starts a thread that outlives the call."""
    threading.Thread(target=time.sleep, args=(6,), name="forgotten", daemon=True).start()
