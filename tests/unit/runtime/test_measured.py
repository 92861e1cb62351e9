"""From the records of ranks to a timeline: a step in two parts with the user's between them."""

from __future__ import annotations

from lightning_gpp.runtime.action_record import ActionRecord
from lightning_gpp.runtime.measured import (
    ClockOffset,
    Mark,
    RankRecord,
    RunRecord,
    measured_timeline,
)
from lightning_gpp.schedule import Action
from lightning_gpp.simulate import SpanKind, Timeline, TimelineStage

MS = 1_000_000


def record(text: str, start_ms: int, end_ms: int) -> ActionRecord:
    action = Action.parse(text)
    size_bytes = None if action.kind.is_compute else 8
    return ActionRecord(action, start_ms * MS, end_ms * MS, size_bytes)


def mark(kind: SpanKind, start_ms: int, end_ms: int, minibatch: int = 0) -> Mark:
    return Mark(kind, start_ms * MS, end_ms * MS, minibatch)


# rank 0 has the loss and stage 1, rank 1 has stage 0
#
# ms       0    2    3         5    6    8         10   11
# rank 0   |recv     |1F0      |loss     |1B0      |send|finish
# rank 1   |0F0 |send|wait             |receive         |0B0, finish
LEADER = (
    (record("1RF0<0", 0, 3), record("1F0", 3, 5)),
    (record("1B0", 8, 10), record("1SB0>0", 10, 11)),
)
FOLLOWER = (
    (record("0F0", 0, 2), record("0SF0>1", 2, 3)),
    (record("0RB0<1", 7, 11), record("0B0", 11, 13)),
)


def run_of(parts: tuple[tuple[ActionRecord, ...], ...]) -> RunRecord:
    first, second = parts
    return RunRecord((*first, *second), second[-1].end_ns)


def timeline_of(*ranks: RankRecord) -> Timeline:
    return measured_timeline(
        ranks,
        [ClockOffset(0, 0)] * len(ranks),
        step=3,
        rank_of_device=(1, 0),
        schedule="gpipe",
        stages=(TimelineStage(0, 1), TimelineStage(1, 0)),
    )


def rows(timeline: Timeline) -> list[str]:
    return [
        " ".join(
            f"{span.kind.value}@{span.start_s * 1e3:g}-{span.end_s * 1e3:g}"
            for span in timeline.of_rank(rank)
            if span.duration_s
        )
        for rank in range(timeline.num_ranks)
    ]


def step() -> Timeline:
    return timeline_of(
        RankRecord((run_of(LEADER),), (mark(SpanKind.LOSS, 5, 8), mark(SpanKind.FINISH, 11, 14))),
        RankRecord((run_of(FOLLOWER),), (mark(SpanKind.WAIT, 3, 7), mark(SpanKind.FINISH, 13, 15))),
    )


def test_the_users_step_is_between_the_parts_on_the_rank_of_the_loss() -> None:
    assert rows(step()) == [
        "wait@0-2 receive@2-3 forward@3-5 loss@5-8 backward@8-10 send@10-11 finish@11-14",
        "forward@0-2 send@2-3 wait@3-7 wait@7-10 receive@10-11 backward@11-13 finish@13-15",
    ]
    assert [span.action for span in step().spans if span.kind is SpanKind.LOSS] == [None]


def test_the_critical_path_goes_through_it() -> None:
    found = [segment.item.name for segment in step().path_segments if segment.duration_s]
    assert found == ["0F0", "0SF0>1", "1F0", "loss", "1B0", "1SB0>0", "0B0", "finish"]


def test_marks_are_of_their_mini_batch() -> None:
    """Two calls of the forward, whose backwards come the other way round."""
    marks = (mark(SpanKind.LOSS, 5, 6, 0), mark(SpanKind.LOSS, 7, 8, 1))
    ends = (mark(SpanKind.FINISH, 11, 12, 1), mark(SpanKind.FINISH, 13, 14, 0))
    runs = (RunRecord((record("1F0", 3, 5),), 5 * MS), RunRecord((record("1F0", 6, 7),), 7 * MS))
    timeline = timeline_of(RankRecord(runs, marks + ends))
    found = [(s.kind, s.minibatch) for s in timeline.spans if s.action is None and s.duration_s]
    assert found == [
        (SpanKind.LOSS, 0),
        (SpanKind.LOSS, 1),
        (SpanKind.FINISH, 1),
        (SpanKind.FINISH, 0),
    ]
