"""Throughput against the number of devices: S-SGD in its variants, and the planner's own plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_gpp.common.units_of_measure import count_text
from lightning_gpp.jobs.figures import COLOURS, MARKERS, diagram, tidy
from lightning_gpp.planner.data_parallel import NAME as DATA_PARALLEL
from lightning_gpp.planner.plan.by_rank import in_plan_order
from lightning_gpp.planner.plan_to_run import PlanQuestion, plan_to_run
from lightning_gpp.simulate.ssgd.layers import model_layers
from lightning_gpp.simulate.ssgd.program import VARIANTS, Ssgd
from lightning_gpp.simulate.what_if.changes import WhatIf
from lightning_gpp.simulate.what_if.plan_case import PlanCase

FILE = "speedup.png"


@dataclass(frozen=True)
class Speedups:
    """Throughput of every way to train on every number of devices.

    Attributes:
        samples_per_s: way to train -> number of devices -> samples per second; None where it
            cannot be had.
        base_samples_per_s: of one device, without any overlap; what speed-ups are measured by.
        notes: what to know.
    """

    samples_per_s: Mapping[str, Mapping[int, float | None]]
    base_samples_per_s: float
    notes: tuple[str, ...] = ()

    def speedups(self) -> dict[str, dict[int, float | None]]:
        """Way to train -> number of devices -> how many times the throughput of one device."""
        return {
            name: {
                count: None if rate is None else rate / self.base_samples_per_s
                for count, rate in column.items()
            }
            for name, column in self.samples_per_s.items()
        }


def device_counts(num_devices: int, asked: Sequence[int] | None = None) -> list[int]:
    """The numbers of devices of the table: those asked for, or powers of two and all.

    Raises:
        ValueError: one is not a number of devices of the cluster.

    >>> device_counts(6), device_counts(8, [8, 2])
    ([1, 2, 4, 6], [2, 8])
    """
    if asked is None:
        powers = {2**power for power in range(num_devices.bit_length())}
        return sorted({*powers, num_devices})
    for count in asked:
        if not isinstance(count, int) or not 1 <= count <= num_devices:
            raise ValueError(
                f"job.speedup: {count!r} is no number of devices of the cluster, which has "
                f"{num_devices}; raise cluster.num_devices, or leave it out"
            )
    return sorted(set(asked))


def find_speedups(case: PlanCase, counts: Sequence[int]) -> Speedups:
    """Simulates S-SGD in all variants, and the planner's plans, with the same samples per device.

    Args:
        case: the plan for all devices.
        counts: numbers of devices.
    """
    rates: dict[str, dict[int, float | None]] = {name: {} for name in VARIANTS}
    own: dict[int, float | None] = {}
    notes = []
    for count in counts:
        for name in VARIANTS:
            found = ssgd_case(case, count, name)
            rates[name][count] = found.samples / found.simulate().step_s
        try:
            part = on_first_devices(case, count)
            own[count] = part.samples / part.simulate().step_s
        except ValueError as error:
            own[count] = None
            notes.append(f"No plan on {count_text(count, 'device')}: {error}.")
    if too_large := data_parallel_failure(case):
        notes.append(f"S-SGD is computed as if memory had no limit: {too_large}.")
    alone = ssgd_case(case, 1, "naive")
    base = alone.samples / alone.simulate().step_s
    return Speedups({case.planner: own, **rates}, base, tuple(notes))


def data_parallel_failure(case: PlanCase) -> str:
    """Why the model cannot be trained by data parallelism alone; empty where it can."""
    try:
        plan_to_run(PlanQuestion(case.request, DATA_PARALLEL, case.asked_schedule))
    except ValueError as error:
        return str(error)
    return ""


def on_first_devices(case: PlanCase, count: int) -> PlanCase:
    """The planner's plan for the first devices.

    Raises:
        ValueError: no planner made the plan, or it finds none.
    """
    request = case.request
    if count == request.num_devices:
        return case
    samples = max(1, round(request.minibatch_size * count / request.num_devices))
    cluster = in_plan_order(request.cluster).first(count)
    return case.replanned(replace(request, cluster=cluster, minibatch_size=samples))


def ssgd_case(case: PlanCase, count: int, variant: str) -> Ssgd:
    """Pure data parallelism of the same model on the first devices, each with its own input."""
    request = case.request
    samples = request.minibatch_size / request.num_devices
    part = replace(request, cluster=in_plan_order(request.cluster).first(count))
    step = case.run.step
    own = replace(
        step,
        data_s=step.data_s / request.num_devices,
        input_bytes=step.input_bytes / request.num_devices,
        optimizer_s=first_devices(step.optimizer_s, count),
        finish_s=first_devices(step.finish_s, count),
    )
    found = Ssgd(
        layers=model_layers(part, samples),
        cluster=part.cluster,
        variant=variant,
        step=own,
        all_reduce=case.run.all_reduce,
        samples_per_device=samples,
    )
    return found.changed(WhatIf(bytes=case.size_factor))


def first_devices(seconds: Mapping[int, float], count: int) -> dict[int, float]:
    """What is said of the first devices."""
    return {device: value for device, value in seconds.items() if device < count}


def write_speedup_picture(found: Speedups, folder: Path) -> None:
    """Writes the speed-ups as curves, beside the line of as many times as there are devices."""
    columns = found.speedups()
    counts = sorted({count for column in columns.values() for count in column})
    if len(counts) < 2:
        return
    with diagram(folder / FILE, 7.0, 4.6) as figure:
        axes = figure.subplots()
        axes.plot(counts, counts, color="#AAAAAA", linestyle="--", label="as many times")
        for number, (name, column) in enumerate(columns.items()):
            points = [(count, value) for count, value in column.items() if value is not None]
            axes.plot(
                [count for count, _ in points],
                [value for _, value in points],
                color=COLOURS[number % len(COLOURS)],
                marker=MARKERS[number % len(MARKERS)],
                label=name if number else f"planner {name}",
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for set_ticks in (axes.set_xticks, axes.set_yticks):
            set_ticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        tidy(axes, "devices", "speed-up over one device (samples per second)")
        axes.legend(frameon=False)
