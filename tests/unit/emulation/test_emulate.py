"""Programs on emulated devices: real training is exact, shapes alone run to their end."""

from __future__ import annotations

import pytest
import torch
from helpers.stage_dags import ToyBoundary, ToyStages, edges_to_graph, run_on_threads
from helpers.threads.emulate import emulate
from helpers.threads.ranks import RankWork
from helpers.threads.shapes import emulate_shapes

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.graph import (
    FEED,
    GraphInput,
    ModelGraph,
    OpNode,
    Parameter,
    StageGraph,
    TensorSpec,
    Value,
    Variation,
)
from lightning_gpp.planner import Plan, Stage, plan_graph
from lightning_gpp.runtime.pieces import Cutter
from lightning_gpp.schedule import Program, build_program
from lightning_gpp.simulate import SpanKind, simulate
from lightning_gpp.simulate.program_costs import (
    Bucket,
    MessageBytes,
    ProgramCosts,
    StageCosts,
    StepCosts,
)
from lightning_gpp.simulate.refit.recorded import check_program

LINK = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-4, is_shared=True)
BRANCHES = edges_to_graph(4, {(FEED, 0), (FEED, 1), (0, 2), (1, 2), (1, 3), (2, 3)})
"""
x -> 0 -> 2 -> 3
x -> 1 -> 2
     1 ------> 3
"""


def costs_of(program: Program, buckets: tuple[Bucket, ...] = (), **step: object) -> ProgramCosts:
    sizes = {(edge.source, edge.target): MessageBytes(1000.0) for edge in program.edges}
    return ProgramCosts(
        uniform_cluster(len(program.actions), LINK),
        (StageCosts(1e-3, 2e-3),) * program.num_stages,
        sizes,
        sizes,
        buckets,
        StepCosts(**step),
    )


