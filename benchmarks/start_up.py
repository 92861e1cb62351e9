"""How long ``graphpipe`` takes to answer: CPU seconds of whole commands, the least of several runs.

- ``first line``: until something is printed (errors are printed at the end);
- ``plan``: until the plan is printed;
- ``end``: of the whole command, with its files.

Seconds are those of the processor, user and system, because the clock on the wall also counts what
other processes do; on an idle machine both agree. Files are compiled by a first run, as an
installation does.

    python benchmarks/start_up.py [--runs 5]
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass

PLAN = ("job=plan", "graph=mmt", "cluster=summit", "cluster.num_devices=8")
COMMANDS = (
    ("--help",),
    ("job=plan", "graph=no_such_model", "cluster=summit"),
    PLAN,
    (*PLAN[:-1], "cluster.num_devices=32"),
    (*PLAN, "job.picture=false", "job.alternatives=[]"),
    ("job=simulate", *PLAN[1:]),
)
HEADING = "Predicted step:"

# Runs a command and writes the CPU seconds at its first line, its plan and its end to stderr.
MEASURED = f"""
import sys, time

class Watched:
    def __init__(self, stream):
        self.stream, self.seen = stream, {{}}
    def __getattr__(self, name):
        return getattr(self.stream, name)
    def write(self, text):
        self.seen.setdefault("first line", time.process_time())
        if {HEADING!r} in text:
            self.seen.setdefault("plan", time.process_time())
        return self.stream.write(text)

sys.stdout = watched = Watched(sys.stdout)
sys.argv[0] = "graphpipe"
try:
    from lightning_gpp.cli import main
    main()
finally:
    seen = watched.seen | {{"end": time.process_time()}}
    print("\\n", seen.get("first line"), seen.get("plan"), seen["end"], file=sys.stderr)
"""


@dataclass(frozen=True, slots=True)
class Seconds:
    """CPU seconds of a command; None where it prints nothing of the kind."""

    first_line_s: float | None
    plan_s: float | None
    end_s: float


def main() -> None:
    """Prints a line for every command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="of which the least counts")
    runs = parser.parse_args().runs
    print(f"{platform.machine()}, Python {platform.python_version()}; CPU seconds, least of {runs}")
    print("first line   plan    end  command")
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            found = [measured(command, folder) for _ in range(runs + 1)][1:]
            first = text(least([each.first_line_s for each in found]))
            plan = text(least([each.plan_s for each in found]))
            end = text(least([each.end_s for each in found]))
            print(f"{first:>10} {plan:>6} {end:>6}  graphpipe {' '.join(command)}", flush=True)


def measured(command: tuple[str, ...], folder: str) -> Seconds:
    """Runs a command in a folder, with a cache of compiled files in it."""
    environment = dict(os.environ, PYTHONPYCACHEPREFIX=os.path.join(folder, "compiled"))
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *command],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = [None if word == "None" else float(word) for word in done.stderr.split()[-3:]]
    first_line_s, plan_s, end_s = seconds
    assert end_s is not None
    return Seconds(first_line_s, plan_s, end_s)


def least(seconds: list[float | None]) -> float | None:
    """The least of some seconds; None where there are none."""
    return min((each for each in seconds if each is not None), default=None)


def text(seconds: float | None) -> str:
    """Two digits; nothing for None."""
    return "" if seconds is None else f"{seconds:.2f}"


if __name__ == "__main__":
    main()
