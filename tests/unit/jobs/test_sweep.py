"""The diagram of a sweep: groups of bars."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_gpp.jobs import figures, sweep
from lightning_gpp.jobs.sweep import SweptJob, varied_overrides, write_sweep_picture


def job(number: int, step_s: float = 0.5, **overrides: str) -> SweptJob:
    return SweptJob(number, overrides, 1.0, {"step_s": step_s, "samples_per_s": 8 / step_s})


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Draws jobs; the axes, and the file that must be there."""
    seen = []

    def tidy(axes, *labels):
        seen.append(axes)
        figures.tidy(axes, *labels)

    monkeypatch.setattr(sweep, "tidy", tidy)

    def draw(*jobs: SweptJob):
        path = write_sweep_picture(jobs, tmp_path)
        assert path == tmp_path / "sweep.png" and path.read_bytes().startswith(b"\x89PNG")
        return seen

    return draw


def test_numbers_are_in_order(drawn):
    jobs = [job(0, 0.4, n="16"), job(1, 0.1, n="2"), job(2, 0.2, n="4")]
    step, throughput = drawn(*jobs)
    assert [label.get_text() for label in step.get_xticklabels()] == ["2", "4", "16"]
    assert [round(bar.get_height()) for bar in step.patches] == [100, 200, 400]
    assert [round(bar.get_height()) for bar in throughput.patches] == [80, 40, 20]


def test_names_are_bars(drawn):
    step, _ = drawn(job(0, 0.4, planner="piper"), job(1, 0.2, planner="graphpipe"))
    assert [bar.get_height() for bar in step.patches] == [400, 200]
    assert [label.get_text() for label in step.get_xticklabels()] == ["piper", "graphpipe"]


def test_several_parameters_are_groups_of_bars(drawn):
    jobs = [job(i, 0.1 * (i + 1), p="ab"[i // 3], n="421"[i % 3], g="mmt") for i in range(6)]
    step, _ = drawn(*jobs)
    assert [label.get_text() for label in step.get_xticklabels()] == ["1", "2", "4"]
    assert [bars.get_label() for bars in step.containers] == ["p=a", "p=b"]
    heights = [[round(bar.get_height()) for bar in bars] for bars in step.containers]
    assert heights == [[300, 200, 100], [600, 500, 400]]


def test_a_sweep_without_step_times_has_no_picture(tmp_path):
    training = [SweptJob(i, {"lr": str(i)}, 1.0, {"val_loss": 1.0}) for i in range(3)]
    assert write_sweep_picture(training, tmp_path) is None
    assert write_sweep_picture([job(0, n="1")], tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_what_varies():
    jobs = [job(0, a="1", b="x"), job(1, a="2", b="x", c="y")]
    assert varied_overrides(jobs) == ["a", "c"]
