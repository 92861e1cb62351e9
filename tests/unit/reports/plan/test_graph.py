"""The stage graph as text: it is looked at by people, so it is compared as people see it."""

from __future__ import annotations

from helpers.graphs import stage_edges

from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.reports.plan.graph import draw_stage_graph


def drawn(num_stages: int, edges: str, *, max_width: int = 100) -> str:
    labels = [f"stage {stage}" for stage in range(num_stages)]
    return draw_stage_graph(stage_edges(num_stages, edges), labels, max_width=max_width)


def picture(text: str) -> str:
    """The picture in an indented docstring-like literal."""
    lines = text.strip("\n").rstrip().split("\n")
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join(line[margin:] for line in lines)


def test_stages_of_one_depth_are_side_by_side() -> None:
    assert drawn(4, "0>1 0>2 1>3 2>3") == picture("""
        ┌─────────────┐
        │   stage 0   │
        │ → 1: 1.0 kB │
        │ → 2: 1.0 kB │
        └─────────────┘
        ┌─────────────┐ ┌─────────────┐
        │   stage 1   │ │   stage 2   │
        │ → 3: 1.0 kB │ │ → 3: 1.0 kB │
        └─────────────┘ └─────────────┘
        ┌─────────┐
        │ stage 3 │
        └─────────┘
    """)


def test_the_feed_is_named_in_the_boxes() -> None:
    stages = StageGraph(1, (StageEdge(FEED, 0, ("x",), 4096, has_backward=False),))
    assert draw_stage_graph(stages, ["only"]) == picture("""
        ┌─────────────┐
        │    only     │
        │ feed 4.1 kB │
        └─────────────┘
    """)


def test_edges_without_gradient_say_so() -> None:
    edges = (StageEdge(0, 1, ("v",), 8, has_backward=False),)
    assert "→ 1: 8 B, no gradient" in draw_stage_graph(StageGraph(2, edges), ["a", "b"])


def test_what_is_too_wide_goes_on_below() -> None:
    edges = " ".join(f"{branch}>60" for branch in range(60))
    text = drawn(61, edges, max_width=80)
    assert max(map(len, text.split("\n"))) <= 80
    assert text.count("→ 60: 1.0 kB") == 60
