"""Branches of a stage graph are at work at the same time, in the training of a real module."""

from __future__ import annotations

import pytest
from helpers.concurrency import record_towers
from helpers.workers import WorkerPool

from lightning_gpp.runtime.run_state import ActionRecord
from lightning_gpp.schedule import Kind

NUM_MICROBATCHES = 6


@pytest.fixture(scope="module", params=["gpipe", "1f1b"])
def schedule(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def records(pool: WorkerPool, schedule: str) -> list[ActionRecord]:
    """All ranks' records; the clock is one for all processes of a machine."""
    ranks = pool.run(record_towers, NUM_MICROBATCHES, schedule, num_ranks=3)
    return sorted((r for rank in ranks for r in rank), key=lambda r: r.start_ns)


def forwards(records: list[ActionRecord], stage: int) -> list[ActionRecord]:
    return [r for r in records if r.action.stage == stage and r.action.kind is Kind.FORWARD]


def test_both_towers_work_at_the_same_time(records: list[ActionRecord]) -> None:
    pairs = zip(forwards(records, 0), forwards(records, 1), strict=True)
    overlapping = [
        left.action.microbatch
        for left, right in pairs
        if left.start_ns < right.end_ns and right.start_ns < left.end_ns
    ]
    assert len(overlapping) >= NUM_MICROBATCHES // 2, overlapping


def test_in_flight_follows_depth_not_position(records: list[ActionRecord], schedule: str) -> None:
    # left ──┐
    #        ├──> head       a chain of three would hold 3, 2, 1
    # right ─┘
    for stage, depth in {0: 2, 1: 2, 2: 1}.items():
        held = peak = 0
        for record in records:
            if record.action.stage == stage and record.action.kind.is_compute:
                held += 1 if record.action.kind is Kind.FORWARD else -1
                peak = max(peak, held)
        assert peak == (depth if schedule == "1f1b" else NUM_MICROBATCHES)


def test_the_head_starts_before_the_towers_are_done(records: list[ActionRecord]) -> None:
    assert forwards(records, 2)[0].end_ns < forwards(records, 0)[-1].start_ns
