"""Optimizers, schedulers, accumulation and clipping work as on one device, on own parameters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from helpers.models import FIXED_MODELS, DataSpec, ExportableModel, SparseEmbeddings
from helpers.plans import captured_graph, random_plan
from helpers.random_models import BranchyModel, ModelSpec, OptimizerSpec
from helpers.reference import assert_equal_training
from helpers.training import Training
from helpers.workers import WorkerPool

from lightning_gpp import GraphPipeStrategy


def branchy(name: str, optimizer: OptimizerSpec, **trainer: object) -> Training:
    spec: ModelSpec = FIXED_MODELS[name]
    data = DataSpec(num_inputs=spec.num_inputs)
    return Training(partial(BranchyModel, spec, optimizer), data, trainer=trainer)


@pytest.mark.parametrize("algorithm", ["value", "norm"])
def test_gradient_clipping_where_a_rank_has_no_parameters(pool: WorkerPool, algorithm: str) -> None:
    clip = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    training = branchy("chain", OptimizerSpec(), **clip)
    plan = random_plan(captured_graph(training), num_devices=1, seed=0)
    assert_equal_training(pool, training, num_ranks=2, num_microbatches=2, plan=plan)


def test_a_rank_keeps_only_its_own_parameters_and_their_state(pool: WorkerPool) -> None:
    training = branchy("six_branches", OptimizerSpec("adamw", num_groups=2))
    plan = random_plan(captured_graph(training), num_devices=4, seed=0)  # without replicas
    results = assert_equal_training(pool, training, num_ranks=4, num_microbatches=4, plan=plan)
    owners = Counter(name for result in results for name in result.own_parameters)
    everything = set(results[0].weights)
    assert set(owners) == everything
    assert set(owners.values()) == {1}, f"no parameter here is shared, but: {owners}"
    for rank, result in enumerate(results):
        assert result.own_parameters, f"rank {rank} has no parameters"
        assert result.optimizer_state == result.own_parameters
        assert sum(result.optimizer_groups) == len(result.own_parameters)
        assert len(result.optimizer_groups) == 2


def test_a_shared_parameter_is_held_by_all_ranks_that_use_it(pool: WorkerPool) -> None:
    training = branchy("shared_weights", OptimizerSpec())
    results = assert_equal_training(
        pool, training, num_ranks=2, num_microbatches=2, plan=PLAN_WITH_SHARED_WEIGHT
    )
    for result in results:
        assert "node_2.weight" in result.own_parameters
    assert "heads.0.weight" in results[0].own_parameters
    assert "heads.0.weight" not in results[1].own_parameters


PLAN_WITH_SHARED_WEIGHT = [["entries", "node_2"], ["node_6", "heads"]]
"""``node_6`` uses the weight of ``node_2``."""


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("is_adam", [False, True])
@pytest.mark.parametrize(
    ("schedule", "embedding_devices", "trainer"),
    [
        ("gpipe", [0], {"accumulate_grad_batches": 2}),
        ("gpipe", [1, 2], {}),
        ("1f1b", [1, 0], {}),
    ],
)
def test_sparse_gradients_of_embeddings(
    pool: WorkerPool,
    is_adam: bool,
    schedule: str,
    embedding_devices: list[int],
    trainer: dict[str, object],
) -> None:
    """Replicas use different rows of their tables; the last batch of an epoch has five samples."""
    plan = [
        {"modules": ["embed", "bag"], "devices": embedding_devices},
        {"modules": ["left", "right", "norm", "out"], "devices": [0]},
    ]
    training = Training(
        partial(SparseEmbeddings, is_adam), DataSpec(tokens=True), num_steps=8, trainer=trainer
    )
    assert_equal_training(
        pool,
        training,
        num_ranks=1 + max(embedding_devices),
        num_microbatches=4,
        schedule=schedule,
        plan=plan,
    )


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_stages(pool: WorkerPool, schedule: str) -> None:
    """Odd last batches, validation and recomputation run compiled, too."""
    training = replace(branchy("two_towers", OptimizerSpec("adamw")), num_steps=6)
    results = assert_equal_training(
        pool,
        training,
        num_ranks=2,
        schedule=schedule,
        plan=random_plan(captured_graph(training), num_devices=2, seed=3, with_replicas=True),
        compile={"backend": "aot_eager"},
    )
    assert results[0].global_step == 6


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compile": {"fullgraph": False}}, "every stage is one graph"),
        ({"compile": True, "schedule": "1f1b-async"}, "each step would compile again"),
    ],
)
def test_what_cannot_be_compiled(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        GraphPipeStrategy(**options)


def test_the_loss_falls(pool: WorkerPool) -> None:
    """Guards against a training that equals one device because nothing is trained."""
    training = Training(ExportableModel, DataSpec(num_inputs=2), num_steps=20)
    losses = assert_equal_training(pool, training, num_ranks=2, num_microbatches=2)[0].losses
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
