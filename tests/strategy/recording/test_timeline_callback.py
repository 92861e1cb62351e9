"""Chosen steps are recorded on every rank and shown; nothing hangs, nothing else changes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from helpers.timelines import TimelineRun, fit_on_one_device, fit_with_timeline
from helpers.workers import WorkerPool

from lightning_gpp.simulate import SpanKind
from lightning_gpp.simulate.refit import load_costs_or_refit
from lightning_gpp.strategy.recording.timeline_callback import TYPICAL_OF

PARTS = (SpanKind.WAIT, SpanKind.LOSS)
"""Kinds that are the second span of an action."""


@pytest.fixture(scope="module", params=["gpipe", "1f1b"])
def schedule(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, schedule: str) -> Path:
    return tmp_path_factory.mktemp(schedule)


@pytest.fixture(scope="module")
def runs(pool: WorkerPool, folder: Path, schedule: str) -> list[TimelineRun]:
    callback = {"steps": [2], "dirpath": folder}
    result: list[TimelineRun] = pool.run(
        fit_with_timeline, 3, callback, schedule=schedule, num_ranks=3
    )
    return result


def test_every_action_of_the_program_appears_once(runs: list[TimelineRun]) -> None:
    timeline = runs[0].timelines[2]
    for rank, run in enumerate(runs):
        assert run.program
        spans = timeline.of_rank(rank)
        found = Counter(s.action for s in spans if s.action and s.kind not in PARTS)
        assert found == Counter(run.program)


def test_data_loss_and_optimizer_are_in_it(runs: list[TimelineRun], schedule: str) -> None:
    kinds = [Counter(s.kind for s in runs[0].timelines[2].of_rank(rank)) for rank in range(3)]
    assert [k[SpanKind.DATA] for k in kinds] == [1, 0, 0]
    assert [k[SpanKind.LOSS] for k in kinds] == [4 if schedule == "1f1b" else 1, 0, 0]
    assert [k[SpanKind.OPTIMIZER] for k in kinds] == [1, 1, 1]


def test_the_users_step_is_between_the_halves(runs: list[TimelineRun], schedule: str) -> None:
    """Once on rank 0, while the others wait; with 1f1b it runs for every micro-batch."""
    if schedule == "1f1b":
        found = runs[0].reports[2].refit
        assert found is not None and found.besides.turn_s == 0.0 < found.besides.loss_s
        return
    timeline = runs[0].timelines[2]
    for rank in range(3):
        spans = timeline.of_rank(rank)
        kind = SpanKind.WAIT if rank else SpanKind.LOSS
        (number,) = (
            i
            for i, s in enumerate(spans)
            if s.kind is kind and s.action is None and spans[i + 1].kind is not SpanKind.FINISH
        )
        forwards = [s.parsed.kind.is_forward for s in spans[:number] if s.action]
        assert forwards and all(forwards)
        assert not any(s.parsed.kind.is_forward for s in spans[number:] if s.action)
    (step,) = (i for i, s in enumerate(timeline.spans) if s.kind is SpanKind.LOSS)
    assert timeline.spans[step] in timeline.critical_path
    found = runs[0].reports[2].refit
    assert found is not None and found.besides.turn_s > 0.999 * timeline.spans[step].duration_s > 0
    assert found.besides.loss_s == 0.0
    fit = runs[0].reports[2].predictions["fit"]
    (predicted,) = (s for s in fit.spans if s.kind is SpanKind.LOSS)
    assert predicted.duration_s == pytest.approx(found.besides.turn_s)


def test_what_is_around_the_program_is_in_it(runs: list[TimelineRun]) -> None:
    timeline = runs[0].timelines[2]
    kinds = [Counter(s.kind for s in timeline.of_rank(rank)) for rank in range(3)]
    assert [k[SpanKind.PREPARE] for k in kinds] == [1, 0, 0]
    assert [k[SpanKind.FINISH] for k in kinds] == [1, 1, 1]
    ends_s = [s.start_s for s in timeline.of_rank(0) if s.kind is SpanKind.FINISH]
    for rank in (1, 2):  # they hear the result from rank 0
        (span,) = (s for s in timeline.of_rank(rank) if s.kind is SpanKind.FINISH)
        assert span.end_s >= ends_s[0]
        assert span.start_s >= min(ends_s[0], span.end_s)


def test_no_message_is_received_before_it_was_sent(runs: list[TimelineRun]) -> None:
    timeline = runs[0].timelines[2]
    pairs = list(timeline.messages())
    assert pairs
    for sent, received in pairs:
        assert sent.start_s <= received.end_s
        assert sent.size_bytes == received.size_bytes > 0


def test_files_and_loggers_have_it(runs: list[TimelineRun], folder: Path) -> None:
    files = ["refit.json", "timeline.html", "timeline.png"]
    assert sorted(path.name for path in folder.iterdir()) == files
    (row,) = (row for row in runs[0].logged if "timeline/bubble_share" in row)
    assert row["step"] == 2
    assert 0 < row["timeline/bubble_share"] < 1
    assert row["timeline/rank2/forward_share"] > 0


def test_the_step_is_laid_beside_its_prediction(runs: list[TimelineRun]) -> None:
    report = runs[0].reports[2]
    assert list(report.predictions) == ["profile", "fit"]
    spans = [s for s in report.predicted.spans if s.action and s.kind not in PARTS]
    assert Counter(s.action for s in spans) == Counter(a for run in runs for a in run.program)
    (row,) = (row for row in runs[0].logged if "prediction/profile/error" in row)
    step_s = row["prediction/measured/step_s"]
    assert step_s == row["timeline/step_s"]
    assert row["prediction/fit/error"] == report.error("fit")
    assert not runs[1].reports  # rank 0 knows


def test_a_refit_of_recorded_steps_predicts_the_next(pool: WorkerPool, tmp_path: Path) -> None:
    callback = {"steps": (2, 3), "dirpath": tmp_path / "first", "picture": False}
    first, _ = pool.run(fit_with_timeline, 2, callback, num_ranks=2)
    assert list(first.reports[3].predictions) == ["profile", "refit"]
    path = tmp_path / "first" / "refit.json"
    kept = load_costs_or_refit(path)
    assert kept.steps == (2, 3)
    assert kept == first.reports[3].refit
    callback = {"steps": (2,), "dirpath": tmp_path / "again", "picture": False}
    again, _ = pool.run(fit_with_timeline, 2, callback, costs=str(path), num_steps=3, num_ranks=2)
    assert any("refitted to 2 steps recorded on " in note for note in again.notes)
    assert list(again.reports[2].predictions) == ["known", "fit"]


def test_accumulated_steps_and_several_of_them(pool: WorkerPool, tmp_path: Path) -> None:
    callback = {"steps": (1, 2, 9), "dirpath": tmp_path, "page": False}
    first, second = pool.run(
        fit_with_timeline,
        2,
        callback,
        num_ranks=2,
        num_steps=3,
        accumulate_grad_batches=2,
        val_check_interval=3,  # in the middle of step 1
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["timeline.png"]
    for timeline in first.timelines.values():
        for rank, run in enumerate((first, second)):
            spans = timeline.of_rank(rank)
            for minibatch in (0, 1):
                mine = [s for s in spans if s.minibatch == minibatch and s.kind not in PARTS]
                assert Counter(s.action for s in mine if s.action) == Counter(run.program)
            assert [s.kind for s in spans].count(SpanKind.OPTIMIZER) == 1
            assert [s.kind for s in spans].count(SpanKind.FINISH) == 2
    kinds = [s.kind for s in first.timelines[1].spans]
    assert SpanKind.VALIDATION in kinds
    assert kinds.count(SpanKind.DATA) == 2  # not those of the validation


def test_replicas_are_rows_of_their_own(pool: WorkerPool, tmp_path: Path) -> None:
    plan = [
        {"modules": ["left", "right"], "device": 1},
        {"modules": ["fuse", "norm", "head"], "devices": [0, 2]},
    ]
    runs = pool.run(
        fit_with_timeline, 3, {"steps": (2,), "dirpath": tmp_path}, plan=plan, num_ranks=3
    )
    timeline = runs[0].timelines[2]
    assert [(stage.rank, stage.title) for stage in timeline.stages] == [
        (1, "stage 0"),
        (0, "stage 1.0"),
        (2, "stage 1.1"),
        (0, "loss"),
    ]
    for rank, run in enumerate(runs):
        spans = [s for s in timeline.of_rank(rank) if s.kind not in PARTS]
        assert Counter(s.action for s in spans if s.action) == Counter(run.program)
    sums = [s for s in timeline.spans if s.kind is SpanKind.REDUCE]
    assert {span.rank for span in sums} == {0, 2}


def test_a_rank_that_fails_in_a_recorded_step_ends_all(pool: WorkerPool, tmp_path: Path) -> None:
    outcomes = pool.outcomes(
        fit_with_timeline, 3, {"steps": (2,), "dirpath": tmp_path}, fail_on=2, num_ranks=3
    )
    for outcome in outcomes:
        assert "the callback is out of order" in outcome.error, outcome.describe()
        assert not outcome.hung, outcome.describe()


def test_other_strategies_have_nothing_to_record(tmp_path: Path) -> None:
    (warning,) = fit_on_one_device(tmp_path)
    assert "nothing to record" in warning
    assert not list(tmp_path.iterdir())


def test_by_default_the_typical_step_is_shown(pool: WorkerPool, tmp_path: Path) -> None:
    callback = {"dirpath": tmp_path, "picture": False, "page": False}
    first, _ = pool.run(fit_with_timeline, 2, callback, num_ranks=2, num_steps=17, num_samples=29)
    assert tuple(first.timelines) == TYPICAL_OF == (3, 6, 9, 12, 15)
    (row,) = (row for row in first.logged if "timeline/bubble_share" in row)
    # Four mini-batches an epoch: those of steps 3 and 15 are smaller; 6 has no refit of others.
    lengths_s = sorted(first.timelines[step].step_s for step in (9, 12))
    assert row["timeline/step_s"] == lengths_s[1]
    assert first.timelines[row["step"]].step_s == row["timeline/step_s"]
    assert load_costs_or_refit(tmp_path / "refit.json").steps == (6, 9, 12)
