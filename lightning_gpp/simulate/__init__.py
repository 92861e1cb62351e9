"""What a step looks like in time: simulations, timelines, and how they are shown.

:func:`simulate` plays a program with what it costs; :func:`simulate_plan` does so for a plan.
:func:`critical_path` and :func:`usage` say what the step waits for and how busy everything is.

A :class:`Timeline` says what every rank did when, for one optimizer step. It is the same type
whether the step was measured by the runtime or predicted from a program, so that the two can be
put side by side. :func:`shares` reads off where the time went; :func:`write_picture`,
:func:`write_page` and :func:`write_trace` show it.
"""

from lightning_gpp.simulate.critical_path import CriticalPath, PathStep, critical_path
from lightning_gpp.simulate.engine import simulate
from lightning_gpp.simulate.measured_path import with_inferred_path
from lightning_gpp.simulate.page import write_page
from lightning_gpp.simulate.picture import timeline_figure, write_picture
from lightning_gpp.simulate.plan_costs import Overlap, program_costs, simulate_plan
from lightning_gpp.simulate.predicted import predicted_timeline
from lightning_gpp.simulate.program_costs import (
    Bucket,
    MessageBytes,
    Overhead,
    ProgramCosts,
    StageCosts,
    StepCosts,
)
from lightning_gpp.simulate.shares import RankShares, Shares, path_shares, shares
from lightning_gpp.simulate.simulation import Simulation, Task, TaskKind
from lightning_gpp.simulate.span import Category, Span, SpanKind
from lightning_gpp.simulate.timeline import MemoryCurve, PathPart, Timeline, TimelineStage
from lightning_gpp.simulate.timeline_stages import plan_stages
from lightning_gpp.simulate.trace import trace_events, write_trace
from lightning_gpp.simulate.transfer import Transfer, TransferKind
from lightning_gpp.simulate.usage import ChannelUsage, DeviceUsage, TransferUsage, Usage, usage
from lightning_gpp.simulate.write_step import write_step

__all__ = [
    "Bucket",
    "Category",
    "ChannelUsage",
    "CriticalPath",
    "DeviceUsage",
    "MemoryCurve",
    "MessageBytes",
    "Overhead",
    "Overlap",
    "PathPart",
    "PathStep",
    "ProgramCosts",
    "RankShares",
    "Shares",
    "Simulation",
    "Span",
    "SpanKind",
    "StageCosts",
    "StepCosts",
    "Task",
    "TaskKind",
    "Timeline",
    "TimelineStage",
    "Transfer",
    "TransferKind",
    "TransferUsage",
    "Usage",
    "critical_path",
    "path_shares",
    "plan_stages",
    "predicted_timeline",
    "program_costs",
    "shares",
    "simulate",
    "simulate_plan",
    "timeline_figure",
    "trace_events",
    "usage",
    "with_inferred_path",
    "write_page",
    "write_picture",
    "write_step",
    "write_trace",
]
