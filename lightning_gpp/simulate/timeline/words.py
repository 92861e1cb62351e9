"""Texts of timelines: names of actions, stages and weight versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_gpp.graph import FEED, ModelGraph
from lightning_gpp.graph.operator_names import summarize_operators
from lightning_gpp.planner import Plan
from lightning_gpp.schedule import Action, Kind, Program
from lightning_gpp.simulate.timeline.span import Span, SpanKind, Transfer
from lightning_gpp.simulate.timeline.timeline import LOSS, Timeline, TimelineStage

WHAT = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.SEND_FORWARD: "send activations",
    Kind.RECEIVE_FORWARD: "receive activations",
    Kind.SEND_BACKWARD: "send gradients",
    Kind.RECEIVE_BACKWARD: "receive gradients",
    Kind.REDUCE: "all-reduce of gradients of",
    Kind.STEP: "update of the rank of",
}


def action_words(text: str, stages: Sequence[TimelineStage]) -> str:
    """An action as a person reads it.

    >>> two = (TimelineStage(0, 0, name="0"), TimelineStage(1, 1, name="1.0"))
    >>> action_words("1F2", two), action_words("0SF2>1", two)
    ('forward 2 of stage 1.0', 'send activations 2 of stage 0 to stage 1.0')
    >>> action_words("-1SF0>0", two)
    'send inputs 0 to stage 0'
    """
    action = Action.parse(text)
    stage = stage_title(action.stage, stages)
    if action.kind in (Kind.REDUCE, Kind.STEP):
        return f"{WHAT[action.kind]} {stage}"
    what = f"{WHAT[action.kind]} {action.microbatch}"
    if action.peer is None:
        return f"{what} of {stage}"
    peer = stage_title(action.peer, stages)
    if FEED in (action.stage, action.peer):
        what = what.replace("activations", "inputs").replace("gradients", "gradients of inputs")
    where = "to" if action.kind.is_send else "from"
    if action.stage == FEED:
        return f"{what} {where} {peer}"
    return f"{what} of {stage} {where} {peer}"


def words_of(item: Span | Transfer, timeline: Timeline) -> str:
    """The action of a span or a transfer in words, or what else it is."""
    return item.name if item.action is None else action_words(item.action, timeline.stages)


def stage_title(stage: int, stages: Sequence[TimelineStage]) -> str:
    """The name of a program's stage for people; that of the feed is "the user's step"."""
    return "your step" if stage == FEED else stages[stage].title


Met = Mapping[tuple[int | None, int | None], int]
"""(stage, mini-batch) -> updates before its backward."""


def met_by_backwards(timeline: Timeline) -> Met:
    """Updates before the backward of every stage and mini-batch that went backward."""
    return {
        (span.stage, span.microbatch): span.updates
        for span in timeline.spans
        if span.kind is SpanKind.BACKWARD and span.updates is not None
    }


def plan_stages(
    program: Program, plan: Plan, graph: ModelGraph, rank_of_device: Sequence[int]
) -> tuple[TimelineStage, ...]:
    """The stages of a program with the operators that they hold.

    Args:
        program: of the plan.
        plan: stages on devices.
        graph: the model.
        rank_of_device: rank of every device.
    """
    return tuple(
        _stage(program, plan, graph, stage, rank_of_device[program.device(stage)])
        for stage in range(program.num_stages)
    )


def _stage(program: Program, plan: Plan, graph: ModelGraph, id: int, rank: int) -> TimelineStage:
    replica = program.replica(id)
    if replica.stage == plan.num_stages:
        return TimelineStage(id, rank, name=LOSS)
    operators = plan.stages[replica.stage].operators
    name = str(replica.stage)
    if replica.count > 1:
        name = f"{name}.{replica.index}"
    return TimelineStage(id, rank, summarize_operators(graph, operators), operators, name)
