"""The report of a sweep: one line per job with its overrides and final metrics.

Hydra calls :class:`SweepReport` around every job, in whatever process runs it. A job adds a line
to ``sweep.jsonl`` in the sweep's folder when it starts and another when it ends, so that a long
sweep can be read while it runs. At the end, also after an error or Ctrl-C, the last line of every
job becomes a line of ``sweep.csv`` and of the printed table.
"""

from __future__ import annotations

import atexit
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_gpp.common.units_of_measure import count_text
from lightning_gpp.jobs.figures import COLOURS, diagram, tidy
from lightning_gpp.jobs.table import Cell, Row, cell, console_width, describe_rows, save_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = "sweep.jsonl"
COMPARISONS = "compare.jsonl"
"""What the jobs of ``job=compare`` found, a line per job."""

NOT_ENDED = "did not end"

PICTURE = "sweep.png"
GROUP_WIDTH = 0.8
"""Of the bars of a value; values are 1 apart."""

LONG = 45
"""Letters of all values below the axis, from which on they are written at an angle."""


@dataclass(frozen=True, slots=True)
class SweptJob:
    """How one job of a sweep ended.

    Attributes:
        number: of the job, counted from 0.
        overrides: its overrides, name -> value.
        seconds: that it took, None for a job that did not end.
        metrics: final metrics by name; empty after an error.
        error: first line of the error, None without one.
    """

    number: int
    overrides: Mapping[str, str]
    seconds: float | None
    metrics: Mapping[str, float]
    error: str | None = None

    @property
    def row(self) -> Row:
        """Of the table."""
        settings = {"job=" if name == "job" else name: v for name, v in self.overrides.items()}
        numbers = {"job": self.number, "seconds": self.seconds, "error": self.error}
        return {**settings, **self.metrics, **numbers}


def split_override(text: str) -> tuple[str, str]:
    """Name and value of an override.

    >>> split_override("+trainer.max_steps=3"), split_override("~callbacks.timeline")
    (('trainer.max_steps', '3'), ('~callbacks.timeline', ''))
    """
    name, _, value = text.partition("=")
    return name.lstrip("+"), value


def varied_overrides(jobs: Sequence[SweptJob]) -> list[str]:
    """The overrides that are not the same in all jobs, in their order."""
    names = dict.fromkeys(name for job in jobs for name in job.overrides)
    return [name for name in names if len({job.overrides.get(name) for job in jobs}) > 1]


def shared_overrides(jobs: Sequence[SweptJob]) -> str:
    """What all jobs have in common."""
    varied = varied_overrides(jobs)
    return " ".join(f"{n}={value}" for n, value in jobs[0].overrides.items() if n not in varied)


class SweepReport(Callback):
    """Collects the jobs of a sweep; does nothing in a single run."""

    def __init__(self) -> None:
        self._start_s = 0.0

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Begins an empty report; Hydra leaves out ``on_multirun_end`` when a job failed."""
        folder = sweep_folder(config)
        for name in (LINES, COMPARISONS):
            (folder / name).unlink(missing_ok=True)
        atexit.register(report, folder)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Writes and prints the report."""
        atexit.unregister(report)
        report(sweep_folder(config))

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Starts the clock and notes a job that has not ended."""
        self._start_s = time.monotonic()
        self._note(config, None, {}, NOT_ENDED)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Notes how the job ended, and what it compared."""
        seconds, folder = time.monotonic() - self._start_s, Path(config.hydra.runtime.output_dir)
        metrics, rows = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
            for path in (folder / "metrics.json", folder / "compare.json")
        )
        error = None
        if job_return.status != JobStatus.COMPLETED:
            error, metrics = str(job_return._return_value).strip().partition("\n")[0], {}
        self._note(config, round(seconds, 1), metrics or {}, error)
        if rows is not None:
            _add(config, COMPARISONS, {"rows": rows})

    def _note(
        self, config: DictConfig, seconds: float | None, metrics: Row, error: str | None
    ) -> None:
        overrides = dict(map(split_override, config.hydra.overrides.task))
        known = {"overrides": overrides, "seconds": seconds, "metrics": metrics, "error": error}
        _add(config, LINES, known)


def _add(config: DictConfig, name: str, line: Row) -> None:
    """Adds a line; jobs in parallel do not mix, as it is one write at the file's end."""
    if config.hydra.mode == RunMode.MULTIRUN:
        with (sweep_folder(config) / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"number": config.hydra.job.num, **line}) + "\n")


def sweep_folder(config: DictConfig) -> Path:
    """Folder of a sweep; jobs may run in others."""
    return Path(config.hydra.runtime.cwd, config.hydra.sweep.dir)


def report(folder: Path) -> None:
    """Writes ``sweep.csv`` and prints the table; nothing when no job has started."""
    jobs = read_jobs(folder)
    if not jobs:
        return
    save_csv([job.row for job in jobs], folder / "sweep.csv", ["job"])
    has_comparisons = (folder / COMPARISONS).exists()
    if has_comparisons:
        report_comparison(folder)
    if any(job.error for job in jobs) or not has_comparisons:
        picture = write_sweep_picture(jobs, folder)
        files = ", ".join(["sweep.csv", *([] if picture is None else [picture.name])])
        print(f"\n{describe_sweep(jobs)}\nwritten to {folder}: {files}", flush=True)


