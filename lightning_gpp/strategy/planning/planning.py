"""Asks the planner for a captured model and the devices found, and checks the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_gpp.capture import CapturedModel
from lightning_gpp.cluster import Cluster
from lightning_gpp.cost import Costs
from lightning_gpp.graph.graph_parallel import WaysGraph
from lightning_gpp.planner import (
    Plan,
    PlanRequest,
    num_devices_used,
    plan_request,
    resolve_plan,
    validate_plan,
)
from lightning_gpp.planner.plan.by_rank import in_plan_order, note_of_ranks, with_devices_of
from lightning_gpp.planner.plan_to_run import (
    PlanQuestion,
    PlanToRun,
    on_all_devices,
    plan_to_run,
)
from lightning_gpp.planner.units import num_separable
from lightning_gpp.planner.ways import first_way, plan_in_ways
from lightning_gpp.simulate.refit import Refit
from lightning_gpp.strategy.devices.devices_at_hand import resolve_cluster
from lightning_gpp.strategy.planning.plan_cache import kept_answer
from lightning_gpp.strategy.settings import PlanLike, Settings, refuse_async_plan

Measured = tuple[Costs, tuple[str, ...]]
"""Costs, and what the user should know of where they are from."""


@dataclass(frozen=True, slots=True)
class Example:
    """The part of a mini-batch that capture and measurement run on.

    Attributes:
        args: arguments of the pipelined forward for the first micro-batch.
        kwargs: likewise, by name.
        minibatch_size: samples of the mini-batch; None where the batch cannot be cut.
        num_microbatches: micro-batches that the mini-batch was cut into for it.
        otherwise: what they see if the forward does not take some of the samples.
        inputs_ahead: whether inputs of a step are likely to be sent during the step before.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    minibatch_size: int | None
    num_microbatches: int
    otherwise: Example | None = None
    inputs_ahead: bool = False


def plan_pipeline(
    settings: Settings,
    captured: CapturedModel,
    example: Example,
    at_hand: Cluster,
    measured: Measured | None,
    ways: WaysGraph | None = None,
) -> PlanToRun:
    """Rank 0: the plan of a run, with what the user should know of how it came about.

    With ``num_microbatches`` in the settings all stages have micro-batches of one size; otherwise
    the planner chooses the sizes. Without a schedule in the settings, it is the one that holds the
    activations of all micro-batches where that fits into memory. Every device gets a stage or a
    replica of one; a warning says where that is not so.

    Args:
        settings: what the user asked for.
        captured: the model.
        example: the micro-batch that the model was captured with.
        at_hand: the devices of all ranks, by rank.
        measured: costs on every kind of these devices; None where the settings give costs.
        ways: the model in ways, if there are several.

    Raises:
        ValueError: the model cannot be planned like this.
    """
    fills = settings.use_all_devices and not settings.is_asynchronous
    num_devices, chosen, plan = at_hand.num_devices, settings.cluster, None
    cluster = in_plan_order(at_hand if chosen is None else resolve_cluster(chosen, num_devices))
    if settings.plan is not None:
        plan = _given_plan(settings.plan, settings, captured, num_devices)
    costs, notes = measured or (settings.costs, ())
    assert isinstance(costs, Costs), "the planner needs costs"
    question = _request(settings, captured, example, cluster, costs, plan)
    _tell_of_few_samples(settings.num_microbatches or 0, example)
    if question.is_estimated and settings.full_graph is None:  # no measured second is in it
        notes = ()
    notes = (*captured.kept_whole, *notes)
    if isinstance(settings.costs, Refit):
        question = settings.costs.request(question)
        notes += (f"Costs: {settings.costs.describe()}.",)
    if plan is not None:  # its devices keep their numbers
        question = with_devices_of(plan, question)

    def search(asked: PlanRequest, planner: str) -> Plan:
        if ways is None:
            return kept_answer(settings.cache, asked, planner)
        part = first_way(asked, ways)
        plan = kept_answer(settings.cache, part, planner)
        return plan_in_ways(on_all_devices(plan, part) if fills else plan, ways)

    compares = settings.report == "full"
    asked = PlanQuestion(question, settings.planner, settings.schedule, fills, plan, compares)
    found = plan_to_run(asked, search)
    notes += found.notes
    if found.request.feeds_ahead:
        notes += ("Inputs: sent during the step before; worker processes read the batches.",)
    if plan is None:
        _warn_of_idle_devices(found, captured.kept_whole)
    else:
        notes += note_of_ranks(plan, num_devices)
    return replace(found, notes=notes)


def _given_plan(
    given: PlanLike, settings: Settings, captured: CapturedModel, num_devices: int
) -> Plan:
    """The plan that the user made by hand; ValueError where it does not fit the other settings."""
    plan = resolve_plan(given, captured.graph)
    if settings.is_asynchronous:
        refuse_async_plan(plan.stages)
    at_a_time = validate_plan(plan, captured.graph, num_devices).units_at_a_time
    if (settings.num_microbatches or 0) % at_a_time:
        raise ValueError(
            f"num_microbatches={settings.num_microbatches} does not fit the plan, whose stages "
            f"take up to {at_a_time} micro-batches at a time; use a multiple of {at_a_time}, or "
            "leave it out"
        )
    return plan


def _tell_of_few_samples(wanted: int, example: Example) -> None:
    """Says that a mini-batch makes fewer micro-batches than the user asked for."""
    samples, count = example.minibatch_size, example.num_microbatches
    if samples and count < wanted:
        rank_zero_info(
            f"num_microbatches={wanted} is too many for {samples} samples, which are cut into "
            f"{count} micro-batches."
        )


def _warn_of_idle_devices(found: PlanToRun, kept_whole: Sequence[str]) -> None:
    num_used, num_devices = num_devices_used(found.plan), found.request.num_devices
    num_parts = num_separable(found.request.graph)
    because = "it is predicted to be faster, or the only one that fits into memory"
    if num_parts < num_devices:
        reasons = "".join(f" ({reason})" for reason in kept_whole)
        because = f"the model has only {num_parts} operators that can be separated{reasons}"
    if num_used < num_devices:
        rank_zero_warn(
            f"the plan uses {num_used} of {num_devices} devices, the others stay idle: {because}. "
            f"Use devices={num_used}, or give a plan by hand."
        )


def _request(
    settings: Settings,
    captured: CapturedModel,
    example: Example,
    cluster: Cluster,
    costs: Costs,
    plan: Plan | None,
) -> PlanRequest:
    num_microbatches = settings.num_microbatches and example.num_microbatches
    if plan is not None:
        num_microbatches = num_microbatches or plan.num_microbatches or example.num_microbatches
    if example.minibatch_size is None:  # it cannot be cut
        num_microbatches = 1
    if settings.is_asynchronous:
        num_microbatches = None
    size = captured.graph.microbatch_size * example.num_microbatches
    # One micro-batch is asked for where the samples of a batch must stay together, be it in the
    # forward, of which replicas would see a part each.
    return plan_request(
        captured.graph,
        cluster,
        costs=costs,
        minibatch_size=example.minibatch_size or size,
        num_microbatches=num_microbatches,
        max_replicas=1 if num_microbatches == 1 or settings.full_graph is not None else None,
        held_versions=settings.held_versions,
        inputs_ahead=example.inputs_ahead,
    )
