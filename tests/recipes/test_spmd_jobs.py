"""The jobs that plan SPMD programs of a recipe's module, beside pipelines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_gpp.common.units_of_measure import seconds_text
from lightning_gpp.jobs.spmd import SPMD_PLANNERS

Run = Callable[..., str]
RECIPE = ["hydra.run.dir=run", "cluster=dgx_a100", "cluster.num_devices=2", "strategy.cache=false"]


@pytest.mark.usefixtures("restored_logging")
def test_programs_and_pipelines_in_one_table(graphpipe: Run, run_folder: Path) -> None:
    names = ["data_parallel", *SPMD_PLANNERS]
    printed = graphpipe("job=compare", *RECIPE, f"job.planners=[{','.join(names)}]")
    rows = {
        row["planner"]: row for row in json.loads((run_folder / "run/compare.json").read_text())
    }
    assert [*rows] == names
    for name in SPMD_PLANNERS:
        row = rows[name]
        assert row["schedule"] == "spmd" and not row["error"]
        assert row["step_s"] >= rows["hap"]["step_s"] * (1 - 1e-9)
        assert row["peak_memory_bytes"] > 0 and name in printed
    # Deals samples, so that gradients of all parameters are summed: as the pipeline of one stage.
    sums = rows["data_parallel"]["message_bytes"]
    assert rows["even_shares"]["message_bytes"] == pytest.approx(sums, rel=0.05)


@pytest.mark.usefixtures("restored_logging")
def test_a_program_is_explained(graphpipe: Run, run_folder: Path) -> None:
    printed = graphpipe("job=plan", "planner=hap", *RECIPE)
    for heading in ("A step takes", "Devices", "What moves"):
        assert heading in printed
    program = json.loads((run_folder / "run/program.json").read_text())
    assert len(program["shares"]) == 2
    metrics = json.loads((run_folder / "run/metrics.json").read_text())
    assert metrics["samples_per_s"] == pytest.approx(64 / metrics["step_s"])
    verdict = " ".join(printed[printed.index("Verdict: 2 devices are ") :].split())
    assert f" {seconds_text(metrics['step_s'])} a step, one " in verdict


@pytest.mark.usefixtures("restored_logging")
def test_mini_batches_are_as_large_as_asked_for(graphpipe: Run, run_folder: Path) -> None:
    """Smaller and larger ones than the recipe's: what is held and sent goes with them.

    The program is given, as of two that are nearly as fast the measured seconds choose.
    """
    found = {}
    for size in (16, 64, 256):
        graphpipe("job=plan", "planner=even_shares", *RECIPE, f"minibatch_size={size}")
        found[size] = json.loads((run_folder / "run/metrics.json").read_text())
        assert found[size]["samples_per_s"] == pytest.approx(size / found[size]["step_s"])
    memory = {size: one["peak_memory_bytes"] for size, one in found.items()}
    # Parameters do not grow, activations do.
    assert (memory[256] - memory[64]) == pytest.approx(4 * (memory[64] - memory[16]), rel=0.05)


@pytest.mark.usefixtures("restored_logging")
def test_devices_without_a_data_sheet_are_a_row(graphpipe: Run, run_folder: Path) -> None:
    options = [*RECIPE, "cluster=uniform", "job.planners=[data_parallel,hap]"]
    graphpipe("job=compare", *options)
    ours, hap = json.loads((run_folder / "run/compare.json").read_text())
    assert ours["step_s"] and not ours["error"]
    assert hap["step_s"] is None and "nothing is known of devices of kind" in hap["error"]


@pytest.mark.usefixtures("restored_logging")
def test_a_search_that_is_ended_is_a_row(graphpipe: Run, run_folder: Path) -> None:
    """Nothing imports torch in a hundredth of a second."""
    graphpipe("job=compare", *RECIPE, "job.planners=[hap]", "job.limit_s=0.01")
    (row,) = json.loads((run_folder / "run/compare.json").read_text())
    assert row["error"] == "no answer within 0.01 s; raise job.limit_s"


@pytest.mark.usefixtures("restored_logging", "run_folder")
@pytest.mark.parametrize(
    "options", [["job=compare", "job.planners=[hap]"], ["job=plan", "planner=hap"]]
)
def test_published_graphs_have_no_operators_of_torch(
    graphpipe: Run, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        graphpipe(*options, "graph=mmt", "cluster=summit", "hydra.run.dir=run")
    assert "leave out graph=, and give a recipe" in capsys.readouterr().err
