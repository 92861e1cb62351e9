"""The console command with the dlrm recipe: processes started by spawn, two stages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_gpp.planner import load_plan, num_devices_used


@pytest.mark.timeout(180)
def test_clicks_are_trained_as_a_graph_of_stages(run_folder: Path) -> None:
    command = [
        *(sys.executable, "-m", "lightning_gpp.cli", "hydra.run.dir=run"),
        *("recipe=dlrm", "data=clicks", "data.num_samples=600", "data.batch_size=128"),
        *("trainer.devices=2", "trainer.max_epochs=1", "trainer.enable_progress_bar=false"),
        "trainer.log_every_n_steps=1",
    ]
    done = subprocess.run(
        command, cwd=run_folder, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    assert num_devices_used(load_plan(run_folder / "run" / "plan.json")) == 2
    metrics = json.loads((run_folder / "run" / "metrics.json").read_text())
    assert set(metrics) == {"train_loss", "val_loss", "val_auc", "val_acc"}
    assert 0.0 < metrics["val_auc"] < 1.0
    assert "Warning" not in done.stderr
