"""Pictures of stage graphs for people; here only that everything is on them and nothing beside."""

from __future__ import annotations

import pytest
from helpers.graphs import stage_edges

from lightning_gpp.graph import StageEdge, StageGraph
from lightning_gpp.reports.plan.picture_bands import fold
from lightning_gpp.reports.plan.picture_layout import lay_out
from lightning_gpp.reports.plan.picture_shapes import Picture, Polyline, Rectangle, Text
from lightning_gpp.reports.plan.picture_stages import StageBox, stage_graph_picture


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


def drawn(stages: StageGraph, boxes: list[StageBox] | None = None) -> Picture:
    texts = {(e.source, e.target): "1.0 kB" for e in stages.edges if e.values}
    boxes = boxes or [box(stage) for stage in range(stages.num_stages)]
    return stage_graph_picture(stages, boxes, texts, title="Plan", subtitle="Step")


def frames(picture: Picture) -> list[Rectangle]:
    return [each for each in picture.shapes if isinstance(each, Rectangle) and each.border_pt]


def lines(picture: Picture) -> list[Polyline]:
    return [each for each in picture.shapes if isinstance(each, Polyline)]


def overlap(one: Rectangle, other: Rectangle) -> bool:
    return (
        one.x < other.x + other.width
        and other.x < one.x + one.width
        and one.y < other.y + other.height
        and other.y < one.y + one.height
    )


@pytest.mark.parametrize("stages", [stage_edges(4, "0>1 0>2 1>3 2>3"), chain(32)])
def test_everything_is_inside_and_nothing_overlaps(stages: StageGraph) -> None:
    picture = drawn(stages)
    written = [shape.text for shape in picture.shapes if isinstance(shape, Text)]
    for stage in range(stages.num_stages):
        assert written.count(f"stage {stage} · device {stage}") == 1
    assert written.count("1.00 ms · 50 %") == stages.num_stages
    assert written.count("1.0 kB") == len(stages.edges)
    assert len(frames(picture)) == stages.num_stages
    for frame in frames(picture):
        assert frame.x > 0 and frame.x + frame.width < picture.width
        assert frame.y > 0 and frame.y + frame.height < picture.height
    for number, frame in enumerate(frames(picture)):
        assert not any(overlap(frame, other) for other in frames(picture)[:number])
    for x, y in (point for line in lines(picture) for point in line.points):
        assert 0 < x < picture.width and 0 < y < picture.height


def test_an_edge_goes_from_box_to_box() -> None:
    """In a diamond from the lower side of the source to the upper one of the target."""
    picture = drawn(stage_edges(4, "0>1 0>2 1>3 2>3"))
    assert [line.has_tip for line in lines(picture)] == [True] * 4
    for line in lines(picture):
        (x, start), *_, (end_x, end) = line.points
        assert any(
            start == pytest.approx(frame.y + frame.height) and frame.x < x < frame.x + frame.width
            for frame in frames(picture)
        )
        assert any(
            end == pytest.approx(frame.y) and frame.x < end_x < frame.x + frame.width
            for frame in frames(picture)
        )


def test_an_edge_without_gradients_is_dotted_and_one_without_values_grey() -> None:
    edges = (
        StageEdge(0, 1, ("x",), 1000),
        StageEdge(1, 2, ("mask",), 1000, has_backward=False),
        StageEdge(2, 3, (), 0),
    )
    found = lines(drawn(StageGraph(4, edges)))
    assert [line.is_dotted for line in found] == [False, True, True]
    assert found[0].colour == found[1].colour != found[2].colour


def test_replicas_are_stacked_and_the_bottleneck_is_marked() -> None:
    picture = drawn(chain(3), [box(0, num_replicas=2), box(1, is_bottleneck=True), box(2)])
    assert len(frames(picture)) == 4
    assert len({frame.border for frame in frames(picture)}) == 2
    assert sum(frame.border_pt > 2 for frame in frames(picture)) == 1


def test_a_deep_graph_is_folded() -> None:
    """32 boxes of 2 x 1 inches below each other would be 45 inches high."""
    layout = lay_out(chain(32), box_width=[20] * 32, label_width={})
    bands = fold(layout, [1.0] * 32, {}, character_in=0.1)
    assert max(bands.band) >= 2
    assert bands.height_in <= 1.5 * bands.width_in
    assert fold(layout, [1.0] * 32, {}, character_in=2.0).band == (0,) * 32


def test_no_line_strikes_out_the_text_of_an_edge() -> None:
    """A line that bends, or goes to the next band, turns to the right where its text stands."""
    picture = drawn(chain(32))
    assert sum(len(line.points) == 6 for line in lines(picture)) == 3
    texts = [shape for shape in picture.shapes if isinstance(shape, Text) and shape.is_on_line]
    assert [text.text for text in texts] == ["1.0 kB"] * 31
    last_line = max(i for i, shape in enumerate(picture.shapes) if isinstance(shape, Polyline))
    assert all(picture.shapes.index(text) > last_line for text in texts)
