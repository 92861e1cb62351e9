"""What is printed of plans: once per Trainer, whose strategy travels to ranks and back."""

from __future__ import annotations

import pickle

from lightning_gpp.strategy.report import PlanReports


def test_reports_travel_to_spawned_ranks() -> None:
    reports = PlanReports()
    reports.shown_plan = "a plan"
    assert pickle.loads(pickle.dumps(reports)).shown_plan == "a plan"
    reports.batch_begins(is_recorded=False, in_pipeline_s=0.0)  # of no pipeline of ours: nothing
    assert reports.batch_times is None
