"""Programs whose schedule has all forwards first: a forward half, the user's step, a backward half.

The user's step runs on the device of the loss between its two halves, so it needs all outputs, and
whatever goes backward needs the step.
"""

from __future__ import annotations

from helpers.graphs import model_graphs
from helpers.plan_cases import questions, without_feed_gradients
from helpers.simulations import programs, random_simulations
from helpers.stage_dags import compute_actions, stage_graphs
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.planner.step_time.evaluate import evaluate_plan
from lightning_gpp.planner.step_time.pipeline_run import PipelineRun
from lightning_gpp.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Program,
    build_program,
    dry_run,
)
from lightning_gpp.simulate import simulate
from lightning_gpp.simulate.program_costs import compute_s

HALVED = st.sampled_from([name for name, found in SCHEDULES.items() if found.forwards_first])
MIXED = st.sampled_from([name for name, found in SCHEDULES.items() if not found.forwards_first])
FORWARD_KINDS = {Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD}


def halved_programs() -> st.SearchStrategy[Program]:
    return programs(with_dead_ends=True, schedules=HALVED)


@given(halved_programs())
def test_the_halves_are_the_program(program):
    assert program.has_halves
    for device, actions in enumerate(program.actions):
        first = program.forward_half(device)
        second = program.device_actions(device)[len(first) :]
        assert first + second == actions
        assert {action.kind for action in first} <= FORWARD_KINDS
        assert not {action.kind for action in second} & FORWARD_KINDS


@given(stage_graphs(), HALVED, st.data())
def test_the_forward_halves_are_the_program_without_backwards(stages, schedule, data):
    """So one forward of the pipeline serves training and evaluation."""
    arguments = {
        "devices": [data.draw(st.integers(0, 2)) for _ in range(stages.num_stages)],
        "multiples": [data.draw(st.sampled_from([1, 2, 4])) for _ in range(stages.num_stages)],
        "num_microbatches": 8,
    }
    training = build_program(stages, schedule=schedule, **arguments)
    alone = build_program(stages, forward_only=True, **arguments)
    for device, actions in enumerate(alone.actions):
        assert training.forward_half(device) == alone.forward_half(device) == actions
        assert alone.device_actions(device) == alone.forward_half(device)


@given(programs(with_dead_ends=True, schedules=MIXED))
def test_a_schedule_that_mixes_has_no_halves(program):
    assert not program.has_halves


def behind_the_loss(program: Program) -> set[Action]:
    """The backwards that need a gradient of the user's step; those of dead ends need none."""
    needing = {program.loss_stage}
    for edge in sorted(program.edges, key=lambda edge: -edge.target):
        if edge.target in needing and edge.has_backward and edge.source != FEED:
            needing.add(edge.source)
    return {a for a in compute_actions(program) if a.kind is Kind.BACKWARD and a.stage in needing}


def outputs(program: Program) -> list[Action]:
    last = program.loss_stage
    return [Action(last, Kind.FORWARD, m) for m in range(program.stage_microbatches(last))]


@given(random_simulations(with_dead_ends=True, schedules=HALVED))
def test_no_gradient_is_there_before_all_outputs_are(case):
    """In the dry run and in the simulation."""
    program = case.program
    run = dry_run(program, lambda a: compute_s(case.costs, a) if a.kind.is_compute else 1.0)
    ends_s = [run.start_s[a] + compute_s(case.costs, a) for a in outputs(program)]
    assert all(run.start_s[action] >= max(ends_s) for action in behind_the_loss(program))
    tasks = {
        task.action: task for task in simulate(program, case.costs).tasks if task.device is not None
    }
    ends_s = [tasks[action].end_s for action in outputs(program)]
    assert all(tasks[action].start_s >= max(ends_s) for action in behind_the_loss(program))


@given(st.data(), HALVED, st.booleans())
def test_planners_play_it_so(data, schedule, is_chain):
    graph = without_feed_gradients(data.draw(model_graphs(with_state=False)))
    plan, request = data.draw(questions(graph, schedule, is_chain=is_chain))
    run = PipelineRun(plan, request)
    found = evaluate_plan(plan, request).stages
    starts_s = [replicas[0] for replicas in run.starts_s()]
    middle = len(starts_s[-1]) // 2
    outputs_s = starts_s[-1][middle - 1] + found[-1].forward_s
    program = run.graph.program(run.num_microbatches, schedule=schedule)
    for stage in {action.stage for action in behind_the_loss(program)}:
        assert starts_s[stage][len(starts_s[stage]) // 2] >= outputs_s


#   0 ──▶ 2     1 is a dead end: its backward waits for nothing, and neither does its forward
#   1
DEAD_END = StageGraph(3, (StageEdge(FEED, 0, ("x",)), StageEdge(0, 2, ("h",))))


def test_a_dead_end_on_a_shared_device_waits_for_the_other_half():
    """Its device is free early, and did the backward of stage 1 while it waited for stage 0."""
    program = build_program(DEAD_END, devices=[0, 1, 1], num_microbatches=1, schedule="gpipe")
    assert str(program).splitlines()[1] == (
        "device 1: -1F0 -1SF0>0 1F0 2RF0<0 2F0 2B0 2SB0>0 1B0 -1RB0<0 -1B0 1S0"
    )


@given(stage_graphs(), st.data(), st.sampled_from(sorted(SCHEDULES)))
def test_only_schedules_with_all_forwards_first_say_so(stages, data, schedule):
    multiples = [data.draw(st.sampled_from([1, 2, 4])) for _ in range(stages.num_stages)]
    orders = SCHEDULES[schedule].steps(stages, 32, multiples).values()
    in_halves = all(max(steps[len(steps) // 2 :]) < 0 for steps in orders)
    assert in_halves == SCHEDULES[schedule].forwards_first
