"""Whether processes that this one has not started still run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path


def wait_until_ended(pids: Sequence[int], limit_s: float) -> None:
    """Fails when one of the processes runs longer."""
    end = time.monotonic() + limit_s
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < end, f"processes {left} outlive their job"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
