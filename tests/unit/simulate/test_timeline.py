"""Timelines of a few literal spans: their shares, their pictures."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from helpers.steps import predicted_and_measured

from lightning_gpp.reports.step.picture import timeline_figure
from lightning_gpp.reports.step.write_step import write_step
from lightning_gpp.simulate import (
    Span,
    SpanKind,
    Timeline,
    TimelineStage,
    shares,
)

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


class TestShares:
    def test_by_hand(self) -> None:
        first, second = shares(timeline()).ranks
        parts = {"forward": 2.25, "backward": 0.5, "communication": 1.5, "wait": 2.0, "other": 0.5}
        assert first.seconds == parts | {"idle": 8 - sum(parts.values())}
        parts = {"forward": 2.0, "backward": 1.0, "communication": 1.5, "wait": 2.5, "other": 0.0}
        assert second.seconds == parts | {"idle": 1.0}
        assert (first.bubble_s, second.bubble_s) == (5.25, 5.0)
        assert shares(timeline()).bubble_share == 10.25 / 16


class TestTimeline:
    def test_messages_are_joined(self) -> None:
        pairs = [(sent.action, received.action) for sent, received in timeline().messages()]
        assert pairs == [("-1SF0>0", "0RF0<-1"), ("0SF0>1", "1RF0<0"), ("1SB0>0", "0RB0<1")]

    def test_a_span_does_not_end_before_it_starts(self) -> None:
        with pytest.raises(ValueError, match=r"2F0 goes from 2\.0 s to 1\.0 s"):
            Span(0, SpanKind.FORWARD, 2.0, 1.0, "2F0")


class TestEverything:
    def test_files(self, tmp_path: Path) -> None:
        written = write_step(predicted_and_measured(), tmp_path)
        names = ["timeline.png", "timeline.html"]
        assert [path.name for path in written] == names
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
        assert not write_step(predicted_and_measured(), tmp_path, picture=False, page=False)


class TestPicture:
    def test_file_is_a_png_of_the_figure(self, tmp_path: Path) -> None:
        write_step([timeline()], tmp_path, page=False)
        data = (tmp_path / "timeline.png").read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        figure = timeline_figure([timeline()])
        expected = tuple(int(inches * figure.dpi) for inches in figure.get_size_inches())
        assert struct.unpack(">2I", data[16:24]) == expected

    def test_bars_are_where_the_spans_are(self) -> None:
        (axes,) = timeline_figure([timeline()]).axes
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

    def test_predicted_over_measured_on_one_axis(self) -> None:
        figure = timeline_figure(predicted_and_measured())
        steps = figure.axes
        assert {axes.get_xlim() for axes in figure.axes} == {(0, 12000.0)}
        assert steps[0].get_position().y0 > steps[1].get_position().y1
        titles = [text.get_text() for text in figure.texts if text.get_weight() == "bold"]
        assert titles[0].startswith("Predicted step: 12000 ms (0 % more than measured), bubble")
        assert titles[1].startswith("Measured step 3: 12000 ms, bubble")
        assert len(steps) == 2

    def test_the_critical_path_is_a_line_along_its_spans(self) -> None:
        (axes, _) = timeline_figure(predicted_and_measured()).axes
        (line,) = (c for c in axes.collections if c.get_gid() == "path")
        along = [tuple(1e-3 * x for x, _ in path.vertices) for path in line.get_paths()]
        assert along == [(0.0, 1.0), (2.0, 3.0), (3.0, 5.0), (5.0, 6.0), (6.0, 8.0), (10.0, 12.0)]


def ranges(bars) -> list[tuple[float, float]]:
    return [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in bars.get_paths()]
