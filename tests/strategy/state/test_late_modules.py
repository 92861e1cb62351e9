"""Modules that are made in ``configure_model``: no process has the memory of all."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.late import (
    LargeModel,
    train_late,
    train_within,
)
from helpers.models import FIXED_MODELS, DataSpec
from helpers.plans import captured_graph, random_plan
from helpers.random_models import (
    BranchyModel,
    LateBranchyModel,
    ModelSpec,
    OptimizerSpec,
    model_specs,
    optimizer_specs,
)
from helpers.reference import assert_equal_copies, assert_same_training, weight_differences
from helpers.training import Training
from helpers.workers import WorkerPool
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_gpp.common.mapped_tensor import is_mapped
from lightning_gpp.strategy import unshard_checkpoint
from lightning_gpp.strategy.state.without_values import give_values


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
    strategy = {"plan": plan, "schedule": schedule, "num_microbatches": 2, "timeout": 100.0}
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


@pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux holds them")
def test_a_model_larger_than_the_memory_of_every_process(pool: WorkerPool) -> None:
    """Four ranks train what none could hold, the weights alone; plain Lightning fails.

    They need weights and gradients of their stages, one gradient more, and some threads. The disk
    has the weights once per rank, and no gradients.
    """
    whole = LargeModel.num_layers * LargeModel.width**2 * 4
    limit_bytes = int(0.95 * whole)
    (alone,) = pool.run(train_within, limit_bytes, 1, num_ranks=1)
    assert alone.error is not None and "allocate memory" in alone.error
    found = pool.run(train_within, limit_bytes, 4, num_ranks=4)
    assert [rank.error for rank in found] == [None] * 4
    assert [rank.changed_bytes for rank in found] == [whole / 4] * 4
    assert all(rank.disk_bytes == whole for rank in found), found


def test_resuming_from_files_and_folders(pool: WorkerPool, tmp_path: Path) -> None:
    """Late modules read either form; what was trained on three stages goes on on two."""
    spec = FIXED_MODELS["diamond"]
    training = Training(
        partial(LateBranchyModel, spec, OptimizerSpec("adamw")),
        DataSpec(num_inputs=spec.num_inputs),
        num_steps=8,
        validate=False,
        trainer={"precision": "64-true"},
    )
    half = replace(training, num_steps=4, save_as=str(tmp_path / "folder"))
    strategy = {"num_microbatches": 2, "timeout": 100.0, "state_dict_type": "sharded"}
    pool.run(train_late, half, strategy, 3, num_ranks=3)
    unshard_checkpoint(tmp_path / "folder", tmp_path / "file")
    expected = train_late(replace(training, checkpoint=str(tmp_path / "file")), None)
    for name in ("folder", "file"):
        rest = replace(training, checkpoint=str(tmp_path / name))
        result = pool.run(train_late, rest, strategy, 2, num_ranks=2)[0]
        assert result.extra["in files"]
        assert not weight_differences(result.weights, expected.weights, 1e-9)


class _WithoutRule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))


def test_modules_on_the_meta_device_are_drawn_by_their_modules() -> None:
    with torch.device("meta"):
        made = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 300))
        made[2].weight = made[0].weight
        made[0].bias.requires_grad_(False)
    torch.manual_seed(3)
    give_values(made)
    torch.manual_seed(3)
    for layer in made:
        again = copy.deepcopy(layer)
        again.reset_parameters()
        if layer is not made[0]:  # whose weight was drawn twice
            assert all(map(torch.equal, layer.parameters(), again.parameters()))
    assert made[2].weight is made[0].weight
    assert is_mapped(made[0].weight)
    assert not made[0].bias.requires_grad
    assert made[1].running_var.tolist() == [1.0] * 300


def test_modules_on_the_meta_device_that_cannot_be_drawn() -> None:
    with torch.device("meta"):
        module = nn.Sequential(_WithoutRule())
    with pytest.raises(TypeError, match=r"_WithoutRule .'0'. has parameters.*reset_parameters"):
        give_values(module)
