"""The rows of the table of ``benchmarks/gpu.py``, from the results of its cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpu_cases import FLOAT32, LINKS, ONE, PAIRS, PLAIN, TWO, WATCHED, Key
from gpu_processes import Failure, Outcome

from lightning_gpp.common.units_of_measure import bytes_text, seconds_text

Ranks = list[dict[str, Any]]
"""What every rank of a case returned."""


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
