"""Windows of a pipeline that does not drain, recorded in threads and laid beside simulated ones."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from helpers.stage_dags import ToyBoundary, ToyStages
from helpers.threads.transport import ThreadHub

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.reports.step.page import page_data
from lightning_gpp.reports.step.picture import timeline_figure
from lightning_gpp.reports.step.texts import subtitle, versions_text
from lightning_gpp.reports.step.trace import trace_events
from lightning_gpp.reports.step.write_step import write_step
from lightning_gpp.runtime.clock import ClockOffset
from lightning_gpp.runtime.executor import Executor
from lightning_gpp.runtime.measured import RankRecord, WindowRecord, measured_timeline
from lightning_gpp.runtime.run_state import RunState
from lightning_gpp.schedule import ONE_F_ONE_B_ASYNC, Program, Windows, build_program, most_ahead
from lightning_gpp.schedule.windows import version_differences
from lightning_gpp.simulate import (
    MessageBytes,
    ProgramCosts,
    SpanKind,
    StageCosts,
    Timeline,
    TimelineStage,
    predicted_timeline,
    simulate,
)
from lightning_gpp.simulate.refit.recorded import timeline_actions
from lightning_gpp.simulate.timeline.windows import pace_s, windows_of
from lightning_gpp.strategy.recording.recorder import StepRecorder

#          1
# 0 ------>  >-- 3     the loss is stage 3's
#          2
DIAMOND = StageGraph(
    4,
    (
        StageEdge(FEED, 0, ("x",), has_backward=False),
        *(StageEdge(a, b, (f"v{a}",)) for a, b in [(0, 1), (0, 2), (1, 3), (2, 3)]),
    ),
)
COUNT = 12


def program(count: int) -> Program:
    return build_program(
        DIAMOND,
        devices=range(4),
        num_microbatches=count,
        schedule=ONE_F_ONE_B_ASYNC,
    )


def recorded(chosen: Sequence[int], drops_after: int | None = None) -> list[RankRecord]:
    """What the ranks recorded of the windows with some numbers."""
    hub, errors = ThreadHub(4), list[BaseException]()
    records = [RankRecord((), ())] * 4
    x = torch.ones(2 * COUNT, 3).double()
    boundary, toy = ToyBoundary(x, [2] * COUNT, "v3"), ToyStages(DIAMOND)

    def work(rank: int) -> None:
        recorder, state, since = StepRecorder(torch.device("cpu")), RunState(), 0
        executor = Executor(
            hub.transport(rank),
            range(4),
            {rank: toy.code(rank)},
            output_names=("v3",),
            timeout_s=20,
        )
        windows = Windows(program, most_ahead(DIAMOND))
        try:
            for number in range(COUNT):
                window = windows.window(since, COUNT - 1 - number)
                run = executor.begin(
                    window.program,
                    [2] * window.program.num_microbatches,
                    training=True,
                    boundary=boundary if rank == 3 else None,
                    state=state,
                    shift=number - window.number,
                )
                if number == chosen[0]:
                    recorder.start()
                found = WindowRecord(since, min(COUNT - 1 - number, 2), updates=100 + number)
                with recorder.window(run, window.number, found):
                    run.window(window.number)
                recorder.begin(SpanKind.OPTIMIZER)
                recorder.end()
                if number == chosen[-1]:
                    records[rank] = recorder.stop()
                since += 1
                if number == drops_after:
                    run.drop_ahead(window.number)
                    since = 0
        except BaseException as error:
            errors.append(error)
            for mailbox in hub.mailboxes:
                mailbox.waits.abort(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return records


def measured(records: Sequence[RankRecord], step: int) -> Timeline:
    return measured_timeline(
        records,
        [ClockOffset(0, 0)] * 4,
        step=step,
        rank_of_device=range(4),
        schedule=ONE_F_ONE_B_ASYNC.name,
        stages=tuple(TimelineStage(stage, stage) for stage in range(4)),
    )


SIZES = {(edge.source, edge.target): MessageBytes(1.0) for edge in DIAMOND.edges}
COSTS = ProgramCosts(
    uniform_cluster(4, Link(10.0)),
    (StageCosts(1.0, 2.0, activation_bytes=1.0),) * 4,
    SIZES,
    SIZES,
)


def predicted(windows: range, count: int = COUNT) -> Timeline:
    whole = program(count)
    found = predicted_timeline(simulate(whole, COSTS))
    return windows_of(found, whole, windows, updates=[100 + number for number in windows])


def actions(timeline: Timeline) -> list[list[str | None]]:
    return [
        [action for action, _ in groupby(spans, key=lambda span: span.action)]
        for spans in timeline_actions(timeline)
    ]


def seen(timeline: Timeline) -> dict[str | None, int | None]:
    """Action -> updates before it."""
    return {span.action: span.updates for span in timeline.spans if span.updates is not None}


@pytest.mark.parametrize("chosen", [range(3), range(4, 5), range(4, 9), range(8, 12)], ids=str)
def test_they_are_the_windows_of_the_program(chosen: range) -> None:
    """While the pipeline fills, is full, and drains."""
    timeline = measured(recorded(chosen), chosen.start)
    expected = predicted(chosen)
    assert actions(timeline) == actions(expected)
    assert timeline.num_minibatches == expected.num_minibatches == len(chosen)
    assert seen(timeline) == seen(expected)


def test_forwards_have_seen_as_many_updates_less_as_the_schedule_says() -> None:
    timeline = measured(recorded(range(3, 10)), 3)
    found = seen(timeline)
    differences = version_differences(Windows(program, 2).window(5, 2))
    assert differences == {0: 2, 1: 1, 2: 1, 3: 0}
    for stage, difference in differences.items():
        for number in range(difference, 7):  # both are in it
            forward, backward = found[f"{stage}F{number}"], found[f"{stage}B{number}"]
            assert forward is not None and backward is not None
            assert backward == 103 + number and backward - forward == difference


def test_a_recording_ends_where_the_pipeline_fills_anew() -> None:
    records = recorded(range(3, 9), drops_after=5)
    assert [[run.window.updates for run in r.runs if run.window] for r in records] == [
        [103, 104, 105]
    ] * 4
    for record in records:
        assert [mark.minibatch for mark in record.marks] == [0, 0, 1, 1, 2, 2]
    row = actions(measured(records, 3))[0]
    assert [action for action in row if action and action[1] in "FB"] == (
        ["0F2", "0B0", "0F3", "0B1", "0F4", "0B2"]
    )


def test_what_is_shown_says_which_weights_a_forward_used() -> None:
    """Stage 0 is two updates behind its backward, the last stage none."""
    timeline = replace(predicted(range(4, 8)), weights="pipeoptim")
    axes = timeline_figure(timeline).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("104→106") == 1  # the forward of 2 in stage 0
    assert texts.count("105→106") == 2  # that in stages 1 and 2
    assert texts.count("107") == 4 + 4  # the last forwards and backwards of four stages
    assert "weights pipeoptim" in subtitle(timeline) and versions_text(timeline)
    assert not versions_text(predicted_timeline(simulate(program(1), COSTS)))
    page = page_data([timeline])
    assert "forward, 104 updates before it, 106 before its backward" in page["texts"]
    assert "forward, 107 updates before it" in page["texts"]


def test_messages_from_outside_are_no_pairs(tmp_path) -> None:
    """Picture, page and trace are written all the same."""
    timeline = measured(recorded(range(4, 8)), 4)
    names = {(sent.action, received.action) for sent, received in timeline.messages()}
    assert ("0SF3>1", "1RF3<0") in names
    assert ("0SF1>1", "1RF1<0") not in names  # sent in window 3
    assert "1RF1<0" in actions(timeline)[1]
    assert len(timeline.transfers) == len(names)
    assert list(trace_events(timeline))
    files = write_step([predicted(range(4, 8)), timeline], tmp_path)
    assert sorted(path.name for path in files) == ["timeline.html", "timeline.png", "trace.json"]


def test_simulated_windows_by_hand() -> None:
    """The pace of a full pipeline is that of its busiest stage, a forward and a backward."""
    one, two = predicted(range(6, 7), 20), predicted(range(6, 8), 20)
    assert two.step_s - one.step_s == pytest.approx(3.0, rel=0.1)
    assert pace_s(one) is None
    assert pace_s(predicted(range(6, 12), 20)) == pytest.approx(3.0, rel=0.1)
    row = [s.action for s in one.of_rank(0) if s.action and s.parsed.kind.is_compute]
    assert row == ["0F2", "0B0"]
    assert one.memory[0].used_bytes[0] == 3.0 and one.memory[0].times_s[0] == 0.0
    assert one.critical_path
