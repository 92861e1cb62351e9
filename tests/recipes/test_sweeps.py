"""Sweeps: jobs that leave nothing to each other, failures in the middle, and the report."""

from __future__ import annotations

import atexit
import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.processes import wait_until_ended

from lightning_gpp import cli
from lightning_gpp.jobs import sweep

FAST = [
    "trainer.max_epochs=1",
    "+trainer.limit_train_batches=2",
    "+trainer.limit_val_batches=1",
    "trainer.enable_progress_bar=false",
    "trainer.log_every_n_steps=1",
    "data=digits",
    "strategy=single_device",
]
FOLDER = ["hydra.sweep.dir=sweep"]


@pytest.fixture
def no_report_at_exit() -> Iterator[None]:
    """A failed sweep reports when the process ends; pytest's is not the sweep's."""
    yield
    atexit.unregister(sweep.report)


def graphpipe(*overrides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["graphpipe", *overrides])
    cli.main()


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("restored_logging", "no_report_at_exit")
class TestInThisProcess:
    def test_jobs_are_as_if_alone(
        self, run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = dict(os.environ)
        sizes = "recipe.module.encoder_width=8,16"
        graphpipe("-m", sizes, *FOLDER, *FAST, monkeypatch=monkeypatch)
        assert dict(os.environ) == before
        printed = capsys.readouterr().out
        graphpipe(sizes.removesuffix("8,16") + "16", "hydra.run.dir=alone", *FAST,
                  monkeypatch=monkeypatch)  # fmt: skip
        alone = json.loads((run_folder / "alone" / "metrics.json").read_text())
        assert json.loads((run_folder / "sweep" / "1" / "metrics.json").read_text()) == alone
        first, second = rows(run_folder / "sweep")
        assert (first["run"], second["run"]) == ("0", "1")
        assert first["recipe.module.encoder_width"] == "8"
        assert {name: float(second[name]) for name in alone} == alone
        assert first["val_loss"] != second["val_loss"]
        assert "sweep of 2 runs; all with trainer.max_epochs=1" in printed
        assert printed.count("final metrics") == 2

    def test_a_failing_job_does_not_stop_the_others(
        self, run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        widths = "recipe.module.encoder_width=8,wide,16"
        with pytest.raises(SystemExit) as caught:
            graphpipe("-m", widths, *FOLDER, *FAST, monkeypatch=monkeypatch)
        assert caught.value.code == 1
        error = capsys.readouterr().err
        assert "recipe.module.encoder_width=wide" in error
        assert "Traceback" not in error
        sweep.report(run_folder / "sweep")  # as at the end of the process
        table = rows(run_folder / "sweep")
        assert [bool(row["error"]) for row in table] == [False, True, False]
        assert table[1]["val_loss"] == "" and float(table[2]["val_loss"]) > 0
        printed = capsys.readouterr().out
        assert "sweep of 3 runs, 1 failed" in printed
        assert "TypeError" in printed

    def test_processes_that_would_repeat_the_sweep_are_refused(
        self, run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("LOCAL_RANK", "HYDRA_FULL_ERROR"):
            monkeypatch.delenv(name, raising=False)
        overrides = ["strategy.start_method=popen", "strategy.schedule=gpipe", *FOLDER, *FAST[:-1]]
        with pytest.raises(SystemExit):
            graphpipe("-m", *overrides, monkeypatch=monkeypatch)
        error = capsys.readouterr().err
        assert "each of them would run the whole sweep" in error
        assert "strategy.start_method to spawn" in error

    @pytest.mark.filterwarnings("ignore:The ``declarative_base")  # sqlalchemy below optuna
    def test_a_search_without_objective_ends_before_training(
        self, run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        search = ["hydra/sweeper=optuna", "seed=choice(0,1)"]
        with pytest.raises(SystemExit):
            graphpipe("-m", *search, *FOLDER, *FAST, monkeypatch=monkeypatch)
        error = capsys.readouterr().err
        assert "OptunaSweeper needs a metric to look at: set objective=" in error
        assert not list(run_folder.glob("sweep/*/lightning"))
        assert not list(run_folder.glob("sweep/*/metrics.json"))


class TestObjective:
    def test_is_the_metric(self) -> None:
        assert cli.objective_value("b", {"a": 1.0, "b": 2.0}) == 2.0
        assert cli.objective_value(None, {"a": 1.0}) is None


class TestReport:
    def test_job_that_did_not_end(self, tmp_path: Path) -> None:
        begun = {"seconds": None, "metrics": {}, "error": "x"}
        lines = [
            {"run": 1, "settings": {"a": "2"}, **begun},
            {"run": 0, "settings": {"a": "1"}, **begun},
            {"run": 0, "settings": {"a": "1"}, "seconds": 0.0, "metrics": {"m": 1.0}},
        ]
        (tmp_path / sweep.LINES).write_text("\n".join(map(json.dumps, lines)) + "\n")
        first, second = sweep.read_jobs(tmp_path)
        assert (first["run"], first["metrics"]) == (0, {"m": 1.0}) and "error" not in first
        assert (second["run"], second["seconds"], second["error"]) == (1, None, "x")
        sweep.report(tmp_path)
        assert [row["seconds"] for row in rows(tmp_path)] == ["0.0", ""]


@pytest.mark.usefixtures("interruptible")
def test_interrupt_ends_all_processes_and_reports(run_folder: Path) -> None:
    """Ctrl-C in the middle of a job with two ranks: the sweep ends, with its report."""
    overrides = ["trainer.devices=2", *FAST[1:-1], "trainer.max_epochs=1000000", *FOLDER]
    with (run_folder / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_gpp.cli", "-m", *overrides],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(run_folder / "sweep" / "0" / "plan.json", process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) != 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    printed = (run_folder / "output").read_text()
    (row,) = rows(run_folder / "sweep")
    assert row["error"] == sweep.NOT_ENDED
    assert "sweep of 1 run, 1 failed" in printed
    wait_until_ended(group_members(process.pid), 10.0)


def wait_for(path: Path, process: subprocess.Popen[bytes], limit_s: float = 100.0) -> None:
    end = time.monotonic() + limit_s
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, path
        time.sleep(0.1)


def group_members(group: int) -> list[int]:
    """Processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            process_group = stat.read_text().rpartition(")")[2].split()[2]
        except OSError:
            continue
        if int(process_group) == group:
            found.append(int(stat.parent.name))
    return found
