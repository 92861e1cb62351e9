"""Checks a program before anything runs: complete, ordered, free of deadlock."""

from __future__ import annotations

import itertools
from collections import Counter

from lightning_gpp.graph import FEED
from lightning_gpp.schedule.action import Action, Kind
from lightning_gpp.schedule.dry_run import Message, ScheduleError, dry_run
from lightning_gpp.schedule.merge import dependencies
from lightning_gpp.schedule.program import Program

__all__ = ["ScheduleError", "validate"]


def validate(program: Program) -> None:
    """Checks a program.

    - every stage runs every micro-batch forward and, when training, backward, exactly once, on its
      own device;
    - every message is sent once and received once, in the same order on both sides of a pair of
      devices is not needed: messages carry their identity;
    - every device that computes updates its parameters once per mini-batch, after all of its
      backwards and sums of it;
    - what an action needs is there before it: results of its own device earlier in the list,
      results of others received earlier;
    - where the schedule has all forwards first, no device has a backward, or a message of one,
      before a forward or a message of one;
    - the program runs to its end.

    Raises:
        ScheduleError: the text names the stage, the action and the device.
    """
    _check_complete(program)
    _check_messages(program)
    for device, actions in enumerate(program.actions):
        _check_order(program, device, actions)
        if program.has_halves:
            _check_halves(device, actions)
    dry_run(program)
    if program.has_backward:
        _check_updates(program)


def _check_complete(program: Program) -> None:
    expected = Counter(
        Action(stage, kind, microbatch)
        for stage in range(program.num_stages)
        for kind in ((Kind.FORWARD, Kind.BACKWARD) if program.has_backward else (Kind.FORWARD,))
        for microbatch in range(program.stage_microbatches(stage))
    )
    found = Counter(action for action in program.compute_actions() if action.stage != FEED)
    if missing := expected - found:
        raise ScheduleError(f"the program lacks {_names(missing)}")
    if extra := found - expected:
        raise ScheduleError(f"the program repeats or invents {_names(extra)}")
    for device, actions in enumerate(program.actions):
        for action in actions:
            if action.kind is Kind.REDUCE:
                if device not in program.reduce_group(action.microbatch).devices:
                    raise ScheduleError(f"{action} is on device {device}, which holds no part")
            elif action.kind is Kind.STEP:
                continue  # of the device
            elif program.device(action.stage) != device:
                raise ScheduleError(
                    f"{action} is on device {device}, but stage {action.stage} is on device "
                    f"{program.device(action.stage)}"
                )


def _check_updates(program: Program) -> None:
    for device, actions in enumerate(program.actions):
        updates = [action.microbatch for action in actions if action.kind is Kind.STEP]
        if updates != list(range(program.num_minibatches)) and actions:
            raise ScheduleError(
                f"device {device} updates its parameters by the mini-batches {updates}; the "
                f"program has {program.num_minibatches}"
            )
        done = -1
        for action in actions:
            if action.kind is Kind.STEP:
                done = action.microbatch
            elif action.kind in (Kind.BACKWARD, Kind.REDUCE) and program.minibatch(action) <= done:
                raise ScheduleError(f"device {device} runs {action} after the update {done}")


def _check_messages(program: Program) -> None:
    sent: Counter[Message] = Counter()
    received: Counter[Message] = Counter()
    for actions in program.actions:
        sent.update(action.message for action in actions if action.kind.is_send)
        received.update(action.message for action in actions if action.kind.is_receive)
    for message in sent.keys() | received.keys():
        if (sent[message], received[message]) != (1, 1):
            source, target, backward, index = message
            what = "gradient" if backward else "activation"
            raise ScheduleError(
                f"{what} message {index} from stage {source} to stage {target} is sent "
                f"{sent[message]} times and received {received[message]} times"
            )


def _check_order(program: Program, device: int, actions: tuple[Action, ...]) -> None:
    done: set[Action] = set()
    got: set[Message] = set()
    for action in actions:
        if action.kind.is_receive:
            got.add(action.message)
        elif action.kind.is_compute:
            for need in dependencies(program, action):
                if program.device(need.stage) == device and need not in done:
                    raise ScheduleError(f"device {device} runs {action} before {need}")
            for message in _needed_messages(program, action):
                if message not in got:
                    raise ScheduleError(f"device {device} runs {action} before receiving {message}")
            done.add(action)
        elif action.kind.is_send and Action(*_maker(program, action)) not in done:
            raise ScheduleError(f"device {device} sends {action} before computing it")


def _check_halves(device: int, actions: tuple[Action, ...]) -> None:
    for action, following in itertools.pairwise(actions):
        if following.kind.is_forward and not action.kind.is_forward:
            raise ScheduleError(f"device {device} runs {following} after {action}")


def _needed_messages(program: Program, action: Action) -> list[Message]:
    backward = action.kind is Kind.BACKWARD
    edges = program.out_edges[action.stage] if backward else program.in_edges[action.stage]
    return [
        (edge.target, edge.source, True, index)
        if backward
        else (edge.source, edge.target, False, index)
        for edge in edges
        if not program.is_local(edge) and (edge.has_backward or not backward)
        for index in program.message_range(edge, action.stage, action.microbatch)
    ]


def _maker(program: Program, send: Action) -> tuple[int, Kind, int]:
    assert send.peer is not None
    is_forward = send.kind is Kind.SEND_FORWARD
    kind = Kind.FORWARD if is_forward else Kind.BACKWARD
    return send.stage, kind, program.part(send).microbatch(of_source=is_forward)


def _names(actions: Counter[Action]) -> str:
    names = [str(action) for action in actions]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
