"""The actions of a timeline in words, with the stages called as the plan calls them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.graph import FEED
from lightning_gpp.schedule import Action, Kind
from lightning_gpp.simulate.timeline.span import Span
from lightning_gpp.simulate.timeline.timeline import Timeline, TimelineStage
from lightning_gpp.simulate.timeline.transfer import Transfer

_WHAT = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.SEND_FORWARD: "send activations",
    Kind.RECEIVE_FORWARD: "receive activations",
    Kind.SEND_BACKWARD: "send gradients",
    Kind.RECEIVE_BACKWARD: "receive gradients",
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
    if action.kind is Kind.REDUCE:
        return f"sum of gradients of {stage}"
    if action.kind is Kind.STEP:
        return f"update of the rank of {stage}"
    what = f"{_WHAT[action.kind]} {action.microbatch}"
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
    """What a stage of a program is called; the feed is the user's step."""
    return "your step" if stage == FEED else stages[stage].title
