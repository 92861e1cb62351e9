"""What a schedule says of itself, and that a new order is one more value."""

from __future__ import annotations

import pytest

from lightning_gpp.graph import StageEdge, StageGraph
from lightning_gpp.schedule import (
    GPIPE,
    ONE_F_ONE_B,
    ONE_F_ONE_B_ASYNC,
    SCHEDULES,
    Kind,
    Program,
    build_program,
    dry_run,
    find_schedule,
)

"""1F1B over all mini-batches of a program, without draining in between."""

CHAIN = StageGraph(3, tuple(StageEdge(i, i + 1, (f"v{i}",)) for i in range(2)))


def rows(program: Program) -> list[str]:
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.STEP)
    return [
        " ".join(str(a) for a in actions if a.kind in kinds and a.stage >= 0)
        for actions in program.actions
    ]


def test_minibatches_follow_each_other():
    program = build_program(
        CHAIN, devices=range(3), num_microbatches=4, num_minibatches=2, schedule="gpipe"
    )
    assert rows(program) == [
        f"{s}F0 {s}F1 {s}B0 {s}B1 {s}S0 {s}F2 {s}F3 {s}B2 {s}B3 {s}S1" for s in range(3)
    ]


def test_minibatches_overlap():
    program = build_program(
        CHAIN, devices=range(3), num_microbatches=4, num_minibatches=2, schedule=ONE_F_ONE_B_ASYNC
    )
    assert rows(program) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0S0 0B2 0B3 0S1",
        "1F0 1F1 1B0 1F2 1B1 1S0 1F3 1B2 1B3 1S1",
        "2F0 2B0 2F1 2B1 2S0 2F2 2B2 2F3 2B3 2S1",
    ]
    flushed = build_program(
        CHAIN, devices=range(3), num_microbatches=4, num_minibatches=2, schedule="1f1b"
    )
    assert dry_run(program).step_s < dry_run(flushed).step_s


@pytest.mark.parametrize(
    ("num_microbatches", "num_minibatches", "multiples", "message"),
    [
        (4, 3, None, "num_minibatches must divide num_microbatches=4, got 3"),
        (4, 0, None, "got 0"),
        (4, 2, [4, 4, 4], "stage 0 takes 4 micro-batches at a time.* the 2 of a mini-batch"),
    ],
)
def test_wrong_minibatches(num_microbatches, num_minibatches, multiples, message):
    with pytest.raises(ValueError, match=message):
        build_program(
            CHAIN,
            devices=range(3),
            num_microbatches=num_microbatches,
            num_minibatches=num_minibatches,
            multiples=multiples,
        )


def test_names():
    assert [find_schedule(name) for name in SCHEDULES] == [GPIPE, ONE_F_ONE_B]
    with pytest.raises(ValueError, match="unknown schedule 'zigzag'; known schedules: gpipe, 1f1b"):
        find_schedule("zigzag")
