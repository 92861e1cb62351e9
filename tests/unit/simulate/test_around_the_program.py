"""What a step costs beside its program: cutting the input, telling the result, the user's step."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.schedule import Program, build_program
from lightning_gpp.simulate import (
    Bucket,
    MessageBytes,
    ProgramCosts,
    StageCosts,
    StepCosts,
    TaskKind,
    critical_path,
    simulate,
)

# Stage 0 on device 1 makes what stage 1 on device 0 takes; the loss and the feed are on device 0.
CHAIN = StageGraph(
    2,
    (StageEdge(FEED, 0, ("x",), has_backward=True), StageEdge(0, 1, ("h",))),
    (("tied", (0, 1)),),
)
PROGRAM = build_program(CHAIN, devices=[1, 0], num_microbatches=1)
SIZE = MessageBytes(per_unit=0.0)
COSTS = ProgramCosts(
    uniform_cluster(2, Link(10.0)),
    (StageCosts(1.0, 2.0), StageCosts(4.0, 8.0)),
    {(FEED, 0): SIZE, (0, 1): SIZE},
    {(FEED, 0): SIZE, (0, 1): SIZE},
    (Bucket(0, 0.0),),
)


def with_step(**changes: object) -> ProgramCosts:
    return replace(COSTS, step=StepCosts(**changes))  # type: ignore[arg-type]


def test_the_input_is_cut_before_anything_is_fed() -> None:
    assert simulate(PROGRAM, with_step()).step_s == 15.0
    found = simulate(PROGRAM, with_step(data_s=0.5, prepare_s=0.25))
    assert found.step_s == 15.75
    (task,) = (task for task in found.tasks if task.kind is TaskKind.PREPARE)
    assert (task.device, task.start_s, task.end_s) == (0, 0.5, 0.75)


def program_of(schedule: str) -> Program:
    return build_program(CHAIN, devices=[1, 0], num_microbatches=2, schedule=schedule)


def test_the_users_step_runs_once_between_the_parts() -> None:
    # device 1  |0F0|0F1|                             |0B0|            |0B1|
    # device 0      |1F0        |1F1        |turn|1B0      |1B1
    #           0   1           5           9    9.5      17.5     25.5    27.5
    program = program_of("gpipe")
    assert program.has_turn
    assert simulate(program, with_step()).step_s == 27.0
    found = simulate(program, with_step(turn_s=0.5))
    assert found.step_s == 27.5
    (task,) = (task for task in found.tasks if task.kind is TaskKind.TURN)
    assert (task.device, task.start_s, task.end_s) == (0, 9.0, 9.5)
    assert critical_path(found).kind_s[TaskKind.TURN] == 0.5
