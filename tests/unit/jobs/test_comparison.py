"""Planners side by side, as text."""

from __future__ import annotations

import re

from lightning_gpp.jobs.compare import describe_comparison, legend_of, row_of
from lightning_gpp.jobs.table import Row


def longer(rows: list[Row]) -> list[str]:
    """What the column "than best" says of every row, "" where it says nothing."""
    lines = describe_comparison(rows, max_width=140).split("\n")
    found = [re.search(r"[-+][0-9]+ %", line) for line in lines[3:]]
    return [match.group() if match else "" for match in found]


def test_steps_are_held_against_the_shortest_that_can_be_used():
    rows = [row_of("a", step_s=2e-3), row_of("b", step_s=3e-3), row_of("c")]
    rows.append(row_of("d", step_s=1e-3, error="does not fit"))
    assert longer(rows) == ["+0 %", "+50 %", "", "-50 %"]


def test_columns_are_explained_with_the_source_of_the_costs():
    step, _ = legend_of("estimated, not measured", {"gpipe"})
    assert step.endswith("(costs: estimated, not measured; schedule: gpipe).")
    assert "ZeRO" in legend_of("estimated", {"gpipe", "spmd"})[0]


def test_time_memory_and_messages_stand_in_a_narrow_terminal():
    costs = {"peak_memory_bytes": 10**9, "message_bytes": 2.5e6, "search_s": 0.5}
    rows = [
        row_of("graphpipe_exclusive", "gpipe", step_s=2e-3, samples_per_s=32e3, **costs),
        row_of("sharded_data_parallel", "spmd", step_s=3e-3, samples_per_s=21e3, **costs),
    ]
    table = describe_comparison(rows, max_width=80)
    assert "1.0 GB" in table and "2.5 MB" in table and "32000" in table
    assert max(map(len, table.split("\n"))) <= 80


def test_schedules_are_a_column_where_they_differ():
    rows = [row_of("a", "gpipe", step_s=2e-3), row_of("b", "1f1b", step_s=3e-3)]
    assert re.search(r"(?m)^ *planner +schedule +step", describe_comparison(rows, max_width=140))
    same = [row_of("a", "gpipe", step_s=2e-3), row_of("b", error="none")]
    assert "schedule" not in describe_comparison(same, max_width=140)
