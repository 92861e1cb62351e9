"""What a GPU has to show, in one table: equality, times, messages, overlap, memory, predictions.

Needs the installed package and one GPU; with two or more also NCCL is measured, and
``torch.distributed.pipelining`` beside it. A row that fails says why, the others go on, and the
status is 1. It takes less than ten minutes on a fast card, and ends after twenty on any.

    python benchmarks/gpu.py                    # the first GPU, or the first two
    python benchmarks/gpu.py --only messages    # rows whose name has this in it
    python benchmarks/gpu.py --width 2048       # for a card of less than 24 GB
    python benchmarks/gpu.py --device cpu       # the same rows on CPUs, to try the script itself

Everything runs in processes of its own (:mod:`gpu_ranks`): plain Lightning on one device, this
strategy with one stage, with two stages on one device (``accelerator="pool"``: NCCL refuses two
ranks on a GPU, so messages are staged through pinned memory of the host), and with two stages on
two devices. Two stages on one device cannot be faster than one by more than they overlap: the row
says what a second process and the staging cost. Between CPUs all messages go through shared memory.

The cases of a place are measured one after the other in the same processes, as starting them takes
longer than most cases do. Where one fails or hangs, its processes are ended, the error is kept, and
new processes go on with the next case.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpu_ranks
import lightning
import torch
from gpu_ranks import MICROBATCHES, WATCHED, Case, Place

from lightning_gpp.common.text_table import text_table
from lightning_gpp.common.units_of_measure import bytes_text, seconds_text

Key = tuple[str, str]
"""Names of a place and of a case."""

Ranks = list[dict[str, Any]]
"""What every rank of a case returned."""

PLAIN, ONE, POOL, TWO = "plain Lightning", "one stage", "two stages, staged", "two stages, NCCL"
PAIRS = (POOL, TWO)
LINKS = {POOL: "between ranks, staged", TWO: "between ranks, NCCL"}
FLOAT32 = "float32"


LIMIT_S, GRACE_S = 180.0, 20.0
"""Without a case that is done, and for the other ranks to say what they saw once one has failed."""

# Cases --------------------------------------------------------------------------------------------

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
        add(place, name, "gpu_ranks:train", **{**given, **options})

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
        add(LINKS[place], "messages", "gpu_ranks:messages", sizes_bytes=sizes_bytes)
        add(LINKS[place], "overlap", "gpu_ranks:overlap", side=2 * large[0])
    for size, name, precision in (
        (large, f"large {FLOAT32}", "32-true"),
        (large, "large bf16", "bf16-mixed"),
        (small, "small", "32-true"),
    ):
        for schedule in ("gpipe", "1f1b"):
            given = {"precision": precision, "schedule": schedule}
            given |= {"width": size[0], "batch": size[1], "blocks": 12}
            add(LINKS[TWO], f"{name} {schedule}", "gpu_ranks:torch_pipeline", **given)
    for place, strategy in strategies.items():
        given = {"precision": "bf16-true", "strategy": strategy, "blocks": 4}
        given["positions"] = max(16, large[1] // 8)
        add_training(place, "flash", (max(64, large[0] // 4), 4 * MICROBATCHES), **given)
    add(PLAIN, "speeds", "gpu_ranks:speeds", side=2 * large[0])
    return found


# Processes ----------------------------------------------------------------------------------------


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
                        [sys.executable, gpu_ranks.__file__, str(here)],
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


# The table ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: of it.
        needs: the cases that it is made of.
        fill: from their results to what was found and what stands beside it.
    """

    name: str
    needs: tuple[Key, ...]
    fill: Callable[..., tuple[str, str]]


def filled(row: Row, found: Mapping[Key, Outcome]) -> list[str]:
    """Its cells; of a row that cannot be filled the reason."""
    results = [found[key] for key in row.needs]
    for result in results:
        if isinstance(result, Failure):
            return [row.name, "failed", result.summary[:100]]
    return [row.name, *row.fill(*results)]


