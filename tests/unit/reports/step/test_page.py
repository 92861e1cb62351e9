"""The page of a step: its data, that it needs nothing but itself, and that its script runs.

The script runs in node, in a stand-in for a browser that records what is drawn
(``helpers/page_browser.js``); without node these tests are skipped.
"""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import helpers
import pytest
from helpers.steps import predicted_and_measured

from lightning_gpp.reports.step.page import page_data, page_html
from lightning_gpp.simulate import Span, SpanKind, Timeline, TimelineStage
from lightning_gpp.simulate.timeline.words import words_of

BROWSER = Path(helpers.__file__).with_name("page_browser.js")
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
EVIL = "</script><script>alert(1)</script> <!-- & {{script}}"


def lanes(timelines: list[Timeline], kind: str) -> list[dict[str, Any]]:
    (first, *_) = page_data(timelines)["timelines"]
    return [lane for lane in first["lanes"] if lane["kind"] == kind]


class TestData:
    def test_every_span_is_in_the_row_of_its_rank(self) -> None:
        timelines = predicted_and_measured()
        texts = page_data(timelines)["texts"]
        rows = lanes(timelines, "rank")
        assert [row["label"] for row in rows] == ["rank 0", "rank 1", "rank 2"]
        for rank, row in enumerate(rows):
            spans = timelines[0].of_rank(rank)
            assert [texts[name] for name in row["name"]] == [
                words_of(span, timelines[0]) for span in spans
            ]
            assert row["start"] == [span.start_s for span in spans]
            assert row["seconds"] == [span.duration_s for span in spans]

    def test_every_transfer_is_in_the_lanes_of_its_channels(self) -> None:
        timelines = predicted_and_measured()
        rows = {row["label"]: row for row in lanes(timelines, "link")}
        assert list(rows) == ["gpu0 out", "gpu1 out", "gpu2 out"]
        assert rows["gpu2 out"]["start"] == [5.0, 6.0, 8.0, 9.0]
        assert rows["gpu2 out"]["critical"] == [0, 0, 1, 1]
        assert rows["gpu2 out"]["bytes"] == [1, 1, 1, 1]

    def test_memory_and_its_limit(self) -> None:
        (first, *_) = lanes(predicted_and_measured(), "memory")
        assert (first["limit"], max(first["bytes"])) == (8, 5)
        assert first["note"] == "peak 5 of 8 B"

    def test_the_critical_path_goes_along_ranks(self) -> None:
        (first, _) = page_data(predicted_and_measured())["timelines"]
        assert [point[:3] for point in first["path"]][:3] == [
            [0.0, 1.0, 0],
            [2.0, 3.0, 2],
            [3.0, 5.0, 2],
        ]

    def test_items_of_a_lane_do_not_overlap(self) -> None:
        """The script looks for the first visible one by bisection."""
        for timeline in page_data(predicted_and_measured())["timelines"]:
            for lane in timeline["lanes"]:
                if lane["kind"] != "memory":
                    ends = [a + b for a, b in zip(lane["start"], lane["seconds"])]
                    assert all(end <= start for end, start in zip(ends, lane["start"][1:]))


