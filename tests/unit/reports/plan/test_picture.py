"""Pictures of plans are for people; here only that everything is on them and nothing beside."""

from __future__ import annotations

import pytest
from helpers.graphs import literal_graph, profile_of, stage_edges
from matplotlib.figure import Figure

from lightning_gpp.graph import StageEdge, StageGraph
from lightning_gpp.planner import (
    Plan,
    PlanRequest,
    Stage,
    evaluate_plan,
    plan_request,
)
from lightning_gpp.reports.plan.layers import Layout, lay_out
from lightning_gpp.reports.plan.picture import plan_figure

DIAMOND = stage_edges(4, "0>1 0>2 1>3 2>3")
SKIPS = stage_edges(6, "0>1 1>2 0>3 2>3 1>4 3>4 0>5 2>5 4>5")


def chain(num_stages: int) -> StageGraph:
    edges = tuple(StageEdge(i, i + 1, ("x",), 1000) for i in range(num_stages - 1))
    return StageGraph(num_stages, edges)


def laid_out(stages: StageGraph) -> Layout:
    return lay_out(stages, [(2.0, 1.0)] * stages.num_stages)


@pytest.mark.parametrize("stages", [DIAMOND, SKIPS, chain(32)])
def test_everything_is_inside_and_no_boxes_overlap(stages: StageGraph) -> None:
    layout = laid_out(stages)
    boxes = [layout.boxes[stage] for stage in range(stages.num_stages)]
    for x, y, width, height in boxes:
        assert x >= 0 and x + width <= layout.width_in
        assert y >= 0 and y + height <= layout.height_in
    for number, (x, y, width, height) in enumerate(boxes):
        for left, top, wide, high in boxes[:number]:
            assert x >= left + wide or left >= x + width or y >= top + high or top >= y + height
    for x, y in (point for _, way in layout.ways for point in way):
        assert 0 <= x <= layout.width_in and 0 <= y <= layout.height_in


def test_skip_edges_pass_beside_the_boxes() -> None:
    layout = laid_out(stage_edges(3, "0>1 1>2 0>2"))
    (way,) = (way for edge, way in layout.ways if (edge.source, edge.target) == (0, 2))
    left, _, width, _ = layout.boxes[1]
    x, _ = way[1]
    assert x < left or x > left + width


GRAPH = literal_graph({"a": "x", "b": "a", "c": "b"})
PLAN = Plan(
    (Stage(0, ("a",), (0, 1), 2), Stage(1, ("b",), (2,)), Stage(2, ("c",), (3,))),
    num_microbatches=4,
)


def drawn(plan: Plan = PLAN) -> tuple[Figure, PlanRequest]:
    request = plan_request(GRAPH, 4, costs=profile_of(GRAPH), minibatch_size=16, num_microbatches=4)
    return plan_figure(evaluate_plan(plan, request), request, model="towers"), request


def test_texts_replicas_and_the_bottleneck() -> None:
    figure, _ = drawn()
    title, _ = (text.get_text() for text in figure.texts)
    assert title.startswith("towers on 4 devices (cpu): plan 'manual', 3 stages, depth 3")
    (axes,) = figure.axes
    written = [text.get_text() for text in axes.texts]
    assert {"stage 0 · devices 0-1", "stage 1 · device 2", "stage 2 · device 3"} <= set(written)
    assert "2 replicas" in written and written.count("750 us · 100 %") == 2
    frames = [patch for patch in axes.patches if patch.get_gid() == "box"]
    assert len(frames) == 4  # one is behind stage 0
    assert sorted(frame.get_linewidth() for frame in frames) == [0.9, 0.9, 2.2, 2.2]
    edges = [patch for patch in axes.patches if patch.get_gid() == "edge"]
    assert [edge.get_linestyle() for edge in edges] == ["-", "-"]
