"""Signals at chosen points leave a checkpoint from which training goes on as if nothing was."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers import interrupts

LIMIT_S = 600.0


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    "cases",
    [
        ("int:placing", "int:batch_end_of_rank_1", "usr1:stage_of_rank_1"),
        *(pytest.param((f"{name}:",), marks=pytest.mark.extra) for name in interrupts.SIGNALS),
    ],
)
def test_what_is_left_is_what_one_device_leaves(cases: tuple[str, ...]) -> None:
    """In a process of its own, as it forks ranks."""
    done = subprocess.run(
        [sys.executable, interrupts.__file__, *cases],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=LIMIT_S * (1 if len(cases) > 1 else 4),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "WRONG" not in done.stdout and "ok " in done.stdout
