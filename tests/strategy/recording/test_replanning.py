"""A plan that is made anew between epochs: the training stays that of one device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import forms_of_call as forms
from helpers.replans import TIMES, Replanned, fit_with_replans
from helpers.workers import WorkerPool
from torch import Tensor
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from lightning_gpp import GraphPipeStrategy
from lightning_gpp.planner import Plan, Stage


@pytest.mark.parametrize(
    ("slow", "schedule", "num_ranks"),
    [(1, "gpipe", 2), (0, "1f1b", 2), (2, "gpipe", 3)],
)
def test_a_slow_device_gets_less_and_training_is_that_of_one_device(
    pool: WorkerPool, slow: int, schedule: str, num_ranks: int
) -> None:
    expected = fit_with_replans(1)
    options = {"replan_every_n_epochs": 1, "schedule": schedule}
    runs = pool.run(fit_with_replans, num_ranks, (slow,), num_ranks=num_ranks, **options)
    said = "\n".join(runs[0].said)
    assert f"rank {slow} (" in said and f" is {TIMES:.2f} times as slow" in said
    assert "a new plan, predicted to take" in said
    assert runs[slow].held[-1] < runs[slow].held[0]
    assert_same(runs, expected)


def test_a_device_that_gets_slower_in_the_midst_of_an_epoch(pool: WorkerPool) -> None:
    """A line says so before the epoch ends, once, and the plan after it counts it as slow."""
    data = {"num_samples": 8 * 30, "num_epochs": 2}
    expected = fit_with_replans(1, **data)
    options = {"replan_every_n_epochs": 1, "since": 11, **data}
    runs = pool.run(fit_with_replans, 2, (1,), num_ranks=2, **options)
    found, replanned = runs[0].said
    assert found.startswith("Step 14: rank 1 (") and "since step 12" in found
    assert "a new plan, predicted to take" in replanned and "since step 12" in replanned
    assert runs[1].held[-1] < runs[1].held[0]
    assert_same(runs, expected)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_all_state_moves_to_every_new_plan(pool: WorkerPool, schedule: str) -> None:
    """Whatever is predicted to be gained, every epoch begins with a new plan."""
    expected = fit_with_replans(1)
    options = {"replan_every_n_epochs": 1, "schedule": schedule, "worth_it": -100.0}
    runs = pool.run(fit_with_replans, 3, num_ranks=3, **options)
    assert sum("a new plan, predicted to take" in line for line in runs[0].said) == 3
    assert_same(runs, expected)


def test_pipelines_side_by_side_take_the_plan_of_the_first(pool: WorkerPool) -> None:
    options = {"schedule": "1f1b", "pipelines": 2, "num_epochs": 3}
    expected, *_ = pool.run(fit_with_replans, 4, num_ranks=4, **options)
    options |= {"replan_every_n_epochs": 1, "worth_it": -100.0}
    runs = pool.run(fit_with_replans, 4, (1,), num_ranks=4, **options)
    assert sum("a new plan, predicted to take" in line for line in runs[0].said) == 2
    assert [run.held for run in runs[:2]] == [run.held for run in runs[2:]]
    assert_same(runs[:2], expected)
    assert_same(runs[2:], expected)


@pytest.mark.parametrize(
    ("build", "schedule"),
    [
        (forms.LossInForward, "gpipe"),
        (forms.LossInForward, "1f1b"),
        (forms.Alternating, "gpipe"),
    ],
)
def test_all_forms_of_call_move(pool: WorkerPool, build: Any, schedule: str) -> None:
    """Validation, or every other two steps, call the forward in another form."""
    expected = fit_with_replans(1, build=build)
    options = {"replan_every_n_epochs": 1, "schedule": schedule, "worth_it": -100.0}
    runs = pool.run(fit_with_replans, 2, num_ranks=2, build=build, **options)
    assert sum("a new plan, predicted to take" in line for line in runs[0].said) == 3
    assert_same(runs, expected)


def test_the_form_that_was_called_first_is_the_one_that_is_planned(pool: WorkerPool) -> None:
    build = forms.LossInForward
    expected = fit_with_replans(1, build=build, sanity=2)
    options = {"replan_every_n_epochs": 1, "build": build, "sanity": 2, "worth_it": -100.0}
    runs = pool.run(fit_with_replans, 2, num_ranks=2, **options)
    stays = [line for line in runs[0].said if "the plan stays" in line]
    assert len(stays) == 3 and all("num_sanity_val_steps=0" in line for line in stays)
    assert_same(runs, expected)


def test_a_plan_that_another_form_does_not_fit_does_not_come(pool: WorkerPool) -> None:
    stages = ["first_0", "first_1", "matmul"], ["matmul_1", "second_0", "second_1", "head"]
    forced = Plan(tuple(Stage(i, tuple(names), (i,)) for i, names in enumerate(stages)))
    expected = fit_with_replans(1, build=forms.Joined)
    options = {"replan_every_n_epochs": 1, "build": forms.Joined, "forced": forced}
    # The first plan keeps what is joined together: messages take longer than operators.
    runs = pool.run(fit_with_replans, 2, num_ranks=2, operator_s=2e-5, **options)
    assert sum("reads left, right, which the plan" in line for line in runs[0].said) == 3
    assert_same(runs, expected)


@pytest.mark.parametrize("resumed_from", [0, 1])
def test_sharded_checkpoints_of_before_and_after(
    pool: WorkerPool, tmp_path: Path, resumed_from: int
) -> None:
    """Every rank writes what it holds by the plan of the moment; others read it."""
    expected = fit_with_replans(1, folder=str(tmp_path / "one"))
    options = {
        "replan_every_n_epochs": 1,
        "worth_it": -100.0,
        "state_dict_type": "sharded",
        "folder": str(tmp_path),
    }
    runs = pool.run(fit_with_replans, 3, num_ranks=3, **options)
    assert_same(runs, expected)
    options["checkpoint"] = str(tmp_path / f"epoch={resumed_from}.ckpt")
    runs = pool.run(fit_with_replans, 2, num_ranks=2, **options)
    assert any("a new plan, predicted to take" in line for line in runs[0].said)
    assert_same(runs, expected)


def assert_same(runs: Sequence[Replanned], expected: Replanned) -> None:
    def on_cpu(state: Any) -> Any:
        return pytree.tree_map_only(Tensor, Tensor.cpu, state)

    for run in runs:
        assert_close(on_cpu(run.weights), expected.weights, rtol=1e-9, atol=1e-12)
    assert_close(on_cpu(runs[0].average), expected.average, rtol=1e-9, atol=1e-12)
    assert_close(on_cpu(runs[0].optimizer), expected.optimizer, rtol=1e-9, atol=1e-12)


def test_without_a_gain_nothing_happens(pool: WorkerPool) -> None:
    options = {"num_epochs": 3, "worth_it": 1.0, "replan_every_n_epochs": 2}
    runs = pool.run(fit_with_replans, 2, num_ranks=2, **options)
    (said,) = runs[0].said
    assert re.match("After epoch 2: the plan stays: (the best other one is|none is faster)", said)
    assert len(set(runs[1].held)) == 1


def test_what_has_its_plan_is_not_planned_anew() -> None:
    with pytest.raises(ValueError, match="does not go with plan="):
        GraphPipeStrategy(plan=[["left"], ["right"]], replan_every_n_epochs=1)
    with pytest.raises(ValueError, match="does not go with schedule='1f1b-async'"):
        GraphPipeStrategy(schedule="1f1b-async", replan_every_n_epochs=1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_rank_0_has_the_loss_where_the_last_stage_is_another_ranks(
    pool: WorkerPool, schedule: str
) -> None:
    """So it is where devices differ and rank 0 is a slow one."""
    names = ("left_0", "left_1"), ("right_0", "right_1", "cat", "fuse", "norm", "head", "add")
    stages = tuple(Stage(i, names[i], (i,)) for i in range(2))
    plan = Plan(stages, num_microbatches=4, loss_device=0)
    runs = pool.run(fit_with_replans, 2, num_ranks=2, num_epochs=2, plan=plan, schedule=schedule)
    assert [run.held[-1] for run in runs] == [2, 8]
    expected = fit_with_replans(1, num_epochs=2)
    for run in runs:
        assert_close(run.weights, expected.weights, rtol=1e-9, atol=1e-12)
