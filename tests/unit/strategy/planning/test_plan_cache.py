"""A plan is found again by its whole question."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

from helpers.small_requests import chain_request

from lightning_gpp.cost import estimate_costs
from lightning_gpp.planner.base import HeldVersions, PlanRequest
from lightning_gpp.strategy.planning import plan_cache
from lightning_gpp.strategy.planning.plan_cache import kept_answer

ASKED = chain_request(4, 2, 4)
OTHERS: dict[str, Any] = {
    "graph": chain_request(3, 2, 4).graph,
    "cluster": chain_request(4, 2, 4, message_s=1e-3).cluster,
    "costs": estimate_costs(ASKED.graph, ASKED.cluster, 4),
    "minibatch_size": 8,
    "num_microbatches": 2,
    "schedule": "1f1b",
    "optimizer_values": 1,
    "may_recompute": True,
    "max_replicas": 2,
    "held_versions": HeldVersions(2, 2),
    "sums_share": 0.5,
    "inputs_ahead": True,
}


def searches(folder: Path, request: PlanRequest, planner: str = "graphpipe") -> int:
    """How many times a planner is asked."""
    with mock.patch.object(plan_cache, "answer", wraps=plan_cache.answer) as answer:
        kept_answer(folder, request, planner)
    return answer.call_count


def test_whatever_differs_is_another_question(tmp_path: Path) -> None:
    assert OTHERS.keys() == {field.name for field in fields(PlanRequest)}
    assert searches(tmp_path, ASKED) == 1
    assert searches(tmp_path, ASKED) == 0
    for name, other in OTHERS.items():
        assert searches(tmp_path, replace(ASKED, **{name: other})) == 1, name
    assert searches(tmp_path, ASKED, "sequential") == 1
    with mock.patch.object(plan_cache, "_newest_source_ns", return_value=0):
        assert searches(tmp_path, ASKED) == 1
    assert searches(tmp_path, ASKED) == 0
