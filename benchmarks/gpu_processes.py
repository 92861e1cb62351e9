"""Runs the cases of ``benchmarks/gpu.py`` in processes of their own.

The cases of a place are measured one after the other in the same processes, as starting them takes
longer than most cases do. Where one fails or hangs, its processes are ended, the error is kept, and
new processes go on with the next case.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_cases import Case, Place

RANKS = Path(__file__).with_name("gpu_ranks.py")
LIMIT_S, GRACE_S = 180.0, 20.0
"""Without a case that is done, and for the other ranks to say what they saw once one has failed."""


@dataclass(frozen=True)
class Failure:
    """Why there is no result.

    Attributes:
        summary: a line.
        text: all of it: the traceback of the rank that failed first, and the end of the logs.
    """

    summary: str
    text: str = ""


Outcome = list[dict[str, Any]] | Failure
"""What every rank returned, or why it did not."""


def outcomes(
    place: Place, cases: Sequence[Case], folder: Path, until_s: float
) -> Iterator[tuple[Case, Outcome]]:
    """Measures cases; each as soon as it is known how it ended.

    Args:
        place: where.
        cases: in this order.
        folder: for the files of this place.
        until_s: on the monotonic clock; nothing goes on after it.
    """
    left, attempt = list(cases), 0
    while left:
        if time.monotonic() > until_s:
            yield from ((case, Failure("not begun: the time was up")) for case in left)
            return
        here = folder / f"attempt{attempt}"
        here.mkdir(parents=True)
        (here / "task.json").write_text(
            json.dumps({"place": asdict(place), "cases": [asdict(case) for case in left]})
        )
        why = _run(place, left, here, until_s)
        while left and (found := _results(place, left[0], here)) is not None:
            yield left.pop(0), found
        if left:
            yield left.pop(0), _failure(here, why)
        elif why:
            yield Case("the end", ""), _failure(here, why)
        attempt += 1


def _run(place: Place, cases: Sequence[Case], here: Path, until_s: float) -> str:
    """Runs the processes to their end or ends them; why, if they did not end well."""
    with _processes(place, here) as processes:
        seen, limit_s = 0, LIMIT_S
        since_s, failed_s = time.monotonic(), float("inf")
        while any(process.poll() is None for process in processes):
            now_s = time.monotonic()
            if (num := len(list(here.glob("*.json")))) != seen:
                seen, since_s = num, now_s
            if any(process.poll() for process in processes):
                failed_s = min(failed_s, now_s)
            if now_s > failed_s + GRACE_S:
                return "a rank failed, another one did not end"
            if now_s > since_s + limit_s:
                return f"no end after {limit_s:.0f} s"
            if now_s > until_s:
                return "the time was up"
            time.sleep(0.05)
        bad = [f"rank {rank}: {p.returncode}" for rank, p in enumerate(processes) if p.returncode]
    return f"status of {', '.join(bad)}" if bad else ""


@contextmanager
def _processes(place: Place, here: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes, which do not outlive the body."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(len(place.devices)):
            environment = dict(os.environ)
            if not place.is_plain:
                environment |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "GROUP_RANK": "0",
                    "WORLD_SIZE": str(len(place.devices)),
                    "LOCAL_WORLD_SIZE": str(len(place.devices)),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "TORCHELASTIC_RUN_ID": "benchmark",
                }
            with (here / f"{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(RANKS), str(here)],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _results(place: Place, case: Case, here: Path) -> list[dict[str, Any]] | None:
    paths = [here / f"{case.name}.{rank}.json" for rank in range(len(place.devices))]
    if not all(path.exists() for path in paths):
        return None
    return [json.loads(path.read_text()) for path in paths]


def _failure(here: Path, why: str) -> Failure:
    logs = [
        f"rank {path.stem}: …{path.read_text(errors='replace')[-1500:]}"
        for path in sorted(here.glob("*.log"))
    ]
    errors = sorted(here.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if not errors:
        return Failure(why or "no result", "\n".join(logs))
    first = json.loads(errors[0].read_text())
    return Failure(first["summary"], "\n".join([first["text"][-4000:], *logs]))
