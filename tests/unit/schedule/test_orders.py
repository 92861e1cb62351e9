"""Golden orders and programs, written as the rows a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from helpers.orders import most_in_flight

from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.schedule import Action, Kind, Program, ScheduleError, build_program, dry_run
from lightning_gpp.schedule.schedules import (
    FORWARD_ONLY,
    Steps,
    in_flight_microbatches,
)


def graph(num_stages: int, *pairs: tuple[int, int]) -> StageGraph:
    edges = tuple(StageEdge(s, t, ("x",) if s == FEED else (f"v{s}",)) for s, t in sorted(pairs))
    return StageGraph(num_stages, edges)


def compute_rows(program: Program) -> list[str]:
    return [
        " ".join(str(a) for a in actions if a.kind.is_compute and a.stage != FEED)
        for actions in program.actions
    ]


def steps_of(actions: Sequence[Action]) -> Steps:
    """The steps of a device with one stage."""
    compute = [a for a in actions if a.kind.is_compute and a.stage != FEED]
    return tuple(a.microbatch if a.kind is Kind.FORWARD else ~a.microbatch for a in compute)


CHAIN = graph(3, (0, 1), (1, 2))
#   0 ──┐
#       ├──▶ 2
#   1 ──┘
TWO_TOWERS = graph(3, (0, 2), (1, 2))
#   0 ──▶ 1 ──▶ 3
#   └───▶ 2 ────┘
DIAMOND = graph(4, (0, 1), (0, 2), (1, 3), (2, 3))


def test_1f1b_on_a_chain():
    program = build_program(CHAIN, devices=[0, 1, 2], num_microbatches=4)
    assert compute_rows(program) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_1f1b_gives_both_towers_the_depth_of_one():
    program = build_program(TWO_TOWERS, devices=[0, 1, 2], num_microbatches=4)
    assert compute_rows(program)[:2] == [
        "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
    ]


def test_gpipe_on_a_diamond():
    program = build_program(DIAMOND, devices=range(4), num_microbatches=2, schedule="gpipe")
    assert compute_rows(program) == [f"{s}F0 {s}F1 {s}B0 {s}B1" for s in range(4)]


def test_forward_only():
    program = build_program(
        TWO_TOWERS, devices=[0, 1, 2], num_microbatches=2, schedule=FORWARD_ONLY
    )
    assert str(program).splitlines() == [
        "device 0: 0F0 0SF0>2 0F1 0SF1>2",
        "device 1: 1F0 1SF0>2 1F1 1SF1>2",
        "device 2: -1F0 -1F1 2RF0<0 2RF0<1 2F0 2RF1<0 2RF1<1 2F1",
    ]


def test_in_flight_follows_depth_not_position():
    # Six stages: three towers of one stage, then a chain of three.
    stages = graph(6, (0, 3), (1, 3), (2, 3), (3, 4), (4, 5))
    assert in_flight_microbatches(stages, 8) == {0: 4, 1: 4, 2: 4, 3: 3, 4: 2, 5: 1}


def test_k_f_k_b_where_the_successor_takes_two():
    #  0 takes 1, 1 takes 2 and 2 takes 4 micro-batches at a time (GraphPipe, figure 5).
    program = build_program(CHAIN, devices=[0, 1, 2], num_microbatches=8, shares=[(1,), (2,), (4,)])
    assert compute_rows(program) == [
        "0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7 0B0 0B1 0B2 0B3 0B4 0B5 0B6 0B7",
        "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3",
        "2F0 2B0 2F1 2B1",
    ]
    longer = build_program(CHAIN, devices=[0, 1, 2], num_microbatches=16, shares=[(1,), (2,), (4,)])
    assert [most_in_flight(steps) for steps in map(steps_of, longer.actions)] == [10, 4, 1]
    uniform = build_program(CHAIN, devices=[0, 1, 2], num_microbatches=16, shares=[(4,)] * 3)
    assert [most_in_flight(steps) for steps in map(steps_of, uniform.actions)] == [3, 2, 1]


def test_several_stages_on_one_device_run_what_can_start_first():
    program = build_program(TWO_TOWERS, devices=[0, 0, 1], num_microbatches=2)
    assert compute_rows(program) == [
        "1F0 0F0 1F1 0F1 1B0 0B0 1B1 0B1",
        "2F0 2B0 2F1 2B1",
    ]


@pytest.mark.parametrize(
    ("order_pace", "row"),
    [
        (0.0, "0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3"),
        (1.0, "0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3"),
    ],
)
def test_a_chain_twice_around_two_devices(order_pace, row):
    """Longest path first, or a micro-batch to its end as early as the busiest device can."""
    program = build_program(
        graph(4, (0, 1), (1, 2), (2, 3)),
        devices=[0, 1, 0, 1],
        num_microbatches=4,
        schedule="gpipe",
        order_pace=order_pace,
    )
    assert compute_rows(program)[0].split(" 2B0")[0] == row


def test_1f1b_on_a_balanced_chain_takes_the_closed_form_time():
    for num_microbatches in (1, 4, 8):
        program = build_program(CHAIN, devices=[0, 1, 2], num_microbatches=num_microbatches)
        assert dry_run(program).step_s == 3 * (num_microbatches + 3 - 1)


def test_towers_shorten_the_pipeline():
    chain = build_program(CHAIN, devices=[0, 1, 2], num_microbatches=4)
    towers = build_program(TWO_TOWERS, devices=[0, 1, 2], num_microbatches=4)
    assert dry_run(towers).step_s == 3 * (4 + 1) < dry_run(chain).step_s


def test_shared_parameters_are_reduced_once_per_device():
    stages = StageGraph(
        3,
        CHAIN.edges,
        parameter_readers=(("emb", (0, 2)), ("local", (0, 1)), ("own", (1,)), ("head", (0, 2))),
    )
    program = build_program(stages, devices=[0, 0, 1], num_microbatches=1)
    assert [group.parameters for group in program.reduce_groups] == [("emb", "head")]
    assert [str(a) for row in program.actions for a in row if a.kind is Kind.REDUCE] == [
        "0R0",
        "2R0",
    ]


def test_replicas_take_their_share_of_every_microbatch():
    #   0 ──▶ 1 (on two devices) ──▶ 2      stage 2 and 3 of the program are replicas of stage 1
    program = build_program(
        CHAIN,
        devices=[0, (1, 2), 3],
        num_microbatches=4,
        shares=[(1,), (1, 1), (4,)],
        schedule="gpipe",
    )
    assert [str(replica) for replica in program.replicas] == [
        "stage 0",
        "stage 1, replica 0 of 2",
        "stage 1, replica 1 of 2",
        "stage 2",
    ]
    assert str(program).splitlines() == [
        "device 0: 0F0 0SF0>1 0F1 0SF0>2 0F2 0SF1>1 0F3 0SF1>2"
        " 0RB0<1 0B0 0RB0<2 0B1 0RB1<1 0B2 0RB1<2 0B3 0S0",
        "device 1: 1RF0<0 1F0 1SF0>3 1RF1<0 1F1 1SF1>3 1RB0<3 1B0 1SB0>0 1RB1<3 1B1 1SB1>0 1S0",
        "device 2: 2RF0<0 2F0 2SF0>3 2RF1<0 2F1 2SF1>3 2RB0<3 2B0 2SB0>0 2RB1<3 2B1 2SB1>0 2S0",
        "device 3: -1F0 3RF0<1 3RF1<1 3RF0<2 3RF1<2 3F0 3B0 3SB0>1 3SB1>1 3SB0>2 3SB1>2 3S0",
    ]
    assert [program.units(2, m) for m in (0, 1)] == [range(1, 2), range(3, 4)]


def test_replicas_reduce_their_gradients():
    stages = StageGraph(2, graph(2, (0, 1)).edges, parameter_readers=(("w", (0,)), ("v", (1,))))
    program = build_program(stages, devices=[(0, 1), 2], num_microbatches=2)
    assert [(g.parameters, g.devices, g.stage) for g in program.reduce_groups] == [
        (("w",), (0, 1), 0)
    ]
    assert [" ".join(map(str, actions[-2:])) for actions in program.actions] == [
        "0R0 0S0",
        "1R0 1S0",
        "2SB0>1 2S0",
    ]


@pytest.mark.parametrize("text", ["2X0", "2S", "F0", "2F", "2F0>3x", "2SF0<3", "2RF0>3", ""])
def test_what_is_not_an_action(text):
    with pytest.raises(ValueError, match=r"not an action|peer"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "zigzag"}, "unknown schedule 'zigzag'; known schedules: gpipe, 1f1b"),
        ({"num_microbatches": 0}, "at least 1, got 0"),
        ({"shares": [(1,), (3,), (1,)]}, "does not divide the 4 of a mini-batch"),
    ],
)
def test_wrong_arguments(arguments, message):
    good = {"devices": [0, 1, 2], "num_microbatches": 4}
    with pytest.raises(ValueError, match=message):
        build_program(CHAIN, **(good | arguments))


def test_a_deadlock_is_found():
    program = build_program(graph(2, (0, 1)), devices=[0, 1], num_microbatches=1)
    rows = ("0RB0<1 0F0 0SF0>1 0B0", "1RF0<0 1F0 1B0 1SB0>0")
    wrong = replace(program, actions=tuple(tuple(map(Action.parse, row.split())) for row in rows))
    with pytest.raises(ScheduleError, match="deadlocks: device 0 waits at 0RB0<1"):
        dry_run(wrong)
