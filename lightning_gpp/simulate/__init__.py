"""Simulations and timelines of steps.

:func:`simulate` plays a program with what it costs; :func:`simulate_plan` does so for a plan.
:func:`critical_path` says what the step waits for.

A :class:`Timeline` says what every rank did when, for one optimizer step. It is the same type
whether the step was measured by the runtime or predicted from a program, so that the two can be
put side by side. :func:`shares` reads off where the time went; :mod:`lightning_gpp.reports` shows
it.

Beside it: ``timeline`` says what happened, ``ssgd`` is pure data parallelism as a special case,
``what_if`` tries changes, ``recorded`` makes a ``refit`` of costs from recorded steps.
"""

from lightning_gpp.simulate.plan_costs import program_costs as program_costs
from lightning_gpp.simulate.plan_costs import simulate_plan as simulate_plan
from lightning_gpp.simulate.program_costs import Bucket as Bucket
from lightning_gpp.simulate.program_costs import MessageBytes as MessageBytes
from lightning_gpp.simulate.program_costs import ProgramCosts as ProgramCosts
from lightning_gpp.simulate.program_costs import StageCosts as StageCosts
from lightning_gpp.simulate.program_costs import StepCosts as StepCosts
from lightning_gpp.simulate.simulation import Simulation as Simulation
from lightning_gpp.simulate.simulation import critical_path as critical_path
from lightning_gpp.simulate.simulation import simulate as simulate
from lightning_gpp.simulate.timeline.predicted import predicted_timeline as predicted_timeline
from lightning_gpp.simulate.timeline.shares import shares as shares
from lightning_gpp.simulate.timeline.span import Span as Span
from lightning_gpp.simulate.timeline.span import SpanKind as SpanKind
from lightning_gpp.simulate.timeline.span import TransferKind as TransferKind
from lightning_gpp.simulate.timeline.timeline import Timeline as Timeline
from lightning_gpp.simulate.timeline.timeline import TimelineStage as TimelineStage
