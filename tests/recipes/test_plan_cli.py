"""The jobs that plan: what they print and write, quickly and without torch; edited plans train."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.experiment_jobs import train_configuration
from helpers.graphs import literal_graph
from helpers.light_command import printed_without_heavy_imports
from helpers.workers import WorkerPool

from lightning_gpp.common.units_of_measure import seconds_text
from lightning_gpp.cost import ANY_DEVICE, Costs, OpProfile, Profile, costs_to_json
from lightning_gpp.graph import graph_to_json
from lightning_gpp.planner import PLANNERS, load_plan, save_plan

GRAPH = literal_graph({"stem": "x", "a": "stem", "b": "stem", "cat()": "a b", "head": "cat()"})
Run = Callable[..., str]
PLAN = ["job=plan", "hydra.run.dir=run", "graph=graph.json", "cluster=dgx_a100"]


COSTS = ["cluster=uniform", "costs=costs.json", "minibatch_size=64", "job.picture=false"]
"""Options with the costs of :func:`write_costs`; memory has no limit."""


def write_costs(folder: Path) -> None:
    """Costs in which every operator keeps 1 kB of a sample."""
    profile = Profile(
        {op.name: OpProfile(1e-3, 2e-3, activation_bytes=1000) for op in GRAPH}, 1, ANY_DEVICE
    )
    (folder / "costs.json").write_text(costs_to_json(Costs((profile,))))


@pytest.fixture
def graph_file(run_folder: Path) -> Path:
    """A model graph in the working directory."""
    path = run_folder / "graph.json"
    path.write_text(graph_to_json(GRAPH))
    return path


@pytest.mark.usefixtures("restored_logging", "graph_file")
class TestPlan:
    def test_prints_and_writes_the_plan(self, graphpipe: Run, run_folder: Path) -> None:
        printed = graphpipe(*PLAN, "cluster.num_devices=2", "minibatch_size=16")
        assert printed.startswith(
            "graph: 5 operators for 2 devices (NVIDIA A100-SXM4-80GB) in 1 host, mini-batches of 16"
        )
        for heading in ("Predicted step:", "Bottleneck: stage", "Searched by "):
            assert heading in printed
        assert max(map(len, printed.split("\n"))) <= 100 or str(run_folder) in printed
        run = run_folder / "run"
        plan = load_plan(run / "plan.json")
        assert f"Plan {plan.planner!r}: {plan.num_stages} stage" in printed
        assert plan.stages[-1].devices[0] == 0  # the rank of the loss
        assert (run / "plan.png").read_bytes().startswith(b"\x89PNG")
        metrics = json.loads((run / "metrics.json").read_text())
        assert metrics["samples_per_s"] == pytest.approx(16 / metrics["step_s"])
        assert (
            f"written to {run}: config.yaml, graphpipe.log, metrics.json, plan.json, plan.png"
            in printed
        )

    @pytest.mark.parametrize("name", ["planner", "strategy.planner"])
    def test_planner_is_chosen_by_name(self, graphpipe: Run, run_folder: Path, name: str) -> None:
        options = [f"{name}=sequential", "cluster.num_devices=2", "job.picture=false"]
        graphpipe(*PLAN, *options)
        assert load_plan(run_folder / "run" / "plan.json").planner.startswith("sequential")

    def test_explains_a_plan_by_hand(self, graphpipe: Run, run_folder: Path) -> None:
        by_hand = "strategy.plan=[[stem,a],[b],[cat,head]]"
        options = ["cluster.num_devices=3", "num_microbatches=4", "job.picture=false"]
        printed = graphpipe(*PLAN, *options, by_hand)
        assert "Plan 'manual': 3 stages on 3 devices" in printed

    def test_schedule_is_the_one_that_fits_unless_it_is_named(
        self, graphpipe: Run, run_folder: Path
    ) -> None:
        """Five operators keep 1 kB each for each of 64 samples, on one device."""
        write_costs(run_folder)
        one = [*PLAN, *COSTS, "cluster.num_devices=1", "num_microbatches=64"]
        roomy = graphpipe(*one)
        assert "schedule gpipe" in roomy and "Schedule: 1f1b" not in roomy
        assert "Peak memory: 348 kB on device 0." in roomy
        named = graphpipe(*one, "strategy.schedule=1f1b")
        assert "schedule 1f1b" in named and "Schedule: 1f1b" not in named
        tight = " ".join(graphpipe(*one, "cluster.memory_bytes=300000").split())
        assert "schedule 1f1b" in tight
        assert (
            "Schedule: 1f1b, as the activations of all micro-batches do not fit into memory (gpipe "
            "needs 348 kB of 300 kB on device 0 with this plan, and no other was found); it runs "
            "the step once per micro-batch: the loss must be a mean over samples."
        ) in tight
        by_hand = graphpipe(
            *one, "cluster.memory_bytes=300000", "strategy.plan=[[stem,a,b,cat,head]]"
        )
        assert "schedule 1f1b" in by_hand and "Schedule: 1f1b" in by_hand
        with pytest.raises(SystemExit):
            graphpipe(*one, "cluster.memory_bytes=300000", "strategy.schedule=gpipe")

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["graph=nowhere.txt"], "graph=nowhere.txt is neither a file nor a known model"),
            (["graph=plan.json"], 'plan.json: expected "format": "lightning_gpp.model_graph"'),
            (["graph=broken.txt"], "broken.txt, line 1: expected 'node"),
            (
                ["graph=mmt", "+graph_options.branches=2"],
                "unknown option 'branches'; expected num_",
            ),
            (["cluster=from_file", "cluster.path=broken.json"], "broken.json: not JSON"),
            (
                ["cluster.num_devices=1.5"],
                "num_devices must be a whole number of at least 1, got 1.5",
            ),
            (["graph=mmt", "num_microbatches=many"], "num_microbatches must be a whole number"),
            (["costs=zero.json"], "zero.json: no operator takes any time"),
            (["planner=best"], "unknown planner 'best'; known planners: balanced"),
            (["strategy.schedule=2f2b"], "unknown schedule '2f2b'; known schedules: gpipe, 1f1b"),
            (["minibatch_size=0"], "minibatch_size must be at least 1, got 0"),
            (["+num_microbatch=4"], "+num_microbatch adds an option that nothing reads"),
            (["+job.limit=4"], "+job.limit adds an option that nothing reads"),
        ],
    )
    def test_a_mistake_is_one_message(
        self,
        graphpipe: Run,
        run_folder: Path,
        capsys: pytest.CaptureFixture[str],
        overrides: list[str],
        message: str,
    ) -> None:
        for name in ("broken.json", "broken.txt"):
            (run_folder / name).write_text('{"a": 1 "b"}')
        (run_folder / "plan.json").write_text('{"format": "lightning_gpp.plan", "version": 1}')
        zero = Costs((Profile({op.name: OpProfile(0.0) for op in GRAPH}, 1, ANY_DEVICE),))
        (run_folder / "zero.json").write_text(costs_to_json(zero))
        with pytest.raises(SystemExit):
            graphpipe(*PLAN, *overrides)
        printed = capsys.readouterr()
        assert message in printed.err
        assert "Traceback" not in printed.err
        assert printed.out == ""


@pytest.mark.usefixtures("restored_logging", "graph_file")
class TestCompare:
    def test_a_row_for_every_planner(self, graphpipe: Run, run_folder: Path) -> None:
        printed = graphpipe("job=compare", *PLAN[1:], "cluster.num_devices=2", "minibatch_size=16")
        rows = json.loads((run_folder / "run" / "compare.json").read_text())
        assert [row["planner"] for row in rows] == list(PLANNERS)
        for row in rows:
            assert row["samples_per_s"] == pytest.approx(16 / row["step_s"])
            assert row["schedule"] == "gpipe"
            assert any(line.startswith(row["planner"]) for line in printed.split("\n"))

    def test_every_planner_has_the_schedule_that_fits(
        self, graphpipe: Run, run_folder: Path
    ) -> None:
        """Each of two devices holds the activations of all operators for half of the samples.

        Three operators for all samples are too many, and a division into two stages has such a one.
        """
        write_costs(run_folder)
        printed = graphpipe(
            "job=compare", *PLAN[1:], *COSTS[:-1], "cluster.num_devices=2", "job.limit_s=null",
            "cluster.memory_bytes=195000", "job.planners=[balanced,data_parallel]",
            "num_microbatches=64",
        )  # fmt: skip
        rows = json.loads((run_folder / "run" / "compare.json").read_text())
        assert all(row["step_s"] and not row["error"] for row in rows)
        schedules = {row["planner"]: row["schedule"] for row in rows}
        assert schedules == {"balanced": "1f1b", "data_parallel": "gpipe"}
        assert "balanced       1f1b" in printed
        assert "balanced: Schedule: 1f1b, as the activations" in printed
        assert "schedule: 1f1b or gpipe)" in " ".join(printed.split())

    def test_a_planner_without_a_plan_says_why(self, graphpipe: Run, run_folder: Path) -> None:
        """``balanced`` wants a stage for each of 6 devices, and there are 5 operators."""
        printed = graphpipe(
            "job=compare", *PLAN[1:], "cluster.num_devices=6",
            "job.planners=[balanced,graphpipe]", "job.limit_s=null",
        )  # fmt: skip
        none, found = json.loads((run_folder / "run" / "compare.json").read_text())
        assert none["step_s"] is None and "6 devices need as many stages" in none["error"]
        assert found["step_s"] > 0 and not found["error"]
        assert "6 devices need as many" in printed
        assert max(map(len, printed.split("\n")[:-2])) <= 100

    def test_a_planner_that_runs_into_the_limit_is_a_row(
        self, graphpipe: Run, run_folder: Path
    ) -> None:
        options = ["cluster.num_devices=2", "job.planners=[graphpipe]", "job.limit_s=0.01"]
        printed = graphpipe("job=compare", *PLAN[1:], *options)
        (row,) = json.loads((run_folder / "run" / "compare.json").read_text())
        assert row["step_s"] is None and row["search_s"] == 0.01
        assert "no answer within 0.01 s; raise job.limit_s" in row["error"]
        assert "no answer" in printed

    def test_models_on_one_graph_have_one_planner(
        self, graphpipe: Run, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            graphpipe("job=compare", *REDDIT)
        assert "nothing is compared; use job=plan" in capsys.readouterr().err

    def test_a_sweep_has_a_column_for_every_planner(self, graphpipe: Run, run_folder: Path) -> None:
        printed = graphpipe(
            "-m", "job=compare", "graph=graph.json", "cluster=dgx_a100", "hydra.sweep.dir=sweep",
            "cluster.num_devices=1,2", "job.planners=[balanced,graphpipe]", "job.limit_s=null",
        )  # fmt: skip
        with (run_folder / "sweep" / "sweep.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["cluster.num_devices"] for row in rows] == ["1", "2"]
        for row in rows:
            compared = json.loads((run_folder / "sweep" / row["run"] / "compare.json").read_text())
            assert {one["planner"]: one["samples_per_s"] for one in compared} == {
                name: float(row[name]) for name in ("balanced", "graphpipe")
            }
        assert "sweep of 2 runs" in printed


def test_planning_a_published_workload_imports_neither_torch_nor_lightning(
    run_folder: Path,
) -> None:
    """The real command, with its picture, for which alone matplotlib is imported."""
    printed = printed_without_heavy_imports(
        *("graph=mmt", "cluster=summit", "job=plan", "hydra.run.dir=run"),
        also=("lightning_gpp.simulate", "lightning_gpp.strategy"),
    )
    assert printed.startswith("mmt-4: 97 operators for 4 devices")
    assert (run_folder / "run" / "plan.png").exists()


@pytest.mark.usefixtures("restored_logging")
def test_an_edited_plan_of_a_recipe_trains(
    graphpipe: Run, run_folder: Path, pool: WorkerPool
) -> None:
    """Plan a recipe for two devices, move an operator by hand, explain that, train it."""
    recipe = ["data=digits", "recipe.module.encoder_width=16", "data.batch_size=64"]
    printed = graphpipe(
        "job=plan", *recipe, "cluster.num_devices=2", "hydra.run.dir=run", "job.picture=false",
        "planner=balanced", "trainer=emulated",
    )  # fmt: skip
    assert "MultimodalClassifier: 30 operators for 2 devices (cpu)" in printed
    assert "measured on cpu" in printed
    plan = load_plan(run_folder / "run" / "plan.json")
    assert plan.num_stages == 2

    first, last = plan.stages
    moved = first.operators[-1]
    edited = replace(
        plan,
        planner="by hand",
        stages=(
            replace(first, operators=first.operators[:-1]),
            replace(last, operators=(moved, *last.operators)),
        ),
    )
    save_plan(edited, run_folder / "edited.json")

    kept = ["graph=run/graph.json", "costs=run/costs.json", "cluster=uniform"]
    again = graphpipe(
        "job=plan", *kept, "cluster.num_devices=2", "strategy.plan=edited.json",
        "hydra.run.dir=again", "minibatch_size=64", "job.picture=false",
    )  # fmt: skip
    assert "Plan 'by hand': 2 stages on 2 devices" in again

    overrides = [
        *recipe, "trainer.devices=2", "trainer.max_epochs=1", "+trainer.limit_train_batches=2",
        "+trainer.limit_val_batches=1", "trainer.enable_progress_bar=false",
        "callbacks.timeline=null", "strategy.start_method=popen",
        f"strategy.plan={run_folder / 'edited.json'}",
    ]  # fmt: skip
    metrics, _ = pool.run(train_configuration, overrides, run_folder / "trained", num_ranks=2)
    assert math.isfinite(metrics["train_loss"])
    assert load_plan(run_folder / "trained" / "plan.json") == edited


REDDIT = ["graph=full_graph", "cluster=dgx_a100", "cluster.num_devices=4", "hydra.run.dir=run"]


@pytest.mark.usefixtures("restored_logging", "run_folder")
class TestWays:
    """Models on one graph: how many ways?"""

    def test_plan_takes_the_best_number(self, graphpipe: Run, run_folder: Path) -> None:
        options = ("+graph_options.layers=4", "job.picture=false")
        epochs_s = {}
        for ways in (1, 2, 4):
            graphpipe("job=plan", *REDDIT, *options, f"ways={ways}")
            metrics = json.loads((run_folder / "run" / "metrics.json").read_text())
            epochs_s[ways] = metrics["step_s"]
        printed = " ".join(graphpipe("job=plan", *REDDIT, *options).split())
        metrics = json.loads((run_folder / "run" / "metrics.json").read_text())
        assert metrics["step_s"] == pytest.approx(min(epochs_s.values()))
        for ways, epoch_s in epochs_s.items():
            assert f"with ways={ways} {seconds_text(epoch_s)}," in printed

    def test_simulate_plays_the_number_that_is_asked_for(
        self, graphpipe: Run, run_folder: Path
    ) -> None:
        options = ("+graph_options.layers=4", "job.picture=false", "job.levers=false")
        printed = graphpipe("job=simulate", *REDDIT, *options, "ways=2", "job.speedup=false")
        assert "2 devices" not in printed.split("\n")[0]
        plan = load_plan(run_folder / "run" / "plan.json")
        assert plan.num_stages == 2 * 5 + 1  # a stem, four layers, and what joins

    def test_ways_divide_the_devices(
        self, graphpipe: Run, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            graphpipe("job=plan", *REDDIT, "ways=3")
        assert "ways=3 has to divide the 4 devices" in capsys.readouterr().err
