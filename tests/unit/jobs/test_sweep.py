"""The diagram of a sweep: a bar for every job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from lightning_gpp.jobs.sweep import SweptJob, varied_overrides, write_sweep_picture


def job(number: int, step_s: float = 0.5, **overrides: str) -> SweptJob:
    return SweptJob(number, overrides, 1.0, {"step_s": step_s, "samples_per_s": 8 / step_s})


def test_every_job_is_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []

    def save(figure: Figure, path: Path, **options: Any) -> None:
        drawn.append(figure)
        own(figure, path, **options)

    own = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", save)
    jobs = [job(i, 0.1 * (i + 1), p="ab"[i // 2], n="42"[i % 2], g="mmt") for i in range(4)]
    path = write_sweep_picture(jobs, tmp_path)
    assert path == tmp_path / "sweep.png" and path.read_bytes().startswith(b"\x89PNG")
    (figure,) = drawn
    step, throughput = figure.axes
    names = ["p=a, n=4", "p=a, n=2", "p=b, n=4", "p=b, n=2"]
    assert [label.get_text() for label in step.get_yticklabels()] == names
    assert [round(bar.get_width(), 3) for bar in step.patches] == [0.1, 0.2, 0.3, 0.4]
    assert [round(bar.get_width()) for bar in throughput.patches] == [80, 40, 27, 20]


def test_a_sweep_without_step_times_has_no_picture(tmp_path: Path) -> None:
    training = [SweptJob(i, {"lr": str(i)}, 1.0, {"val_loss": 1.0}) for i in range(3)]
    assert write_sweep_picture(training, tmp_path) is None
    assert write_sweep_picture([job(0, n="1")], tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_what_varies() -> None:
    jobs = [job(0, a="1", b="x"), job(1, a="2", b="x", c="y")]
    assert varied_overrides(jobs) == ["a", "c"]
