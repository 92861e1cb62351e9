"""Ctrl-C on GPUs, where a backward ends in a thread that hears nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers import interrupts

from standin.build import obstacle
from standin.switch import environment


@pytest.mark.usefixtures("interruptible")
def test_rank_0_ends_its_step_once_others_may_end_theirs() -> None:
    if reason := obstacle():
        pytest.skip(reason)
    gpus = environment("gpus", delay_us=300)
    path = os.pathsep.join([gpus["PYTHONPATH"], *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, interrupts.__file__, "int:batch_end_of_rank_1"],
        env={**os.environ, **gpus, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
