"""Planners side by side, as text."""

from __future__ import annotations

import re
from typing import Any

from lightning_gpp.jobs.comparison import (
    NOTHING,
    describe_comparison,
    describe_comparison_columns,
)
from lightning_gpp.jobs.table import Row


def row(planner: str, step_s: float | None, error: str = "", **settings: str) -> Row:
    return planned(planner, step_s=step_s, error=error, settings=settings)


def planned(planner: str, schedule: str = "", step_s: float | None = None, **known: Any) -> Row:
    return {**NOTHING, "planner": planner, "schedule": schedule, "step_s": step_s, **known}


def longer(rows: list[Row]) -> list[str]:
    """What the column "than best" says of every row, "" where it says nothing."""
    lines = describe_comparison(rows, max_width=140).split("\n")
    found = [re.search(r"[-+][0-9]+ %", line) for line in lines[3:]]
    return [match.group() if match else "" for match in found]


def test_steps_are_held_against_the_shortest_that_can_be_used():
    rows = [row("a", 2e-3), row("b", 3e-3), row("c", None), row("d", 1e-3, "does not fit")]
    assert longer(rows) == ["+0 %", "+50 %", "", "-50 %"]
    a_little_shorter = row("e", 2e-3 * (1 - 1e-9), "does not fit")
    assert longer([row("a", 2e-3), a_little_shorter]) == ["+0 %", "+0 %"]


def test_every_question_of_a_sweep_has_its_own_best():
    rows = [row("a", 2e-3, devices="1"), row("b", 4e-3, devices="1"), row("a", 1e-3, devices="2")]
    assert longer(rows) == ["+0 %", "+100 %", "+0 %"]


def test_columns_are_explained_with_the_source_of_the_costs():
    known = planned("a", step_s=2e-3, in_flight=2, in_flight_samples=8.0)
    table = describe_comparison([known], max_width=140)
    text = describe_comparison_columns(table, "estimated, not measured", {"gpipe"}, max_width=70)
    assert "In flight: most" in text and "spmd" not in text
    assert "(costs: estimated, not measured; schedule: gpipe)" in " ".join(text.split())
    assert max(map(len, text.split("\n"))) <= 70


def test_time_memory_and_messages_stand_in_a_narrow_terminal():
    """And what does not is not explained."""
    sizes = {"num_stages": 4, "depth": 2, "in_flight": 8, "in_flight_samples": 64.0}
    costs = {"peak_memory_bytes": 10**9, "message_bytes": 2.5e6, "search_s": 0.5}
    pace = {"bottleneck_stage": 1, "bottleneck_bound": "compute"}
    rows = [
        planned("graphpipe_exclusive", "gpipe", 2e-3, samples_per_s=32e3, **sizes, **costs, **pace),
        planned("sharded_data_parallel", "spmd", 3e-3, samples_per_s=21e3, **costs),
    ]
    table = describe_comparison(rows, max_width=80)
    assert "1.0 GB" in table and "2.5 MB" in table and "in flight" not in table
    assert max(map(len, table.split("\n"))) <= 80
    text = " ".join(describe_comparison_columns(table, "estimated", {"gpipe", "spmd"}).split())
    assert "Memory: of the fullest" in text and "ZeRO" in text and "In flight" not in text


def test_schedules_are_a_column_where_they_differ():
    rows = [planned("a", "gpipe", 2e-3), planned("b", "1f1b", 3e-3)]
    assert re.search(r"(?m)^ *planner +schedule +step", describe_comparison(rows, max_width=140))
    same = [planned("a", "gpipe", 2e-3), planned("b", error="none")]
    assert "schedule" not in describe_comparison(same, max_width=140)
