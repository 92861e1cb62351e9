"""What is printed of plans: once per Trainer, whose strategy travels to ranks and back."""

from __future__ import annotations

import pickle

import pytest

from lightning_gpp.strategy.report import PlanReports, width


def test_reports_travel_to_spawned_ranks() -> None:
    reports = PlanReports()
    reports.shown_plan = "a plan"
    assert pickle.loads(pickle.dumps(reports)).shown_plan == "a plan"
    reports.batch_begins(is_recorded=False, in_pipeline_s=0.0)  # of no pipeline of ours: nothing
    assert reports.batch_times is None


@pytest.mark.parametrize(("columns", "expected"), [(80, 80), (120, 100)])
def test_reports_are_as_wide_as_the_terminal(
    columns: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert width() == expected
