"""What makes many objects looks for fewer reference cycles, and leaves the collector as it was."""

from __future__ import annotations

import gc
import sys

import pytest
from helpers.graphs import literal_graph

from lightning_gpp.common.without_collection import collecting_only_new, without_collection
from lightning_gpp.planner import Plan, PlanRequest, make_plan
from lightning_gpp.planner.make_plan import PLANNERS


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


def test_only_new_objects_are_looked_through(collector) -> None:
    old = ["old"]

    def fails() -> None:
        with collecting_only_new():
            new = ["new"]
            looked_through = set(map(id, collector.get_objects()))
            assert id(new) in looked_through and id(old) not in looked_through
            raise KeyError

    assert not collector.get_freeze_count()
    with pytest.raises(KeyError):
        fails()
    assert not collector.get_freeze_count()
    assert any(each is old for each in collector.get_objects())


def test_what_somebody_else_keeps_from_the_collector_stays_so(collector) -> None:
    collector.freeze()
    try:
        kept = collector.get_freeze_count()
        with collecting_only_new():
            assert collector.get_freeze_count() == kept
        assert collector.get_freeze_count() == kept
    finally:
        collector.unfreeze()
