"""Schedules and programs: what every device does, in which order, for one mini-batch.

A *schedule* orders the forwards and backwards of every stage. :func:`build_program` merges the
orders of the stages of one device, adds the messages between devices (*lowering*) and looks whether
the result runs to its end: a :class:`Program` that the runtime executes, the simulator predicts and
reports show.
"""

from lightning_gpp.schedule.action import Action, Kind
from lightning_gpp.schedule.dry_run import ScheduleError, dry_run
from lightning_gpp.schedule.lower import build_program
from lightning_gpp.schedule.program import Program
from lightning_gpp.schedule.schedules import (
    GPIPE,
    GPIPE_REVERSED,
    ONE_F_ONE_B,
    ONE_F_ONE_B_ASYNC,
    SCHEDULES,
    find_schedule,
)
from lightning_gpp.schedule.windows import Window, Windows, most_ahead

__all__ = [
    "GPIPE",
    "GPIPE_REVERSED",
    "ONE_F_ONE_B",
    "ONE_F_ONE_B_ASYNC",
    "SCHEDULES",
    "Action",
    "Kind",
    "Program",
    "ScheduleError",
    "Window",
    "Windows",
    "build_program",
    "dry_run",
    "find_schedule",
    "most_ahead",
]
