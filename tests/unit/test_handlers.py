"""Every reader of programs knows what to do with every kind of action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lightning_gpp.runtime import executor, measured
from lightning_gpp.schedule import Kind
from lightning_gpp.simulate import program_work
from lightning_gpp.simulate.timeline import predicted


@pytest.mark.parametrize(
    ("reader", "handlers"),
    [
        ("the executor", executor.HANDLERS),
        ("the simulator", program_work.HANDLERS),
        ("pictures of simulated steps", predicted.HANDLERS),
        ("pictures of recorded steps", measured.SPANS),
    ],
)
def test_a_reader_handles_every_kind_of_action(reader: str, handlers: Mapping[Kind, Any]) -> None:
    lacking = [kind.name for kind in Kind if kind not in handlers]
    assert not lacking, f"{reader} has no handler for {', '.join(lacking)}"
