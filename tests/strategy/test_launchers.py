"""Lightning starts the ranks itself: from a script, by spawn and by fork."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import launch_script
from helpers.reference import relative_error, weight_differences

pytestmark = pytest.mark.timeout(200)

LIMIT_S = 90.0
ORPHAN_LIMIT_S = 10.0


def run_script(
    strategy: str, folder: Path, fault: str = "none"
) -> subprocess.CompletedProcess[str]:
    """Runs the user's script in a process of its own."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, launch_script.__file__, strategy, str(folder), fault],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize("strategy", ["graphpipe", "graphpipe_spawn", "graphpipe_fork"])
def test_training_from_a_script(strategy: str, tmp_path: Path) -> None:
    done = run_script(strategy, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    # In-process reference; the script's main() is the user's whole program.
    launch_script.main("auto", tmp_path, "none")
    got, want = (torch.load(tmp_path / f"{name}.pt") for name in (strategy, "auto"))
    assert not weight_differences(got["weights"], want["weights"], 1e-9)
    assert relative_error(got["val_loss"], want["val_loss"]) < 1e-9
    assert len(list(tmp_path.glob("rank_*.pid"))) == launch_script.NUM_RANKS


@pytest.mark.parametrize(
    ("strategy", "fault", "text"),
    [
        ("graphpipe_spawn", "raise", "the callback is out of order"),
        ("graphpipe", "kill", "rank 1"),
    ],
)
def test_a_failing_rank_ends_the_job(strategy: str, fault: str, text: str, tmp_path: Path) -> None:
    done = run_script(strategy, tmp_path, fault)
    assert done.returncode != 0
    assert text in done.stderr.lower() or text in done.stderr, done.stderr[-4000:]
    pids = [int(path.read_text()) for path in tmp_path.glob("rank_*.pid")]
    assert len(pids) == launch_script.NUM_RANKS
    end = time.monotonic() + ORPHAN_LIMIT_S
    while any(_is_running(pid) for pid in pids):
        assert time.monotonic() < end, f"processes {pids} outlive the job"
        time.sleep(0.1)


def _is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
