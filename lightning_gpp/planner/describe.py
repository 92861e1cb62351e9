"""A plan as text: what is where, what it takes, and a picture of the stage graph."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gpp.cluster import Cluster
from lightning_gpp.cost import Profile, estimate_profile
from lightning_gpp.graph import ModelGraph, stage_graph
from lightning_gpp.planner.operator_names import summarize_operators
from lightning_gpp.planner.picture import draw_stage_graph
from lightning_gpp.planner.plan import Plan, Stage
from lightning_gpp.planner.predict import predict, stage_backward_s, stage_forward_s
from lightning_gpp.planner.units_of_measure import bytes_text, seconds_text
from lightning_gpp.schedule import DryRun

ADAM_VALUES = 2
"""Values per parameter that Adam keeps; the default assumption on the optimizer."""

OPERATORS_WIDTH = 32
"""Columns for the operators of a stage; longer texts take several rows."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """What one stage holds and takes.

    Attributes:
        stage: the stage.
        operators: short text of its operators.
        num_parameters: parameter tensors that it reads.
        parameter_bytes: bytes of these.
        training_bytes: bytes of parameters, their gradients and the optimizer's state.
        activation_bytes: bytes kept for backwards with all micro-batches in flight.
        in_flight: its own micro-batches between forward and backward at the peak.
        compute_s: seconds of forward and backward per smallest micro-batch.
    """

    stage: Stage
    operators: str
    num_parameters: int
    parameter_bytes: int
    training_bytes: int
    activation_bytes: int
    in_flight: int
    compute_s: float

    @property
    def memory_bytes(self) -> int:
        """Bytes of everything that training keeps."""
        return self.training_bytes + self.activation_bytes


def report_stage(
    stage: Stage,
    graph: ModelGraph,
    profile: Profile,
    *,
    in_flight: int,
    optimizer_values: int = ADAM_VALUES,
) -> StageReport:
    """Adds up what a stage holds.

    Args:
        stage: the stage.
        graph: the model.
        profile: what the operators cost.
        in_flight: the stage's micro-batches in flight at the peak.
        optimizer_values: values that the optimizer keeps per trained parameter.
    """
    read = dict.fromkeys(n for name in stage.operators for n in graph.operator[name].parameters)
    parameters = [graph.parameter[name] for name in read]
    parameter_bytes = sum(parameter.size_bytes for parameter in parameters)
    trained_bytes = sum(parameter.size_bytes for parameter in parameters if parameter.requires_grad)
    kept_bytes = sum(profile.operators[name].activation_bytes for name in stage.operators)
    forward_s = stage_forward_s(stage.operators, profile)
    return StageReport(
        stage=stage,
        operators=summarize_operators(graph, stage.operators),
        num_parameters=len(parameters),
        parameter_bytes=parameter_bytes,
        training_bytes=parameter_bytes + trained_bytes * (1 + optimizer_values),
        activation_bytes=kept_bytes * in_flight * stage.microbatch_multiple,
        in_flight=in_flight,
        compute_s=forward_s + stage_backward_s(stage.operators, profile),
    )


def describe_plan(
    plan: Plan,
    graph: ModelGraph,
    profile: Profile | None = None,
    *,
    num_microbatches: int,
    schedule: str = "1f1b",
    cluster: Cluster | None = None,
    optimizer_values: int = ADAM_VALUES,
    max_width: int = 100,
) -> str:
    """A table of the stages, the predicted step, and a picture of the stage graph.

    Args:
        plan: a valid plan.
        graph: the model.
        profile: what the operators cost; estimated from sizes, and marked so, if not given.
        num_microbatches: micro-batches of a mini-batch.
        schedule: name of the schedule.
        cluster: the links; the default link if not given.
        optimizer_values: values that the optimizer keeps per trained parameter.
        max_width: columns of the picture at most (the table takes 100 at most).

    Raises:
        ValueError: the plan does not fit the graph, or the schedule does not fit the plan.
    """
    costs = profile or estimate_profile(graph)
    run = predict(
        plan,
        graph,
        profile=costs,
        num_microbatches=num_microbatches,
        schedule=schedule,
        cluster=cluster,
    )
    reports = [
        report_stage(
            stage,
            graph,
            costs,
            in_flight=run.in_flight[stage.id],
            optimizer_values=optimizer_values,
        )
        for stage in plan.stages
    ]
    stages = stage_graph(graph, plan.stage_operators)
    total_s = sum(report.compute_s for report in reports)
    labels = [_label(report, total_s) for report in reports]
    return "\n\n".join(
        (
            _head(plan, num_microbatches, schedule),
            _table(reports, graph, total_s),
            _notes(run, costs, optimizer_values),
            draw_stage_graph(stages, labels, max_width=max_width),
        )
    )


def _head(plan: Plan, num_microbatches: int, schedule: str) -> str:
    used = len({device for stage in plan.stages for device in stage.devices})
    return (
        f"Plan {plan.planner!r}: {_count(plan.num_stages, 'stage')} on {_count(used, 'device')}, "
        f"{_count(num_microbatches, 'micro-batch')}, schedule {schedule}"
    )


def _table(reports: Sequence[StageReport], graph: ModelGraph, total_s: float) -> str:
    multiples = any(report.stage.microbatch_multiple > 1 for report in reports)
    rows = [["stage", "device", "operators", "parameters", "memory", "in flight", "time", "share"]]
    for report in reports:
        first, *more = textwrap.wrap(report.operators, OPERATORS_WIDTH)
        size = report.stage.microbatch_multiple
        rows.append(
            [
                str(report.stage.id),
                ",".join(map(str, report.stage.devices)),
                first,
                f"{bytes_text(report.parameter_bytes)} ({report.num_parameters})",
                bytes_text(report.memory_bytes),
                f"{report.in_flight}{f' x{size}' if multiples else ''}",
                seconds_text(report.compute_s),
                _percent(report.compute_s, total_s),
            ]
        )
        rows += [["", "", line, "", "", "", "", ""] for line in more]
    parameter_bytes = sum(parameter.size_bytes for parameter in graph.parameters)
    memory_bytes = sum(report.memory_bytes for report in reports)
    rows.append(
        [
            "total",
            "",
            "",
            f"{bytes_text(parameter_bytes)} ({len(graph.parameters)})",
            bytes_text(memory_bytes),
            "",
            seconds_text(total_s),
            "",
        ]
    )
    return _aligned(rows, left_columns=(2,))


def _aligned(rows: Sequence[Sequence[str]], left_columns: Sequence[int]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join(
            cell.ljust(width) if index in left_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join((lines[0], rule, *lines[1:-1], rule, lines[-1]))


def _notes(run: DryRun, profile: Profile, optimizer_values: int) -> str:
    idle_s = sum(run.step_s - busy_s for busy_s in run.busy_s)
    bubble = _percent(idle_s, run.step_s * len(run.busy_s))
    optimizer = _count(optimizer_values, "value")
    if optimizer_values == ADAM_VALUES:
        optimizer = f"Adam: {optimizer}"
    source = (
        "estimated from sizes, not measured"
        if profile.is_estimated
        else f"measured on {profile.device}"
    )
    return "\n".join(
        (
            f"Predicted step: {seconds_text(run.step_s)}, of which devices are idle {bubble}.",
            f"Time: forward and backward of one micro-batch ({source}).",
            "Parameters: bytes (tensors); one that several stages share counts in each of them.",
            f"Memory: parameters, gradients, optimizer state ({optimizer} per trained parameter),",
            "        activations of the micro-batches in flight.",
            "In flight: micro-batches between forward and backward at the peak.",
            "Feed: arguments of forward, sent by the rank that reads the data (the last stage's).",
        )
    )


def _label(report: StageReport, total_s: float) -> str:
    return "\n".join(
        (
            f"stage {report.stage.id} · device {','.join(map(str, report.stage.devices))}",
            report.operators if len(report.operators) <= 60 else f"{report.operators[:59]}…",
            f"{bytes_text(report.memory_bytes)} · {_percent(report.compute_s, total_s)} of time",
        )
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0:.0f} %"


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
