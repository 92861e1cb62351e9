"""What is printed of plans: once per Trainer, whose strategy travels to ranks and back."""

from __future__ import annotations

import pickle

import pytest
from torch import nn

from lightning_gpp.cluster import cluster_preset
from lightning_gpp.planner import PLANNERS, plan_request
from lightning_gpp.planner.plan_to_run import PlanToRun
from lightning_gpp.strategy import report
from lightning_gpp.strategy.report import PlanReports, width
from lightning_gpp.strategy.settings import Settings
from lightning_gpp.workloads import mmt


def test_reports_travel_to_spawned_ranks() -> None:
    reports = PlanReports()
    reports.shown_plan = "a plan"
    assert pickle.loads(pickle.dumps(reports)).shown_plan == "a plan"
    reports.batch_begins(is_recorded=False, in_pipeline_s=0.0)  # of no pipeline of ours: nothing
    assert reports.batch_times is None


def test_further_plans_are_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(report, "show", said.append)
    model, cluster, reports = mmt(2, 1), cluster_preset("summit", 2), PlanReports()
    costs = model.costs_for(cluster)
    request = plan_request(model.graph, cluster, minibatch_size=8, costs=costs)
    plans = [PLANNERS[name](request) for name in ("balanced", "data_parallel")]
    for plan in (*plans, plans[1]):
        reports.built(PlanToRun(plan, request, ("A note.",)), Settings(), "validate")
    first, second = said
    assert "Bottleneck" in first and "A note." in first
    assert second.startswith("For validate: Plan 'data_parallel ") and "A note." not in second


@pytest.mark.parametrize(("columns", "expected"), [(80, 80), (120, 100)])
def test_reports_are_as_wide_as_the_terminal(
    columns: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert width() == expected


def test_what_the_forward_does_not_read_is_told_if_it_is_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = list[str]()
    monkeypatch.setattr(report, "show", said.append)
    gan = nn.ModuleDict(
        {"g": nn.Linear(3, 3), "d": nn.Linear(3, 1), "scale": nn.Linear(1, 1, False)}
    )
    report.tell_of_outside(gan, gan["g"], ["weight", "bias"])
    report.tell_of_outside(gan, gan, ["g.weight", "g.bias", "d.weight", "d.bias"])  # 1 of 17
    (line,) = said
    assert line.endswith("so it stays on rank 0: d (4 parameters), scale (1 parameters).")
