"""What a step looks like in time: simulations and timelines.

:func:`simulate` plays a program with what it costs; :func:`simulate_plan` does so for a plan.
:func:`critical_path` and :func:`usage` say what the step waits for and how busy everything is.

A :class:`Timeline` says what every rank did when, for one optimizer step. It is the same type
whether the step was measured by the runtime or predicted from a program, so that the two can be
put side by side. :func:`shares` reads off where the time went; :mod:`lightning_gpp.reports` shows
it.

Beside it: ``timeline`` says what happened, ``ssgd`` is pure data parallelism as a special case,
``what_if`` tries changes, ``refit`` corrects costs by recorded steps.
"""

from lightning_gpp.simulate.critical_path import critical_path
from lightning_gpp.simulate.plan_costs import program_costs, simulate_plan
from lightning_gpp.simulate.program_costs import (
    Bucket,
    MessageBytes,
    Overhead,
    ProgramCosts,
    StageCosts,
    StepCosts,
)
from lightning_gpp.simulate.simulation import Simulation, simulate
from lightning_gpp.simulate.task import TaskKind
from lightning_gpp.simulate.timeline.predicted import predicted_timeline
from lightning_gpp.simulate.timeline.shares import shares
from lightning_gpp.simulate.timeline.span import Span, SpanKind
from lightning_gpp.simulate.timeline.timeline import Timeline, TimelineStage
from lightning_gpp.simulate.usage import usage

__all__ = [
    "Bucket",
    "MessageBytes",
    "Overhead",
    "ProgramCosts",
    "Simulation",
    "Span",
    "SpanKind",
    "StageCosts",
    "StepCosts",
    "TaskKind",
    "Timeline",
    "TimelineStage",
    "critical_path",
    "predicted_timeline",
    "program_costs",
    "shares",
    "simulate",
    "simulate_plan",
    "usage",
]
