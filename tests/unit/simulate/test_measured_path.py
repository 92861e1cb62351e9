"""What spans alone tell: transfers, and the critical path."""

from __future__ import annotations

from helpers.steps import as_if_measured, simulated

from lightning_gpp.simulate import (
    Bucket,
    Span,
    SpanKind,
    StepCosts,
    Timeline,
    TimelineStage,
    predicted_timeline,
)
from lightning_gpp.simulate.timeline.measured_path import with_inferred_path
from lightning_gpp.simulate.timeline.shares import path_shares
from lightning_gpp.simulate.timeline.transfer import TransferKind


def path(timeline: Timeline) -> str:
    return " ".join(
        f"{segment.item.name}@{segment.start_s:g}-{segment.end_s:g}"
        for segment in timeline.path_segments
        if segment.duration_s
    )


def times(timeline: Timeline) -> list[tuple[float, float]]:
    return [(s.start_s, s.end_s) for s in timeline.path_segments if s.duration_s]


def test_the_walk_follows_waits_to_the_sender() -> None:
    """As predicted in test_predicted.py, up to a message that was sent before it was asked for."""
    timeline = as_if_measured(predicted_timeline(simulated()))
    assert path(timeline) == (
        "0F0@0-1 0SF0>2@1-2 2F0@2-3 2B0@3-5 2SB0>1@5-7 1B0@7-9 1RB1<2@9-10 1B1@10-12"
    )
    assert sum(path_shares(timeline).values()) == 1.0
    assert path_shares(timeline)["communication"] == 4 / 12


def test_transfers_last_from_send_to_receive() -> None:
    timeline = as_if_measured(predicted_timeline(simulated()))
    found = {t.action: (t.start_s, t.end_s, t.channels, t.ranks) for t in timeline.transfers}
    assert found["2SB0>1"] == (5.0, 7.0, ("rank 2 → 1",), (2, 1))
    assert len(found) == 8


def test_a_sum_waits_for_its_last_rank() -> None:
    # rank 1 comes last to the sum: the path goes on with what it did before
    spans = (
        Span(0, SpanKind.BACKWARD, 0.0, 1.0, "0B0"),
        Span(0, SpanKind.WAIT, 1.0, 3.0, "0R0"),
        Span(0, SpanKind.REDUCE, 3.0, 4.0, "0R0"),
        Span(0, SpanKind.OPTIMIZER, 4.0, 5.0),
        Span(1, SpanKind.BACKWARD, 0.5, 3.0, "1B0"),
        Span(1, SpanKind.REDUCE, 3.0, 4.0, "1R0"),
    )
    stages = (TimelineStage(0, 0), TimelineStage(1, 1))
    timeline = with_inferred_path(Timeline("measured", 5.0, (0, 1), "1f1b", stages, spans))
    assert path(timeline) == "1B0@0.5-3 0R0@3-4 optimizer@4-5"
    (total,) = timeline.transfers
    assert (total.kind, total.start_s, total.end_s) == (TransferKind.SUM, 3.0, 4.0)
    assert total.ranks == (0, 1)
    assert path_shares(timeline)["idle"] == 0.1


def test_the_end_of_a_mini_batch_comes_from_rank_0() -> None:
    spans = (
        Span(0, SpanKind.BACKWARD, 0.0, 2.0, "0B0"),
        Span(0, SpanKind.FINISH, 2.0, 2.5),
        Span(1, SpanKind.BACKWARD, 0.0, 1.0, "1B0"),
        Span(1, SpanKind.WAIT, 1.0, 2.0),
        Span(1, SpanKind.FINISH, 2.0, 3.0),
    )
    stages = (TimelineStage(0, 0), TimelineStage(1, 1))
    timeline = with_inferred_path(Timeline("measured", 3.0, (0, 1), "1f1b", stages, spans))
    assert path(timeline) == "0B0@0-2 finish@2-3"
    assert not timeline.transfers


def test_replicas() -> None:
    simulation = simulated(edges="0>1", num_stages=2, devices=[(0, 1), 2], buckets=[Bucket(0, 4.0)])
    predicted = predicted_timeline(simulation)
    measured = as_if_measured(predicted)
    assert times(measured) == times(predicted)
    assert path(measured).endswith("1B0@9-11 1R0@11-15")


def test_the_walk_goes_through_the_users_step() -> None:
    simulation = simulated("0>1", 2, schedule="gpipe", step=StepCosts(turn_s=0.5))
    predicted = predicted_timeline(simulation)
    assert path(as_if_measured(predicted)) == path(predicted)


def test_a_rank_that_is_told_late_waited_for_the_users_step() -> None:
    spans = (
        Span(0, SpanKind.FORWARD, 0.0, 2.0, "1F0"),
        Span(0, SpanKind.LOSS, 2.0, 3.0),
        Span(0, SpanKind.BACKWARD, 3.0, 3.5, "1B0"),
        Span(0, SpanKind.SEND, 3.5, 3.75, "1SB0>0"),
        Span(1, SpanKind.FORWARD, 0.0, 1.0, "0F0"),
        Span(1, SpanKind.WAIT, 1.0, 4.0),
        Span(1, SpanKind.RECEIVE, 4.0, 5.0, "0RB0<1"),
        Span(1, SpanKind.BACKWARD, 5.0, 7.0, "0B0"),
    )
    stages = (TimelineStage(0, 1), TimelineStage(1, 0))
    timeline = with_inferred_path(Timeline("measured", 7.0, (1, 0), "gpipe", stages, spans))
    assert path(timeline) == "1F0@0-2 loss@2-3 0RB0<1@4-5 0B0@5-7"


def test_waits_for_the_step_are_not_waits_for_the_end() -> None:
    spans = (
        Span(0, SpanKind.FORWARD, 0.0, 2.0, "1F0"),
        Span(0, SpanKind.LOSS, 2.0, 3.0),
        Span(0, SpanKind.BACKWARD, 3.0, 8.0, "1B0"),
        Span(0, SpanKind.FINISH, 8.0, 8.5),
        Span(1, SpanKind.FORWARD, 0.0, 1.0, "0F0"),
        Span(1, SpanKind.WAIT, 1.0, 3.0),
        Span(1, SpanKind.BACKWARD, 3.0, 4.0, "0B0"),
        Span(1, SpanKind.WAIT, 4.0, 8.0),
        Span(1, SpanKind.FINISH, 8.0, 9.0),
    )
    stages = (TimelineStage(0, 1), TimelineStage(1, 0))
    timeline = with_inferred_path(Timeline("measured", 9.0, (1, 0), "gpipe", stages, spans))
    assert path(timeline) == "1F0@0-2 loss@2-3 1B0@3-8 finish@8-9"
