"""Schedules and programs: what every device does, in which order, for one mini-batch.

A *schedule* orders the forwards and backwards of every stage. :func:`build_program` merges the
orders of the stages of one device, adds the messages between devices (*lowering*) and looks whether
the result runs to its end: a :class:`Program` that the runtime executes, the simulator predicts and
reports show.
"""

from lightning_gpp.schedule.action import Action as Action
from lightning_gpp.schedule.action import Kind as Kind
from lightning_gpp.schedule.dry_run import ScheduleError as ScheduleError
from lightning_gpp.schedule.dry_run import dry_run as dry_run
from lightning_gpp.schedule.lower import build_program as build_program
from lightning_gpp.schedule.program import Program as Program
from lightning_gpp.schedule.schedules import FORWARD_ONLY as FORWARD_ONLY
from lightning_gpp.schedule.schedules import GPIPE as GPIPE
from lightning_gpp.schedule.schedules import GPIPE_REVERSED as GPIPE_REVERSED
from lightning_gpp.schedule.schedules import ONE_F_ONE_B as ONE_F_ONE_B
from lightning_gpp.schedule.schedules import ONE_F_ONE_B_ASYNC as ONE_F_ONE_B_ASYNC
from lightning_gpp.schedule.schedules import SCHEDULES as SCHEDULES
from lightning_gpp.schedule.schedules import find_schedule as find_schedule
from lightning_gpp.schedule.windows import Window as Window
from lightning_gpp.schedule.windows import Windows as Windows
from lightning_gpp.schedule.windows import most_ahead as most_ahead
