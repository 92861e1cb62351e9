"""Golden pictures: they are looked at by people, so they are compared as people see them."""

from __future__ import annotations

from helpers.graphs import stage_edges

from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.reports import draw_stage_graph


def drawn(num_stages: int, edges: str, *, max_width: int = 100, ascii_only: bool = False) -> str:
    labels = [f"stage {stage}" for stage in range(num_stages)]
    stages = stage_edges(num_stages, edges)
    return draw_stage_graph(stages, labels, max_width=max_width, ascii_only=ascii_only)


def picture(text: str) -> str:
    """The picture in an indented docstring-like literal."""
    lines = text.strip("\n").rstrip().split("\n")
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join(line[margin:] for line in lines)


def test_one_stage():
    assert drawn(1, "") == picture("""
        ┌─────────┐
        │ stage 0 │
        └─────────┘
    """)


def test_chain():
    assert drawn(2, "0>1") == picture("""
        ┌─────────┐
        │ stage 0 │
        └────┬────┘
             │ 1.0 kB
        ┌────▼────┐
        │ stage 1 │
        └─────────┘
    """)


def test_fork_and_join_are_side_by_side():
    assert drawn(4, "0>1 0>2 1>3 2>3") == picture("""
           ┌───────────────┐
           │    stage 0    │
           └─┬───────────┬─┘
             │ 1.0 kB    │ 1.0 kB
        ┌────▼────┐ ┌────▼────┐
        │ stage 1 │ │ stage 2 │
        └────┬────┘ └────┬────┘
             │ 1.0 kB    │ 1.0 kB
           ┌─▼───────────▼─┐
           │    stage 3    │
           └───────────────┘
    """)


def test_a_skip_edge_passes_the_stages_between():
    assert drawn(3, "0>1 1>2 0>2") == picture("""
        ┌─────────────┐
        │   stage 0   │
        └─┬─────────┬─┘
          │ 1.0 kB  │ 1.0 kB
        ┌─▼───────┐ │
        │ stage 1 │ │
        └─┬───────┘ │
          │ 1.0 kB  │
        ┌─▼─────────▼─┐
        │   stage 2   │
        └─────────────┘
    """)


def test_crossing_edges_cross_without_meeting():
    assert drawn(4, "0>2 0>3 1>2 1>3") == picture("""
        ┌─────────────┐ ┌──────────────┐
        │   stage 0   │ │   stage 1    │
        └─┬────────┬──┘ └───┬────────┬─┘
          │ 1.0 kB │ 1.0 kB │ 1.0 kB │ 1.0 kB
          │       ┌┼────────┘        │
          │       │└────────┐        │
          │       │         │        │
        ┌─▼───────▼───┐ ┌───▼────────▼─┐
        │   stage 2   │ │   stage 3    │
        └─────────────┘ └──────────────┘
    """)


def test_the_feed_is_named_in_the_boxes():
    stages = StageGraph(1, (StageEdge(FEED, 0, ("x",), 4096, has_backward=False),))
    assert draw_stage_graph(stages, ["only"]) == picture("""
        ┌─────────────┐
        │    only     │
        │ feed 4.1 kB │
        └─────────────┘
    """)


def test_edges_without_gradient_are_dotted():
    edges = (StageEdge(0, 1, ("v",), 8, has_backward=False),)
    assert "┊ 8 B" in draw_stage_graph(StageGraph(2, edges), ["a", "b"])


def test_ascii():
    assert drawn(2, "0>1", ascii_only=True) == picture("""
        +---------+
        | stage 0 |
        +----+----+
             | 1.0 kB
        +----v----+
        | stage 1 |
        +---------+
    """)


def test_long_names_are_broken_where_people_would():
    stages = stage_edges(3, "0>2 1>2")
    labels = ["encoders.expression (3) 12.5 MB", "encoders.fingerprints (3) 12.5 MB", "fusion"]
    text = draw_stage_graph(stages, labels, max_width=36)
    assert max(map(len, text.split("\n"))) <= 36
    assert "encoders. " in text
    assert "expression" in text
    assert "12.5 MB" in text


def test_what_is_too_wide_is_listed_below_a_picture_of_ids():
    branches = 12
    edges = " ".join(f"{i}>{branches}" for i in range(branches))
    text = drawn(branches + 1, edges, max_width=80)
    assert "│ 11 │" in text
    assert "\n11: stage 11\n" in text
    assert "12: stage 12 <- 0 (1.0 kB), 1 (1.0 kB)" in text


def test_what_is_much_too_wide_is_only_listed():
    branches = 60
    edges = " ".join(f"{i}>{branches}" for i in range(branches))
    text = drawn(branches + 1, edges)
    assert text.startswith("0: stage 0\n1: stage 1\n")