def rows(is_gpu: bool) -> Iterator[Row]:
    """All rows; those of what only a GPU has are left out on CPUs."""
    yield from _equality()
    yield from _steps()
    yield from _links(is_gpu)
    if is_gpu:
        yield from _memory()
        yield from _waits()
    yield from _capture()
    yield from _predictions()
    yield Row("speeds that hap measures", ((PLAIN, "speeds"),), _speeds)


def _equality() -> Iterator[Row]:
    def fill(ranks: Ranks, plain: Ranks) -> tuple[str, str]:
        ours, theirs = ranks[0]["losses"], plain[0]["losses"]
        losses = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        value = f"weights {ranks[0]['difference']:.1e}, losses {losses:.1e}"
        own = plain[0]["difference"]
        return value, PLAIN + (f", itself {own:.1e} off float32" if own is not None else "")

    for precision in (FLOAT32, "bf16"):
        for place in (ONE, *PAIRS):
            needs = (place, f"large {precision}"), (PLAIN, f"large {precision}")
            yield Row(f"largest difference, {place}, {precision}", needs, fill)
    for place in PAIRS:
        for name in ("1f1b", "hap"):
            needs = (place, name), (PLAIN, f"large {FLOAT32}")
            yield Row(f"largest difference, {_of(place, name)}", needs, fill)


def _of(place: str, name: str) -> str:
    """The two stages of a place with another schedule or strategy."""
    return place.replace(
        "two stages", "hap on two ranks" if name == "hap" else f"{name}, two stages"
    )


def _steps() -> Iterator[Row]:
    for size in (f"large {FLOAT32}", "large bf16", "small"):
        yield Row(f"step, {size}, {PLAIN}", ((PLAIN, size),), lambda r: (_step_text(r), ""))
        for place in (ONE, *PAIRS):
            needs = (place, size), (PLAIN, size)
            yield Row(f"step, {size}, {place}", needs, _compare_steps(PLAIN))
        for schedule in ("gpipe", "1f1b"):
            needs = (TWO, size), (LINKS[TWO], f"{size} {schedule}")
            yield Row(f"step, {size}, {TWO}", needs, _compare_steps(f"torch's {schedule}"))
    for place in PAIRS:
        for name in ("1f1b", "async", "hap"):
            needs = (place, name), (place, f"large {FLOAT32}")
            yield Row(f"step, large {FLOAT32}, {_of(place, name)}", needs, _compare_steps("gpipe"))


def _step_text(ranks: Ranks) -> str:
    return seconds_text(ranks[0]["step_s"])


def _compare_steps(name: str) -> Callable[[Ranks, Ranks], tuple[str, str]]:
    def fill(ranks: Ranks, others: Ranks) -> tuple[str, str]:
        ratio = ranks[0]["step_s"] / others[0]["step_s"]
        return f"{_step_text(ranks)} ({ratio:.2f} ×)", f"{name}: {_step_text(others)}"

    return fill


def _links(is_gpu: bool) -> Iterator[Row]:
    def message(size_bytes: int) -> Callable[[Ranks], tuple[str, str]]:
        def fill(ranks: Ranks) -> tuple[str, str]:
            per_s = ranks[0][str(size_bytes)]
            return f"{per_s:,.0f} per second", f"{bytes_text(per_s * size_bytes)} per second"

        return fill

    def ratio(rank: int, which: str, busy_rank: int) -> Callable[[Ranks], tuple[str, str]]:
        def fill(ranks: Ranks) -> tuple[str, str]:
            busy_s = ranks[busy_rank]["alone_s"]
            value = f"{ranks[rank][which] / busy_s:.2f} ×"
            return value, f"rank {busy_rank} computes for {seconds_text(busy_s)}; best is 0"

        return fill

    for place in PAIRS:
        way = place.split(", ")[1]
        for size_bytes in (4 << 10, 1 << 20, 64 << 20):
            needs = ((LINKS[place], "messages"),)
            yield Row(f"messages of {bytes_text(size_bytes)}, {way}", needs, message(size_bytes))
        if is_gpu:
            for name, fill in (
                ("a send waits for compute before it", ratio(0, "send_s", 0)),
                ("other work waits for a late message", ratio(1, "other_work_s", 0)),
                ("a message waits for its receiver's work", ratio(0, "message_s", 1)),
            ):
                yield Row(f"{name}, {way}", ((LINKS[place], "overlap"),), fill)


