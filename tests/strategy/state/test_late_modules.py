"""Modules that are made in ``configure_model``: no process has the memory of all."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers.late import train_late
from helpers.models import DataSpec
from helpers.plans import captured_graph, random_plan
from helpers.random_models import (
    BranchyModel,
    LateBranchyModel,
    ModelSpec,
    OptimizerSpec,
    model_specs,
    optimizer_specs,
)
from helpers.reference import assert_equal_copies, assert_same_training
from helpers.training import Training
from helpers.workers import WorkerPool
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.timeout(180)


@settings(max_examples=4, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    spec=model_specs(),
    optimizer=optimizer_specs(),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    num_ranks=st.integers(2, 3),
    plan_seed=st.integers(0, 999),
)
def test_random_models_begin_and_train_as_on_one_device(
    pool: WorkerPool,
    spec: ModelSpec,
    optimizer: OptimizerSpec,
    schedule: str,
    num_ranks: int,
    plan_seed: int,
) -> None:
    training = Training(
        partial(LateBranchyModel, spec, optimizer),
        DataSpec(num_inputs=spec.num_inputs),
        num_steps=6,
        trainer={"precision": "64-true"},
    )
    early = Training(partial(BranchyModel, spec, optimizer), training.data)
    graph = captured_graph(early)
    plan = random_plan(graph, num_devices=min(num_ranks, len(graph)), seed=plan_seed)
    strategy = {"plan": plan, "schedule": schedule, "num_microbatches": 2, "timeout": 30.0}
    expected = train_late(training, None)
    ranks = plan.num_devices
    results = pool.run(train_late, training, strategy, ranks, num_ranks=ranks)
    for result in results:
        first, again = result.extra.pop("first"), expected.extra["first"]
        assert set(first) == set(again)
        assert all(torch.equal(first[name], again[name]) for name in again)
        assert result.extra.pop("drawn") == expected.extra["drawn"]  # the generator went on alike
        assert result.extra.pop("in files")
    assert_same_training(results, expected, "float64")
    assert_equal_copies(results)
