"""The console command, in this process where that is possible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_gpp import cli
from lightning_gpp.jobs.train import train
from lightning_gpp.planner import load_plan, num_devices_used

FAST = [
    "trainer.max_epochs=1",
    "+trainer.limit_train_batches=3",
    "+trainer.limit_val_batches=2",
    "trainer.enable_progress_bar=false",
    "trainer.log_every_n_steps=1",
    "data=digits",
]


def graphpipe(*overrides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the command line in this process; the run goes to ``run`` in the working directory."""
    monkeypatch.setattr(sys, "argv", ["graphpipe", "hydra.run.dir=run", *overrides])
    cli.main()


@pytest.mark.usefixtures("restored_logging")
class TestInThisProcess:
    def test_leaves_metrics_and_configuration(
        self, run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        graphpipe("strategy=single_device", *FAST, monkeypatch=monkeypatch)
        run = run_folder / "run"
        metrics = json.loads((run / "metrics.json").read_text())
        assert set(metrics) == {"train_loss", "val_loss", "val_acc"}
        config = OmegaConf.load(run / "config.yaml")
        assert config.paths.output_dir == str(run)
        assert config.trainer.max_epochs == 1
        assert not (run / "plan.json").exists()
        printed = capsys.readouterr().out
        assert f"val_acc     {metrics['val_acc']:.4g}" in printed
        assert f"written to {run}" in printed

    def test_checkpoint_is_tested_and_evaluated(
        self, run_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recipe = [
            "strategy=single_device",
            "data._target_=helpers.tested_digits.TestedDigits",
            "recipe.module._target_=helpers.tested_digits.TestedClassifier.for_data",
            *FAST,
        ]
        graphpipe(*recipe, "callbacks=[default,model_checkpoint]", monkeypatch=monkeypatch)
        trained = json.loads((run_folder / "run" / "metrics.json").read_text())
        checkpoint = f"ckpt_path={run_folder}/run/checkpoints/epoch_000.ckpt"

        def found(job: str, *options: str) -> dict[str, float]:
            folder = f"hydra.run.dir={job}-{len(options)}"
            graphpipe(f"job={job}", folder, checkpoint, *options, monkeypatch=monkeypatch)
            written = (run_folder / folder.partition("=")[2] / "metrics.json").read_text()
            return dict(json.loads(written))

        assert found("eval", *recipe) == {"test_acc": pytest.approx(trained["test_acc"])}
        # Without a test the same checkpoint is validated.
        evaluated = found("eval", "strategy=single_device", *recipe[2:])
        assert evaluated["val_loss"] == pytest.approx(trained["val_loss"])

    def test_checkpoint_has_to_be_there(
        self, run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        for options, text in (([], "ckpt_path=FILE"), (["ckpt_path=none.ckpt"], "is no file")):
            with pytest.raises(SystemExit):
                graphpipe("job=eval", *options, monkeypatch=monkeypatch)
            assert text in capsys.readouterr().err

    def test_configuration_runs_again(
        self, run_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        graphpipe("strategy=single_device", *FAST, monkeypatch=monkeypatch)
        first = json.loads((run_folder / "run" / "metrics.json").read_text())
        config = OmegaConf.load(run_folder / "run" / "config.yaml")
        config.logger = None
        config.trainer.enable_checkpointing = False
        assert train(config) == first  # type: ignore[arg-type]

    def test_missing_data_is_one_message(
        self, run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        with pytest.raises(SystemExit) as caught:
            graphpipe("strategy=single_device", "data.root=nowhere", monkeypatch=monkeypatch)
        assert caught.value.code == 1
        message = capsys.readouterr().err
        assert "FileNotFoundError: nowhere/mfeat/mfeat-fou.csv is not there" in message
        assert "Traceback" not in message


@pytest.mark.extra  # .ci/run gives this command, too
def test_main_job_runs_as_a_graph_of_stages(run_folder: Path) -> None:
    """The real command: processes started by spawn, two stages."""
    command = [sys.executable, "-m", "lightning_gpp.cli", "hydra.run.dir=run"]
    done = subprocess.run(
        [*command, "trainer.devices=2", *FAST, "planner=balanced", "callbacks.timeline.steps=[2]"],
        cwd=run_folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = run_folder / "run"
    assert num_devices_used(load_plan(run / "plan.json")) == 2
    assert set(json.loads((run / "metrics.json").read_text())) == {
        "train_loss",
        "val_loss",
        "val_acc",
    }
    assert "stage" in done.stderr + done.stdout
    assert (run / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "refit.json, timeline.html, timeline.png" in done.stdout
    assert "Warning" not in done.stderr


def test_help_needs_no_torch() -> None:
    code = "import sys, lightning_gpp.cli; assert not {'torch', 'lightning'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.mark.parametrize("options", [["--help"], ["job=plan", "graph=mmt", "cluster=summit"]])
def test_output_that_is_not_read_to_the_end_is_no_error(
    run_folder: Path, options: list[str]
) -> None:
    """``graphpipe … | head``, with a reader that is gone already when the first line comes."""
    code = "from lightning_gpp.cli import main; main()"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-u", "-c", code, *options]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=600)
    os.close(writer)
    assert (done.returncode, done.stderr) == (cli.BROKEN_PIPE, b"")


def test_installation_declares_the_entry_points() -> None:
    (command,) = entry_points(group="console_scripts", name="graphpipe")
    assert command.load() is cli.main
    (hook,) = entry_points(group="torch.backends", name="lightning_gpp")
    assert callable(hook.load())


class TestFirstError:
    def test_error_of_a_process(self) -> None:
        text = (
            "\n\n-- Process 2 terminated with the following error:\n"
            "Traceback (most recent call last):\n"
            '  File "spawn.py", line 95, in _wrap\n'
            "    fn(i, *args)\n"
            '  File "plan.py", line 9, in make\n'
            "    raise ValueError(\n"
            "lightning_gpp.capture.errors.CaptureError: line 3 of forward\n"
            "  remedy: name it a leaf\n"
        )
        assert cli.first_error(RuntimeError(text)) == (
            "lightning_gpp.capture.errors.CaptureError: line 3 of forward\n  remedy: name it a leaf"
        )
