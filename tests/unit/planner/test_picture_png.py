"""Pictures of stage graphs for people; here only that everything is on them and nothing beside."""

from __future__ import annotations

import sys

import pytest
from helpers.graphs import stage_edges

from lightning_gpp.graph import StageEdge, StageGraph
from lightning_gpp.planner.picture_bands import fold
from lightning_gpp.planner.picture_layout import lay_out
from lightning_gpp.planner.picture_png import StageBox, stage_graph_figure, write_stage_graph

pytest.importorskip("matplotlib")


def box(stage: int, *, num_replicas: int = 1, is_bottleneck: bool = False) -> StageBox:
    lines = (f"stage {stage} · device {stage}", "encoder")
    return StageBox(
        *(lines, "1.00 ms · 50 %", 0.5, "communication", "1.0 GB", 0.25),
        num_replicas=num_replicas,
        is_bottleneck=is_bottleneck,
    )


def chain(num_stages: int) -> StageGraph:
    edges = tuple(StageEdge(i, i + 1, ("x",), 1000) for i in range(num_stages - 1))
    return StageGraph(num_stages, edges)


def drawn(stages: StageGraph, boxes: list[StageBox]):
    texts = {(e.source, e.target): "1.0 kB" for e in stages.edges if e.values}
    return stage_graph_figure(stages, boxes, texts, title="Plan", subtitle="Step").axes[0]


@pytest.mark.parametrize("stages", [stage_edges(4, "0>1 0>2 1>3 2>3"), chain(32)])
def test_everything_is_inside_and_nothing_overlaps(stages: StageGraph) -> None:
    axes = drawn(stages, [box(stage) for stage in range(stages.num_stages)])
    written = [text.get_text() for text in axes.texts]
    for stage in range(stages.num_stages):
        assert written.count(f"stage {stage} · device {stage}") == 1
    assert written.count("1.00 ms · 50 %") == stages.num_stages
    assert written.count("1.0 kB") == len(stages.edges)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    frames = [patch.get_bbox() for patch in axes.patches if patch.get_zorder() == 3]
    assert len(frames) == stages.num_stages
    for frame in frames:
        assert left < frame.x0 < frame.x1 < right
        assert top < frame.y0 < frame.y1 < bottom
    for number, frame in enumerate(frames):
        assert not any(frame.overlaps(other) for other in frames[:number])


def test_replicas_are_stacked_and_the_bottleneck_is_marked() -> None:
    axes = drawn(chain(3), [box(0, num_replicas=2), box(1, is_bottleneck=True), box(2)])
    frames = [patch for patch in axes.patches if patch.get_zorder() == 3]
    assert len(frames) == 4
    assert len({frame.get_edgecolor() for frame in frames}) == 2
    assert sum(frame.get_linewidth() > 2 for frame in frames) == 1


def test_a_deep_graph_is_folded() -> None:
    """32 boxes of 2 x 1 inches below each other would be 45 inches high."""
    layout = lay_out(chain(32), box_width=[20] * 32, label_width={})
    bands = fold(layout, [1.0] * 32, {}, character_in=0.1)
    assert max(bands.band) >= 2
    assert bands.height_in <= 1.5 * bands.width_in
    assert fold(layout, [1.0] * 32, {}, character_in=2.0).band == (0,) * 32


def test_writes_a_png_without_pyplot(tmp_path) -> None:
    before = "matplotlib.pyplot" in sys.modules
    path = tmp_path / "plan.png"
    write_stage_graph(path, chain(2), [box(0), box(1)], {}, title="Plan")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == before