def _memory() -> Iterator[Row]:
    def peak(rank: int) -> Callable[[Ranks], tuple[str, str]]:
        def fill(ranks: Ranks) -> tuple[str, str]:
            seen, expected = ranks[rank]["peaks"]["steps"], ranks[0]["predicted_bytes"][rank]
            beside = f"predicted: {bytes_text(expected)} ({expected / seen:.2f} ×)"
            return bytes_text(seen), beside

        return fill

    def first(ranks: Ranks) -> tuple[str, str]:
        seen, model = ranks[0]["peaks"]["first forward"], ranks[0]["model_bytes"]
        return bytes_text(seen), f"the whole model: {bytes_text(model)} ({seen / model:.2f} ×)"

    def checkpoint(ranks: Ranks) -> tuple[str, str]:
        before = ranks[0]["peaks"]["before the checkpoint"]
        seen = ranks[0]["peaks"]["checkpoint"] - before
        return f"{bytes_text(seen)} more", f"than {bytes_text(before)} before it"

    for place in PAIRS:
        for precision in (FLOAT32, "bf16"):
            for rank in range(2):
                name = f"memory, {place}, {precision}, rank {rank}"
                yield Row(name, ((place, f"large {precision}"),), peak(rank))
        needs = ((place, "few samples"),)
        yield Row(f"memory, {place}, rank 0 until its first forward is over", needs, first)
        yield Row(f"memory, {place}, rank 0 while a checkpoint is written", needs, checkpoint)


def _waits() -> Iterator[Row]:
    def fill_of(rank: int) -> Callable[[Ranks], tuple[str, str]]:
        def fill(ranks: Ranks) -> tuple[str, str]:
            seen = ranks[rank]
            at = ", ".join(f"{line} {num / WATCHED:g}" for line, num in seen["waits_at"])
            return f"{seen['num_waits'] / WATCHED:g}", at

        return fill

    size = f"large {FLOAT32}"
    yield Row(f"waits of the host per step, {PLAIN}", ((PLAIN, size),), fill_of(0))
    yield Row(f"waits of the host per step, {ONE}", ((ONE, size),), fill_of(0))
    for place in PAIRS:
        for name, case in (("gpipe", size), ("1f1b", "1f1b")):
            for rank in range(2):
                needs = ((place, case),)
                yield Row(f"waits per step, {place}, {name}, rank {rank}", needs, fill_of(rank))


def _capture() -> Iterator[Row]:
    def fill(ranks: Ranks, plain: Ranks) -> tuple[str, str]:
        ours, theirs = ranks[0]["losses"], plain[0]["losses"]
        off = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        return f"losses differ by {off:.1e}", f"{PLAIN}, of {theirs[0]:.2g} at first"

    for place in (ONE, *PAIRS):
        needs = (place, "flash"), (PLAIN, "flash")
        yield Row(f"kernel for GPUs alone (flash, bf16), {place}", needs, fill)


def _predictions() -> Iterator[Row]:
    def fill(ranks: Ranks) -> tuple[str, str]:
        seen, expected = ranks[0]["recorded_s"], ranks[0]["predicted_s"]
        beside = f"predicted: {seconds_text(expected)} ({expected / seen:.2f} ×)"
        return seconds_text(seen), beside

    for place in PAIRS:
        for precision in (FLOAT32, "bf16"):
            needs = ((place, f"large {precision}"),)
            yield Row(f"recorded step, {place}, {precision}", needs, fill)


def _speeds(ranks: Ranks) -> tuple[str, str]:
    def text(speeds: tuple[float, float]) -> str:
        return f"{speeds[0] / 1e12:.2f} Tflop/s, {bytes_text(speeds[1])} per second"

    (seen,) = ranks
    sheet = f"; data sheet {text(seen['sheet'])}" if seen["sheet"] else ""
    launch = f", {seconds_text(seen['launch_s'])} a launch"
    return text(seen["hap"]) + launch, f"large work {text(seen['large'])}{sheet}"


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
