"""Another Hydra application finds the groups once the package is installed, and uses them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

SOURCES = ("lightning_gpp", "recipes", "configs", "hydra_plugins")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
REPOSITORY = Path(__file__).parents[2]

APPLICATION = '''
"""A foreign application: its own model of the world, our groups inside it."""
import json, sys
import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

@hydra.main(version_base="1.3", config_path="conf", config_name="app")
def main(config):
    import hydra_plugins.lightning_gpp_searchpath as plugin
    found = {"plugin": plugin.__file__, "torch": "torch" in sys.modules,
             "choices": OmegaConf.to_container(HydraConfig.get().runtime.choices)}
    if config.get("build"):
        from hydra.utils import instantiate
        data = instantiate(config.pipeline.data)
        module = instantiate(config.pipeline.recipe.module, data)
        strategy = instantiate(config.strategy)
        logger = [instantiate(each) for each in config.logger.values()]
        trainer = instantiate(config.trainer, strategy=strategy, logger=logger)
        found |= {"module": type(module).__name__, "strategy": type(trainer.strategy).__name__,
                  "num_processes": trainer.strategy.num_processes}
        trainer.fit(module, datamodule=data)
        found |= {"global_step": trainer.global_step, "current_epoch": trainer.current_epoch,
                  "metrics": {name: float(x) for name, x in trainer.callback_metrics.items()}}
    found["config"] = OmegaConf.to_container(config, resolve=True)
    print(json.dumps(found))

if __name__ == "__main__":
    main()
'''

# The groups below their prefix, each wherever the application wants it.
APP = """
defaults:
  - lightning_gpp/data@pipeline.data: digits
  - /lightning_gpp/recipe@pipeline.recipe: multimodal
  - lightning_gpp/strategy@strategy: graphpipe
  - lightning_gpp/trainer@trainer: cpu
  - lightning_gpp/logger@logger: csv
  - lightning_gpp/paths@paths: default
  - trainer: own
  - _self_
paths:
  output_dir: results
"""
OWN_TRAINER = "max_epochs: 77\n"

# The short names, on request; the application's own files win.
SHORT = """
defaults:
  - recipe: multimodal
  - data: digits
  - strategy: graphpipe
  - trainer: cpu
  - own: null
  - _self_
hydra:
  searchpath: [pkg://lightning_gpp.configs]
"""
OWN_STRATEGY = "_target_: builtins.dict\nnum_microbatches: 123\n"


def needs_build_tools() -> None:
    """Skips where the environment cannot build without downloading."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not in this environment")
    if int(version("setuptools").partition(".")[0]) < 77:
        pytest.skip(f"building needs setuptools >= 77, here is {version('setuptools')}")


class Environment:
    """A virtual environment with this package installed and all others borrowed."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        self.folder = folder
        source = folder / "source"
        for name in SOURCES:
            shutil.copytree(
                REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        for name in FILES:
            shutil.copy(REPOSITORY / name, source / name)
        venv.create(folder / "env", with_pip=False)
        self.python = folder / "env" / "bin" / "python"
        (site,) = (folder / "env").glob("lib/python*/site-packages")
        # Folders on a .pth come after the environment's own, and their .pth files do not count.
        (site / "borrowed.pth").write_text("\n".join(path for path in sys.path if "site-p" in path))
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
        command += ["--no-deps", "--no-build-isolation", "--no-index", "--no-compile"]
        self.call([*command, "--disable-pip-version-check", *options, str(source)])
        (self.folder / "app.py").write_text(APPLICATION)
        self.write("app.yaml", APP)
        self.write("trainer/own.yaml", OWN_TRAINER)

    def write(self, name: str, text: str) -> None:
        """Adds a file to the application's configuration."""
        path = self.folder / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def app(self, *arguments: str) -> str:
        """What the foreign application prints."""
        return self.call([str(self.python), "app.py", "hydra.run.dir=run", *arguments])

    def found(self, *arguments: str) -> dict[str, Any]:
        """What a run of the foreign application found."""
        found: dict[str, Any] = json.loads(self.app(*arguments).splitlines()[-1])
        return found

    def call(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module", params=["wheel", pytest.param("editable", marks=pytest.mark.extra)])
def environment(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Environment:
    needs_build_tools()
    options = ["--editable"] if request.param == "editable" else []
    return Environment(tmp_path_factory.mktemp(request.param), options)


def test_foreign_application_composes(environment: Environment) -> None:
    found = environment.found()
    # The plug-in of this installation, not one that the borrowed packages bring along.
    assert Path(found["plugin"]).is_relative_to(environment.folder)
    assert not found["torch"], "Hydra's scan of plug-ins imported torch"
    config = found["config"]
    assert set(config) == {"pipeline", "strategy", "trainer", "logger", "paths"}
    assert config["strategy"]["_target_"] == "lightning_gpp.strategy.GraphPipeStrategy"
    assert config["pipeline"]["recipe"]["module"]["encoder_width"] == 128
    # The application's group `trainer` is its own: ours merged below it, no choice of ours in it.
    assert config["trainer"]["max_epochs"] == 77
    assert config["trainer"]["default_root_dir"] == "results"
    path = environment.app("--info", "searchpath")
    assert "lightning-gpp://lightning_gpp.configs" in path


@pytest.mark.parametrize("environment", ["wheel"], indirect=True)
def test_foreign_application_trains_what_it_composed(environment: Environment) -> None:
    options = [
        "lightning_gpp/data@pipeline.data=multimodal",
        "pipeline.data.root=null",  # digits, whatever data this machine has
        "trainer.max_epochs=1",
        "trainer.devices=1",
        "+trainer.limit_train_batches=3",
        "+trainer.limit_val_batches=1",
    ]
    found = environment.found("+build=true", *options)
    assert found["choices"]["lightning_gpp/data@pipeline.data"] == "multimodal"
    assert (found["module"], found["strategy"]) == ("MultimodalClassifier", "GraphPipeStrategy")
    assert (found["num_processes"], found["global_step"], found["current_epoch"]) == (1, 3, 1)
    assert found["metrics"].keys() >= {"train_loss", "val_loss", "val_acc"}
    assert 0 < found["metrics"]["val_loss"] < 5


def test_short_names_on_request(environment: Environment) -> None:
    environment.write("short.yaml", SHORT)
    environment.write("strategy/graphpipe.yaml", OWN_STRATEGY)
    config = environment.found("--config-name=short")["config"]
    assert config["recipe"]["module"]["encoder_width"] == 128
    assert config["trainer"]["default_root_dir"] == "."
    assert config["strategy"]["num_microbatches"] == 123  # the application's file wins


def test_our_own_application_has_the_groups_once(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['graphpipe', '--info', 'searchpath']; "
    code += "from lightning_gpp.cli import main; main()"
    command = [sys.executable, "-c", code]
    # Not beside the checkout, whose folders would hide the installed package.
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "pkg://lightning_gpp.configs" in done.stdout
    assert "lightning-gpp://" not in done.stdout
