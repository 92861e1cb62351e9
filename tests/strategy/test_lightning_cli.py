"""``LightningCLI`` builds our strategies from its command line, by class and by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.cli_jobs import fit_by_cli
from helpers.reference import weight_differences
from helpers.workers import WorkerPool

OURS = [
    "--trainer.strategy=lightning_gpp.strategy.GraphPipeStrategy",
    "--trainer.strategy.num_microbatches=4",
    "--trainer.strategy.timeout=100",
    "--trainer.strategy.planner=balanced",
    "--trainer.devices=2",
]


def test_two_ranks_train_as_one_device(pool: WorkerPool, run_folder: Path) -> None:
    pytest.importorskip("jsonargparse")
    alone = fit_by_cli(["--trainer.devices=1"], "alone")
    ranks = pool.run(fit_by_cli, OURS, "ours", num_ranks=2)
    weights = {name: value for rank in ranks for name, value in rank["weights"].items()}
    assert all(rank["global_step"] == alone["global_step"] == 6 for rank in ranks)
    assert not weight_differences(weights, alone["weights"], 1e-9)
    assert "GraphPipeStrategy" in Path("ours", "config.yaml").read_text()


def test_all_devices_there_are(pool: WorkerPool, run_folder: Path) -> None:
    """``devices="auto"`` is one device on a CPU: one stage, no process is started."""
    pytest.importorskip("jsonargparse")
    by_name = ["--trainer.strategy=graphpipe", "--trainer.devices=auto"]
    alone = fit_by_cli(["--trainer.devices=1"], "alone")
    (found,) = pool.run(fit_by_cli, [*by_name, "--trainer.profiler=simple"], "ours", num_ranks=1)
    assert not weight_differences(found["weights"], alone["weights"], 1e-9)
