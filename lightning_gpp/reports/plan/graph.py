"""The stage graph of a plan with the bytes of its messages, and as boxes of text.

┌──────────┐
│   stem   │
│ → 1: 4 B │
│ → 2: 4 B │
└──────────┘
┌──────────┐ ┌──────────┐
│ tower a  │ │ tower b  │
└──────────┘ └──────────┘
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace

from lightning_gpp.common.units_of_measure import bytes_text
from lightning_gpp.graph import FEED, StageGraph
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.edge_bytes import edge_bytes
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.plan.plan_graph import plan_graph
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches

WIDEST, NARROWEST = 40, 18
"""Characters of a line in a box."""


def sized_stages(plan: Plan, request: PlanRequest) -> StageGraph:
    """The stage graph of a plan, the one of the loss included, with the bytes of its messages.

    A message carries the activations of one micro-batch of the smaller side, all replicas together.
    """
    pipeline = plan_graph(plan, request.graph)
    unit_size = request.minibatch_size / num_microbatches(plan, request)
    edges = []
    for edge in pipeline.stages.edges:
        source = pipeline.stages.num_stages - 1 if edge.source == FEED else edge.source
        units = min(pipeline.multiples[source], pipeline.multiples[edge.target])
        size_bytes = edge_bytes(request.graph, edge.values).forward(units * unit_size)
        edges.append(replace(edge, size_bytes=round(size_bytes)))
    return replace(pipeline.stages, edges=tuple(edges))


def draw_stage_graph(stages: StageGraph, labels: Sequence[str], *, max_width: int = 100) -> str:
    """Stages as boxes, those of one depth side by side; in each what it sends to which others.

    Args:
        stages: the stage graph.
        labels: what to write into the box of each stage; may have several lines.
        max_width: columns of the terminal.
    """
    texts = [label.splitlines() for label in labels]
    for edge in stages.edges:
        size = bytes_text(edge.size_bytes)
        if edge.source == FEED:
            texts[edge.target].append(f"feed {size}")
        else:
            only = "" if edge.has_backward else ", no gradient"
            texts[edge.source].append(f"→ {edge.target}: {size}{only}")
    depths = list(stages.depths.values())
    rows = []
    for depth in sorted(set(depths), reverse=True):
        layer = [lines for lines, found in zip(texts, depths) if found == depth]
        width = max(NARROWEST, min(WIDEST, max_width // len(layer) - 5))
        wrapped = [[p for line in lines for p in textwrap.wrap(line, width)] for lines in layer]
        inner = max(len(line) for lines in wrapped for line in lines)
        per_row = max(1, (max_width + 1) // (inner + 5))
        rows += [wrapped[i : i + per_row] for i in range(0, len(wrapped), per_row)]
    return "\n".join(map(_row, rows))


def _row(boxes: Sequence[Sequence[str]]) -> str:
    """Boxes side by side."""
    width, height = max(len(line) for box in boxes for line in box), max(map(len, boxes))
    lines = [" ".join(f"┌{'─' * (width + 2)}┐" for _ in boxes)]
    for number in range(height):
        texts = (box[number] if number < len(box) else "" for box in boxes)
        lines.append(" ".join(f"│ {text:^{width}} │" for text in texts))
    return "\n".join([*lines, lines[0].translate(str.maketrans("┌┐", "└┘"))])
