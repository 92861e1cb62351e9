"""Timelines of a few literal spans: their shares, their JSON form, their pictures, their traces."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from helpers.steps import predicted_and_measured, simulated

from lightning_gpp.reports.step.paint import path_pieces
from lightning_gpp.reports.step.picture import timeline_figure, write_picture
from lightning_gpp.reports.step.texts import title
from lightning_gpp.reports.step.trace import trace_events, write_trace
from lightning_gpp.reports.step.write_step import write_step
from lightning_gpp.simulate import (
    Bucket,
    Span,
    SpanKind,
    Timeline,
    TimelineStage,
    predicted_timeline,
    shares,
)
from lightning_gpp.simulate.timeline.transfer import Transfer, TransferKind
from lightning_gpp.simulate.timeline.words import action_words

# seconds  0         1         2         3         4         5         6         7         8
# rank 0   |-1F0     |s        |   wait 1F0's input          |r|1F0    |1B0      |s|       opt|
# rank 1             |  wait   |r| 0F0               |s      |    wait           |r| 0B0   |
SPANS = (
    Span(0, SpanKind.FEED, 0.0, 1.0, "-1F0"),
    Span(0, SpanKind.SEND, 1.0, 2.0, "-1SF0>0", 64),
    Span(0, SpanKind.WAIT, 2.0, 4.0, "1RF0<0"),
    Span(0, SpanKind.RECEIVE, 4.0, 4.25, "1RF0<0", 32),
    Span(0, SpanKind.FORWARD, 4.25, 5.0, "1F0"),
    Span(0, SpanKind.LOSS, 5.0, 5.5, "1F0"),
    Span(0, SpanKind.BACKWARD, 5.5, 6.0, "1B0"),
    Span(0, SpanKind.SEND, 6.0, 6.25, "1SB0>0", 32),
    Span(0, SpanKind.OPTIMIZER, 7.5, 8.0),
    Span(1, SpanKind.WAIT, 0.5, 1.0, "0RF0<-1"),
    Span(1, SpanKind.RECEIVE, 1.0, 2.0, "0RF0<-1", 64),
    Span(1, SpanKind.FORWARD, 2.0, 4.0, "0F0"),
    Span(1, SpanKind.SEND, 4.0, 4.0, "0SF0>1", 32),
    Span(1, SpanKind.WAIT, 4.0, 6.0, "0RB0<1"),
    Span(1, SpanKind.RECEIVE, 6.0, 6.5, "0RB0<1", 32),
    Span(1, SpanKind.BACKWARD, 6.5, 7.5, "0B0"),
)
STAGES = (
    TimelineStage(0, 1, "tower (3)", ("tower_0", "tower_1", "tower_2")),
    TimelineStage(1, 0, "head", ("head",)),
)


def timeline(spans: tuple[Span, ...] = SPANS, **changes: object) -> Timeline:
    fields = {"source": "measured", "step_s": 8.0, "devices": (1, 0), "schedule": "1f1b"}
    return Timeline(**(fields | {"stages": STAGES, "spans": spans, "step": 3} | changes))  # type: ignore[arg-type]


def message(start_s: float, end_s: float, target: int) -> Transfer:
    return Transfer(TransferKind.MESSAGE, start_s, end_s, ("link",), (0, target), "0SF0>1")


class TestShares:
    def test_by_hand(self) -> None:
        first, second = shares(timeline()).ranks
        parts = {"forward": 2.25, "backward": 0.5, "communication": 1.5, "wait": 2.0, "other": 0.5}
        assert first.seconds == parts | {"idle": 8 - sum(parts.values())}
        parts = {"forward": 2.0, "backward": 1.0, "communication": 1.5, "wait": 2.5, "other": 0.0}
        assert second.seconds == parts | {"idle": 1.0}
        assert (first.bubble_s, second.bubble_s) == (5.25, 5.0)
        assert shares(timeline()).bubble_share == 10.25 / 16

    def test_parts_of_a_rank_add_up(self) -> None:
        for rank in shares(timeline()).ranks:
            assert sum(rank.by_category().values()) == pytest.approx(1.0)

    def test_names_in_loggers(self) -> None:
        metrics = shares(timeline()).metrics()
        assert metrics["timeline/bubble_share"] == 10.25 / 16
        assert metrics["timeline/rank1/forward_share"] == 0.25
        assert metrics["timeline/step_s"] == 8.0
        assert len(metrics) == 2 + 2 * 7


class TestTimeline:
    def test_messages_are_joined(self) -> None:
        pairs = [(sent.action, received.action) for sent, received in timeline().messages()]
        assert pairs == [("-1SF0>0", "0RF0<-1"), ("0SF0>1", "1RF0<0"), ("1SB0>0", "0RB0<1")]

    def test_a_span_does_not_end_before_it_starts(self) -> None:
        with pytest.raises(ValueError, match=r"2F0 goes from 2\.0 s to 1\.0 s"):
            Span(0, SpanKind.FORWARD, 2.0, 1.0, "2F0")


class TestTrace:
    @pytest.fixture
    def trace(self, tmp_path: Path) -> dict:
        write_trace([timeline()], tmp_path / "trace.json")
        return json.loads((tmp_path / "trace.json").read_text())

    def test_events_have_what_the_format_asks_for(self, trace: dict) -> None:
        assert trace["displayTimeUnit"] == "ms"
        required = {
            "M": {"name", "pid", "tid", "args"},
            "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
            "s": {"name", "cat", "id", "pid", "tid", "ts"},
            "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
        }
        for event in trace["traceEvents"]:
            assert required[event["ph"]] <= event.keys()
            assert all(isinstance(event[key], int) for key in ("pid", "tid"))
            assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0

    def test_process_and_threads_are_named(self, trace: dict) -> None:
        names = {
            (event["name"], event["tid"]): event["args"].get("name")
            for event in trace["traceEvents"]
            if event["ph"] == "M"
        }
        assert names["process_name", 0] == "measured"
        assert names["thread_name", 0] == "rank 0 · stage 1"
        assert names["thread_name", 1] == "rank 1 · stage 0"

    def test_spans_are_in_microseconds_with_arguments(self, trace: dict) -> None:
        (event,) = (
            event for event in trace["traceEvents"] if event["name"] == "forward 0 of stage 0"
        )
        assert (event["ts"], event["dur"], event["tid"]) == (2e6, 2e6, 1)
        assert event["cat"] == "forward"
        assert event["args"]["operators"] == "tower_0, tower_1, tower_2"
        assert event["args"]["microbatch"] == 0
        sent = next(
            event for event in trace["traceEvents"] if event["name"] == "send inputs 0 to stage 0"
        )
        assert sent["args"]["bytes"] == 64
        assert len([event for event in trace["traceEvents"] if event["ph"] == "X"]) == len(SPANS)

    def test_arrows_lie_in_the_spans_of_their_ends(self, trace: dict) -> None:
        slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        flows = [event for event in trace["traceEvents"] if event["ph"] in "sf"]
        assert [flow["ph"] for flow in flows] == ["s", "f"] * 3
        for flow in flows:
            ends = {"s": "send", "f": "receive"}[flow["ph"]]
            assert any(
                s["tid"] == flow["tid"]
                and s["ts"] <= flow["ts"] <= s["ts"] + s["dur"]
                and ends in s["name"]
                for s in slices
            )


class TestTraceOfTwo:
    """Predicted and measured as two processes, each with its links, critical path and memory."""

    @pytest.fixture
    def events(self, tmp_path: Path) -> list[dict]:
        write_trace(predicted_and_measured(), tmp_path / "trace.json")
        return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    def test_events_have_what_the_format_asks_for(self, events: list[dict]) -> None:
        required = {
            "M": {"name", "pid", "tid", "args"},
            "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
            "s": {"name", "cat", "id", "pid", "tid", "ts"},
            "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
            "C": {"name", "pid", "tid", "ts", "args"},
        }
        assert {event["ph"] for event in events} == set(required)
        for event in events:
            assert required[event["ph"]] <= event.keys()
            assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0

    def test_threads(self, events: list[dict]) -> None:
        names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
        for pid, link in ((0, "link gpu2 out"), (1, "link rank 2 → 0")):
            assert {(pid, "rank 0 · stage 0"), (pid, link), (pid, "critical path")} <= names
        processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
        assert processes == ["predicted", "measured"]

    def test_slices_of_a_thread_do_not_overlap(self, events: list[dict]) -> None:
        """Perfetto refuses slices that overlap without one being inside the other."""
        threads: dict = {}
        for event in events:
            if event["ph"] == "X":
                threads.setdefault((event["pid"], event["tid"]), []).append(event)
        for slices in threads.values():
            slices.sort(key=lambda event: (event["ts"], event["dur"]))
            for one, other in zip(slices, slices[1:]):
                assert one["ts"] + one["dur"] <= other["ts"] + 1e-3

    def test_memory_is_a_counter(self, events: list[dict]) -> None:
        counters = [e for e in events if e["ph"] == "C" and e["name"] == "memory of rank 0"]
        assert [e["pid"] for e in counters] == [0] * len(counters)
        assert max(e["args"]["bytes"] for e in counters) == 5.0

    def test_what_is_critical_says_so(self, events: list[dict]) -> None:
        found = {
            e["name"]
            for e in events
            if e["ph"] == "X" and e["pid"] == 0 and e["args"].get("critical")
        }
        actions = ["0F0", "0SF0>2", "2F0", "2B0", "2F1", "2B1", "2SB1>0", "2SB1>1", "1B1"]
        stages = predicted_and_measured()[0].stages
        assert found == {action_words(action, stages) for action in actions}


class TestEverything:
    def test_files(self, tmp_path: Path) -> None:
        written = write_step(predicted_and_measured(), tmp_path, suffix="-step3")
        names = ["timeline-step3.png", "timeline-step3.html", "trace-step3.json"]
        assert [path.name for path in written] == names
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
        assert not write_step(
            predicted_and_measured(), tmp_path, picture=False, page=False, trace=False
        )

    def test_predictions_of_several_worlds_have_names(self) -> None:
        as_it_is = predicted_timeline(simulated(), name="as it is")
        assert title(as_it_is).startswith("Predicted step (as it is): 12000 ms, bubble")
        processes = [e for e in trace_events(as_it_is) if e["name"] == "process_name"]
        assert processes[0]["args"]["name"] == "predicted, as it is"


class TestPicture:
    def test_file_is_a_png_of_the_figure(self, tmp_path: Path) -> None:
        write_picture(timeline(), tmp_path / "timeline.png")
        data = (tmp_path / "timeline.png").read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        figure = timeline_figure(timeline())
        expected = tuple(int(inches * figure.dpi) for inches in figure.get_size_inches())
        assert struct.unpack(">2I", data[16:24]) == expected

    def test_bars_are_where_the_spans_are(self) -> None:
        (axes,) = timeline_figure(timeline()).axes
        bars = {c.get_gid(): c for c in axes.collections if c.get_gid() is not None}
        assert ranges(bars["forward/1/0"]) == [(2000.0, 4000.0)]
        assert ranges(bars["backward/1/0"]) == [(6500.0, 7500.0)]
        assert ranges(bars["wait/0/row"]) == [(2000.0, 4000.0)]
        assert ranges(bars["communication/1/row"]) == [
            (1000.0, 2000.0),
            (4000.0, 4000.0),
            (6000.0, 6500.0),
        ]
        assert axes.get_xlim() == (0, 8000.0)

    def test_numbers_only_where_they_fit(self) -> None:
        (axes,) = timeline_figure(timeline()).axes
        assert [t.get_text() for t in axes.texts].count("0") == 4
        tiny = tuple(
            Span(1, SpanKind.FORWARD, 0.01 * i, 0.01 * i + 0.005, f"0F{i}") for i in range(9)
        )
        (axes,) = timeline_figure(timeline(tiny)).axes
        assert not {str(i) for i in range(9)} & {t.get_text() for t in axes.texts}

    def test_stages_of_a_rank_have_lanes_of_their_own(self) -> None:
        both = (Span(0, SpanKind.FORWARD, 0, 1, "0F0"), Span(0, SpanKind.FORWARD, 1, 2, "1F0"))
        stages = (TimelineStage(0, 0), TimelineStage(1, 0))
        (axes,) = timeline_figure(timeline(both, stages=stages)).axes
        tops = [c.get_paths()[0].vertices[:, 1].min() for c in axes.collections if c.get_gid()]
        heights = [c.get_paths()[0].vertices[:, 1].max() for c in axes.collections if c.get_gid()]
        assert heights[0] <= tops[1]

    def test_predicted_over_measured_on_one_axis(self) -> None:
        figure = timeline_figure(predicted_and_measured())
        steps, memory = figure.axes[:2], figure.axes[2:]
        assert {axes.get_xlim() for axes in figure.axes} == {(0, 12000.0)}
        assert steps[0].get_position().y0 > steps[1].get_position().y1 > memory[0].get_position().y1
        titles = [text.get_text() for text in figure.texts if text.get_weight() == "bold"]
        assert titles[0].startswith("Predicted step: 12000 ms (0 % more than measured), bubble")
        assert titles[1].startswith("Measured step 3: 12000 ms, bubble")
        assert len(memory) == 1  # that of a measured step is not known

    def test_the_critical_path_is_a_line_along_its_spans(self) -> None:
        (axes, _, _) = timeline_figure(predicted_and_measured()).axes
        (line,) = (c for c in axes.collections if c.get_gid() == "path")
        along = [tuple(1e-3 * x for x, _ in path.vertices) for path in line.get_paths()]
        assert along == [(0.0, 1.0), (2.0, 3.0), (3.0, 5.0), (5.0, 6.0), (6.0, 8.0), (10.0, 12.0)]

    def test_the_path_goes_along_a_sum(self) -> None:
        simulation = simulated("0>1", 2, devices=[(0, 1), 2], buckets=[Bucket(0, 4.0)])
        *_, before, last = path_pieces(predicted_timeline(simulation))
        assert (last.start_s, last.end_s, last.rank, last.span) == (11.0, 15.0, before.rank, None)
        assert before.rank in (0, 1)

    def test_memory_above_the_limit_is_marked(self) -> None:
        for limit, above in ((8, False), (4, True)):
            timeline = predicted_timeline(simulated(memory_bytes=limit))
            gids = {c.get_gid() for c in timeline_figure(timeline).axes[1].collections}
            assert "memory/0" in gids
            assert ("above the limit/0" in gids) == above

    def test_many_ranks_stay_readable(self) -> None:
        """Rows get thinner, names are left out before they overlap."""
        stages = tuple(TimelineStage(rank, rank) for rank in range(400))
        spans = tuple(Span(rank, SpanKind.FORWARD, 0, 1, f"{rank}F0") for rank in range(400))
        figure = timeline_figure(timeline(spans, stages=stages, devices=tuple(range(400))))
        assert figure.get_figheight() < 60
        (axes,) = figure.axes
        names = [t for t in axes.texts if t.get_text().startswith("rank ")]
        assert 20 < len(names) < 400
        pitch_pt = 72 * abs(names[1].get_position()[1] - names[0].get_position()[1])
        assert pitch_pt > names[0].get_size()

    def test_title_says_the_bubble_and_pyplot_is_untouched(self) -> None:
        import sys

        figure = timeline_figure(timeline())
        assert figure.texts[0].get_text() == "Measured step 3: 8000 ms, bubble 64 %"
        assert (
            "matplotlib.pyplot" not in sys.modules
            or not sys.modules["matplotlib.pyplot"].get_fignums()
        )


def ranges(bars) -> list[tuple[float, float]]:
    return [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in bars.get_paths()]
