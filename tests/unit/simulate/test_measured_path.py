"""What spans alone tell: transfers, and the critical path."""

from __future__ import annotations

from helpers.steps import as_if_measured, simulated

from lightning_gpp.simulate import (
    Span,
    SpanKind,
    StepCosts,
    Timeline,
    TimelineStage,
    predicted_timeline,
)
from lightning_gpp.simulate.timeline.measured_path import with_inferred_path
from lightning_gpp.simulate.timeline.shares import path_shares
from lightning_gpp.simulate.timeline.span import TransferKind


def path(timeline: Timeline) -> str:
    return " ".join(
        f"{segment.item.name}@{segment.start_s:g}-{segment.end_s:g}"
        for segment in timeline.path_segments
        if segment.duration_s
    )


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


def test_the_walk_goes_through_the_users_step() -> None:
    simulation = simulated("0>1", 2, schedule="gpipe", step=StepCosts(turn_s=0.5))
    predicted = predicted_timeline(simulation)
    assert path(as_if_measured(predicted)) == path(predicted)