def report_comparison(folder: Path) -> None:
    """Writes and prints one table of what all jobs have compared."""
    from lightning_gpp.jobs.comparison import describe_comparison, save_comparison

    jobs = map(json.loads, (folder / COMPARISONS).read_text(encoding="utf-8").splitlines())
    rows = [row for job in sorted(jobs, key=lambda job: int(job["number"])) for row in job["rows"]]
    save_comparison(rows, folder)
    table = describe_comparison(rows, max_width=console_width())
    print(f"\n{table}\nwritten to {folder}: compare.json, compare.csv, sweep.csv", flush=True)


def read_jobs(folder: Path) -> list[SweptJob]:
    """The jobs of a sweep by number, each as its last line says; none where no job has started."""
    if not (folder / LINES).exists():
        return []
    lines = (folder / LINES).read_text(encoding="utf-8").splitlines()
    jobs = {job.number: job for job in (SweptJob(**json.loads(line)) for line in lines)}
    return [jobs[number] for number in sorted(jobs)]


def describe_sweep(jobs: Sequence[SweptJob]) -> str:
    """A table with a line per job; overrides that all jobs share stand above it.

    >>> first = SweptJob(0, {"devices": "2", "schedule": "gpipe"}, 9.5, {"val_loss": 0.25})
    >>> second = SweptJob(1, {"devices": "2", "schedule": "none"}, 0.5, {}, "ValueError: unknown")
    >>> print(describe_sweep([first, second]))
    sweep of 2 jobs, 1 failed; all with devices=2
    job  schedule  val_loss  seconds  error
    ─────────────────────────────────────────────────────
      0  gpipe         0.25      9.5
      1  none                    0.5  ValueError: unknown
    """
    varied, shared = varied_overrides(jobs), shared_overrides(jobs)
    metrics = dict.fromkeys(name for job in jobs for name in job.metrics)
    columns: dict[str, Cell] = {"job": cell("job")}
    columns |= {name: cell(name) for name in ("job=" if n == "job" else n for n in varied)}
    columns |= {name: cell(name, lambda value: f"{value:.4g}") for name in metrics}
    columns |= {"seconds": cell("seconds", lambda s: f"{s:.1f}"), "error": cell("error")}
    failed = sum(job.error is not None for job in jobs)
    title = f"sweep of {count_text(len(jobs), 'job')}"
    title += f", {failed} failed" if failed else ""
    title += f"; all with {shared}" if shared else ""
    table = describe_rows(
        [job.row for job in jobs],
        columns,
        left={*varied, "job=", "error"},
        flexible="error",
        max_width=console_width(),
    )
    return f"{title}\n{table}"


def write_sweep_picture(jobs: Sequence[SweptJob], folder: Path) -> Path | None:
    """Writes the diagram of the jobs that say how long a step takes; None where fewer than two do.

    Args:
        jobs: of the sweep.
        folder: of the sweep.
    """
    timed = [job for job in jobs if {"step_s", "samples_per_s"} <= job.metrics.keys()]
    varied = varied_overrides(timed)
    if len(timed) < 2 or not varied:
        return None
    values = {
        name: list(dict.fromkeys(j.overrides.get(name, "") for j in timed)) for name in varied
    }
    # Below the axis: the parameter of numbers with the most values, or of names.
    axis = max(varied, key=lambda name: (_are_numbers(values[name]), len(values[name])))
    if _are_numbers(values[axis]):
        values[axis].sort(key=float)
    series: dict[str, dict[str, SweptJob]] = {}
    for job in timed:
        name = ", ".join(f"{n}={job.overrides.get(n, '')}" for n in varied if n != axis)
        series.setdefault(name, {})[job.overrides.get(axis, "")] = job
    path = folder / PICTURE
    with diagram(path, max(9.0, 0.35 * len(timed) + 4), 4.2) as figure:
        figure.suptitle(shared_overrides(timed), size=10, color="#444444")
        both = figure.subplots(1, 2, gridspec_kw={"wspace": 0.08})
        _bars(both[0], values[axis], series, "step_s", 1e3)
        tidy(both[0], axis, "step, ms")
        _bars(both[1], values[axis], series, "samples_per_s", 1.0)
        tidy(both[1], axis, "samples per second")
        if len(series) > 1:
            handles, labels = both[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return path


def _bars(
    axes: Axes,
    values: Sequence[str],
    series: Mapping[str, Mapping[str, SweptJob]],
    metric: str,
    scale: float,
) -> None:
    width = GROUP_WIDTH / len(series)
    for number, (name, jobs) in enumerate(series.items()):
        offset = (number - (len(series) - 1) / 2) * width
        axes.bar(
            [place + offset for place, value in enumerate(values) if value in jobs],
            [jobs[value].metrics[metric] * scale for value in values if value in jobs],
            0.95 * width,
            color=COLOURS[number % len(COLOURS)],
            label=name,
        )
    is_long = len("".join(values)) > LONG
    axes.set_xticks(
        range(len(values)),
        values,
        rotation=30 if is_long else 0,
        ha="right" if is_long else "center",
    )


def _are_numbers(texts: Sequence[str]) -> bool:
    try:
        return all(math.isfinite(float(text)) for text in texts)
    except ValueError:
        return False
