"""What happens to the user's module."""

from __future__ import annotations

import pytest
import torch
from helpers.alike import differences
from helpers.jobs import evaluate_another, lines_of_fit, plan_of_fit
from helpers.models import DataSpec
from helpers.modules import TrainedAroundModel, UnusedParameterModel, WrappedModel
from helpers.reference import assert_equal_training
from helpers.training import Training
from helpers.workers import WorkerPool

from lightning_gpp.strategy.pipeline import pipelined_module


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_trainer_of_a_fit_evaluates_other_modules(pool: WorkerPool, num_ranks: int) -> None:
    """The optimizers that it still has are none of theirs."""
    expected = evaluate_another(None)
    strategy = {"num_microbatches": 4, "timeout": 100.0}
    for found in pool.run(evaluate_another, strategy, num_ranks, num_ranks=num_ranks):
        wanted = {name: expected[name] for name in found}
        assert not differences(found, wanted, "found", 1e-9)


@pytest.mark.parametrize("module", ["net", None])
def test_a_submodule_is_pipelined(pool: WorkerPool, module: str | None) -> None:
    """One that is named, or the only one of a module without a forward."""
    training = Training(WrappedModel, DataSpec())
    results = assert_equal_training(
        pool, training, num_ranks=2, num_microbatches=4, module=module, plan=[["0", "1"], ["2"]]
    )
    assert all(result.own_parameters < set(results[0].weights) for result in results)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_trainable_layers_around_the_pipelined_submodule(pool: WorkerPool, schedule: str) -> None:
    """Gradients flow back out of the pipeline, also when validation is what is captured first."""
    training = Training(TrainedAroundModel, DataSpec())
    results = assert_equal_training(
        pool, training, num_ranks=3, num_microbatches=4, module="net", schedule=schedule
    )
    assert {"before.weight", "after"} <= results[0].own_parameters


def test_several_submodules_to_choose_from() -> None:
    with pytest.raises(ValueError, match=r"has no forward.*: net, before$"):
        pipelined_module(TrainedAroundModel(), None)


def test_a_step_that_does_not_call_the_forward(pool: WorkerPool) -> None:
    """Nothing is pipelined then, and a warning says so."""
    training = Training(UnusedParameterModel, DataSpec(num_inputs=2))
    lines, _ = pool.run(lines_of_fit, training, {"module": "spare"}, 2, num_ranks=2)
    assert any("did not call the forward of Linear, so nothing was pipelined" in x for x in lines)


def test_parameters_and_buffers_that_the_forward_does_not_use(pool: WorkerPool) -> None:
    training = Training(UnusedParameterModel, DataSpec(num_inputs=2))
    results = assert_equal_training(pool, training, num_ranks=3, num_microbatches=4)
    assert torch.equal(results[0].weights["note"], torch.arange(3))


def test_a_plan_by_module_names(pool: WorkerPool) -> None:
    rows = [["left"], ["right"], ["fuse", "norm", "head"]]
    strategy = {"num_microbatches": 2, "timeout": 100.0, "plan": rows}
    plan, edges = pool.run(plan_of_fit, strategy, 3, num_ranks=3)[0]
    assert plan.num_stages == 3
    assert {(edge.source, edge.target) for edge in edges if edge.source >= 0} == {(0, 2), (1, 2)}
