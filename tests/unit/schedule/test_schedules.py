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


def test_minibatches_overlap():
    program = build_program(CHAIN, devices=range(3), num_microbatches=4, schedule=ONE_F_ONE_B_ASYNC)
    assert rows(program) == [
        "0F0 0F1 0F2 0B0 0S0 0F3 0B1 0S1 0B2 0S2 0B3 0S3",
        "1F0 1F1 1B0 1S0 1F2 1B1 1S1 1F3 1B2 1S2 1B3 1S3",
        "2F0 2B0 2S0 2F1 2B1 2S1 2F2 2B2 2S2 2F3 2B3 2S3",
    ]
    one = build_program(CHAIN, devices=range(3), num_microbatches=1, schedule="1f1b")
    assert dry_run(program).step_s < 4 * dry_run(one).step_s


def test_a_stage_takes_no_more_than_there_is():
    with pytest.raises(ValueError, match=r"stage 0 takes 4 micro-batches .* the 2 of a mini-batch"):
        build_program(CHAIN, devices=range(3), num_microbatches=2, shares=[(4,)] * 3)


def test_names():
    assert [find_schedule(name) for name in SCHEDULES] == [GPIPE, ONE_F_ONE_B]
    with pytest.raises(ValueError, match="unknown schedule 'zigzag'; known schedules: gpipe, 1f1b"):
        find_schedule("zigzag")
