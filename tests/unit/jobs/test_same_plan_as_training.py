"""The job ``plan`` of a recipe finds the plan that training runs, on unequal devices, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from lightning_gpp.capture import capture
from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.jobs.plan import chosen_plan
from lightning_gpp.jobs.problem import recipe_problem
from lightning_gpp.strategy import GraphPipeStrategy
from lightning_gpp.strategy.planning.planning import Example, plan_pipeline

MINIBATCH = 8
SPEEDS = {"slow": 1.0, "fast": 3.0}


@pytest.mark.parametrize(
    ("kinds", "num_microbatches"),
    [(("slow", "fast"), 8), (("fast", "slow", "slow"), 8), (("fast", "slow", "slow"), None)],
)
def test_unequal_devices(
    kinds: tuple[str, ...],
    num_microbatches: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    captured = capture(model, (torch.randn(1, 4),), {})
    costs = Costs(
        tuple(
            Profile(
                {op.name: OpProfile(1 / speed, 2 / speed, 100) for op in captured.graph}, 1, kind
            )
            for kind, speed in SPEEDS.items()
        )
    )
    hosts = [f"host{index // 2}" for index in range(len(kinds))]
    devices = tuple(Device(f"{i}", kind, host=hosts[i]) for i, kind in enumerate(kinds))
    cluster = Cluster(devices, Link(1e9), Link(1e3))

    def look_at(*_: Any) -> recipe_problem.Look:
        return recipe_problem.Look(captured, MINIBATCH, costs)

    monkeypatch.setattr(recipe_problem, "look_at", look_at)
    config = OmegaConf.create(
        {
            "strategy": {"num_microbatches": num_microbatches},
            "recipe": {"module": {"_target_": "a.Model"}},
            "job": {"limit_s": None},
            **dict.fromkeys(("schedule", "minibatch_size", "costs", "planner")),
            "num_microbatches": None,
            "recompute": False,
        }
    )
    chosen = chosen_plan(config, recipe_problem.recipe_problem(config, cluster, tmp_path))

    settings = GraphPipeStrategy(
        cache=False, costs=costs, num_microbatches=num_microbatches, cluster=cluster
    ).settings
    cut = num_microbatches or MINIBATCH
    example = Example((torch.randn(1, 4),), {}, MINIBATCH, cut)
    trained = plan_pipeline(settings, captured, example, cluster, None)
    assert chosen.evaluation.plan == trained.plan
    assert chosen.request.cluster == trained.request.cluster
    assert chosen.request.schedule == trained.request.schedule


@pytest.mark.parametrize("cluster", [None, "summit"])
def test_a_busy_machine_is_no_matter_where_costs_are_estimated(cluster: str | None) -> None:
    captured = capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(1, 4),), {})
    operators = {op.name: OpProfile(1.0, 2.0, 100) for op in captured.graph}
    measured = Costs((Profile(operators, 1, "cpu"),)), ("This machine was busy",)
    settings = GraphPipeStrategy(cache=False, cluster=cluster).settings
    here = Cluster((Device("0", "cpu"), Device("1", "cpu")), Link(1e9), Link(1e9))
    example = Example((torch.randn(1, 4),), {}, MINIBATCH, MINIBATCH)
    trained = plan_pipeline(settings, captured, example, here, measured)
    assert ("This machine was busy" in trained.notes) == (cluster is None)
