"""The third reader of a plan and of its program: what a person sees.

``plan`` shows a plan: a table of its stages, explanations, a text picture and a PNG of its stage
graph. ``step`` shows steps in time, predicted or measured: a picture, a page, a trace.

Nothing below imports this room. Names are loaded when they are asked for: the picture of a plan
needs no simulator.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_gpp.reports.plan.describe import describe_plan, describe_what
    from lightning_gpp.reports.plan.picture_text import draw_stage_graph
    from lightning_gpp.reports.plan.plan_picture import write_plan_picture
    from lightning_gpp.reports.plan.verdict import BatchTimes, PlanVerdict
    from lightning_gpp.reports.step.page import write_page
    from lightning_gpp.reports.step.picture import timeline_figure, write_picture
    from lightning_gpp.reports.step.trace import trace_events, write_trace
    from lightning_gpp.reports.step.write_step import write_step

_HOMES = {
    "BatchTimes": "plan.verdict",
    "PlanVerdict": "plan.verdict",
    "describe_plan": "plan.describe",
    "describe_what": "plan.describe",
    "draw_stage_graph": "plan.picture_text",
    "timeline_figure": "step.picture",
    "trace_events": "step.trace",
    "write_page": "step.page",
    "write_picture": "step.picture",
    "write_plan_picture": "plan.plan_picture",
    "write_step": "step.write_step",
    "write_trace": "step.trace",
}

__all__ = [
    "BatchTimes",
    "PlanVerdict",
    "describe_plan",
    "describe_what",
    "draw_stage_graph",
    "timeline_figure",
    "trace_events",
    "write_page",
    "write_picture",
    "write_plan_picture",
    "write_step",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
