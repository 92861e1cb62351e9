"""Runs every ``graphpipe`` command of README and docs/ as a reader would, training cut short.

``python benchmarks/documents.py [WORDS]`` (half an hour on two cores; with WORDS only commands that
hold them) works in a temporary folder and prints a line per command: seconds, exit code, command.
The tests compose the same commands without running them (``tests/recipes/test_documents.py``).

Commands that wait for a second host, or need what a page asks the reader to write, are left out.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.documents import PAGES, commands

LEFT_OUT = (
    "two_hosts",
    "gnnpipe_reddit",
    "recipe=mine",
    "graph=FILE",
    "outputs/",
    "data.root",
    "from_file",
)
JOBS_WITHOUT_TRAINING = ("job=plan", "job=simulate", "job=compare", "--", "-sc")
FIRST_RUN = ["data=digits", "debug=limit", "strategy=single_device", "hydra.run.dir=first"]
LIMIT_S = 900


def main() -> None:
    """Runs the commands; ends with 1 if one fails."""
    wanted = " ".join(sys.argv[1:])
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        failed += run(FIRST_RUN, folder)
        (checkpoint,) = Path(folder, "first", "lightning", "checkpoints").glob("*.ckpt")
        for words in unique_commands():
            text = " ".join(words)
            if wanted in text and not any(part in text for part in LEFT_OUT):
                failed += run(shortened(words, checkpoint), folder)
    sys.exit(1 if failed else 0)


def unique_commands() -> list[list[str]]:
    """Every command once, in the order of the pages."""
    found = {tuple(words): None for page in PAGES for _, words in commands(page)}
    return [list(words) for words in found]


def shortened(words: list[str], checkpoint: Path) -> list[str]:
    """A command with a checkpoint that is there; training takes a few batches."""
    words = [word.replace("CHECKPOINT", str(checkpoint)) for word in words]
    if any(word.startswith(JOBS_WITHOUT_TRAINING) for word in words):
        return words
    return words if any(word.startswith("debug=") for word in words) else [*words, "debug=limit"]


def run(words: list[str], folder: str) -> bool:
    """Runs a command; whether it failed."""
    begin_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "lightning_gpp.cli", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    seconds = time.perf_counter() - begin_s
    print(f"{seconds:6.1f} s  {done.returncode}  graphpipe {' '.join(words)}", flush=True)
    if done.returncode:
        print(done.stderr[-2000:], flush=True)
    return done.returncode != 0


if __name__ == "__main__":
    main()
