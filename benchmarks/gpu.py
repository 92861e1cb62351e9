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
from typing import Any

import lightning
import torch
from gpu_processes import Case, Failure, Outcome, Place, outcomes
from gpu_table import FLOAT32, LINKS, ONE, PAIRS, PLAIN, POOL, TWO, Key, Row, filled, rows
from gpu_trainings import MICROBATCHES

from lightning_gpp.common.text_table import text_table

PRECISIONS = {FLOAT32: "32-true", "bf16": "bf16-mixed"}


def places(is_gpu: bool) -> dict[str, Place]:
    """Where cases are measured."""
    one, two, kind = ("cuda:0", "cuda:1", "gpu") if is_gpu else ("cpu", "cpu", "cpu")
    pool, both = ((one, one), "pool"), ((one, two), kind)
    return {
        PLAIN: Place(PLAIN, (one,), kind, is_plain=True),
        ONE: Place(ONE, (one,), kind),
        LINKS[POOL]: Place(LINKS[POOL], *pool),
        POOL: Place(POOL, *pool),
        LINKS[TWO]: Place(LINKS[TWO], *both),
        TWO: Place(TWO, *both),
    }


def cases(large: tuple[int, int], small: tuple[int, int]) -> dict[Key, Case]:
    """All that can be measured.

    Args:
        large: width of the layers and samples of a batch of which a step keeps a device busy.
        small: of which it does not.
    """
    found: dict[Key, Case] = {}

    def add(place: str, name: str, measure: str, **options: Any) -> None:
        found[place, name] = Case(name, measure, options)

    def add_training(place: str, name: str, size: tuple[int, int], **options: Any) -> None:
        given = {"blocks": 12, "precision": "32-true", "width": size[0], "batch": size[1]}
        add(place, name, "gpu_trainings:train", **{**given, **options})

    two = {"num_microbatches": MICROBATCHES}
    strategies = {PLAIN: None, ONE: {"num_microbatches": 1}, POOL: two, TWO: two}
    for place, strategy in strategies.items():
        for name, precision in PRECISIONS.items():
            weights = {"keeps": name} if place == PLAIN else {"compares": name}
            if place == PLAIN and name != FLOAT32:
                weights["compares"] = FLOAT32
            given: dict[str, Any] = {"precision": precision, "strategy": strategy, **weights}
            add_training(place, f"large {name}", large, **given)
        add_training(place, "small", small, strategy=strategy)
    for place in PAIRS:
        given = {"compares": FLOAT32}
        add_training(place, "1f1b", large, strategy={**two, "schedule": "1f1b"}, **given)
        add_training(place, "hap", large, strategy="hap", **given)
        asynchronous = {"num_microbatches": 1, "schedule": "1f1b-async"}
        add_training(place, "async", large, strategy=asynchronous)
        few = (large[0], 4 * MICROBATCHES)
        add_training(place, "few samples", few, strategy=two, has_checkpoint=True)
        sizes_bytes = (4 << 10, 1 << 20, 64 << 20)
        add(LINKS[place], "messages", "gpu_measures:messages", sizes_bytes=sizes_bytes)
        add(LINKS[place], "overlap", "gpu_measures:overlap", side=2 * large[0])
    for size, name, precision in (
        (large, f"large {FLOAT32}", "32-true"),
        (large, "large bf16", "bf16-mixed"),
        (small, "small", "32-true"),
    ):
        for schedule in ("gpipe", "1f1b"):
            given = {"precision": precision, "schedule": schedule}
            given |= {"width": size[0], "batch": size[1], "blocks": 12}
            add(LINKS[TWO], f"{name} {schedule}", "gpu_trainings:torch_pipeline", **given)
    for place, strategy in strategies.items():
        given = {"precision": "bf16-true", "strategy": strategy, "blocks": 4}
        given["positions"] = max(16, large[1] // 8)
        add_training(place, "flash", (max(64, large[0] // 4), 4 * MICROBATCHES), **given)
    add(PLAIN, "speeds", "gpu_measures:speeds", side=2 * large[0])
    return found


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
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
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
