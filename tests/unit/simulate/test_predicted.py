"""Simulated steps as timelines: by hand, and against what the simulation says."""

from __future__ import annotations

from helpers.steps import simulated

from lightning_gpp.cluster import Link
from lightning_gpp.simulate import (
    Bucket,
    Overhead,
    SpanKind,
    StepCosts,
    Timeline,
    predicted_timeline,
)
from lightning_gpp.simulate.timeline.transfer import TransferKind

# Forwards 1 s, backwards 2 s, messages 1 s. Both branches feed stage 2, which sends two gradients,
# one after the other through its port.
#
# seconds  0    1    2    3    4    5    6    7    8    9    10   11   12
# rank 0   |0F0 |0F1 |     wait     |recv|0B0      |recv|0B1      |
# rank 1   |1F0 |1F1 |     wait     |  receive |1B0      |recv|1B1      |
# rank 2   |wait|recv|2F0 |2B0      |2F1 |2B1      |
# path     |0F0 |>2  |2F0 |2B0      |2F1 |2B1      |2>0 |2>1 |1B1      |


def rows(timeline: Timeline) -> list[str]:
    return [
        " ".join(
            f"{span.kind.value if span.kind is SpanKind.WAIT else span.name}"
            f"@{span.start_s:g}-{span.end_s:g}"
            for span in timeline.of_rank(rank)
            if span.duration_s
        )
        for rank in range(timeline.num_ranks)
    ]


def path(timeline: Timeline) -> str:
    return " ".join(
        f"{segment.item.name}@{segment.start_s:g}-{segment.end_s:g}"
        for segment in timeline.path_segments
        if segment.duration_s
    )


def test_two_branches_by_hand() -> None:
    timeline = predicted_timeline(simulated())
    assert (timeline.source, timeline.step, timeline.step_s) == ("predicted", None, 12.0)
    assert rows(timeline) == [
        "0F0@0-1 0F1@1-2 wait@2-5 0RB0<2@5-6 0B0@6-8 0RB1<2@8-9 0B1@9-11",
        "1F0@0-1 1F1@1-2 wait@2-5 1RB0<2@5-7 1B0@7-9 1RB1<2@9-10 1B1@10-12",
        "wait@0-1 2RF0<0@1-2 2F0@2-3 2B0@3-5 2F1@5-6 2B1@6-8",
    ]
    assert path(timeline) == (
        "0F0@0-1 0SF0>2@1-2 2F0@2-3 2B0@3-5 2F1@5-6 2B1@6-8 2SB1>0@8-9 2SB1>1@9-10 1B1@10-12"
    )


def test_messages_are_transfers_on_their_channels() -> None:
    timeline = predicted_timeline(simulated())
    found = {t.action: (t.start_s, t.end_s, t.channels, t.ranks) for t in timeline.transfers}
    assert len(found) == len(timeline.transfers) == 8
    assert found["2SB1>1"] == (9.0, 10.0, ("gpu2 out",), (2, 1))
    assert {t.kind for t in timeline.transfers} == {TransferKind.MESSAGE}
    assert {t.size_bytes for t in timeline.transfers} == {1}


def test_memory_has_the_limits_of_the_devices() -> None:
    timeline = predicted_timeline(simulated())
    assert [curve.peak_bytes for curve in timeline.memory] == [5.0, 5.0, 4.0]
    assert [curve.limit_bytes for curve in timeline.memory] == [8, 8, 8]
    assert timeline.memory[0].times_s[:2] == (0.0, 0.0)


