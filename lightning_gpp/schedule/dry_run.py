"""Plays a program without its work: finds deadlocks, and estimates its time.

Sends are taken as buffered (the runtime posts them and goes on) and leave a device one after the
other, those of the feed beside the others; receives wait. The full prediction, with shared links
and memory, is the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_gpp.graph import FEED
from lightning_gpp.schedule.action import Action, Message, unit_time_s
from lightning_gpp.schedule.program import Program


class ScheduleError(ValueError):
    """A program that deadlocks, or leaves work undone."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """The result of a dry run.

    Attributes:
        step_s: seconds until the last action ends.
        start_s: when each compute action started.
    """

    step_s: float
    start_s: dict[Action, float]


def dry_run(program: Program, action_s: Callable[[Action], float] = unit_time_s) -> DryRun:
    """Plays a program through with given durations.

    Args:
        program: what to play.
        action_s: seconds of an action. For a send: how long the message takes; the sending device
            computes on meanwhile. Receives take no time of their own.

    Raises:
        ScheduleError: devices wait for messages that never come; the text names where.
    """
    num_devices = len(program.actions)
    clock_s = [0.0] * num_devices
    sent_s: dict[tuple[int, bool], float] = {}
    position = [0] * num_devices
    arrival_s: dict[Message, float] = {}
    waiting: dict[Message, int] = {}
    start_s: dict[Action, float] = {}
    runnable = list(range(num_devices))
    while runnable:
        device = runnable.pop()
        actions = program.actions[device]
        while position[device] < len(actions):
            action = actions[position[device]]
            if action.kind.is_receive:
                if action.message not in arrival_s:
                    waiting[action.message] = device
                    break
                clock_s[device] = max(clock_s[device], arrival_s[action.message])
            elif action.kind.is_send:
                channel = device, action.stage == FEED
                start = max(clock_s[device], sent_s.get(channel, 0.0))
                arrival_s[action.message] = sent_s[channel] = start + action_s(action)
                if action.message in waiting:
                    runnable.append(waiting.pop(action.message))
            else:
                if action.kind.is_compute:
                    start_s[action] = clock_s[device]
                clock_s[device] += action_s(action)
            position[device] += 1
    _check_finished(program, position)
    return DryRun(max(clock_s), start_s)


def _check_finished(program: Program, position: list[int]) -> None:
    stuck = [
        f"device {device} waits at {actions[position[device]]}"
        for device, actions in enumerate(program.actions)
        if position[device] < len(actions)
    ]
    if stuck:
        raise ScheduleError("the program deadlocks: " + "; ".join(stuck))