class Reader(html.parser.HTMLParser):
    """Collects the elements of a page and what stands in its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


class TestPage:
    def test_it_asks_for_nothing(self) -> None:
        text = page_html(predicted_and_measured())
        for tag, attributes in read(text).tags:
            assert not {"src", "href", "action", "srcset"} & attributes.keys(), tag
        assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttpRequest|import\(", text)
        assert "default-src 'none'" in text

    def test_names_from_the_model_stay_texts(self) -> None:
        stages = (TimelineStage(0, 0, EVIL, (EVIL,)),)
        spans = (Span(0, SpanKind.FORWARD, 0.0, 1.0, "0F0"),)
        text = page_html([Timeline("measured", 1.0, (0,), EVIL, stages, spans, step=1)])
        reader = read(text)
        assert [tag for tag, _ in reader.tags].count("script") == 2
        data = json.loads(reader.scripts[0])
        assert data["timelines"][0]["stages"] == [
            {"title": "stage 0", "label": EVIL, "operators": EVIL}
        ]
        assert EVIL in data["timelines"][0]["lines"][0]

    def test_numbers_are_json(self) -> None:
        with pytest.raises(ValueError, match="not JSON compliant"):
            page_html([replace(predicted_and_measured()[0], step_s=float("inf"))])


def browse(
    folder: Path, timelines: list[Timeline], events: list[dict[str, Any]], *size: int
) -> list[dict[str, Any]]:
    """What the page draws at first and after every event."""
    (folder / "step.html").write_text(page_html(timelines), encoding="utf-8")
    (folder / "events.json").write_text(json.dumps(events))
    command = ["node", str(BROWSER), str(folder / "step.html"), str(folder / "events.json")]
    command += map(str, size)
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def drawn(report: dict[str, Any], what: str) -> list[dict[str, Any]]:
    return [item for item in report["frame"] if item["what"] == what]


def texts(report: dict[str, Any]) -> list[str]:
    return [item["text"] for item in drawn(report, "text")]


def at(kind: str, x: float, y: float, **more: Any) -> dict[str, Any]:
    return {"type": kind, "clientX": x, "clientY": y, "pointerId": 1, **more}


LEFT, WIDTH = 190, 1400 - 190 - 180
"""Where the plot is on the page."""


@needs_node
class TestScript:
    def test_bars_are_where_the_spans_are(self, tmp_path: Path) -> None:
        timelines = predicted_and_measured()
        (report,) = browse(tmp_path, timelines, [])
        y, per_second = first_row(report), WIDTH / (12.0 * 1.02)
        bars = [(item["x"], item["w"] + 0.5) for item in compute(report) if item["y"] == y]
        for bar, start_s, seconds in zip(bars, (0.0, 1.0, 6.0, 9.0), (1.0, 1.0, 2.0, 2.0)):
            assert bar == pytest.approx(
                (LEFT + (start_s + 0.12) * per_second, seconds * per_second)
            )
        assert len(bars) == 4
        assert "Measured step 3: 12000 ms, bubble 50 %" in texts(report)
        assert report["legend"] == [
            "forward",
            "backward",
            "communication",
            "wait",
            "idle",
        ]

    def test_on_a_phone_bars_have_the_room_of_notes(self, tmp_path: Path) -> None:
        (report,) = browse(tmp_path, predicted_and_measured(), [], 400, 800)
        bars = compute(report)
        assert max(bar["x"] + bar["w"] for bar in bars) - min(bar["x"] for bar in bars) > 200
        assert not any(text.startswith("bubble ") for text in texts(report))

    def test_hovering_tells_about_a_span(self, tmp_path: Path) -> None:
        y = first_row(browse(tmp_path, predicted_and_measured(), [])[0]) + 5
        x = LEFT + (7.0 + 0.12) * WIDTH / 12.24
        _, over, outside = browse(
            tmp_path, predicted_and_measured(), [at("pointermove", x, y), at("pointerleave", 0, 0)]
        )
        assert over["tip"].split("\n") == [
            "backward 0 of stage 0",
            "stage 0",
            "micro-batch 0",
            "from 6 s to 8 s",
            "takes 2 s",
        ]
        assert outside["tip"] is None

    def test_the_wheel_zooms_where_the_mouse_is_and_dragging_moves(self, tmp_path: Path) -> None:
        x = LEFT + 616  # second 7, in a backward
        before, zoomed, *_, moved = browse(
            tmp_path,
            predicted_and_measured(),
            [
                at("wheel", x, 150, deltaY=-700),
                at("pointerdown", x, 150),
                at("pointermove", x - 50, 150),
                at("pointerup", x - 50, 150),
            ],
        )
        assert under(before, x) == under(zoomed, x) == under(moved, x - 50) == "#E69F00"
        assert widest(zoomed) == pytest.approx(widest(before) * 4.055, rel=0.01)
        first, then = (
            min(end for i in compute(report) if (end := i["x"] + i["w"]) > x - shift)
            for report, shift in ((zoomed, 0), (moved, 50))
        )
        assert then == pytest.approx(first - 50, abs=0.01)

    def test_the_critical_path_can_be_switched_off(self, tmp_path: Path) -> None:
        with_path, without, dim = browse(
            tmp_path, predicted_and_measured(), [{"check": "path"}, {"check": "dim"}]
        )
        assert len(drawn(with_path, "line")) == 6 and not drawn(without, "line")
        assert {item["alpha"] for item in compute(with_path)} == {1}
        assert {item["alpha"] for item in compute(dim)} == {0.25, 1}


def compute(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars of forwards and backwards."""
    return [i for i in drawn(report, "rect") if i["colour"] in ("#0072B2", "#E69F00")]


def first_row(report: dict[str, Any]) -> float:
    return min(item["y"] for item in compute(report))


def widest(report: dict[str, Any]) -> float:
    return max(item["w"] for item in compute(report)) + 0.5


def under(report: dict[str, Any], x: float) -> str:
    """Colour of the bar in the first row."""
    (item,) = (
        i for i in compute(report) if i["y"] == first_row(report) and i["x"] <= x < i["x"] + i["w"]
    )
    return str(item["colour"])
