"""A pipeline trains to the same weights, losses and metrics as one device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from helpers.models import FIXED_MODELS, DataSpec, TiedEmbeddings
from helpers.plans import captured_graph, random_plan
from helpers.random_models import (
    BranchyModel,
    ModelSpec,
    OptimizerSpec,
    model_specs,
    optimizer_specs,
)
from helpers.reference import assert_equal_training
from helpers.training import Training
from helpers.workers import WorkerPool
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

SCHEDULES = ("gpipe", "1f1b")
NUM_STEPS = 10


def branchy(spec: ModelSpec, optimizer: OptimizerSpec, **data: object) -> Training:
    """Ten steps; 29 samples in batches of 8: every fourth batch has five samples."""
    return Training(
        partial(BranchyModel, spec, optimizer),
        DataSpec(num_inputs=spec.num_inputs, **data),  # type: ignore[arg-type]
        num_steps=NUM_STEPS,
    )


# Shrinking would train hundreds of pipelines; the models are small enough to read as they are.
@settings(
    max_examples=max(4, settings.default.max_examples // 2),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(
    spec=model_specs(),
    optimizer=optimizer_specs(),
    dtype=st.sampled_from(["float64", "float64", "float32"]),
    schedule=st.sampled_from(SCHEDULES),
    num_ranks=st.integers(1, 4),
    num_microbatches=st.integers(1, 5),
    plan_seed=st.integers(0, 999),
)
def test_random_models_with_random_plans(
    pool: WorkerPool,
    spec: ModelSpec,
    optimizer: OptimizerSpec,
    dtype: str,
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    plan_seed: int,
) -> None:
    training = branchy(spec, optimizer, dtype=dtype)
    graph = captured_graph(training)
    plan = random_plan(graph, num_devices=min(num_ranks, len(graph)), seed=plan_seed)
    assert_equal_training(
        pool,
        training,
        num_ranks=plan.num_devices,
        num_microbatches=num_microbatches,
        schedule=schedule,
        plan=plan,
    )


@settings(
    max_examples=max(5, settings.default.max_examples // 4),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(
    spec=model_specs(),
    optimizer=optimizer_specs(),
    schedule=st.sampled_from(SCHEDULES),
    num_ranks=st.integers(2, 4),
    plan_seed=st.integers(0, 999),
    options=st.sampled_from(
        [
            {},
            {"accumulate_grad_batches": 2},
            {"gradient_clip_val": 0.3, "check_val_every_n_epoch": 2},
        ]
    ),
)
def test_random_plans_with_replicas(
    pool: WorkerPool,
    spec: ModelSpec,
    optimizer: OptimizerSpec,
    schedule: str,
    num_ranks: int,
    plan_seed: int,
    options: dict[str, object],
) -> None:
    """Replicas, micro-batches of other sizes, recomputation and chains; see the random plan."""
    training = replace(branchy(spec, optimizer, dtype="float64"), trainer=options, num_steps=10)
    graph = captured_graph(training)
    num_devices = min(num_ranks, len(graph))
    plan = random_plan(graph, num_devices=num_devices, seed=plan_seed, with_replicas=True)
    assert_equal_training(pool, training, num_ranks=num_devices, schedule=schedule, plan=plan)


@pytest.mark.parametrize(
    ("name", "num_ranks", "schedule", "optimizer", "dtype"),
    [
        ("chain", 4, "1f1b", "sgd", "float64"),
        ("two_towers", 3, "gpipe", "adamw", "float32"),
        ("diamond", 2, "1f1b", "adamw", "float64"),
        ("six_branches", 4, "1f1b", "sgd", "float32"),
        ("shared_weights", 3, "gpipe", "sgd", "float64"),
        ("shared_weights", 4, "1f1b", "adamw", "float32"),
    ],
)
def test_hand_made_models_with_the_automatic_plan(
    pool: WorkerPool, name: str, num_ranks: int, schedule: str, optimizer: str, dtype: str
) -> None:
    training = branchy(FIXED_MODELS[name], OptimizerSpec(optimizer), dtype=dtype)
    assert_equal_training(
        pool, training, num_ranks=num_ranks, num_microbatches=4, schedule=schedule
    )


@pytest.mark.parametrize(("schedule", "plan_seed"), [("gpipe", 0), ("1f1b", 1)])
def test_tied_embeddings_on_different_stages(
    pool: WorkerPool, schedule: str, plan_seed: int
) -> None:
    training = Training(TiedEmbeddings, DataSpec(tokens=True))
    plan = random_plan(captured_graph(training), num_devices=3, seed=plan_seed)
    assert_equal_training(
        pool, training, num_ranks=3, num_microbatches=4, schedule=schedule, plan=plan
    )


def test_the_references_do_differ(pool: WorkerPool) -> None:
    """Guards the comparison itself: another learning rate must not pass as equal."""
    from helpers.reference import assert_same_training, train_one_device

    training = branchy(FIXED_MODELS["chain"], OptimizerSpec())
    other = replace(
        training, build=partial(BranchyModel, FIXED_MODELS["chain"], OptimizerSpec(lr=0.02001))
    )
    with pytest.raises(AssertionError, match="relative error"):
        assert_same_training([train_one_device(other)], train_one_device(training), "float64")
