"""The job that simulates: what it prints and writes, what-ifs, mistakes, sweeps, without torch."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.graphs import literal_graph
from helpers.light_command import printed_without_heavy_imports

from lightning_gpp.cost import ANY_DEVICE, Costs, OpProfile, Profile, costs_to_json
from lightning_gpp.graph import graph_to_json
from lightning_gpp.planner import load_plan

Run = Callable[..., str]
GRAPH = literal_graph({"stem": "x", "a": "stem", "b": "stem", "cat()": "a b", "head": "cat()"})
FIXED = ["graph=graph.json", "costs=costs.json", "cluster=uniform", "minibatch_size=32"]
SIMULATE = ["job=simulate", "hydra.run.dir=run", *FIXED]
QUICK = ["job.picture=false", "job.levers=false", "job.speedup=false"]


@pytest.fixture
def graph_files(run_folder: Path) -> Path:
    """A model graph and what it costs in the working directory."""
    profile = Profile(
        {op.name: OpProfile(1e-3, 2e-3, activation_bytes=1000) for op in GRAPH}, 4, ANY_DEVICE
    )
    (run_folder / "graph.json").write_text(graph_to_json(GRAPH))
    (run_folder / "costs.json").write_text(costs_to_json(Costs((profile,))))
    return run_folder


def simulation(folder: Path, name: str = "run") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name / "simulation.json").read_text())
    return found


@pytest.mark.usefixtures("restored_logging", "graph_files")
class TestSimulate:
    def test_prints_and_writes_the_step(self, graphpipe: Run, run_folder: Path) -> None:
        printed = graphpipe(*SIMULATE)
        for heading in (
            "Simulated step: ", "Critical path: ", "channel", "What would speed up this plan",
            "twice the bandwidth", "Speed-up: samples per second",
        ):  # fmt: skip
            assert heading in printed
        assert max(map(len, printed.split("\n")[:-2])) <= 100
        found = simulation(run_folder)
        metrics = json.loads((run_folder / "run" / "metrics.json").read_text())
        assert metrics["step_s"] == found["step"]["step_s"]
        assert metrics["samples_per_s"] == pytest.approx(32 / metrics["step_s"])
        assert sum(found["step"]["critical_path_s"].values()) == pytest.approx(metrics["step_s"])
        assert (run_folder / "run" / "timeline.png").read_bytes().startswith(b"\x89PNG")
        assert "written to" in printed and "timeline.html" in printed
        assert "Predicted step: " in (run_folder / "run" / "timeline.html").read_text()
        assert load_plan(run_folder / "run" / "plan.json").planner == found["step"]["planner"]
        speedup = found["speedup"]["speedup"]
        assert set(speedup) == {"this plan", "naive", "pre-fetch", "wait-free", "merged"}
        assert speedup["naive"]["1"] == pytest.approx(1.0)

    def test_shows_a_step_before_and_after_a_change(self, graphpipe: Run, run_folder: Path) -> None:
        options = ("what_if.compute=2", "cluster.num_devices=1", "job.picture=true")
        printed = graphpipe(*SIMULATE, *QUICK, *options)
        assert "as it is" in printed and "compute x2" in printed and "+100.0 %" in printed
        page = (run_folder / "run" / "timeline.html").read_text()
        assert "step (as it is): " in page and "step (compute x2): " in page
        found = simulation(run_folder)
        assert found["before"]["step_s"] == pytest.approx(2 * found["step"]["step_s"])
        assert found["levers"] == [] and found["speedup"] is None

    def test_everything_can_be_changed(self, graphpipe: Run, run_folder: Path) -> None:
        """Every one of these changes makes the step of two stages longer."""
        two = [*SIMULATE, *QUICK, "cluster.num_devices=2", "planner=balanced"]
        steps = []
        for change in (
            [],
            ["what_if.compute=0.5"],
            ["what_if.bandwidth=1e-6"],
            ["num_microbatches=1"],
        ):
            graphpipe(*two, *change)
            steps.append(simulation(run_folder)["step"]["step_s"])
        assert all(changed_s > steps[0] * 1.05 for changed_s in steps[1:]), steps

    def test_every_plan_has_the_schedule_that_fits(self, graphpipe: Run, run_folder: Path) -> None:
        """All activations are 40 kB and the weights 16 kB; with ``1f1b`` 21 kB do."""
        one = [*SIMULATE, "job.picture=false", "cluster.num_devices=1", "num_microbatches=8"]
        assert "schedule gpipe" in graphpipe(*one)
        tight = graphpipe(*one, "cluster.memory_bytes=30000")
        assert "schedule 1f1b" in tight
        assert "Schedule: 1f1b, as the activations of all micro-batches do not fit" in tight
        levers = {lever["name"]: lever["gain"] for lever in simulation(run_folder)["levers"]}
        assert levers["devices twice as fast"] == pytest.approx(1.0)

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["what_if.bandwidth=-2"], "what_if.bandwidth is a factor above 0 (1 changes nothing)"),
            (["what_if.latency=half"], "what_if.latency is a factor above 0"),
            (["planner=best"], "unknown planner 'best'; known planners: balanced"),
            (["planner=hap"], "job=plan planner=hap predicts and explains one"),
            (["ways=2"], "ways is for models on one graph, which graph=graph.json is not"),
            (["strategy=gnnpipe"], "strategy=gnnpipe is for models on one graph"),
            (["strategy.schedule=2f2b"], "unknown schedule '2f2b'; known schedules: gpipe, 1f1b"),
        ],
    )
    def test_a_mistake_is_one_message(
        self,
        graphpipe: Run,
        capsys: pytest.CaptureFixture[str],
        overrides: list[str],
        message: str,
    ) -> None:
        with pytest.raises(SystemExit):
            graphpipe(*SIMULATE, "job.picture=false", *overrides)
        printed = capsys.readouterr()
        assert message in printed.err
        assert "Traceback" not in printed.err
        assert printed.out == ""

    def test_a_sweep_has_a_table(self, graphpipe: Run, run_folder: Path) -> None:
        printed = graphpipe(
            "-m", "job=simulate", *FIXED, "hydra.sweep.dir=sweep", *QUICK,
            "cluster.num_devices=1,2,4",
        )  # fmt: skip
        with (run_folder / "sweep" / "sweep.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["cluster.num_devices"] for row in rows] == ["1", "2", "4"]
        assert float(rows[2]["samples_per_s"]) > float(rows[0]["samples_per_s"])
        assert "sweep of 3 runs" in printed and "sweep.csv" in printed


def test_simulating_a_published_workload_imports_neither_torch_nor_lightning(
    run_folder: Path,
) -> None:
    """The real command, with its pictures."""
    printed = printed_without_heavy_imports(
        "graph=mmt", "cluster=summit", "job=simulate", "hydra.run.dir=run"
    )
    assert printed.startswith("mmt-4: 97 operators for 4 devices")
    assert (run_folder / "run" / "timeline.png").exists()