def test_what_is_around_the_program() -> None:
    step = StepCosts(
        data_s=1.0,
        input_bytes=2.0,
        host_link=Link(2.0),
        prepare_s=0.5,
        feed_s=0.5,
        loss_s=0.25,
        finish_s={0: 1.0, 1: 0.5},
        optimizer_s={0: 0.25, 1: 0.5},
        send=Overhead(0.125),
        receive=Overhead(0.25),
    )
    simulation = simulated(edges="0>1", num_stages=2, num_microbatches=1, step=step)
    assert rows(predicted_timeline(simulation)) == [
        "0F0@0-1 0SF0>1@1-1.125 wait@1.125-6.25 0RB0<1@6.25-7.625 0B0@7.625-9.625 "
        "finish@9.625-10.625 optimizer@10.625-10.875",
        "data@0-1 data@1-2 prepare@2-2.5 -1F0@2.5-3 1RF0<0@3-3.25 1F0@3.25-4 1F0@4-4.25 "
        "1B0@4.25-6.25 1SB0>0@6.25-6.375 finish@6.375-6.875 optimizer@6.875-7.375",
    ]


def test_the_result_is_waited_for() -> None:
    simulation = simulated(
        "0>3 1>3 2>3",
        4,
        devices=[0, 1, 1, 1],
        num_microbatches=1,
        step=StepCosts(finish_s={0: 1.0, 1: 2.0}),
    )
    timeline = predicted_timeline(simulation)
    assert rows(timeline)[0].endswith("0B0@6-8 wait@8-9 finish@9-10")
    assert path(timeline).endswith("3B0@3-5 2B0@5-7 1B0@7-9 finish@9-11")


def test_what_the_interpreter_takes_is_idle() -> None:
    simulation = simulated(step=StepCosts(action_s=0.5))
    timeline = predicted_timeline(simulation)
    assert timeline.step_s == simulation.step_s > 12.0
    assert rows(timeline)[0].startswith("0F0@0-1 0F1@2-3")
    assert sum(segment.duration_s for segment in timeline.path_segments) < timeline.step_s - 0.5


def test_sums_of_replicas_are_waited_for_at_the_end() -> None:
    # stage 0 on devices 0 and 1, a sum takes 2 (d - 1) rounds of 4 / 2 bytes: 4 s
    simulation = simulated(edges="0>1", num_stages=2, devices=[(0, 1), 2], buckets=[Bucket(0, 4.0)])
    timeline = predicted_timeline(simulation)
    (total,) = (t for t in timeline.transfers if t.kind is TransferKind.SUM)
    assert total.ranks == (0, 1) and total.duration_s == 4.0
    for rank in (0, 1):
        *_, last = timeline.of_rank(rank)
        assert (last.kind, last.start_s, last.end_s) == (
            SpanKind.REDUCE,
            total.start_s,
            total.end_s,
        )
    first = timeline.of_rank(0)[-2]  # came first: waits for the other replica
    assert (first.kind, first.end_s) == (SpanKind.WAIT, total.start_s)
    assert path(timeline).endswith(f"{total.name}@{total.start_s:g}-{total.end_s:g}")


def test_ranks_need_not_be_devices() -> None:
    simulation = simulated()
    timeline = predicted_timeline(simulation, rank_of_device=(2, 0, 1))
    assert timeline.devices == (1, 2, 0)
    assert rows(timeline) == [rows(predicted_timeline(simulation))[d] for d in (1, 2, 0)]
    assert [stage.rank for stage in timeline.stages] == [2, 0, 1]


def test_the_users_step_is_between_the_parts() -> None:
    simulation = simulated("0>1", 2, schedule="gpipe", step=StepCosts(turn_s=0.5))
    timeline = predicted_timeline(simulation)
    assert rows(timeline) == [
        "0F0@0-1 0F1@1-2 wait@2-6.5 0RB0<1@6.5-7.5 0B0@7.5-9.5 0B1@9.5-11.5",
        "wait@0-1 1RF0<0@1-2 1F0@2-3 1F1@3-4 loss@4-4.5 1B0@4.5-6.5 1B1@6.5-8.5",
    ]
    assert path(timeline) == (
        "0F0@0-1 0SF0>1@1-2 1F0@2-3 1F1@3-4 loss@4-4.5 1B0@4.5-6.5 1SB0>0@6.5-7.5 "
        "0B0@7.5-9.5 0B1@9.5-11.5"
    )
