"""When a step begins on all ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.threads.transport import ThreadHub
from helpers.threads.virtual_time import VirtualTime

from lightning_gpp.emulation.clock import EmulatedCursor, EmulatedStep, EmulatedSteps
from lightning_gpp.strategy.ranks.control import Control


def test_no_rank_begins_a_step_before_all_have_ended_theirs() -> None:
    """Rank 0 is through early, and emulated time passes slowly."""
    time = VirtualTime(2)
    hub = ThreadHub(2, time.condition)

    def steps_of(rank: int) -> list[EmulatedStep]:
        cursor = EmulatedCursor(rank, time.clock(time_scale=1000.0))
        timed = EmulatedSteps(cursor, Control(hub.transport(rank), 10.0))
        with time.thread(rank):
            for _ in range(2):
                with timed.part(1, is_second=False):
                    cursor.spend("forward", 1.0)
                with timed.part(1, is_second=True):
                    cursor.spend("backward", 1.0 + 3.0 * rank)
        return timed.steps

    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(steps_of, range(2)))
    for rank, steps in enumerate(ranks):
        taken_s = [step.end_s - step.start_s for step in steps]
        assert taken_s == pytest.approx([2.0 + 3.0 * rank] * 2)
    assert [s.start_s for s in ranks[0]] == [s.start_s for s in ranks[1]]
