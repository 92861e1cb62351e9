"""What happens to the user's module, and how the strategy is found by name."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers.alike import differences
from helpers.jobs import evaluate_another, fit_repeatedly, plan_of_fit
from helpers.models import DataSpec
from helpers.modules import TrainedAroundModel, UnusedParameterModel, WrappedModel
from helpers.reference import assert_equal_training, relative_error, weight_differences
from helpers.training import Training
from helpers.workers import WorkerPool

from lightning_gpp.planner import num_devices_used

NAMES = ("graphpipe", "graphpipe_spawn", "graphpipe_fork", "graphpipe_notebook", "graphpipe_async")


def test_importing_the_package_registers_the_names() -> None:
    code = (
        "import lightning_gpp\n"
        "from lightning.pytorch.strategies import StrategyRegistry as registry\n"
        "print(sorted(name for name in registry.available_strategies() if 'graphpipe' in name))\n"
        "print([type(registry.get(name)).__name__ for name in sorted(registry)"
        " if 'graphpipe' in name])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(sorted(NAMES)) in done.stdout
    assert str(["GraphPipeStrategy"] * len(NAMES)) in done.stdout


def test_one_module_in_several_fits_and_validations(pool: WorkerPool) -> None:
    """Rank 0 has the whole trained module after each fit; the next one starts from it."""
    expected = fit_repeatedly(None)
    strategy = {"num_microbatches": 4, "timeout": 100.0}
    results = pool.run(fit_repeatedly, strategy, 3, num_ranks=3)
    for rank, result in enumerate(results):
        for got, want in zip(result["metrics"], expected["metrics"], strict=True):
            assert got == pytest.approx(want, rel=1e-9), rank
    for got, want in zip(results[0]["weights"], expected["weights"], strict=True):
        assert not weight_differences(got, want, 1e-9)
    assert relative_error(results[0]["prediction"], expected["prediction"]) < 1e-9


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_trainer_of_a_fit_evaluates_other_modules(pool: WorkerPool, num_ranks: int) -> None:
    """The optimizers that it still has are none of theirs."""
    expected = evaluate_another(None)
    strategy = {"num_microbatches": 4, "timeout": 100.0}
    for found in pool.run(evaluate_another, strategy, num_ranks, num_ranks=num_ranks):
        wanted = {name: expected[name] for name in found}
        assert not differences(found, wanted, "found", 1e-9)


def test_a_named_submodule_is_pipelined(pool: WorkerPool) -> None:
    training = Training(WrappedModel, DataSpec())
    results = assert_equal_training(
        pool, training, num_ranks=2, num_microbatches=4, module="net", plan=[["0", "1"], ["2"]]
    )
    assert all(result.own_parameters < set(results[0].weights) for result in results)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_trainable_layers_around_the_pipelined_submodule(pool: WorkerPool, schedule: str) -> None:
    """Gradients flow back out of the pipeline, also when validation is what is captured first."""
    training = Training(TrainedAroundModel, DataSpec())
    results = assert_equal_training(
        pool, training, num_ranks=3, num_microbatches=4, module="net", schedule=schedule
    )
    assert {"before.weight", "after"} <= results[0].own_parameters


def test_parameters_and_buffers_that_the_forward_does_not_use(pool: WorkerPool) -> None:
    training = Training(UnusedParameterModel, DataSpec(num_inputs=2))
    results = assert_equal_training(pool, training, num_ranks=3, num_microbatches=4)
    assert torch.equal(results[0].weights["note"], torch.arange(3))


def test_plan_and_stage_graph_are_shown_on_every_rank(pool: WorkerPool) -> None:
    strategy = {"num_microbatches": 2, "timeout": 100.0}
    shown = pool.run(plan_of_fit, strategy, 3, num_ranks=3)
    plan, edges = shown[0]
    assert num_devices_used(plan) == 3
    assert shown == [(plan, edges)] * 3


def test_a_plan_by_module_names(pool: WorkerPool) -> None:
    rows = [["left"], ["right"], ["fuse", "norm", "head"]]
    strategy = {"num_microbatches": 2, "timeout": 100.0, "plan": rows}
    plan, edges = pool.run(plan_of_fit, strategy, 3, num_ranks=3)[0]
    assert plan.num_stages == 3
    assert {(edge.source, edge.target) for edge in edges if edge.source >= 0} == {(0, 2), (1, 2)}
