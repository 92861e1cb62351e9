"""What a GPU has to show, in one table: equality, times, messages, overlap, memory, predictions.

Needs the installed package and one GPU; with two or more also NCCL is measured, and
``torch.distributed.pipelining`` beside it. A row that fails says why, the others go on, and the
status is 1. It takes less than ten minutes on a fast card, and ends after twenty on any.

    python benchmarks/gpu.py                    # the first GPU, or the first two
    python benchmarks/gpu.py --only messages    # rows whose name has this in it
    python benchmarks/gpu.py --width 2048       # for a card of less than 24 GB
    python benchmarks/gpu.py --device cpu       # the same rows on CPUs, to try the script itself

Everything runs in processes of its own (:mod:`gpu_processes`): plain Lightning on one device, this
strategy with one stage, with two stages on one device (``accelerator="pool"``: NCCL refuses two
ranks on a GPU, so messages are staged through pinned memory of the host), and with two stages on
two devices. Two stages on one device cannot be faster than one by more than they overlap: the row
says what a second process and the staging cost. Between CPUs all messages go through shared memory.
"""

from __future__ import annotations

import argparse
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch
from gpu_cases import LINKS, MICROBATCHES, TWO, Case, Key, cases, places
from gpu_processes import Failure, Outcome, outcomes
from gpu_rows import Row, filled, rows

from lightning_gpp.common.text_table import text_table


def measured(
    wanted: Sequence[Key], known: dict[Key, Case], is_gpu: bool, until_s: float
) -> dict[Key, Outcome]:
    """Measures cases, place by place, and tells on the way how it goes."""
    found: dict[Key, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, place in places(is_gpu).items():
            chosen = [case for key, case in known.items() if key[0] == name and key in wanted]
            start_s = time.monotonic()
            for case, outcome in outcomes(place, chosen, Path(folder) / name, until_s):
                found[name, case.name] = outcome
                word = f"FAILED: {outcome.summary}" if isinstance(outcome, Failure) else "done"
                seconds = f"{time.monotonic() - start_s:.0f} s"
                print(f"{name}, {case.name}: {word} ({seconds})", file=sys.stderr, flush=True)
    return found


def report(table: Sequence[Row], found: dict[Key, Outcome], head: str, why: str) -> bool:
    """Prints what failed, and then the table; whether all is well.

    Args:
        table: its rows.
        found: of their cases.
        head: stands above the table.
        why: there are no rows of two devices, if there are none.
    """
    failures = {key: each for key, each in found.items() if isinstance(each, Failure)}
    for (place, case), failure in failures.items():
        print(f"== {place}, {case}: {failure.summary}\n{failure.text}\n")
    lines = [filled(row, found) for row in table]
    if why:
        lines.append(["NCCL, torch.distributed.pipelining", "not measured", why])
    print(f"{head}\n\n{text_table(['', 'found', 'beside'], lines, left=['', 'beside'])}")
    return not failures


def machine(is_gpu: bool) -> str:
    """What this ran on."""
    parts = ["CPUs (which say nothing of GPUs)"]
    if is_gpu:
        parts = [f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}", _driver()]
        parts.append(f"CUDA {torch.version.cuda}, NCCL {_nccl()}")
    parts.append(f"torch {torch.__version__}, lightning {lightning.__version__}")
    parts.append(f"Python {platform.python_version()}")
    return ", ".join(parts)


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"driver unknown ({type(error).__name__} of nvidia-smi)"
    return f"driver {answer.stdout.splitlines()[0]}"


def _nccl() -> str:
    try:
        version = torch.cuda.nccl.version()
    except AttributeError:  # a build without it
        return "unknown"
    return ".".join(map(str, version))


def main(given: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default="", help="regular expression: rows with such a name")
    parser.add_argument("--width", type=int, help="of the layers that keep a device busy")
    parser.add_argument("--batch", type=int, help="samples that keep a device busy")
    parser.add_argument("--minutes", type=float, default=20, help="the table comes by then")
    arguments = parser.parse_args(given)
    is_gpu = arguments.device == "cuda"
    if is_gpu and not torch.cuda.is_available():
        print("There is no GPU here; --device cpu tries the same rows on CPUs.")
        return 1
    start_s = time.monotonic()
    width = arguments.width or (4096 if is_gpu else 128)
    large = width, arguments.batch or (4096 if is_gpu else 256)
    small = max(16, large[0] // 16), max(16, large[1] // 16)
    has_two = not is_gpu or torch.cuda.device_count() > 1
    table = [
        row
        for row in rows(is_gpu)
        if re.search(arguments.only, row.name)
        and (has_two or not any(place in (TWO, LINKS[TWO]) for place, _ in row.needs))
    ]
    if not table:
        parser.error(f"no row has {arguments.only!r} in its name")
    known, wanted = cases(large, small), {key for row in table for key in row.needs}
    found = measured(sorted(wanted), known, is_gpu, start_s + 60 * arguments.minutes - 5)
    head = (
        f"{machine(is_gpu)}\nlarge: 12 layers of {large[0]}, batches of {large[1]}; small: of "
        f"{small[0]}, {small[1]}; {MICROBATCHES} micro-batches in two stages; "
        f"{time.monotonic() - start_s:.0f} s in all"
    )
    why = "" if has_two else "needs two GPUs; here is one"
    return 0 if report(table, found, head, why) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and no process is left behind
    sys.exit(main())
