"""Planners side by side, as text."""

from __future__ import annotations

import re

from lightning_gpp.jobs.comparison import (
    ComparedPlan,
    describe_comparison,
    describe_comparison_columns,
)


def row(planner: str, step_s: float | None, error: str = "", **settings: str) -> ComparedPlan:
    return ComparedPlan(planner, step_s=step_s, error=error, settings=settings)


def longer(rows: list[ComparedPlan]) -> list[str]:
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
    text = describe_comparison_columns("estimated, not measured", {"gpipe"}, max_width=70)
    assert "(costs: estimated, not measured; schedule: gpipe)" in " ".join(text.split())
    assert max(map(len, text.split("\n"))) <= 70


def test_schedules_are_a_column_where_they_differ():
    rows = [ComparedPlan("a", "gpipe", 2e-3), ComparedPlan("b", "1f1b", 3e-3)]
    assert re.search(r"(?m)^ *planner +schedule +step", describe_comparison(rows, max_width=140))
    same = [ComparedPlan("a", "gpipe", 2e-3), ComparedPlan("b", error="none")]
    assert "schedule" not in describe_comparison(same, max_width=140)
