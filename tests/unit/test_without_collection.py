"""Searches do not look for reference cycles, and leave the collector as they found it."""

from __future__ import annotations

import gc
import sys

import pytest
from helpers.graphs import literal_graph

from lightning_gpp.planner import Plan, PlanRequest, make_plan
from lightning_gpp.planner.make_plan import PLANNERS
from lightning_gpp.without_collection import without_collection


@pytest.fixture
def collector():
    """The collector, as it was again after the test."""
    was_enabled = gc.isenabled()
    yield gc
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_it_is_as_it_was_even_after_an_error(collector, is_enabled: bool) -> None:
    def fails() -> None:
        with without_collection():
            assert not collector.isenabled()
            raise KeyError

    (collector.enable if is_enabled else collector.disable)()
    with pytest.raises(KeyError):
        fails()
    assert collector.isenabled() is is_enabled


def test_planners_search_without_it(collector, monkeypatch: pytest.MonkeyPatch) -> None:
    collector.enable()
    seen: list[bool] = []
    search = PLANNERS["balanced"]

    def watched(request: PlanRequest) -> Plan:
        seen.append(collector.isenabled())
        return search(request)

    planners = {**PLANNERS, "balanced": watched}
    monkeypatch.setattr(sys.modules["lightning_gpp.planner.make_plan"], "PLANNERS", planners)
    graph = literal_graph({"a": "x", "b": "a"})
    make_plan(graph, 2, minibatch_size=4, planner="balanced")
    assert seen == [False]
    assert collector.isenabled()
