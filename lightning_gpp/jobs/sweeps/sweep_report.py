"""The report of a sweep: one line per job with its overrides and final metrics.

Hydra calls :class:`SweepReport` around every job, in whatever process runs it. A job adds a line
to ``sweep.jsonl`` in the sweep's folder when it starts and another when it ends, so that a long
sweep can be read while it runs. At the end, also after an error or Ctrl-C, the last line of every
job becomes a line of ``sweep.csv`` and of the printed table.
"""

from __future__ import annotations

import atexit
import csv
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_gpp.jobs.sweeps.swept_job import SweptJob, split_override

LINES = "sweep.jsonl"
COMPARISONS = "compare.jsonl"
"""What the jobs of ``job=compare`` found, a line per job."""

NOT_ENDED = "did not end"

ERROR_WIDTH = 60
"""Columns for an error in the table; ``sweep.csv`` has the whole first line."""


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
        _add(config, None, {}, NOT_ENDED)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Notes how the job ended."""
        _add(config, round(time.monotonic() - self._start_s, 1), *_outcome(config, job_return))
        _add_comparison(config)


def sweep_folder(config: DictConfig) -> Path:
    """Folder of a sweep; jobs may run in others."""
    return Path(config.hydra.runtime.cwd, config.hydra.sweep.dir)


def _add(
    config: DictConfig, seconds: float | None, metrics: dict[str, float], error: str | None
) -> None:
    """Adds a job's line; jobs in parallel do not mix, as it is one write at the file's end."""
    if config.hydra.mode != RunMode.MULTIRUN:
        return
    overrides = dict(split_override(text) for text in config.hydra.overrides.task)
    job = SweptJob(config.hydra.job.num, overrides, seconds, metrics, error)
    with (sweep_folder(config) / LINES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(job)) + "\n")


def _add_comparison(config: DictConfig) -> None:
    """Keeps what a job of a sweep has compared, for one table of all of them."""
    path = Path(config.hydra.runtime.output_dir, "compare.json")
    if config.hydra.mode != RunMode.MULTIRUN or not path.exists():
        return
    rows = json.loads(path.read_text(encoding="utf-8"))
    with (sweep_folder(config) / COMPARISONS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"number": config.hydra.job.num, "rows": rows}) + "\n")


def _outcome(config: DictConfig, job_return: JobReturn) -> tuple[dict[str, float], str | None]:
    """Metrics and error of a job, from what Hydra knows and the file that the run wrote."""
    if job_return.status != JobStatus.COMPLETED:
        return {}, str(job_return._return_value).strip().partition("\n")[0]
    path = Path(config.hydra.runtime.output_dir, "metrics.json")
    if not path.exists():  # a foreign task function, or a rank other than the first
        return {}, None
    metrics: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return metrics, None


def report(folder: Path) -> None:
    """Writes ``sweep.csv`` and prints the table; nothing when no job has started."""
    jobs = read_jobs(folder)
    if not jobs:
        return
    write_csv(jobs, folder / "sweep.csv")
    if (folder / COMPARISONS).exists():
        report_comparison(folder)
    if any(job.error for job in jobs) or not (folder / COMPARISONS).exists():
        files = ["sweep.csv", *_pictures(jobs, folder)]
        print(f"\n{describe_sweep(jobs)}\nwritten to {folder}: {', '.join(files)}", flush=True)


def _pictures(jobs: Sequence[SweptJob], folder: Path) -> list[str]:
    """Draws jobs that say how long a step takes; the file's name, where there is one."""
    from lightning_gpp.jobs.sweeps.sweep_picture import write_sweep_picture

    path = write_sweep_picture(jobs, folder)
    return [] if path is None else [path.name]


def report_comparison(folder: Path) -> None:
    """Writes and prints one table of what all jobs have compared."""
    from lightning_gpp.jobs.comparison import (
        describe_comparison,
        read_compared_jobs,
        write_comparison,
    )
    from lightning_gpp.jobs.console_width import console_width

    rows = read_compared_jobs(folder / COMPARISONS)
    write_comparison(rows, folder)
    table = describe_comparison(rows, max_width=console_width())
    print(f"\n{table}\nwritten to {folder}: compare.json, compare.csv, sweep.csv", flush=True)


def read_jobs(folder: Path) -> list[SweptJob]:
    """The jobs of a sweep by number, each as its last line says; none where no job has started."""
    if not (folder / LINES).exists():
        return []
    lines = (folder / LINES).read_text(encoding="utf-8").splitlines()
    jobs = {job.number: job for job in (SweptJob(**json.loads(line)) for line in lines)}
    return [jobs[number] for number in sorted(jobs)]


def write_csv(jobs: Sequence[SweptJob], path: Path) -> None:
    """Writes a row per job: number, all overrides, metrics, seconds and the error."""
    overrides, metrics = _names(job.overrides for job in jobs), _names(job.metrics for job in jobs)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["job", *overrides, *metrics, "seconds", "error"])
        for job in jobs:
            settings = [job.overrides.get(name, "") for name in overrides]
            results = [job.metrics.get(name, "") for name in metrics]
            writer.writerow([job.number, *settings, *results, job.seconds, job.error])


def describe_sweep(jobs: Sequence[SweptJob]) -> str:
    """A table with a line per job; overrides that all jobs share stand above it.

    >>> first = SweptJob(0, {"devices": "2", "schedule": "gpipe"}, 9.5, {"val_loss": 0.25})
    >>> second = SweptJob(1, {"devices": "2", "schedule": "none"}, 0.5, {}, "ValueError: unknown")
    >>> print(describe_sweep([first, second]))
    sweep of 2 jobs, 1 failed; all with devices=2
    job  schedule  val_loss  seconds  error
      0  gpipe         0.25      9.5
      1  none                    0.5  ValueError: unknown
    """
    names = _names(job.overrides for job in jobs)
    settings = {name: [job.overrides.get(name, "") for job in jobs] for name in names}
    shared = {n: values[0] for n, values in settings.items() if len({*values}) == 1 < len(jobs)}
    columns = {"job": [str(job.number) for job in jobs]}
    columns |= {name: values for name, values in settings.items() if name not in shared}
    for name in _names(job.metrics for job in jobs):
        columns[name] = [f"{job.metrics[name]:.4g}" if name in job.metrics else "" for job in jobs]
    columns["seconds"] = ["" if job.seconds is None else f"{job.seconds:.1f}" for job in jobs]
    if any(job.error for job in jobs):
        columns["error"] = [(job.error or "")[:ERROR_WIDTH] for job in jobs]
    return "\n".join([_headline(jobs, shared), *_table(columns, left={*names, "error"})])


def _headline(jobs: Sequence[SweptJob], shared: Mapping[str, str]) -> str:
    failed = sum(job.error is not None for job in jobs)
    text = f"sweep of {len(jobs)} job{'s' if len(jobs) != 1 else ''}"
    text += f", {failed} failed" if failed else ""
    return text + (
        f"; all with {' '.join(f'{name}={value}' for name, value in shared.items())}"
        if shared
        else ""
    )


def _table(columns: Mapping[str, Sequence[str]], left: set[str]) -> list[str]:
    """Lines of aligned columns, the named ones to the left."""
    rows = [list(columns), *zip(*columns.values())]
    widths = [max(map(len, column)) for column in zip(*rows)]
    alignments = ["<" if name in left else ">" for name in columns]
    return [
        "  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, alignments, widths)).rstrip()
        for row in rows
    ]


def _names(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """All keys, in the order in which they first appear."""
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))
