"""Every reader of programs knows what to do with every kind of action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lightning_gpp.reports.step.paint import PAINT_OF
from lightning_gpp.runtime import executor, measured
from lightning_gpp.schedule import Kind
from lightning_gpp.simulate import SpanKind, program_work
from lightning_gpp.simulate.timeline import words


@pytest.mark.parametrize(
    ("reader", "handlers"),
    [
        ("the executor", executor.HANDLERS),
        ("the simulator", program_work.HANDLERS),
        ("pictures of recorded steps", measured.SPANS),
        ("what timelines call it", words.WHAT),
    ],
)
def test_a_reader_handles_every_kind_of_action(reader: str, handlers: Mapping[Kind, Any]) -> None:
    lacking = [kind.name for kind in Kind if kind not in handlers]
    assert not lacking, f"{reader} has no handler for {', '.join(lacking)}"


def test_every_kind_of_span_has_a_colour() -> None:
    assert {*SpanKind} - {SpanKind.OVERHEAD} <= {*PAINT_OF}
