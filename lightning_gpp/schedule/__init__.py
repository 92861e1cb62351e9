"""Schedules and programs: what every device does, in which order, for one mini-batch.

A *schedule* orders the forwards and backwards of every stage. :func:`build_program` merges the
orders of the stages of one device, adds the messages between devices (*lowering*) and looks whether
the result runs to its end: a :class:`Program` that the runtime executes, the simulator predicts and
reports show.
"""

from lightning_gpp.schedule.action import Action, Kind
from lightning_gpp.schedule.dry_run import ScheduleError, dry_run
from lightning_gpp.schedule.gradient_sums import last_backward
from lightning_gpp.schedule.in_flight import in_flight_microbatches
from lightning_gpp.schedule.lower import build_program, reduce_groups
from lightning_gpp.schedule.orders import Steps, most_in_flight
from lightning_gpp.schedule.program import Program
from lightning_gpp.schedule.program_parts import Part, ReduceGroup, Replica
from lightning_gpp.schedule.schedules import (
    FORWARD_ONLY,
    GPIPE,
    GPIPE_REVERSED,
    ONE_F_ONE_B,
    ONE_F_ONE_B_ASYNC,
    SCHEDULES,
    Schedule,
    find_schedule,
)
from lightning_gpp.schedule.windows import Window, Windows, most_ahead, version_differences

__all__ = [
    "FORWARD_ONLY",
    "GPIPE",
    "GPIPE_REVERSED",
    "ONE_F_ONE_B",
    "ONE_F_ONE_B_ASYNC",
    "SCHEDULES",
    "Action",
    "Kind",
    "Part",
    "Program",
    "ReduceGroup",
    "Replica",
    "Schedule",
    "ScheduleError",
    "Steps",
    "Window",
    "Windows",
    "build_program",
    "dry_run",
    "find_schedule",
    "in_flight_microbatches",
    "last_backward",
    "most_ahead",
    "most_in_flight",
    "reduce_groups",
    "version_differences",
]
