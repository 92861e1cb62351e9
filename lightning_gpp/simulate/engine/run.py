"""The simulation of a program: an event simulation that contains no schedule logic.

It reads the actions of a :class:`~lightning_gpp.schedule.Program`, the same that the runtime
executes, and takes their durations from :class:`~lightning_gpp.simulate.ProgramCosts`:

- a device runs its actions in their order; sends are handed over and the device goes on, as in the
  runtime;
- messages and sums of gradients keep the channels that they go through to themselves
  (:func:`lightning_gpp.cluster.channels`), first come, first served;
- sums of the gradients of replicas run beside the backward, bucket by bucket;
- a device begins its next step when its optimizer is done; the input of a step is read and copied
  at its start, or with ``prefetch`` by the host while the step before runs.

Of the files beside this one, ``compile_program`` turns actions into the work that
:mod:`lightning_gpp.engine` plays, ``tasks`` and ``memory`` tell what happened. An action takes some
microseconds to simulate (``docs/prediction.md``).
"""

from __future__ import annotations

from lightning_gpp.engine.play import NEVER, Played, play
from lightning_gpp.schedule import Program, ScheduleError
from lightning_gpp.simulate.engine.check_costs import check_costs
from lightning_gpp.simulate.engine.compile_program import compile_program
from lightning_gpp.simulate.engine.compiled import Compiled
from lightning_gpp.simulate.engine.memory import DeviceMemory
from lightning_gpp.simulate.engine.tasks import Tasks
from lightning_gpp.simulate.engine.times import Times
from lightning_gpp.simulate.program_costs import ProgramCosts
from lightning_gpp.simulate.simulation import Simulation


def simulate(
    program: Program,
    costs: ProgramCosts,
    *,
    num_steps: int = 1,
    prefetch: bool = False,
) -> Simulation:
    """When everything in a step happens.

    Args:
        program: what every device does.
        costs: what it costs; device ``d`` of the program is device ``d`` of its cluster.
        num_steps: steps one after the other; more than one show what pre-fetching is good for.
        prefetch: whether the host reads and copies the input of a step while the one before runs.

    Raises:
        ValueError: the costs do not fit the program, or there is no step.
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
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    check_costs(program, costs)
    compiled = compile_program(program, costs, prefetch=prefetch)
    played = play(compiled.work.repeated(num_steps))
    assert played is not None  # no step is too long
    if played.stuck:
        raise ScheduleError(_deadlock(compiled, played))
    times = Times(compiled, played, num_steps)
    memory = DeviceMemory(program, costs, times)
    return Simulation(program, costs, Tasks(times), times.last_step_s, memory)


def _deadlock(compiled: Compiled, played: Played) -> str:
    waiting = []
    for device, item in played.stuck.items():
        step, own = divmod(item, len(compiled.items))
        actions = [
            action
            for sender, action in compiled.waits.get(own, ())
            if sender < 0 or played.start_s[step * len(compiled.items) + sender] == NEVER
        ] or [compiled.items[own].action]
        if actions[0] is not None:
            waiting.append(f"device {device} waits at {actions[0]}")
    return "the program deadlocks: " + "; ".join(sorted(waiting))
