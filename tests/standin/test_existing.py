"""Training tests of the CPU, sent to the stand-in's GPUs by its switch.

What fits into CI; the README beside this file names the command for all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from standin.build import obstacle
from standin.switch import DELAY, SWITCH

TESTS = Path(__file__).parents[1]
STRATEGY = TESTS / "strategy"
SELECTED = {
    "gpus": [
        "test_equality.py::test_random_chains",
        "test_replicas.py",
        "test_pipelines.py",
        "state/test_precision.py",
        "asynchronous/test_async.py",
        "gnn/test_full_graph.py",
        "spmd/test_hap.py",
        "state/test_sharded_checkpoints.py",
        "state/test_checkpoints.py",
    ],
    "shared": ["test_replicas.py", "state/test_checkpoints.py"],
    "mixed": ["test_replicas.py"],
}
LIMIT_S = 1500


@pytest.mark.parametrize("kind", SELECTED)
def test_on_gpus(kind: str, tmp_path: Path) -> None:
    if reason := obstacle():
        pytest.skip(reason)
    environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    environment |= {SWITCH: kind, DELAY: "300"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [f"{STRATEGY / test}" for test in SELECTED[kind]]
    ended = subprocess.run(
        command,
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stdout[-20_000:]
