"""Ray Train starts the ranks, keeps their checkpoints and starts them again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.reference import relative_error

pytest.importorskip("ray", reason="Ray is not installed: pip install 'lightning_gpp[ray]'")

LIMIT_S = 600.0


def test_a_worker_dies_and_training_goes_on(tmp_path: Path) -> None:
    from helpers import ray_script

    tests = str(Path(ray_script.__file__).parents[1])
    path = os.pathsep.join([tests, *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, ray_script.__file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert (tmp_path / "died").exists()
    alone = ray_script.fit(devices=1).state_dict()
    for name, weight in torch.load(tmp_path / "weights.pt").items():
        assert relative_error(weight, alone[name]) < 1e-9, name
