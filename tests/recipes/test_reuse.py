"""A user's own module with our groups, and the answers of the command line that train nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.experiment_jobs import train_configuration
from helpers.workers import WorkerPool

from lightning_gpp import cli

MODULE = '''
import lightning.pytorch as lp
import torch
from torch import nn

class TwoTowers(lp.LightningModule):
    """A user's module; it knows nothing of lightning_gpp."""

    def __init__(self, width):
        super().__init__()
        torch.manual_seed(3)
        self.pixels = nn.Sequential(nn.Linear(64, width), nn.ReLU())
        self.fourier = nn.Sequential(nn.LazyLinear(width), nn.ReLU())
        self.fourier(torch.zeros(1, {fourier}))
        self.head = nn.Linear(2 * width, 10)

    def forward(self, views):
        towers = [self.pixels(views["pixels"]), self.fourier(views["fourier"])]
        return self.head(torch.cat(towers, dim=1))

    def training_step(self, batch, batch_idx):
        views, labels = batch
        loss = nn.functional.cross_entropy(self(views), labels)
        self.log("my_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        views, labels = batch
        self.log("my_accuracy", (self(views).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
'''
RECIPE = """
takes_data: false
module:
  _target_: my_towers.TwoTowers
  width: 8
"""
OVERRIDES = (
    "recipe=mine",
    "data=digits",
    "trainer.max_epochs=1",
    "+trainer.limit_train_batches=3",
    "+trainer.limit_val_batches=1",
    "trainer.enable_progress_bar=false",
    "trainer.log_every_n_steps=1",
)


@pytest.fixture
def users_folder(run_folder: Path) -> Path:
    """A working directory with a module of the user's and a configuration directory."""
    from lightning_gpp.recipes.multimodal import Digits

    sizes = Digits.VIEW_SIZES
    (run_folder / "my_towers.py").write_text(MODULE.replace("{fourier}", str(sizes["fourier"])))
    (run_folder / "conf" / "recipe").mkdir(parents=True)
    (run_folder / "conf" / "recipe" / "mine.yaml").write_text(RECIPE)
    return run_folder


@pytest.mark.usefixtures("restored_logging")
def test_own_module_from_the_working_directory(
    users_folder: Path, monkeypatch: pytest.MonkeyPatch, pool: WorkerPool
) -> None:
    arguments = ["--config-dir", "conf", "hydra.run.dir=run", *OVERRIDES]
    monkeypatch.setattr(sys, "argv", ["graphpipe", *arguments, "strategy=single_device"])
    cli.main()
    alone = json.loads(Path("run/metrics.json").read_text())
    assert set(alone) == {"my_loss", "my_accuracy"}
    sys.modules.pop("my_towers", None)
    monkeypatch.syspath_prepend(str(users_folder))
    pipeline = [
        f"hydra.searchpath=[file://{users_folder}/conf]",
        *OVERRIDES,
        "trainer.devices=2",
        "strategy.start_method=popen",
        "strategy.plan=[[pixels,fourier],[head]]",
    ]
    first, second = pool.run(train_configuration, pipeline, users_folder / "pipe", num_ranks=2)
    assert first == second
    assert first == pytest.approx(alone, rel=1e-5)
    assert len(json.loads(Path("pipe/plan.json").read_text())["stages"]) == 2


def test_answers_without_training_need_no_torch(run_folder: Path) -> None:
    code = (
        "import os, sys\n"
        "from lightning_gpp.cli import main\n"
        "os.environ['COMP_LINE'] = 'graphpipe recipe=multi'\n"
        "for arguments in (['--help'], ['--cfg', 'job'], ['--info', 'searchpath'],\n"
        "                  ['--hydra-help'], ['-sc', 'query=bash'], ['experiment=schedules',\n"
        "                  '--cfg', 'hydra', '--package', 'hydra.sweeper.params']):\n"
        "    sys.argv = ['graphpipe', *arguments]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        assert not end.code\n"
        "    print('== end of', arguments[0])\n"
        "print({'torch', 'lightning', 'sklearn', 'optuna'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    answers = done.stdout.split("== end of")
    assert "experiment: " in answers[0] and "strategy.num_microbatches=" in answers[0]
    assert answers[0].count("\n") < 50
    assert "GraphPipeStrategy" in answers[1]
    assert "pkg://lightning_gpp.configs" in answers[2]
    assert "recipe=multimodal" in answers[4]
    assert "strategy.schedule: gpipe,1f1b" in answers[5]
    assert done.stdout.strip().endswith("set()")
