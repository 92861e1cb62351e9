"""Programs for other calls of a model whose parameters are stored as its first program says."""

from __future__ import annotations

import random

import pytest
import torch

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.recipes.dlrm import DLRM
from lightning_gpp.spmd.costs.machine import measured_speeds
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.run.export import export_forward
from lightning_gpp.strategy.spmd.divide import HapPlanner, machine_of

TABLES = {f"table{i}": 50 for i in range(8)}


def exported(model: DLRM, num_samples: int, *, is_training: bool) -> SpmdGraph:
    categories = {name: torch.randint(rows, (num_samples,)) for name, rows in TABLES.items()}
    with torch.set_grad_enabled(is_training):
        return export_forward(model, (torch.randn(num_samples, 6), categories)).graph


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_other_batches_and_evaluation(seed: int) -> None:
    """One share vector deals all of them, whatever the devices."""
    draw, model = random.Random(seed), DLRM(6, TABLES)
    lines = [
        (draw.uniform(1e9, 1e11), draw.uniform(1e9, 1e11), 10 ** draw.uniform(-8, -5))
        for _ in range(2)
    ]
    speeds = measured_speeds(*zip(*lines, strict=True))
    link = Link(10 ** draw.uniform(8, 11), 10 ** draw.uniform(-7, -4))
    planner = HapPlanner(machine_of(uniform_cluster(2, link), speeds), has_shares=False)
    first = planner(exported(model, 64, is_training=True), (0.5, 0.5), None)
    for num_samples, is_training in ((7, True), (64, False)):
        graph = exported(model, num_samples, is_training=is_training)
        later = planner(graph, first.shares, first.storage)
        assert later.shares == first.shares
        assert later.storage == {name: first.storage[name] for name in later.storage}
