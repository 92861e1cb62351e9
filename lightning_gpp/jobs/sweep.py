"""The report of a sweep: one row per job, with its overrides and final metrics.

Hydra calls :class:`SweepReport` around every job, in whatever process runs it. A job adds a line
to ``sweep.jsonl`` in the sweep's folder when it starts and another when it ends, so that a long
sweep can be read while it runs. At the end, also after an error or Ctrl-C, the last line of every
job becomes a line of ``sweep.csv`` and of the printed table.
"""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_gpp.common.units_of_measure import bytes_text, count_text
from lightning_gpp.jobs.table import Cell, Row, cell, console_width, describe_rows, save_csv

LINES = "sweep.jsonl"
NOT_ENDED = "did not end"


def split_override(text: str) -> tuple[str, str]:
    """Name and value of an override.

    >>> split_override("+trainer.max_steps=3"), split_override("~callbacks.timeline")
    (('trainer.max_steps', '3'), ('~callbacks.timeline', ''))
    """
    name, _, value = text.partition("=")
    return name.lstrip("+"), value


class SweepReport(Callback):
    """Collects the jobs of a sweep; does nothing in a single run."""

    def __init__(self) -> None:
        self._start_s = 0.0

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Begins an empty report; Hydra leaves out ``on_multirun_end`` when a job failed."""
        folder = sweep_folder(config)
        (folder / LINES).unlink(missing_ok=True)
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
        """Notes how the job ended."""
        seconds = round(time.monotonic() - self._start_s, 1)
        written = Path(config.hydra.runtime.output_dir, "metrics.json")
        metrics, error = {}, None
        if job_return.status != JobStatus.COMPLETED:
            error = str(job_return._return_value).strip().partition("\n")[0]
        elif written.exists():
            metrics = json.loads(written.read_text(encoding="utf-8"))
        self._note(config, seconds, metrics, error)

    def _note(
        self, config: DictConfig, seconds: float | None, metrics: Row, error: str | None
    ) -> None:
        """Adds a line; jobs in parallel do not mix, as it is one write at the file's end."""
        if config.hydra.mode != RunMode.MULTIRUN:
            return
        overrides = dict(map(split_override, config.hydra.overrides.task))
        known = {"run": config.hydra.job.num, "seconds": seconds, "error": error}
        line = {"settings": overrides, "metrics": metrics, **known}
        with (sweep_folder(config) / LINES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def sweep_folder(config: DictConfig) -> Path:
    """Folder of a sweep; jobs may run in others."""
    return Path(config.hydra.runtime.cwd, config.hydra.sweep.dir)


def report(folder: Path) -> None:
    """Writes ``sweep.csv`` and prints the table; nothing when no job has started."""
    jobs = read_jobs(folder)
    if not jobs:
        return
    save_csv(jobs, folder / "sweep.csv", ["run"])
    print(f"\n{describe_sweep(jobs)}\nwritten to {folder}: sweep.csv", flush=True)


def read_jobs(folder: Path) -> list[Row]:
    """The jobs of a sweep by number, each as its last line says; none where no job has started.

    A row has ``settings`` (overrides by name), ``metrics``, ``run`` (its number), ``seconds`` (None
    of a job that did not end) and ``error`` (the first line, None without one).
    """
    if not (folder / LINES).exists():
        return []
    lines = (folder / LINES).read_text(encoding="utf-8").splitlines()
    jobs = {row["run"]: row for row in map(json.loads, lines)}
    return [jobs[number] for number in sorted(jobs)]


def describe_sweep(jobs: Sequence[Row]) -> str:
    """A table with a line per job; overrides that all jobs share stand above it.

    >>> shared = {"devices": "2", "schedule": "gpipe"}
    >>> first = {"run": 0, "settings": shared, "metrics": {"val_loss": 0.25}, "seconds": 9.5}
    >>> none = {"metrics": {}, "seconds": 0.5, "error": "ValueError: unknown"}
    >>> print(describe_sweep([first, {"run": 1, "settings": shared | {"schedule": "no"}, **none}]))
    sweep of 2 runs, 1 failed; all with devices=2
    run  schedule  val_loss  seconds  error
    ─────────────────────────────────────────────────────
      0  gpipe         0.25      9.5
      1  no                      0.5  ValueError: unknown
    """
    settings, metrics = (
        dict.fromkeys(name for job in jobs for name in job[part])
        for part in ("settings", "metrics")
    )
    varied = [n for n in settings if len({job["settings"].get(n) for job in jobs}) > 1]
    shared = [f"{n}={value}" for n, value in jobs[0]["settings"].items() if n not in varied]
    columns: dict[str, Cell] = {"run": cell("run")} | {name: cell(name) for name in varied}
    for name in metrics:
        columns[name] = cell(name, bytes_text if name.endswith("_bytes") else "{:.4g}".format)
    columns |= {"seconds": cell("seconds", lambda s: f"{s:.1f}"), "error": cell("error")}
    failed = sum(job.get("error") is not None for job in jobs)
    title = f"sweep of {count_text(len(jobs), 'run')}"
    title += f", {failed} failed" if failed else ""
    title += f"; all with {' '.join(shared)}" if shared else ""
    rows, width = [{**job, **job["settings"], **job["metrics"]} for job in jobs], console_width()
    left = {*varied, "error"}
    return f"{title}\n{describe_rows(rows, columns, left=left, flexible='error', max_width=width)}"
