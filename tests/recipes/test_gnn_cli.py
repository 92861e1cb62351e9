"""The console command with the gnn recipe: processes started by spawn, two stages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_gpp.planner import load_plan, num_devices_used

pytest.importorskip("torch_geometric")


@pytest.mark.extra
def test_one_graph_is_trained_in_chunks(run_folder: Path) -> None:
    """Generated communities; four chunks per device by default."""
    command = [
        *(sys.executable, "-m", "lightning_gpp.cli", "hydra.run.dir=run"),
        *("recipe=gnn", "data=sbm", "data.num_vertices=200", "data.num_edges=800"),
        *("strategy=gnnpipe", "recipe.module.layer=gcn2", "trainer.devices=2"),
        *("trainer.max_epochs=3", "trainer.enable_progress_bar=false"),
        *("trainer.log_every_n_steps=1", "+trainer.precision=64-true"),
    ]
    done = subprocess.run(
        command, cwd=run_folder, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    assert num_devices_used(load_plan(run_folder / "run" / "plan.json")) == 2
    metrics = json.loads((run_folder / "run" / "metrics.json").read_text())
    assert set(metrics) == {"train_loss", "val_loss", "val_acc", "test_acc"}
    assert "8 chunks, " in done.stderr
    assert "Warning" not in done.stderr
