"""Simulated steps of small stage graphs, for pictures and traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from helpers.graphs import stage_edges
from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.schedule import build_program
from lightning_gpp.simulate import (
    MessageBytes,
    ProgramCosts,
    Simulation,
    StageCosts,
    StepCosts,
    Timeline,
    predicted_timeline,
    simulate,
)
from lightning_gpp.simulate.timeline.measured_path import with_inferred_path

TWO_BRANCHES = "0>2 1>2"


def simulated(
    edges: str = TWO_BRANCHES,
    num_stages: int = 3,
    *,
    num_microbatches: int = 2,
    schedule: str = "1f1b",
    devices: Sequence[Any] | None = None,
    message_bytes: float = 1.0,
    memory_bytes: int | None = 8,
    step: StepCosts | None = None,
    buckets: Sequence[Any] = (),
    **options: Any,
) -> Simulation:
    """Forwards take 1 s and backwards 2 s, a byte takes 1 s; activations have a byte."""
    homes = devices or list(range(num_stages))
    readers = tuple((f"weight{stage}", (stage,)) for stage in range(num_stages))
    stages = replace(stage_edges(num_stages, edges), parameter_readers=readers)
    program = build_program(
        stages, devices=homes, num_microbatches=num_microbatches, schedule=schedule
    )
    num_devices = len(program.actions)
    cluster = Cluster(
        tuple(Device(f"gpu{i}", memory_bytes=memory_bytes) for i in range(num_devices)), Link(1.0)
    )
    messages = {(e.source, e.target): MessageBytes(message_bytes) for e in program.edges}
    costs = ProgramCosts(
        cluster,
        (StageCosts(1.0, 2.0, fixed_bytes=3.0, activation_bytes=1.0),) * program.num_stages,
        messages,
        messages,
        buckets=tuple(buckets),
        step=step or StepCosts(),
    )
    return simulate(program, costs, **options)


def as_if_measured(timeline: Timeline) -> Timeline:
    """The same spans, as if they were all that is known."""
    return with_inferred_path(
        replace(
            timeline,
            source="measured",
            step=3,
            transfers=(),
            critical_path=(),
            memory=(),
        )
    )


def predicted_and_measured(**arguments: Any) -> list[Timeline]:
    """A predicted step, and one with the same spans."""
    timeline = predicted_timeline(simulated(**arguments))
    return [timeline, as_if_measured(timeline)]
