"""The simulation of a program: an event simulation that contains no schedule logic.

It reads the actions of a :class:`~lightning_gpp.schedule.Program`, the same that the runtime
executes, and takes their durations from :class:`~lightning_gpp.simulate.ProgramCosts`:

- a device runs its actions in their order; sends are handed over and the device goes on
  (``sends="buffered"``, as the runtime does) or waits until the message has been received
  (``"rendezvous"``); the feed's messages are handed over at the start of a step in both cases;
- messages and sums of gradients keep the channels that they go through to themselves
  (:func:`lightning_gpp.cluster.channels`), first come, first served;
- sums of the gradients of replicas run beside the backward, bucket by bucket, as
  :mod:`lightning_gpp.runtime.sums.reduction` does it (wait-free back-propagation; Shi et al.,
  arXiv 1805.03812);
- a device begins its next step when its optimizer is done; the input of a step is read and copied
  at its start, or with ``prefetch`` by the host while the step before runs.

Of the files beside this one, ``compile_program`` turns actions into numbers, ``events`` plays them,
``tasks`` and ``memory`` tell what happened. An operation takes some microseconds to simulate
(``docs/prediction.md``).
"""

from __future__ import annotations

from typing import get_args

from lightning_gpp.schedule import Program, ScheduleError
from lightning_gpp.simulate.engine.check_costs import check_costs
from lightning_gpp.simulate.engine.compile_program import Sends, compile_program
from lightning_gpp.simulate.engine.compiled import Compiled
from lightning_gpp.simulate.engine.events import play
from lightning_gpp.simulate.engine.memory import DeviceMemory
from lightning_gpp.simulate.engine.tasks import Tasks
from lightning_gpp.simulate.engine.times import Times
from lightning_gpp.simulate.program_costs import ProgramCosts
from lightning_gpp.simulate.simulation import Simulation


def simulate(
    program: Program,
    costs: ProgramCosts,
    *,
    sends: Sends = "buffered",
    num_steps: int = 1,
    prefetch: bool = False,
) -> Simulation:
    """When everything in a step happens.

    Args:
        program: what every device does.
        costs: what it costs; device ``d`` of the program is device ``d`` of its cluster.
        sends: whether a sender goes on (``"buffered"``) or waits for its receiver
            (``"rendezvous"``).
        num_steps: steps one after the other; more than one show what pre-fetching is good for.
        prefetch: whether the host reads and copies the input of a step while the one before runs.

    Raises:
        ValueError: the costs do not fit the program, or an option is unknown.
        ScheduleError: devices wait for each other for ever; the text names them and where.

    >>> from lightning_gpp.cluster import Link, uniform_cluster
    >>> from lightning_gpp.graph import StageEdge, StageGraph
    >>> from lightning_gpp.schedule import build_program
    >>> from lightning_gpp.simulate.program_costs import MessageBytes, StageCosts
    >>> chain = StageGraph(2, (StageEdge(0, 1, ("h",)),))
    >>> program = build_program(chain, devices=[0, 1], num_microbatches=4)
    >>> size = {(0, 1): MessageBytes(per_unit=0.0)}
    >>> costs = ProgramCosts(
    ...     uniform_cluster(2, Link(10.0)), (StageCosts(1.0, 2.0),) * 2, size, size
    ... )
    >>> simulate(program, costs).step_s  # (4 micro-batches + 2 stages - 1) (1 + 2) seconds
    15.0
    """
    _check(sends, num_steps)
    check_costs(program, costs)
    compiled = compile_program(program, costs, sends=sends, prefetch=prefetch)
    times = play(compiled, num_steps)
    if times.stuck:
        raise ScheduleError(_deadlock(program, compiled, times))
    before_s = times.step_end_s[-2] if num_steps > 1 else 0.0
    return Simulation(
        program,
        costs,
        Tasks(program, costs, compiled, times),
        times.step_end_s[-1] - before_s,
        DeviceMemory(program, costs, compiled, times),
        sends,
    )


def _check(sends: str, num_steps: int) -> None:
    if sends not in get_args(Sends):
        raise ValueError(f"unknown sends {sends!r}; known: {', '.join(get_args(Sends))}")
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")


def _deadlock(program: Program, compiled: Compiled, times: Times) -> str:
    waiting = []
    for stream, operation in times.stuck.items():
        number = compiled.operations.actions[operation]
        if stream < compiled.num_devices and number >= 0:
            waiting.append(f"device {stream} waits at {program.actions[stream][number]}")
    return "the program deadlocks: " + "; ".join(waiting)
