"""Every experiment runs, short; new files are found by themselves."""

from __future__ import annotations

import csv
import importlib.resources
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click_files import write_small_tables
from helpers.experiment_jobs import train_resolved
from helpers.workers import WorkerPool
from hydra import compose, initialize_config_module
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.strategies import SingleDeviceStrategy
from mfeat_files import write_mfeat
from node_files import write_all_node_files
from omegaconf import DictConfig, OmegaConf

from lightning_gpp import cli
from lightning_gpp.jobs import train as train_job
from lightning_gpp.planner import load_plan, num_devices_used
from lightning_gpp.recipes.multimodal import MultipleFeatures

GROUPS = ("experiment", "hparams_search")
FILES = {
    f"{group}={file.name.removesuffix('.yaml')}": file
    for group in GROUPS
    for file in sorted(importlib.resources.files("lightning_gpp.configs").joinpath(group).iterdir())
}
NAMES = [*FILES]
SHORT = (
    "trainer.max_epochs=1",
    "+trainer.limit_train_batches=2",
    "+trainer.limit_val_batches=1",
    "trainer.enable_progress_bar=false",
    "trainer.log_every_n_steps=1",
)
MAX_RANKS = 4
MOST = {"width": 100, "depth": 8}
"""Of graph networks: larger ones only take longer."""
OF_RANK_0 = {"emulated_step_s", "emulated_slip_s", "predicted_step_s", "busiest_device_s"}
"""What emulated steps took, which rank 0 alone reports."""

PLUGINS = {
    "joblib": "hydra_plugins.hydra_joblib_launcher",
    "optuna": "hydra_plugins.hydra_optuna_sweeper",
}


def composed(name: str, *overrides: str) -> DictConfig:
    """The experiment with Hydra's own settings."""
    with initialize_config_module("lightning_gpp.configs", version_base="1.3"):
        return compose(
            "config",
            overrides=[name, "paths.output_dir=run", *overrides],
            return_hydra_config=True,
        )


def skip_without_plugins(text: str) -> None:
    for name, module in PLUGINS.items():
        if f": {name}\n" in text and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed (extra 'sweep')")


@pytest.fixture
def data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small generated files in the formats of the real data sets."""
    root = tmp_path / "data"
    root.mkdir()
    write_mfeat(root, MultipleFeatures.VIEW_SIZES, np.arange(200) % 10)
    write_small_tables(root)
    write_all_node_files(root)
    monkeypatch.setenv("LIGHTNING_GPP_DATA", str(root))
    return root


def test_there_are_experiments() -> None:
    assert {"experiment=multimodal_mfeat", "experiment=schedules", "hparams_search=optuna"} <= {
        *NAMES
    }


@pytest.mark.parametrize("name", NAMES)
def test_says_what_it_shows(name: str) -> None:
    assert FILES[name].name.endswith(".yaml"), f"{name} is no configuration"
    package, comment, *_ = FILES[name].read_text().splitlines()
    assert package == "# @package _global_"
    assert comment.startswith("# ") and comment.endswith(".")


@pytest.mark.parametrize("name", NAMES)
def test_one_device_to_compare_with(name: str) -> None:
    """What the experiment sets for a pipeline stays and plays no part.

    Who plans is no matter of the experiment: each strategy has its own default.
    """
    skip_without_plugins(FILES[name].read_text())
    pipeline, config = composed(name), composed(name, "strategy=single_device")
    others = ("_target_", "planner")
    options = {key: value for key, value in pipeline.strategy.items() if key not in others}
    assert options.items() <= dict(config.strategy).items()
    assert type(instantiate(config.strategy, _convert_="all")) is SingleDeviceStrategy
    assert config.callbacks.timeline is None


@pytest.mark.filterwarnings("ignore:The ``declarative_base")  # sqlalchemy below optuna
@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("name", NAMES)
def test_runs(
    name: str,
    data_root: Path,
    run_folder: Path,
    pool: WorkerPool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    skip_without_plugins(FILES[name].read_text())
    config = composed(name)
    if config.hydra.mode == RunMode.MULTIRUN:
        overrides = sweep_overrides(name, config)
        if "joblib" in config.hydra.launcher._target_:  # its workers outlive the sweep
            check_sweep(config, call_graphpipe(overrides))
            return
        if "n_trials" not in config.hydra.sweeper:
            train_in_pool(pool, monkeypatch)
        monkeypatch.setattr(sys, "argv", ["graphpipe", *overrides])
        cli.main()
        check_sweep(config, capsys.readouterr().out)
    else:
        check_run(name, config, pool)


def check_run(name: str, config: DictConfig, pool: WorkerPool) -> None:
    """Trains with as many ranks as the experiment says; a plan by hand is kept."""
    num_ranks = config.trainer.devices
    assert num_ranks <= MAX_RANKS
    overrides = [name, "paths.output_dir=run", *SHORT]
    for size, most in MOST.items():
        if config.recipe.module.get(size, 0) > most:
            overrides.append(f"recipe.module.{size}={most}")
    with initialize_config_module("lightning_gpp.configs", version_base="1.3"):
        plain = OmegaConf.to_container(compose("config", overrides=overrides), resolve=True)
    results = pool.run(train_resolved, plain, num_ranks=num_ranks)
    everywhere = [
        {name: value for name, value in result.items() if name not in OF_RANK_0}
        for result in results
    ]
    assert all(result == everywhere[0] for result in everywhere)
    assert results[0] and all(math.isfinite(value) for value in results[0].values())
    assert num_devices_used(load_plan("run/plan.json")) == num_ranks


def sweep_overrides(name: str, config: DictConfig) -> list[str]:
    """Two jobs, of two ranks where there are any; a search only on one device."""
    overrides = [name, *SHORT, "trainer.devices=2", "hydra.sweep.dir=sweep"]
    if "n_trials" in config.hydra.sweeper:
        overrides += ["hydra.sweeper.n_trials=2", "strategy=single_device"]
    elif "recipe.module.encoder_width" in config.hydra.sweeper.params:
        overrides += ["recipe.module.encoder_width=16"]
    return overrides


def train_in_pool(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the jobs of a sweep in this process ranks that need no start."""

    def train(config: DictConfig) -> dict[str, float]:
        plain = OmegaConf.to_container(config, resolve=True)
        first, second = pool.run(train_resolved, plain, num_ranks=2)
        assert first == second
        return first

    monkeypatch.setattr(train_job, "train", train)


def call_graphpipe(overrides: list[str]) -> str:
    """What the command prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "lightning_gpp.cli", *overrides],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def check_sweep(config: DictConfig, printed: str) -> None:
    """The report says what the jobs left."""
    with Path("sweep/sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    swept = [key for key in config.hydra.sweeper.params if len({row[key] for row in rows}) > 1]
    assert len(rows) == 2 and swept, rows
    assert not any(row["error"] for row in rows)
    assert "sweep of 2 runs" in printed
    for row in rows:
        run = Path("sweep", row["run"])
        metrics = json.loads((run / "metrics.json").read_text())
        assert {key: float(row[key]) for key in metrics} == metrics
        assert (run / "plan.json").exists() == (row.get("strategy") != "single_device")
    if config.objective:
        best = min(float(row[config.objective]) for row in rows)
        found = Path("sweep/optimization_results.yaml").read_text()
        assert f"best_value: {best}" in found
    else:  # schedules, or one device and two ranks: the same training
        losses = [float(row["val_loss"]) for row in rows]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