def emulated_gradients(
    program: Program, toy: ToyStages, x: torch.Tensor, sizes: list[int], costs: ProgramCosts
) -> tuple[float, list[dict[str, torch.Tensor]]]:
    """The loss, and the gradients of the weights on every device."""
    copies = [toy.copy() for _ in program.actions]
    pace = program.multiples[-1]
    loss_sizes = [sum(sizes[i : i + pace]) for i in range(0, len(sizes), pace)]
    output = f"v{toy.stages.num_stages - 1}"
    boundary = ToyBoundary(x, loss_sizes, output)
    work = [
        RankWork(
            {
                program.replica(s).stage: own.code(program.replica(s).stage)
                for s, home in enumerate(program.devices)
                if home == device
            },
            own.weights,
            boundary if device == program.device(FEED) else None,
        )
        for device, own in enumerate(copies)
    ]
    cutter = Cutter({name: (0,) for edge in program.edges for name in edge.values})
    emulate(
        program,
        costs,
        work,
        unit_sizes=sizes,
        output_names=(output,),
        cutter=cutter,
        time_scale=1.0,
        timeout_s=20,
    )
    return sum(boundary.losses), [
        {name: w.grad for name, w in own.weights.items() if w.grad is not None} for own in copies
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_training_with_real_tensors_is_bit_equal_to_training_without_emulation(schedule: str):
    toy = ToyStages(BRANCHES, weight_of=[0, 1, 2, 1])  # stages 1 and 3 share a weight
    program = build_program(
        toy.stages,
        devices=[(0, 1), 2, (1, 3), 0],
        num_microbatches=4,
        multiples=[2, 1, 4, 2],
        schedule=schedule,
    )
    groups = program.reduce_groups
    assert {group.stage for group in groups} == {None, 0, 2}
    buckets = tuple(Bucket(i, 72.0, 0.5) for i in range(len(groups)))
    costs = costs_of(
        *(program, buckets),
        data_s=1e-3,
        turn_s=1e-3,
        finish_s={0: 1e-3},
        optimizer_s={2: 1e-3},
        action_s=1e-5,
    )
    sizes = [3, 1, 2, 2]
    x = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loss, devices = emulated_gradients(program, toy, x, sizes, costs)

    expected = run_on_threads(program, toy, x, sizes)
    assert loss == sum(expected.losses)
    assert {name for found in devices for name in found} == set(toy.weights)
    for found in devices:
        for name, gradient in found.items():
            assert torch.equal(gradient, toy.weights[name].grad), name


def branchy_model(num_branches: int, parameter_bytes: int) -> ModelGraph:
    """x -> two operators in each branch -> join; integers, fixed values and counts besides."""
    rows = (TensorSpec((2, 8), "float32", 0),)
    fixed = (TensorSpec((5,), "float32"), TensorSpec((3,), "int64"))
    operators = []
    for branch in range(num_branches):
        reads = ("x", "i")
        for depth in range(2):
            name = f"b{branch}_{depth}"
            values = (
                Value(f"{name}_out", rows),
                Value(f"{name}_pair", fixed, Variation.SAME),
                Value(f"{name}_count", (), Variation.COUNT),
            )
            operators.append(OpNode(name, "torch.add", "", reads, values, (f"{name}.w",)))
            reads = tuple(value.name for value in values)
    ends = tuple(f"b{branch}_1_out" for branch in range(num_branches))
    operators.append(OpNode("join", "torch.cat", "", ends, (Value("y", rows),)))
    return ModelGraph(
        (
            GraphInput(Value("x", rows), requires_grad=True),
            GraphInput(Value("i", (TensorSpec((2,), "int64", 0),))),
        ),
        tuple(operators),
        ("y", "b0_0_pair"),
        tuple(Parameter(f"{o.name}.w", parameter_bytes) for o in operators[:-1]),
    )


def test_shapes_of_a_model_that_no_machine_holds_run_with_replicas_and_several_steps():
    graph = branchy_model(2, parameter_bytes=2**45)
    plan = Plan(
        (
            Stage(0, ("b0_0", "b0_1"), (0, 1), microbatch_multiple=4),
            Stage(1, ("b1_0",), (2,), microbatch_multiple=2),
            Stage(2, ("b1_1", "join"), (3,)),
        ),
        num_microbatches=4,
    )
    program = plan_graph(plan, graph).program(4)
    (group,) = program.reduce_groups
    assert group.parameters == ("b0_0.w", "b0_1.w")
    buckets = tuple(Bucket(0, 1000.0, 0.5) for _ in group.parameters)
    costs = costs_of(program, buckets, data_s=1e-3, optimizer_s={3: 1e-3})
    run = emulate_shapes(
        program, graph, costs, minibatch_size=9, num_steps=2, prefetch=True, time_scale=2.0
    )
    assert run.timeline.source == "emulated"
    ran = {span.action for span in run.timeline.spans if span.action is not None}
    assert ran == {str(action) for device in range(4) for action in program.before_update(device)}
    assert run.step_s > 4 * 3e-3  # the busiest device alone; an emulation cannot be faster


def test_the_users_step_takes_its_time_between_the_parts():
    graph = branchy_model(1, parameter_bytes=8)
    plan = Plan((Stage(0, ("b0_0",), (0,)), Stage(1, ("b0_1", "join"), (1,))))
    program = plan_graph(plan, graph).program(2, schedule="gpipe")
    costs = costs_of(program, turn_s=4e-3, action_s=1e-4)
    run = emulate_shapes(program, graph, costs, minibatch_size=4, time_scale=2.0)
    (step,) = (span for span in run.timeline.spans if span.kind is SpanKind.LOSS)
    assert (step.rank, step.action) == (1, None)
    check_program(run.timeline, program)
    assert run.step_s >= simulate(program, costs).step_s * (1 - 1e-6)


def test_a_failing_rank_ends_all_with_its_error():
    toy = ToyStages(StageGraph(2, edges_to_graph(2, {(FEED, 0), (0, 1)}).edges))
    program = build_program(toy.stages, devices=[0, 1], num_microbatches=1)
    costs = costs_of(program)

    def broken(values: object, call: object) -> list[torch.Tensor]:
        raise RuntimeError("stage 1 is broken")

    code = toy.code(1)
    work = [
        RankWork({0: toy.code(0)}, toy.weights),
        RankWork(
            {1: type(code)(broken, code.inputs, code.outputs)},
            boundary=ToyBoundary(torch.ones(2, 3, dtype=torch.float64), [2], "v1"),
        ),
    ]
    with pytest.raises(RuntimeError, match="stage 1 is broken"):
        emulate(program, costs, work, unit_sizes=[2], output_names=("v1",), time_scale=1.0)


def test_the_scale_gives_the_shortest_action_that_matters_some_milliseconds():
    graph = branchy_model(1, parameter_bytes=8)
    plan = Plan((Stage(0, ("b0_0",), (0,)), Stage(1, ("b0_1", "join"), (1,))))
    program = plan_graph(plan, graph).program(2)
    costs = costs_of(program)
    run = emulate_shapes(program, graph, costs, minibatch_size=2)
    assert 5e-3 < run.time_scale * 1e-3 < 50e-3
    free = ProgramCosts(costs.cluster, (StageCosts(0.0, 0.0),) * 2, *[costs.forward_bytes] * 2)
    with pytest.raises(ValueError, match="give time_scale yourself"):
        emulate_shapes(program, graph, free, minibatch_size=2)
