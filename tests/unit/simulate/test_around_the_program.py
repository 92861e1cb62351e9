"""What a step costs beside its program: cutting the input, telling the result, the user's step."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.schedule import build_program
from lightning_gpp.simulate import (
    Bucket,
    MessageBytes,
    Overhead,
    ProgramCosts,
    StageCosts,
    StepCosts,
    TaskKind,
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


def test_devices_hear_the_result_from_that_of_the_loss() -> None:
    found = simulate(PROGRAM, with_step(feed_backward_s=3.0, finish_s={0: 0.5, 1: 0.25}))
    ends = {task.device: task.start_s for task in found.tasks if task.kind is TaskKind.FINISH}
    # device 1 is done at 15 s, device 0 with the backward of the feed at 18 s
    assert ends == {0: 18.0, 1: 18.0}
    assert found.step_s == 18.5


def test_a_sum_costs_its_devices() -> None:
    found = simulate(PROGRAM, with_step(reduce=Overhead(fixed_s=0.5)))
    assert found.step_s == 15.5
    tasks = [
        task for task in found.tasks if task.kind is TaskKind.REDUCE and task.device is not None
    ]
    assert sorted(task.device for task in tasks if task.device is not None) == [0, 1]
